package cuda

import (
	"errors"

	"github.com/tutti-go/tutti/runtime/kernel"
)

// pickMode says what pick does with elements that reach the threshold, as in kernels/select.cu.
type pickMode int

const (
	pickNone pickMode = iota // only adds the gradient
	pickList
	pickNear
	pickTop
)

// selection describes a call of pick, sift and cut, or of some of them, in kernels/select.cu.
type selection struct {
	src       kernel.Source     // the array or list to select from
	idx       uintptr           // indices of a list with the values src.X; 0 for an array
	length    uintptr           // length of a list; 0: it is src.N
	mode      pickMode          // how pick finds candidates
	k         int               // entries wanted, for pickTop and pickNear; 0: all that reach the threshold
	dst       kernel.Entries    // receives the selected entries
	zeros     bool              // zeros may be among the k largest
	threshold uintptr           // 0: cut finds the k largest without pick
	age       uintptr           // age of the threshold, for pickNear
	near      kernel.Acceptance // for pickNear
	used      uintptr           // receives the threshold that was used; 0 for none
	margin    uintptr           // margin of the threshold, for pickTop; 0 for none
	without   uintptr           // range of indices of a list that is not cut; 0 for none
	residual  kernel.Array      // receives the dropped entries of a list; none if its Ptr is 0

	blocks int // of pick; 0 before prepare
	room   int // entries of a warp's segment
}

// sifts reports whether pick may list more than the k largest.
func (p *selection) sifts() bool {
	return p.mode == pickTop || p.mode == pickNear
}

// segmentsOf returns the segments in which pick lists entries.
func (s *sparse) segmentsOf(p *selection) segmentsParameters {
	return segmentsParameters{
		idx:    s.address(segmentIndices),
		val:    s.address(segmentValues),
		count:  s.address(segmentCounts),
		room:   p.room,
		blocks: p.blocks,
	}
}

// sifted returns the memory for sift's candidates.
func (s *sparse) sifted() siftedParameters {
	return siftedParameters{
		counts:     s.address(segmentsAbove),
		candidates: s.address(candidates),
		room:       maxCandidates,
	}
}

// prepare allocates memory for the results of pick and sift.
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
	const warpsPerBlock = block / 32
	warps := p.blocks * warpsPerBlock
	if wanted > 0 {
		// Four times the average, but at most the number of elements in a warp's part.
		tilesPerWarp := tiles(p.src.N)*warpsPerBlock/warps + 1
		p.room = min(4*wanted/warps+64, tilesPerWarp*tileElements/warpsPerBlock)
	}
	counts := 4 * (warps + p.blocks)
	err := errors.Join(
		s.grow(segmentIndices, 4*warps*p.room),
		s.grow(segmentValues, 4*warps*p.room),
		s.grow(segmentCounts, counts))
	if p.sifts() {
		err = errors.Join(err, s.grow(segmentsAbove, counts), s.grow(candidates, 8*maxCandidates))
	}
	return err
}

// pick launches pick.
func (s *sparse) pick(p *selection) error {
	return launch(s.rt, kernelPick, p.blocks, picksPerSM, &pickParameters{
		control:            s.address(control),
		target:             s.segmentsOf(p),
		x:                  p.src.X,
		idx:                p.idx,
		n:                  p.src.N,
		length:             p.length,
		gradientParameters: gradientOf(p.src),
		take:               flag(p.src.Take),
		mode:               int(p.mode),
		threshold:          p.threshold,
		interval:           max(p.near.Interval, 0),
		keep:               p.src.Keep,
	})
}

// sift launches sift, after pick.
func (s *sparse) sift(p *selection) error {
	return launch(s.rt, kernelSift|early, p.blocks, streamsPerSM, &siftParameters{
		control: s.address(control),
		source:  s.segmentsOf(p),
		target:  s.sifted(),
		n:       p.src.N,
		length:  p.length,
		k:       p.k,
	})
}

// cut launches cut, after pick or alone.
func (s *sparse) cut(p *selection) error {
	blocks := p.blocks
	if p.mode != pickList {
		blocks = max(blocks, p.src.N/smallTile+1)
	}
	picked := p.blocks > 0
	parameters := cutOutsideParameters{
		cut: cutParameters{
			control:   s.address(control),
			status:    s.address(status),
			ties:      s.address(statusTies),
			source:    s.segmentsOf(p),
			sifted:    s.sifted(),
			x:         p.src.X,
			n:         p.src.N,
			idx:       p.idx,
			length:    p.length,
			picked:    flag(picked),
			dst:       listOf(p.dst),
			k:         p.k,
			take:      flag(p.src.Take),
			zeros:     flag(p.zeros),
			threshold: p.threshold,
			age:       p.age,
			used:      p.used,
			margin:    p.margin,
			min:       max(p.near.Min, 0),
			step:      float64(p.near.Step),
			shared:    p.dst.Shared,
		},
		without:  p.without,
		residual: arrayOf(p.residual),
	}
	if p.without != 0 || p.residual.Ptr != 0 {
		return launch(s.rt, kernelCutOutside.earlyIf(picked), blocks, streamsPerSM, &parameters)
	}
	return launch(s.rt, kernelCut.earlyIf(picked), blocks, streamsPerSM, &parameters.cut)
}

// run launches the kernels of a selection. If it fails for lack of memory, nothing has been launched. If it fails
// after pick, pick is rolled back.
func (s *sparse) run(p selection) error {
	if err := s.growStatus(p.src.N); err != nil {
		return err
	}
	if p.src.Grad == 0 && p.threshold == 0 {
		return s.cut(&p)
	}
	if err := s.prepare(&p); err != nil {
		return err
	}
	if err := s.pick(&p); err != nil {
		return err
	}
	if err := s.finish(&p); err != nil {
		return errors.Join(err, s.rollBack(&p))
	}
	return nil
}

// finish launches the kernels after pick.
func (s *sparse) finish(p *selection) error {
	if p.sifts() {
		if err := s.sift(p); err != nil {
			return err
		}
	}
	return s.cut(p)
}

// rollBack restores the array from the values that pick has saved, and clears pick's counts, as cut would have. That
// includes the epoch, so the status words of tiles are cleared too.
func (s *sparse) rollBack(p *selection) error {
	err := errors.Join(s.zero(control), s.zero(status), s.zero(statusTies))
	if p.src.Grad != 0 && p.src.Keep != 0 {
		err = errors.Join(err, s.rt.Copy(p.src.X, p.src.Keep, 4*p.src.N))
	}
	return err
}

// listSelection selects from a list.
func listSelection(l kernel.Entries, mode pickMode, dst kernel.Entries) selection {
	return selection{
		src:    kernel.Source{X: l.Val, N: l.N},
		idx:    l.Idx,
		length: l.Len,
		mode:   mode,
		dst:    dst,
	}
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

// TopK implements [kernel.Kernels].
func (s *sparse) TopK(src kernel.Source, k int, dst kernel.Entries, threshold uintptr) error {
	c := s.checks("TopK")
	c.source(src)
	c.target(dst)
	c.room(dst, c.length("k", k), src.N)
	c.optional("threshold", threshold)
	return c.submit(func() error {
		p := selection{
			src:       src,
			mode:      pickTop,
			k:         min(k, src.N),
			dst:       dst,
			zeros:     dst.Len == 0,
			threshold: threshold,
		}
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
		return s.run(selection{
			src:       src,
			mode:      pickList,
			threshold: threshold,
			dst:       dst,
		})
	})
}

// SelectNear implements [kernel.Kernels].
func (s *sparse) SelectNear(src kernel.Source, k int, state uintptr, near kernel.Acceptance, dst kernel.Entries,
	used uintptr) error {
	c := s.checks("SelectNear")
	c.source(src)
	c.target(dst)
	c.room(dst, c.length("k", k), src.N)
	c.number("dst.Len", dst.Len, 4)
	c.number("state", state, 4)
	c.optional("used", used)
	return c.submit(func() error {
		return s.run(selection{
			src:       src,
			mode:      pickNear,
			k:         k,
			dst:       dst,
			threshold: state,
			age:       state + 4,
			near:      near,
			used:      used,
		})
	})
}

// TopKList implements [kernel.Kernels].
func (s *sparse) TopKList(l kernel.Entries, k int, dst kernel.Entries, without uintptr, residual kernel.Array) error {
	c := s.checks("TopKList")
	c.list("l", l)
	c.target(dst)
	c.room(dst, c.length("k", k), l.N)
	c.optional("without", without)
	if residual.Ptr != 0 {
		c.array(residual)
	}
	return c.submit(func() error {
		p := listSelection(l, pickTop, dst)
		p.k = k
		p.zeros = true
		p.without = without
		p.residual = residual
		return s.run(p)
	})
}

// SelectList implements [kernel.Kernels].
func (s *sparse) SelectList(l kernel.Entries, threshold uintptr, dst kernel.Entries) error {
	c := s.checks("SelectList")
	c.list("l", l)
	c.target(dst)
	c.number("threshold", threshold, 4)
	return c.submit(func() error {
		p := listSelection(l, pickList, dst)
		p.threshold = threshold
		return s.run(p)
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
		for first := 0; first < m; first += maxCounts {
			err := launch(s.rt, kernelCountAbove, blocksOf(l.N), streamsPerSM, &countAboveParameters{
				control:    s.address(control),
				l:          listOf(l),
				thresholds: thresholds + uintptr(4*first),
				m:          min(m-first, maxCounts),
				counts:     counts + uintptr(4*first),
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// Narrow implements [kernel.Kernels].
func (s *sparse) Narrow(bracket, counts uintptr, k int, thresholds uintptr, m int) error {
	c := s.checks("Narrow")
	c.number("bracket", bracket, 4)
	c.floats("thresholds", thresholds, m)
	c.optional("counts", counts)
	c.length("k", k)
	return c.submit(func() error {
		return launch(s.rt, kernelNarrow, 1, 1, &narrowParameters{
			bracket:    bracket,
			counts:     counts,
			k:          k,
			thresholds: thresholds,
			m:          m,
		})
	})
}
