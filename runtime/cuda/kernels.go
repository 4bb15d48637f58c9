package cuda

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Blocks of 256 threads that a multiprocessor gets of the kernels that stream
// arrays, and of those that work on lists.
const (
	streamsPerSM = 4
	mergesPerSM  = 4 // twice that for arrays from longMerge on: what is done with its part early gets another
	picksPerSM   = 4
	piecesPerSM  = 2 // leaves room for what communicates beside
)

const _ = uint(streamsPerSM - picksPerSM) // cut closes the gaps of each block of pick

// longMerge is the number of elements from which on a part of merge is cut in two. With
// 104,857,600 float32 that takes 3 % less, with 26,214,400 bf16 10 % more.
const longMerge = 1 << 26

// typed are a kernel's variants, by the type of its elements.
type typed struct{ f32, f16, bf16 kernelID }

func (t typed) of(dt dtype.DType) kernelID {
	switch dt {
	case dtype.F16:
		return t.f16
	case dtype.BF16:
		return t.bf16
	}
	return t.f32
}

var (
	scaleKernels      = typed{kernelScaleF32, kernelScaleF16, kernelScaleBF16}
	storeKernels      = typed{kernelStoreF32, kernelStoreF16, kernelStoreBF16}
	sumSquaresKernels = typed{kernelSumSquaresF32, kernelSumSquaresF16, kernelSumSquaresBF16}
	mergeKernels      = typed{kernelMergeF32, kernelMergeF16, kernelMergeBF16}
)

// gradientType numbers the types of a gradient as kernels/elements.cuh does.
func gradientType(src kernel.Source) uint64 {
	switch {
	case src.Grad == 0:
		return 0
	case src.DType == dtype.F16:
		return 2
	case src.DType == dtype.BF16:
		return 3
	}
	return 1
}

// from is what a gradient is added to.
func from(src kernel.Source) uintptr {
	if src.From == 0 {
		return src.X
	}
	return src.From
}

// What pick does with what passes, as in kernels/select.cu.
const (
	pickNone = iota
	pickList
	pickNear
	pickTop
)

// selection is one call of pick, sift and cut, or some of them, in kernels/select.cu.
type selection struct {
	src         kernel.Source
	idx, length uintptr // of a list, whose values are src.X
	mode, k     int
	dst         kernel.Entries
	zeros       bool // may be among the k largest
	threshold   uintptr
	age         uintptr
	near        kernel.Acceptance
	used        uintptr
	margin      uintptr
	without     uintptr      // of a list: the indices that take no part
	rest        kernel.Array // of a list: what gets the entries that are left out

	blocks, room int // segments: pick's blocks, and entries of each warp of them
}

func flag(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// tiles is the number of tiles that n elements may lie in.
func tiles(n int) int { return (n+3)/tileElements + 1 }

// prepare finds memory for what pick and sift leave to cut.
func (s *sparse) prepare(p *selection) error {
	p.blocks = s.rt.grid(tiles(p.src.N), picksPerSM)
	wanted := 0
	switch p.mode {
	case pickList:
		wanted = p.dst.N
	case pickTop:
		wanted = 2*p.k + tileElements
	case pickNear:
		wanted = max(p.dst.N, 2*p.k+tileElements)
	}
	warps := p.blocks * block / 32
	if wanted > 0 { // four times as many as there are on average, but not more than a warp looks at
		p.room = min(4*wanted/warps+64, (tiles(p.src.N)*block/32/warps+1)*tileElements/(block/32))
	}
	counts := 4 * (warps + p.blocks)
	err := errors.Join(s.grow(segmentIndices, 4*warps*p.room), s.grow(segmentValues, 4*warps*p.room), s.grow(segmentCounts, counts))
	if p.sifts() {
		err = errors.Join(err, s.grow(segmentsAbove, counts), s.grow(candidates, 8*maxCandidates))
	}
	return err
}

// sifts reports whether pick may list what is more than the k largest.
func (p *selection) sifts() bool { return p.mode == pickTop || p.mode == pickNear }

// pick launches pick.
func (s *sparse) pick(p *selection) error {
	return s.rt.launchBlocks(kernelPick, p.blocks, picksPerSM,
		s.at(control), s.at(segmentIndices), s.at(segmentValues), s.at(segmentCounts), uint64(p.room), uint64(p.blocks),
		uint64(p.src.X), uint64(p.idx), uint64(p.src.N), uint64(p.length),
		uint64(from(p.src)), uint64(p.src.Grad), gradientType(p.src), uint64(p.src.Factor), flag(p.src.Take), uint64(p.mode), uint64(p.threshold),
		uint64(max(p.near.Interval, 0)), uint64(p.src.Keep))
}

// cut launches cut, after pick or without it.
func (s *sparse) cut(p *selection) error {
	blocks := p.blocks
	if p.mode != pickList {
		blocks = max(blocks, p.src.N/smallTile+1)
	}
	k := kernelCut
	if p.without != 0 || p.rest.Ptr != 0 {
		k = kernelCutOutside
	}
	return s.rt.launchBlocks(k.earlyIf(p.blocks > 0), blocks, streamsPerSM,
		s.at(control), s.at(status), s.at(statusTies),
		s.at(segmentIndices), s.at(segmentValues), s.at(segmentCounts), uint64(p.room), uint64(p.blocks),
		s.at(segmentsAbove), s.at(candidates), maxCandidates,
		uint64(p.src.X), uint64(p.src.N), uint64(p.idx), uint64(p.length), flag(p.blocks > 0),
		uint64(p.dst.Idx), uint64(p.dst.Val), uint64(p.dst.N), uint64(p.dst.Len),
		uint64(p.k), flag(p.src.Take), flag(p.zeros), uint64(p.threshold), uint64(p.age), uint64(p.used), uint64(p.margin),
		uint64(max(p.near.Min, 0)), math.Float64bits(float64(p.near.Step)), uint64(p.dst.Shared),
		uint64(p.without), uint64(p.rest.Ptr), uint64(p.rest.N), uint64(p.rest.Faults))
}

// sift launches sift, after pick.
func (s *sparse) sift(p *selection) error {
	return s.rt.launchBlocks(kernelSift|early, p.blocks, streamsPerSM,
		s.at(control), s.at(segmentIndices), s.at(segmentValues), s.at(segmentCounts), uint64(p.room), uint64(p.blocks),
		s.at(segmentsAbove), s.at(candidates), maxCandidates, uint64(p.src.N), uint64(p.length), uint64(p.k))
}

// run launches what a selection takes. What fails for want of memory has done nothing. What
// fails later brings back what was kept, and clears what pick has counted, which cut would
// have: the epoch, and with it the tiles' words that it tells from older ones.
func (s *sparse) run(p selection) error {
	picks, picked := p.src.Grad != 0 || p.threshold != 0, false
	err := s.growStatus(p.src.N)
	if picks && err == nil {
		err = s.prepare(&p)
	}
	if picks && err == nil {
		err = s.pick(&p)
		picked = err == nil
	}
	if picks && p.sifts() && err == nil {
		err = s.sift(&p)
	}
	if err == nil {
		err = s.cut(&p)
	}
	if err != nil && picked {
		err = errors.Join(err, s.zero(control), s.zero(status), s.zero(statusTies))
	}
	if err != nil && picked && p.src.Grad != 0 && p.src.Keep != 0 {
		err = errors.Join(err, s.rt.Copy(p.src.X, p.src.Keep, 4*p.src.N))
	}
	return err
}

// Accumulate implements [kernel.Kernels].
func (s *sparse) Accumulate(src kernel.Source) error {
	c := s.checks("Accumulate")
	c.source(src)
	if src.Grad == 0 {
		c.floats("grad", 0, src.N)
	}
	return c.submit(func() error {
		if src.N == 0 {
			return nil
		}
		p := selection{src: src, mode: pickNone}
		if err := s.prepare(&p); err != nil {
			return err
		}
		return s.pick(&p)
	})
}

// Store implements [kernel.Kernels].
func (s *sparse) Store(dst uintptr, dt dtype.DType, src uintptr, n int, scale float32, rest uintptr) error {
	c := s.checks("Store")
	c.elements("dst", dst, dt, n)
	c.floats("src", src, n)
	c.optional("rest", rest)
	return c.submit(func() error {
		if n == 0 {
			return nil
		}
		return s.rt.launchBlocks(storeKernels.of(dt), tiles(n), blocksPerSM, uint64(dst), uint64(src), uint64(n), uint64(math.Float32bits(scale)), uint64(rest))
	})
}

// CopyIf implements [kernel.Kernels].
func (s *sparse) CopyIf(copies []kernel.Copy, flags uintptr, m int) error {
	c := s.checks("CopyIf")
	longest := 0
	for _, one := range copies {
		c.elements("dst", one.Dst, one.DType, one.N)
		if one.Src != 0 {
			c.elements("src", one.Src, one.DType, one.N)
		}
		longest = max(longest, one.N)
	}
	c.buffer("flags", flags, max(m, 1), 4)
	if m < 1 {
		c.fail("%d flags, want at least one", m)
	}
	if len(copies) > kernel.MaxCopies {
		c.fail("%d copies, want at most %d", len(copies), kernel.MaxCopies)
	}
	return c.submit(func() error {
		if longest == 0 {
			return nil
		}
		a := argumentPool.Get().(*arguments)
		defer argumentPool.Put(a)
		at := a.put(uint64(flags), uint64(m), uint64(len(copies)))
		for _, one := range copies {
			at += copy(a.values[at:], []uint64{uint64(one.Dst), uint64(one.Src), uint64(one.N), uint64(one.DType.Size())})
		}
		return s.rt.launchArguments(kernelCopyIf, tiles(longest), blocksPerSM, a)
	})
}

// Scale implements [kernel.Kernels].
func (s *sparse) Scale(x uintptr, dt dtype.DType, n int, factor uintptr) error {
	c := s.checks("Scale")
	c.elements("x", x, dt, n)
	c.number("factor", factor, 4)
	return c.submit(func() error {
		if n == 0 {
			return nil
		}
		return s.rt.launchBlocks(scaleKernels.of(dt), tiles(n), blocksPerSM, uint64(x), uint64(n), uint64(factor))
	})
}

// growPartial makes room for what the segments of n elements add up to.
func (s *sparse) growPartial(n int) error { return s.grow(partial, momentsBytes*(n/segmentElements+1)) }

// SumSquares implements [kernel.Kernels].
func (s *sparse) SumSquares(x uintptr, dt dtype.DType, n int, sum uintptr) error {
	c := s.checks("SumSquares")
	c.elements("x", x, dt, n)
	c.number("sum", sum, 8)
	return c.submit(func() error {
		if err := s.growPartial(n); err != nil {
			return err
		}
		return s.rt.launchBlocks(sumSquaresKernels.of(dt), n/segmentElements+1, streamsPerSM,
			s.at(control), s.at(partial), uint64(x), uint64(n), uint64(sum))
	})
}

// ClipFactor implements [kernel.Kernels].
func (s *sparse) ClipFactor(factor, squares uintptr, m int, share, limit float64) error {
	c := s.checks("ClipFactor")
	c.number("factor", factor, 4)
	c.buffer("squares", squares, max(m, 1), 8)
	if m < 1 {
		c.fail("%d sums of squares, want at least one", m)
	}
	return c.submit(func() error {
		return s.rt.launchBlocks(kernelClipFactor, 1, 1, uint64(factor), uint64(squares), uint64(m), math.Float64bits(share), math.Float64bits(limit))
	})
}

// TopK implements [kernel.Kernels].
func (s *sparse) TopK(src kernel.Source, k int, dst kernel.Entries, threshold uintptr) error {
	c := s.checks("TopK")
	c.source(src)
	c.target(dst)
	c.room(dst, c.length("k", k), src.N)
	c.optional("threshold", threshold)
	return c.submit(func() error {
		p := selection{src: src, mode: pickTop, k: min(k, src.N), dst: dst, zeros: dst.Len == 0, threshold: threshold}
		if threshold != 0 {
			p.margin = threshold + 4
		}
		return s.run(p)
	})
}

// Select implements [kernel.Kernels].
func (s *sparse) Select(src kernel.Source, threshold uintptr, dst kernel.Entries) error {
	c := s.checks("Select")
	c.source(src)
	c.target(dst)
	c.number("threshold", threshold, 4)
	return c.submit(func() error {
		return s.run(selection{src: src, mode: pickList, threshold: threshold, dst: dst})
	})
}

// SelectNear implements [kernel.Kernels].
func (s *sparse) SelectNear(src kernel.Source, k int, state uintptr, o kernel.Acceptance, dst kernel.Entries, used uintptr) error {
	c := s.checks("SelectNear")
	c.source(src)
	c.target(dst)
	c.room(dst, c.length("k", k), src.N)
	c.number("dst.Len", dst.Len, 4)
	c.number("state", state, 4)
	c.optional("used", used)
	return c.submit(func() error {
		return s.run(selection{src: src, mode: pickNear, k: k, dst: dst, threshold: state, age: state + 4, near: o, used: used})
	})
}

// Fit implements [kernel.Kernels].
func (s *sparse) Fit(src kernel.Source, z float64, threshold uintptr) error {
	c := s.checks("Fit")
	c.source(src)
	c.number("threshold", threshold, 4)
	return c.submit(func() error {
		if err := s.growPartial(src.N); err != nil {
			return err
		}
		return s.rt.launchBlocks(kernelFit, src.N/segmentElements+1, streamsPerSM,
			s.at(control), s.at(partial), uint64(src.X), uint64(src.N), uint64(from(src)), uint64(src.Grad), gradientType(src), uint64(src.Factor),
			math.Float64bits(z), uint64(threshold), uint64(src.Keep))
	})
}

// Refine implements [kernel.Kernels].
func (s *sparse) Refine(x uintptr, n int, threshold uintptr, k int, factors []float32) error {
	c := s.checks("Refine")
	c.floats("x", x, n)
	c.number("threshold", threshold, 4)
	c.length("k", k)
	c.atMost64("factors", len(factors))
	return c.submit(func() error {
		a := argumentPool.Get().(*arguments)
		defer argumentPool.Put(a)
		fixed := a.put(s.at(control), uint64(x), uint64(n), uint64(threshold), uint64(k), uint64(len(factors)))
		for i, f := range factors { // two to a word
			word := &a.values[fixed+i/2]
			if i%2 == 0 {
				*word = 0
			}
			*word |= uint64(math.Float32bits(f)) << (32 * (i % 2))
		}
		return s.rt.launchArguments(kernelRefine, tiles(n), streamsPerSM, a)
	})
}

// TopKList implements [kernel.Kernels].
func (s *sparse) TopKList(l kernel.Entries, k int, dst kernel.Entries, without uintptr, rest kernel.Array) error {
	c := s.checks("TopKList")
	c.list("l", l)
	c.target(dst)
	c.room(dst, c.length("k", k), l.N)
	c.optional("without", without)
	if rest.Ptr != 0 {
		c.array(rest)
	}
	return c.submit(func() error {
		return s.run(selection{src: kernel.Source{X: l.Val, N: l.N}, idx: l.Idx, length: l.Len, mode: pickTop, k: k, dst: dst, zeros: true,
			without: without, rest: rest})
	})
}

// SelectList implements [kernel.Kernels].
func (s *sparse) SelectList(l kernel.Entries, threshold uintptr, dst kernel.Entries) error {
	c := s.checks("SelectList")
	c.list("l", l)
	c.target(dst)
	c.number("threshold", threshold, 4)
	return c.submit(func() error {
		return s.run(selection{src: kernel.Source{X: l.Val, N: l.N}, idx: l.Idx, length: l.Len, mode: pickList, threshold: threshold, dst: dst})
	})
}

// CountAbove implements [kernel.Kernels].
func (s *sparse) CountAbove(l kernel.Entries, thresholds uintptr, m int, counts uintptr) error {
	c := s.checks("CountAbove")
	c.floats("l", l.Val, l.N)
	c.optional("l.Len", l.Len)
	c.floats("thresholds", thresholds, m)
	c.floats("counts", counts, m)
	return c.submit(func() error {
		for ; m > 0; m, thresholds, counts = m-maxCounts, thresholds+4*maxCounts, counts+4*maxCounts {
			if err := s.rt.launchBlocks(kernelCountAbove, (l.N+block-1)/block, streamsPerSM,
				s.at(control), 0, uint64(l.Val), uint64(l.N), uint64(l.Len), uint64(thresholds), uint64(min(m, maxCounts)), uint64(counts)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Narrow implements [kernel.Kernels].
func (s *sparse) Narrow(bracket uintptr, counts uintptr, k int, thresholds uintptr, m int) error {
	c := s.checks("Narrow")
	c.number("bracket", bracket, 4)
	c.floats("thresholds", thresholds, m)
	c.optional("counts", counts)
	c.length("k", k)
	return c.submit(func() error {
		return s.rt.launchBlocks(kernelNarrow, 1, 1, uint64(bracket), uint64(counts), uint64(k), uint64(thresholds), uint64(m))
	})
}

// Merge implements [kernel.Kernels].
func (s *sparse) Merge(dst uintptr, dt dtype.DType, n int, lists []kernel.Entries, scale float32, faults, rest uintptr, back kernel.Restoration) error {
	c := s.checks("Merge")
	c.elements("dst", dst, dt, n)
	c.optional("faults", faults)
	c.optional("rest", rest)
	c.lists(lists)
	c.back(back)
	return c.submit(func() error {
		perSM := mergesPerSM
		if n >= longMerge {
			perSM *= 2
		}
		shared := slices.ContainsFunc(lists, func(l kernel.Entries) bool { return l.Shared != 0 })
		return s.launchLists(mergeKernels.of(dt).earlyIf(shared), n, perSM, merging{dst: dst, n: n, lists: lists, scale: scale, faults: faults, rest: rest, back: back})
	})
}

// Union implements [kernel.Kernels].
func (s *sparse) Union(dst kernel.Entries, n int, lists []kernel.Entries, scale float32, faults, threshold uintptr) error {
	c := s.checks("Union")
	c.target(dst)
	c.number("dst.Len", dst.Len, 4)
	c.optional("faults", faults)
	c.optional("threshold", threshold)
	c.lists(lists)
	c.length("n", n)
	return c.submit(func() error {
		m := merging{to: dst, n: n, lists: lists, scale: scale, faults: faults, threshold: threshold}
		k, work := kernelUnite, n
		if len(lists) == 2 {
			k, work = kernelUniteTwo, 2*(lists[0].N+lists[1].N) // its tiles have half as many entries as those of arrays
		}
		if err := s.growStatus(work); err != nil {
			return err
		}
		return s.launchLists(k, work, mergesPerSM, m)
	})
}

// merging is what merge and unite do.
type merging struct {
	dst                     uintptr        // of merge
	to                      kernel.Entries // of unite
	n                       int
	lists                   []kernel.Entries
	scale                   float32
	faults, rest, threshold uintptr
	back                    kernel.Restoration
}

// launchLists launches merge or unite. Lists that are too many for the
// arguments are put into memory first.
func (s *sparse) launchLists(k kernelID, work, perSM int, m merging) error {
	a := argumentPool.Get().(*arguments)
	defer argumentPool.Put(a)
	all, table := m.lists, uint64(0)
	if len(all) > inlineLists {
		if err := s.grow(lists, 8*listWords*len(all)); err != nil {
			return err
		}
		table = s.at(lists)
		const batch = putWords / listWords
		for i := 0; i < len(all); i += batch {
			part := all[i:min(i+batch, len(all))]
			a.putLists(a.put(table+uint64(8*listWords*i), uint64(listWords*len(part))), part)
			if err := s.rt.launchArguments(kernelPutWords, 1, 1, a); err != nil {
				return err
			}
		}
	}
	fixed := a.put(s.at(control), s.at(status), uint64(m.dst), uint64(m.to.Idx), uint64(m.to.Val), uint64(m.to.N), uint64(m.to.Len),
		uint64(m.n), math.Float64bits(float64(m.scale)), uint64(m.faults), uint64(m.rest), uint64(m.threshold), uint64(m.to.Shared))
	fixed += a.putBack(fixed, m.back)
	fixed += copy(a.values[fixed:], []uint64{uint64(len(all)), table})
	if table == 0 {
		a.putLists(fixed, all)
	}
	return s.rt.launchArguments(k, tiles(work), perSM, a)
}

// put stores the first arguments, and returns how many.
func (a *arguments) put(values ...uint64) int { return copy(a.values[:], values) }

// putLists stores lists from an argument on.
func (a *arguments) putLists(at int, lists []kernel.Entries) {
	for i, l := range lists {
		copy(a.values[at+listWords*i:], []uint64{uint64(l.Idx), uint64(l.Val), uint64(l.N), uint64(l.Len)})
	}
}

// putBack stores what is given back from an argument on, and returns how many it takes.
func (a *arguments) putBack(at int, b kernel.Restoration) int {
	end := at + copy(a.values[at:], []uint64{uint64(b.Dst.Ptr), uint64(b.Dst.N), uint64(b.Dst.Faults)})
	a.putLists(end, []kernel.Entries{b.L, b.Taken})
	return end + 2*listWords - at
}

// scatter launches a kernel that follows the indices of a list.
func (s *sparse) scatter(k kernelID, b kernel.Restoration, scale float32) error {
	if b.L.N == 0 {
		return nil
	}
	a := argumentPool.Get().(*arguments)
	defer argumentPool.Put(a)
	a.values[a.putBack(0, b)] = math.Float64bits(float64(scale))
	return s.rt.launchArguments(k, (b.L.N+block-1)/block, blocksPerSM, a)
}

// ScatterAdd implements [kernel.Kernels].
func (s *sparse) ScatterAdd(dst kernel.Array, l kernel.Entries, scale float32) error {
	c := s.checks("ScatterAdd")
	c.array(dst)
	c.list("l", l)
	return c.submit(func() error { return s.scatter(kernelScatterAdd, kernel.Restoration{Dst: dst, L: l}, scale) })
}

// ScatterSet implements [kernel.Kernels].
func (s *sparse) ScatterSet(dst kernel.Array, l kernel.Entries) error {
	c := s.checks("ScatterSet")
	c.array(dst)
	c.list("l", l)
	return c.submit(func() error { return s.scatter(kernelScatterSet, kernel.Restoration{Dst: dst, L: l}, 1) })
}

// ScatterZero implements [kernel.Kernels].
func (s *sparse) ScatterZero(dst kernel.Array, l kernel.Entries) error {
	c := s.checks("ScatterZero")
	c.array(dst)
	c.indices("l", l)
	return c.submit(func() error { return s.scatter(kernelZeroAt, kernel.Restoration{Dst: dst, L: l}, 1) })
}

// Restore implements [kernel.Kernels].
func (s *sparse) Restore(dst kernel.Array, l, taken kernel.Entries) error {
	c, b := s.checks("Restore"), kernel.Restoration{Dst: dst, L: l, Taken: taken}
	c.back(b)
	return c.submit(func() error { return s.scatter(kernelGiveBack, b, 1) })
}

// LowerBounds implements [kernel.Kernels].
func (s *sparse) LowerBounds(l kernel.Entries, bounds uintptr, m int, positions, lengths uintptr) error {
	c := s.checks("LowerBounds")
	c.indices("l", l)
	c.floats("bounds", bounds, m)
	c.floats("positions", positions, m)
	c.optional("lengths", lengths)
	return c.submit(func() error {
		return s.rt.launch(kernelLowerBounds, 32*m, uint64(l.Idx), uint64(l.Val), uint64(l.N), uint64(l.Len),
			uint64(bounds), uint64(m), uint64(positions), uint64(lengths))
	})
}

// CopyPieces implements [kernel.Kernels].
func (s *sparse) CopyPieces(pieces []kernel.Piece) error {
	c := s.checks("CopyPieces")
	for i, p := range pieces {
		c.list("from", p.From)
		c.target(p.To)
		c.number("to.Len", p.To.Len, 4)
		c.optional("start", p.Start)
		c.optional("end", p.End)
		if i >= kernel.MaxPieces && p.To == pieces[i-kernel.MaxPieces].To {
			c.fail("more than %d pieces are to be put together", kernel.MaxPieces)
		}
	}
	return c.submit(func() error {
		a := argumentPool.Get().(*arguments)
		defer argumentPool.Put(a)
		for len(pieces) > 0 {
			count := min(maxPieces, len(pieces))
			for count < len(pieces) && pieces[count].To == pieces[count-1].To { // is put together in one launch
				count--
			}
			most, at := 0, a.put(uint64(count))
			for _, p := range pieces[:count] {
				at += copy(a.values[at:], []uint64{uint64(p.From.Idx), uint64(p.From.Val), uint64(p.From.N), uint64(p.From.Len), uint64(p.Start), uint64(p.End), flag(p.ByIndex),
					uint64(p.To.Idx), uint64(p.To.Val), uint64(p.To.N), uint64(p.To.Len)})
				most = max(most, min(p.From.N, p.To.N))
			}
			if err := s.rt.launchArguments(kernelCopyPieces, most/block+1, piecesPerSM, a); err != nil {
				return err
			}
			pieces = pieces[count:]
		}
		return nil
	})
}

// Sample implements [kernel.Kernels].
func (s *sparse) Sample(l kernel.Entries, quantiles []float64, n int, dst uintptr) error {
	c := s.checks("Sample")
	c.indices("l", l)
	c.floats("dst", dst, len(quantiles))
	c.length("n", n)
	c.atMost64("quantiles", len(quantiles))
	for i, q := range quantiles {
		if !(q >= 0 && q < 1) {
			c.fail("quantiles[%d] is %v, want 0 <= q < 1", i, q)
		}
	}
	return c.submit(func() error {
		a := argumentPool.Get().(*arguments)
		defer argumentPool.Put(a)
		fixed := a.put(uint64(l.Idx), uint64(l.Val), uint64(l.N), uint64(l.Len), uint64(n), uint64(len(quantiles)), uint64(dst))
		for i, q := range quantiles {
			a.values[fixed+i] = math.Float64bits(q)
		}
		return s.rt.launchArguments(kernelSample, 1, 1, a)
	})
}

// Balance implements [kernel.Kernels].
func (s *sparse) Balance(samples uintptr, m, n int, bounds uintptr, parts int) error {
	c := s.checks("Balance")
	c.length("n", n)
	if m < 1 || parts < 1 {
		c.fail("%d samples for %d parts, want at least one of each", m, parts)
	}
	c.floats("samples", samples, m)
	c.floats("bounds", bounds, max(parts, 0)+1)
	return c.submit(func() error {
		if err := s.grow(partial, 4*m); err != nil {
			return err
		}
		return s.rt.launchBlocks(kernelBalance, (m+block-1)/block, streamsPerSM,
			s.at(control), uint64(samples), s.at(partial), uint64(m), uint64(n), uint64(bounds), uint64(parts))
	})
}

// checks are those of the arguments of a method; their first error sticks.
type checks struct {
	s   *sparse
	op  string
	err error
}

func (s *sparse) checks(op string) checks { return checks{s: s, op: op, err: s.rt.usable()} }

// submit launches what a method needs, unless its arguments are wrong.
func (c *checks) submit(launch func() error) error {
	if c.err != nil {
		return c.err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	err := c.s.err
	if err == nil {
		c.s.rt.Serialize(c.s.rt)
		err = c.s.rt.BetweenLaunches(launch)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.op, err)
	}
	return nil
}

// fail makes an error of a bad argument, if it is the first.
func (c *checks) fail(format string, args ...any) {
	if c.err == nil {
		c.err = c.s.rt.argument("%s: %s", c.op, fmt.Sprintf(format, args...))
	}
}

// length checks a number of elements, and returns it.
func (c *checks) length(name string, n int) int {
	if n < 0 || n > math.MaxInt32 {
		c.fail("%s is %d, want 0 to %d", name, n, math.MaxInt32)
	}
	return n
}

func (c *checks) atMost64(name string, n int) {
	if n > 64 {
		c.fail("%d %s, want at most 64", n, name)
	}
}

// buffer checks an array of n elements of that many bytes.
func (c *checks) buffer(name string, p uintptr, n int, size uintptr) {
	switch {
	case n < 0 || n > math.MaxInt32:
		c.fail("%s has %d elements, want 0 to %d", name, n, math.MaxInt32)
	case p == 0 && n > 0:
		c.fail("%s is nil but has %d elements", name, n)
	case p%size != 0:
		c.fail("%s at %#x is not aligned to %d bytes", name, p, size)
	}
}

// floats checks an array of four-byte elements.
func (c *checks) floats(name string, p uintptr, n int) { c.buffer(name, p, n, 4) }

// number checks the address of a number.
func (c *checks) number(name string, p uintptr, size uintptr) { c.buffer(name, p, 1, size) }

// optional checks the address of a four-byte number that may be missing.
func (c *checks) optional(name string, p uintptr) { c.buffer(name, p, 0, 4) }

// elements checks an array of gradients.
func (c *checks) elements(name string, p uintptr, dt dtype.DType, n int) {
	switch dt {
	case dtype.F32, dtype.F16, dtype.BF16:
		c.buffer(name, p, n, uintptr(dt.Size()))
		return
	}
	c.buffer(name, p, n, 1)
	if c.err == nil {
		c.err = fmt.Errorf("cuda:%d: %s: element type of %s is %v, want f32, f16 or bf16: %w", c.s.rt.index, c.op, name, dt, runtime.ErrDType)
	}
}

func (c *checks) source(src kernel.Source) {
	c.floats("x", src.X, src.N)
	if src.Grad != 0 {
		c.elements("grad", src.Grad, src.DType, src.N)
		c.floats("from", from(src), src.N)
		c.optional("factor", src.Factor)
		if src.Keep != 0 {
			c.floats("keep", src.Keep, src.N)
		}
	}
}

// list checks a list, for all that it can hold.
func (c *checks) list(name string, l kernel.Entries) {
	c.floats(name, l.Val, l.N)
	c.indices(name, l)
}

// indices checks a list whose values are not looked at.
func (c *checks) indices(name string, l kernel.Entries) {
	c.floats(name, l.Idx, l.N)
	c.optional(name, l.Len)
}

func (c *checks) target(dst kernel.Entries) { c.list("dst", dst) }

// lists checks lists, and returns how many entries they may have.
func (c *checks) lists(lists []kernel.Entries) (capacity int) {
	for _, l := range lists {
		c.list("list", l)
		capacity += l.N
	}
	if len(lists) > maxLists && c.err == nil {
		c.err = fmt.Errorf("cuda:%d: %s of %d lists, at most %d: %w", c.s.rt.index, c.op, len(lists), maxLists, runtime.ErrUnsupported)
	}
	return min(capacity, math.MaxInt32)
}

// room checks that dst has room for the lesser of a and b.
func (c *checks) room(dst kernel.Entries, a, b int) {
	if need := min(a, b); dst.N < need {
		c.fail("dst has room for %d entries, want %d", dst.N, need)
	}
}

func (c *checks) back(b kernel.Restoration) {
	c.array(b.Dst)
	c.list("l", b.L)
	c.indices("taken", b.Taken)
}

func (c *checks) array(a kernel.Array) {
	c.floats("dst", a.Ptr, a.N)
	c.optional("faults", a.Faults)
}
