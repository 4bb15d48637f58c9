package cuda

import (
	"math"
	"slices"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Merge implements [kernel.Kernels].
func (s *sparse) Merge(dst uintptr, dt dtype.DType, n int, lists []kernel.Entries, scale float32,
	faults, excess uintptr, back kernel.Restoration) error {
	c := s.checks("Merge")
	c.elements("dst", dst, dt, n)
	c.optional("faults", faults)
	c.optional("excess", excess)
	c.lists(lists)
	c.restoration(back)
	return c.submit(func() error {
		perSM := mergesPerSM
		if n >= longMerge {
			perSM *= 2
		}
		shared := slices.ContainsFunc(lists, func(l kernel.Entries) bool { return l.Shared != 0 })
		parameters := mergeParameters{
			dst:         dst,
			n:           n,
			scale:       float64(scale),
			faults:      faults,
			excess:      excess,
			restoration: restorationOf(back),
		}
		return s.launchLists(mergeKernels.variant(dt).earlyIf(shared), n, perSM, lists, &parameters)
	})
}

// Union implements [kernel.Kernels].
func (s *sparse) Union(dst kernel.Entries, n int, lists []kernel.Entries, scale float32,
	faults, threshold uintptr) error {
	c := s.checks("Union")
	c.target(dst)
	c.number("dst.Len", dst.Len, 4)
	c.optional("faults", faults)
	c.optional("threshold", threshold)
	c.lists(lists)
	c.length("n", n)
	return c.submit(func() error {
		k := kernelUnite
		work := n
		if len(lists) == 2 {
			k = kernelUniteTwo
			work = 2 * (lists[0].N + lists[1].N) // its tiles have half as many entries as those of arrays
		}
		if err := s.growStatus(work); err != nil {
			return err
		}
		parameters := mergeParameters{
			union:     listOf(dst),
			n:         n,
			scale:     float64(scale),
			faults:    faults,
			threshold: threshold,
			shared:    dst.Shared,
		}
		return s.launchLists(k, work, mergesPerSM, lists, &parameters)
	})
}

// launchLists launches merge or unite. If the parameters cannot hold all lists, it first writes the lists to memory.
func (s *sparse) launchLists(k kernelID, work, perSM int, all []kernel.Entries, parameters *mergeParameters) error {
	if len(all) <= inlineLists {
		for i, l := range all {
			parameters.lists[i] = listOf(l)
		}
	} else {
		table, err := s.putLists(all)
		if err != nil {
			return err
		}
		parameters.table = table
	}
	parameters.control = s.address(control)
	parameters.status = s.address(status)
	parameters.count = len(all)
	return launch(s.rt, k, tiles(work), perSM, parameters)
}

// putLists stores the descriptors of lists in memory, and returns their address.
func (s *sparse) putLists(all []kernel.Entries) (table uintptr, err error) {
	if err := s.grow(lists, listBytes*len(all)); err != nil {
		return 0, err
	}
	table = s.address(lists)
	for first := 0; first < len(all); first += listsOfPut {
		batch := all[first:min(first+listsOfPut, len(all))]
		parameters := putListsParameters{
			table: table + uintptr(listBytes*first),
			words: listBytes / 8 * len(batch),
		}
		for i, l := range batch {
			parameters.lists[i] = listOf(l)
		}
		if err := launch(s.rt, kernelPutWords, 1, 1, &parameters); err != nil {
			return 0, err
		}
	}
	return table, nil
}

// scatter launches a kernel that accesses an array at the indices of a list.
func (s *sparse) scatter(k kernelID, r kernel.Restoration, scale float32) error {
	if r.L.N == 0 {
		return nil
	}
	parameters := scatterParameters{restorationParameters: restorationOf(r), scale: float64(scale)}
	return launch(s.rt, k, blocksOf(r.L.N), blocksPerSM, &parameters)
}

// ScatterAdd implements [kernel.Kernels].
func (s *sparse) ScatterAdd(dst kernel.Array, l kernel.Entries, scale float32) error {
	c := s.checks("ScatterAdd")
	c.array(dst)
	c.list("l", l)
	return c.submit(func() error {
		return s.scatter(kernelScatterAdd, kernel.Restoration{Dst: dst, L: l}, scale)
	})
}

// ScatterZero implements [kernel.Kernels].
func (s *sparse) ScatterZero(dst kernel.Array, l kernel.Entries) error {
	c := s.checks("ScatterZero")
	c.array(dst)
	c.indices("l", l)
	return c.submit(func() error {
		return s.scatter(kernelZeroAt, kernel.Restoration{Dst: dst, L: l}, 1)
	})
}

// Restore implements [kernel.Kernels].
func (s *sparse) Restore(dst kernel.Array, l, taken kernel.Entries) error {
	r := kernel.Restoration{
		Dst:   dst,
		L:     l,
		Taken: taken,
	}
	c := s.checks("Restore")
	c.restoration(r)
	return c.submit(func() error { return s.scatter(kernelGiveBack, r, 1) })
}

// LowerBounds implements [kernel.Kernels].
func (s *sparse) LowerBounds(l kernel.Entries, bounds uintptr, m int, positions, lengths uintptr) error {
	c := s.checks("LowerBounds")
	c.indices("l", l)
	c.floats("bounds", bounds, m)
	c.floats("positions", positions, m)
	c.optional("lengths", lengths)
	return c.submit(func() error {
		if m == 0 {
			return nil
		}
		return launch(s.rt, kernelLowerBounds, blocksOf(32*m), blocksPerSM, &lowerBoundsParameters{
			l:         listOf(l),
			bounds:    bounds,
			m:         m,
			positions: positions,
			lengths:   lengths,
		})
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
		for len(pieces) > 0 {
			count := min(maxPieces, len(pieces))
			for count < len(pieces) && pieces[count].To == pieces[count-1].To {
				count-- // pieces for one target go into one launch
			}
			if err := s.launchPieces(pieces[:count]); err != nil {
				return err
			}
			pieces = pieces[count:]
		}
		return nil
	})
}

// launchPieces launches copy_pieces for at most maxPieces pieces.
func (s *sparse) launchPieces(pieces []kernel.Piece) error {
	longest := 0
	parameters := copyPiecesParameters{count: len(pieces)}
	for i, p := range pieces {
		parameters.pieces[i] = pieceParameters{
			source:  listOf(p.From),
			start:   p.Start,
			end:     p.End,
			byIndex: flag(p.ByIndex),
			idx:     p.To.Idx,
			val:     p.To.Val,
			room:    p.To.N,
			length:  p.To.Len,
		}
		longest = max(longest, min(p.From.N, p.To.N))
	}
	return launch(s.rt, kernelCopyPieces, longest/block+1, piecesPerSM, &parameters)
}

// Sample implements [kernel.Kernels].
func (s *sparse) Sample(l kernel.Entries, quantiles []float64, n int, dst uintptr) error {
	c := s.checks("Sample")
	c.indices("l", l)
	c.floats("dst", dst, len(quantiles))
	c.length("n", n)
	c.limit("quantiles", len(quantiles), maxQuantiles)
	for i, q := range quantiles {
		if math.IsNaN(q) || q < 0 || q >= 1 {
			c.fail("quantiles[%d] is %v, want 0 <= q < 1", i, q)
		}
	}
	return c.submit(func() error {
		parameters := sampleParameters{
			l:   listOf(l),
			n:   n,
			m:   len(quantiles),
			dst: dst,
		}
		copy(parameters.quantiles[:], quantiles)
		return launch(s.rt, kernelSample, 1, 1, &parameters)
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
		return launch(s.rt, kernelBalance, blocksOf(m), streamsPerSM, &balanceParameters{
			control: s.address(control),
			samples: samples,
			sorted:  s.address(partial),
			m:       m,
			n:       n,
			bounds:  bounds,
			parts:   parts,
		})
	})
}
