package runtimetest

import (
	"math"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// eachList runs f on lists of every size and kind of values.
func (d *device) eachList(f func(d *device, l entries)) {
	d.eachGradient(func(d *device, x []float32) {
		l := d.random(len(x), 2*len(x), "zero")
		l.val = x
		f(d, l)
	})
}

func testTopKList(d *device) {
	d.eachList(func(d *device, l entries) {
		order := ranking(l.val)
		for _, count := range topKCounts(len(l.idx)) {
			want := l.pick(order[:min(count, len(order))])
			list := d.list(l)
			room := min(count, list.N) + d.rng.IntN(40)
			dst := d.target(room, d.coin())
			require.NoError(d, d.TopKList(list, count, dst, 0, kernel.Array{}))
			d.equalEntries(want, len(want.idx), dst, "top %d", count)
			if d.rng.IntN(3) == 0 {
				d.checkTopOutside(l, count)
			}
		}
	})
}

// checkTopOutside has TopKList select from a list without a part of it, and add to an array what it does
// not select.
func (d *device) checkTopOutside(l entries, count int) {
	n := 2 * len(l.idx)
	low, high := d.outsideBounds(n)
	length := d.rng.IntN(n + 1) // of the array: what is beyond is a fault
	var outside entries
	for j, i := range l.idx {
		if i < low || i >= high {
			outside.append(i, l.val[j])
		}
	}
	if d.rng.IntN(3) == 0 {
		count = max(len(outside.idx)+d.rng.IntN(3)-1, 0)
	}
	order := ranking(outside.val)
	selected := order[:min(count, len(order))]
	want := outside.pick(selected)
	x := d.gradient("special", length)
	faults := int32(7)
	sums := slices.Clone(x)
	taken := map[int32]bool{}
	for _, i := range want.idx {
		taken[i] = true
	}
	for j, i := range outside.idx {
		switch {
		case taken[i]:
		case int(i) < length:
			sums[i] = sum(sums[i], outside.val[j])
		default:
			faults++
		}
	}
	list := d.list(l)
	dst := d.target(min(count, list.N), d.coin())
	residual := kernel.Array{
		Ptr:    place(d, x),
		N:      length,
		Faults: place(d, []int32{7}),
	}
	bounds := place(d, []int32{low, high})
	require.NoError(d, d.Kernels.TopKList(list, count, dst, bounds, residual))
	d.equalEntries(want, len(want.idx), dst, "top %d outside of [%d, %d)", count, low, high)
	d.equalArray(sums, residual.Ptr, "what is left out of top %d outside of [%d, %d)", count, low, high)
	d.equalFaults(faults, residual.Faults)
}

// outsideBounds draws the indices of lists that are left out, of n: often those at one end, all or none.
func (d *device) outsideBounds(n int) (low, high int32) {
	end := int32(n)
	low = d.rng.Int32N(end + 1)
	high = d.rng.Int32N(end + 1)
	switch d.rng.IntN(7) {
	case 0:
		return 0, high
	case 1:
		return low, end
	case 2:
		return math.MinInt32, math.MaxInt32
	case 3:
		return 0, 0
	case 4:
		return -1, 0
	case 5:
		return end, end
	default:
		return low, high
	}
}

func testSelectList(d *device) {
	d.eachList(func(d *device, l entries) {
		for _, threshold := range thresholds {
			want := l.pick(passing(l.val, threshold))
			total := len(want.idx)
			room := draw(d, total+40, total, total/2, 0)
			hasLength := d.rng.IntN(4) > 0
			dst := d.target(room, hasLength)
			list := d.list(l)
			require.NoError(d, d.SelectList(list, d.number(threshold), dst))
			d.equalEntries(want.first(room), total, dst, "threshold %v, room for %d", threshold, room)
		}
	})
}

func testCountAbove(d *device) {
	d.eachList(func(d *device, l entries) {
		for _, m := range []int{0, 1, 2, 15, 64, 100} {
			ts := make([]float32, m)
			want := make([]int32, m)
			equal := d.rng.IntN(4) == 0
			for j := range ts {
				ts[j] = draw(d, thresholds...)
				if d.coin() {
					x := 3 * d.rng.NormFloat64()
					ts[j] = float32(math.Abs(x))
				}
				if equal {
					ts[j] = ts[0]
				}
				passed := passing(l.val, ts[j])
				want[j] = int32(len(passed))
			}
			list := d.list(l)
			list.Idx = 0
			unset := slices.Repeat([]int32{-1}, m)
			counts := place(d, unset)
			require.NoError(d, d.CountAbove(list, place(d, ts), m, counts))
			got := read[int32](d, counts, m)
			require.Equal(d, want, got, "thresholds %v, seed %d", ts, Seed)
		}
	})
}

// testNarrow searches as several ranks would, and then checks the result.
func testNarrow(d *device) {
	for _, name := range []string{"normal", "wide", "ties", "zero", "denormal", "special"} {
		for _, m := range []int{1, 7, 15, 63} {
			d.subtest(func(d *device) { d.checkNarrow(name, m) }, "%s, %d cuts", name, m)
		}
	}
}

// checkNarrow has three ranks with such values search by m cuts a round.
func (d *device) checkNarrow(name string, m int) {
	const ranks = 3
	var all []float32
	var lists [ranks]kernel.Entries
	for r := range lists {
		l := d.random(100*r, 1000, name)
		all = append(all, l.val...)
		lists[r] = d.list(l)
	}
	count := 1 + d.rng.IntN(len(all)+10)
	low := uint64(1)
	high := uint64(1) << 31
	bracket := place(d, []uint32{5, 5})
	cuts := place(d, make([]uint32, m))
	counts := uintptr(0)
	for round := 0; ; round++ {
		require.NoError(d, d.Narrow(bracket, counts, count, cuts, m))
		got := read[uint32](d, bracket, 2)
		require.Equal(d, []uint32{uint32(low), uint32(high)}, got, "round %d, seed %d", round, Seed)
		width := (high - low) / uint64(m+1)
		want := make([]uint32, m)
		sums := make([]int32, m)
		for j := range want {
			want[j] = uint32(low + width*uint64(j+1))
			for _, v := range all {
				if magnitude(v) >= want[j] {
					sums[j]++
				}
			}
		}
		gotCuts := read[uint32](d, cuts, m)
		require.Equal(d, want, gotCuts, "round %d, seed %d", round, Seed)
		if width == 0 {
			break
		}
		total := d.countAll(lists[:], cuts, m)
		require.Equal(d, sums, total, "round %d, seed %d", round, Seed)
		counts = place(d, total)
		passed := 0
		for passed < m && int(sums[passed]) >= count {
			passed++
		}
		if passed < m {
			high = low + width*uint64(passed+1)
		}
		low += width * uint64(passed)
	}
	if count > len(all) {
		require.EqualValues(d, 1, low)
		return
	}
	position := ranking(all)[count-1]
	kth := max(uint64(magnitude(all[position])), 1)
	require.True(d, low <= kth && kth < high, "%d is not in [%d, %d), seed %d", kth, low, high, Seed)
}

// countAll returns the sums of what CountAbove counts in lists.
func (d *device) countAll(lists []kernel.Entries, thresholds uintptr, m int) []int32 {
	total := make([]int32, m)
	for _, l := range lists {
		part := place(d, make([]int32, m))
		require.NoError(d, d.CountAbove(l, thresholds, m, part))
		counts := read[int32](d, part, m)
		for j, n := range counts {
			total[j] += n
		}
	}
	return total
}

// merged adds up lists as the contract says, by a map.
func merged(all []entries, n int, scale float32) (sums map[int32]float32, faults int32) {
	sums = map[int32]float32{}
	for _, l := range all {
		for j, i := range l.idx {
			if i < 0 || int(i) >= n {
				faults++
				continue
			}
			sums[i] = sum(sums[i], product(l.val[j], scale))
		}
	}
	return sums, faults
}

func (d *device) checkMerge(all []entries, n int, scale float32) {
	sums, wrong := merged(all, n, scale)
	for _, dt := range gradientTypes {
		dense := make([]float32, n)
		for i, v := range sums {
			dense[i] = v
		}
		dense, excess, check := d.excess(dense, dt)
		want, _ := d.narrow(dense, dt)
		_, dst := d.narrow(d.gradient("normal", n), dt)
		faults := place(d, []int32{1000})
		back, checkBack := d.optionalRestoration(n)
		lists := d.lists(all)
		require.NoError(d, d.Kernels.Merge(dst, dt, n, lists, scale, faults, excess, back))
		check()
		checkBack()
		got := d.readNarrow(dst, dt, n)
		d.equalFloats(want, got, "%d lists as %v", len(all), dt)
		d.equalFaults(1000+wrong, faults)
	}
}

func (d *device) checkUnion(all []entries, n int, scale float32) {
	sums, wrong := merged(all, n, scale)
	var want entries
	threshold := draw(d, thresholds...)
	ptr := uintptr(0)
	if d.coin() {
		ptr = d.number(threshold)
	}
	for i, v := range sums {
		if ptr == 0 || passes(v, threshold) {
			want.idx = append(want.idx, i)
		}
	}
	slices.Sort(want.idx)
	for _, i := range want.idx {
		want.val = append(want.val, sums[i])
	}
	total := len(want.idx)
	lists := d.lists(all)
	room := 0
	for _, l := range lists {
		room += l.N
	}
	room = min(n, room)
	if d.coin() { // for some of them, or just for all
		room = draw(d, total, max(total-1, 0), total/2, min(total, 1), 0)
		want = want.first(room)
	}
	dst := d.target(room, true)
	faults := place(d, []int32{1000})
	require.NoError(d, d.Kernels.Union(dst, n, lists, scale, faults, ptr))
	d.equalEntries(want, total, dst, "%d lists, room for %d of %d", len(all), room, total)
	d.equalFaults(1000+wrong, faults)
}

// eachLists runs f on several lists of indices below n, some of them spoiled, and a scale.
func (d *device) eachLists(f func(d *device, all []entries, n int, scale float32)) {
	for i, n := range kernelSizes() {
		for j, ranks := range []int{0, 1, 2, 3, 8} {
			for s, share := range []int{1, 3, 100, 0} {
				if leftOut(i, j+s) {
					continue
				}
				d.subtest(func(d *device) {
					all := make([]entries, ranks)
					for r := range all {
						m := 2
						if share > 0 {
							m = (n + share - 1) / share
						}
						all[r] = d.random(m, n, "special")
						if d.rng.IntN(3) == 0 {
							all[r], _ = d.spoiled(all[r], n)
						}
					}
					scale := draw[float32](d, 1, 0.5, 1.0/3)
					f(d, all, n, scale)
				}, "%d lists of 1/%d of %d", ranks, share, n)
			}
		}
	}
}

func testScatter(d *device) {
	for _, n := range kernelSizes() {
		for _, m := range []int{0, 1, n / 10, n} {
			d.subtest(func(d *device) {
				x := d.gradient("special", n)
				l := d.random(m, n, "special")
				spoiled, wrong := d.spoiled(l, n)
				list := d.list(spoiled)
				zero := d.list(spoiled)
				zero.Val = 0
				for _, test := range []struct {
					name string
					call func(dst kernel.Array) error
					want func(old, v float32) float32
				}{
					{
						"ScatterAdd",
						func(dst kernel.Array) error {
							return d.ScatterAdd(dst, list, 1)
						},
						sum,
					},
					{
						"ScatterAdd, scaled",
						func(dst kernel.Array) error {
							return d.ScatterAdd(dst, list, -0.3)
						},
						func(old, v float32) float32 {
							return sum(old, product(v, -0.3))
						},
					},
					{
						"ScatterZero",
						func(dst kernel.Array) error {
							return d.ScatterZero(dst, zero)
						},
						func(_, _ float32) float32 { return 0 },
					},
				} {
					want := slices.Clone(x)
					for j, i := range l.idx {
						want[i] = test.want(want[i], l.val[j])
					}
					dst := kernel.Array{
						Ptr:    place(d, x),
						N:      n,
						Faults: place(d, []int32{7}),
					}
					require.NoError(d, test.call(dst))
					d.equalArray(want, dst.Ptr, "%s", test.name)
					d.equalFaults(7+wrong, dst.Faults)
					dst.Faults = 0
					require.NoError(d, test.call(dst), "%s: nobody counts faults", test.name)
				}
			}, "%d of %d", m, n)
		}
	}
}

func testRestore(d *device) {
	for _, n := range kernelSizes() {
		for _, m := range []int{0, 1, n / 10, n} {
			for _, share := range []int{0, 1, 2, 20} {
				d.subtest(func(d *device) {
					r, check := d.restoration(n, m, share)
					require.NoError(d, d.Restore(r.Dst, r.L, r.Taken))
					check()
				}, "%d of %d, share %d", m, n, share)
			}
		}
	}
}

// restoration makes what Restore restores: m of n entries, but those that are taken, one of share
// and some others. check looks at what comes of it.
func (d *device) restoration(n, m, share int) (r kernel.Restoration, check func()) {
	x := d.gradient("special", n)
	l := d.random(m, n, "special")
	taken := d.random(min(3, n), n, "zero") // some that l may not have
	for _, i := range l.idx {
		if share > 0 && d.rng.IntN(share) == 0 {
			taken.idx = append(taken.idx, i)
		}
	}
	slices.Sort(taken.idx)
	taken.idx = slices.Compact(taken.idx)
	taken.val = make([]float32, len(taken.idx))
	isTaken := make([]bool, n)
	for _, i := range taken.idx {
		isTaken[i] = true
	}
	want := slices.Clone(x)
	for j, i := range l.idx {
		if !isTaken[i] {
			want[i] = sum(want[i], l.val[j])
		}
	}
	spoiled, wrong := d.spoiled(l, n)
	without, _ := d.spoiled(taken, n)
	r = kernel.Restoration{
		Dst: kernel.Array{
			Ptr:    place(d, x),
			N:      n,
			Faults: place(d, []int32{7}),
		},
		L:     d.list(spoiled),
		Taken: d.list(without),
	}
	return r, func() {
		d.equalArray(want, r.Dst.Ptr, "%d of %d, %d taken", m, n, len(taken.idx))
		d.equalFaults(7+wrong, r.Dst.Faults)
	}
}

// optionalRestoration is a restoration, or nothing.
func (d *device) optionalRestoration(n int) (r kernel.Restoration, check func()) {
	if d.coin() {
		return kernel.Restoration{}, func() {}
	}
	m := d.rng.IntN(n + 1)
	share := d.rng.IntN(4)
	return d.restoration(n, m, share)
}

func testLowerBounds(d *device) {
	for _, n := range kernelSizes() {
		l := d.random(n/3, n, "zero")
		bounds := []int32{0, 1, int32(n / 2), int32(n), math.MaxInt32, 0, -1, math.MinInt32}
		for range 20 {
			bounds = append(bounds, d.rng.Int32N(int32(n+1)))
		}
		for _, m := range []int{0, 1, 2, len(bounds)} {
			want := make([]int32, m)
			lengths := make([]int32, max(m-1, 0))
			for b, bound := range bounds[:m] {
				for _, i := range l.idx {
					if i < bound {
						want[b]++
					}
				}
				if b > 0 {
					lengths[b-1] = want[b] - want[b-1]
				}
			}
			list := d.list(l)
			list.Val = 0
			ptr := place(d, bounds)
			got := place(d, make([]int32, m))
			gaps := place(d, make([]int32, len(lengths)))
			require.NoError(d, d.LowerBounds(list, ptr, m, got, gaps))
			positions := read[int32](d, got, m)
			require.Equal(d, want, positions, "seed %d: %d entries, bounds %v", Seed, len(l.idx), bounds)
			between := read[int32](d, gaps, len(lengths))
			require.Equal(d, lengths, between, "lengths, seed %d", Seed)
			require.NoError(d, d.LowerBounds(list, ptr, m, got, 0))
		}
	}
}

func testCopyPieces(d *device) {
	for s, n := range kernelSizes() {
		for round := range 10 {
			if leftOut(s, round) {
				continue
			}
			d.checkCopyPieces(n)
		}
	}
}

// checkCopyPieces puts pieces of two lists of up to n entries together.
func (d *device) checkCopyPieces(n int) {
	var sources [2]entries
	var lists [2]kernel.Entries
	for i := range sources {
		m := d.rng.IntN(n + 1)
		sources[i] = d.random(m, n, "special")
		lists[i] = d.list(sources[i])
	}
	var pieces []kernel.Piece
	var wants []entries // of each destination
	var targets []kernel.Entries
	for range d.rng.IntN(12) {
		var want entries
		room := d.rng.IntN(3*n + 1)
		target := d.target(room, true)
		for range 1 + d.rng.IntN(kernel.MaxPieces) {
			i := d.rng.IntN(2)
			source := sources[i]
			piece, start, end := d.piece(source, n)
			for j := start; j < end; j++ {
				want.append(source.idx[j], source.val[j])
			}
			piece.From = lists[i]
			piece.To = target
			pieces = append(pieces, piece)
		}
		wants = append(wants, want)
		targets = append(targets, target)
	}
	require.NoError(d, d.CopyPieces(pieces))
	for i, want := range wants {
		room := targets[i].N
		d.equalEntries(want.first(room), len(want.idx), targets[i], "list %d of %d, room for %d", i, len(wants), room)
	}
}

// piece draws the bounds of a piece of a list with indices below n, and returns the positions that they mean.
func (d *device) piece(l entries, n int) (p kernel.Piece, start, end int) {
	p.ByIndex = d.coin()
	p.Start, start = d.pieceBound(l, n, p.ByIndex, 0)
	p.End, end = d.pieceBound(l, n, p.ByIndex, len(l.idx))
	return p, start, end
}

// pieceBound draws one bound: its address, 0 where it is the one by default, and the position that it means.
func (d *device) pieceBound(l entries, n int, byIndex bool, byDefault int) (ptr uintptr, position int) {
	if d.rng.IntN(4) == 0 {
		return 0, byDefault
	}
	end := len(l.idx)
	inside := int32(d.rng.IntN(end + 1))
	bound := draw(d, 0, int32(end/2), int32(end), inside, -1, math.MinInt32, math.MaxInt32)
	position = min(max(int(bound), 0), end)
	if !byIndex {
		return place(d, []int32{bound}), position
	}
	bound = min(max(bound, -1), int32(n))
	if position < end && d.coin() {
		bound = l.idx[position]
	}
	position = 0
	for _, i := range l.idx {
		if i < bound {
			position++
		}
	}
	return place(d, []int32{bound}), position
}

func testSample(d *device) {
	for _, n := range kernelSizes() {
		for _, m := range []int{0, 1, n / 10, n} {
			for _, count := range []int{0, 1, 16, 64} {
				l := d.random(m, n, "zero")
				quantiles := make([]float64, count)
				want := make([]int32, count)
				for j := range quantiles {
					q := draw(d, 0, 0.5, d.rng.Float64(), math.Nextafter(1, 0))
					quantiles[j] = q
					if len(l.idx) == 0 {
						want[j] = int32(math.Floor(float64(n) * q))
						continue
					}
					position := math.Floor(float64(len(l.idx)) * q)
					want[j] = l.idx[int(position)]
				}
				list := d.list(l)
				list.Val = 0
				dst := place(d, make([]int32, count))
				require.NoError(d, d.Sample(list, quantiles, n, dst))
				got := read[int32](d, dst, count)
				require.Equal(d, want, got, "%d of %d, quantiles %v, seed %d", len(l.idx), n, quantiles, Seed)
			}
		}
	}
}

func testBalance(d *device) {
	const n = 1_000_000
	for _, parts := range []int{1, 2, 3, 8, 64} {
		for _, m := range []int{1, 2, 7, parts, 64 * parts} {
			samples := make([]int32, m)
			for i := range samples {
				samples[i] = d.rng.Int32N(n)
				if d.rng.IntN(10) == 0 {
					samples[i] = draw[int32](d, math.MinInt32, -1, n, math.MaxInt32)
				}
			}
			ptr := place(d, samples)
			bounds := place(d, make([]int32, parts+1))
			require.NoError(d, d.Balance(ptr, m, n, bounds, parts))
			slices.Sort(samples)
			want := []int32{0}
			for r := 1; r < parts; r++ {
				sample := samples[r*m/parts]
				want = append(want, min(max(sample, 0), n))
			}
			want = append(want, n)
			got := read[int32](d, bounds, parts+1)
			require.Equal(d, want, got, "%d samples, seed %d", m, Seed)
			sorted := read[int32](d, ptr, m)
			require.Equal(d, samples, sorted, "samples, seed %d", Seed)
		}
	}
}

// testHostile passes lists of any content and length to all that reads lists:
// nothing around the arrays may be written, and nothing may fail.
func testHostile(d *device) {
	const rounds = 60
	for round := range rounds {
		d.subtest(func(d *device) {
			n := 1 + d.rng.IntN(10_000)
			var lists []kernel.Entries
			for range 3 {
				m := d.rng.IntN(3000)
				l := entries{
					idx: make([]int32, m),
					val: d.gradient("special", m),
				}
				for j := range l.idx {
					l.idx[j] = d.rng.Int32N(int32(n))
					if d.rng.IntN(20) == 0 {
						l.idx[j] = int32(d.rng.Uint32())
					}
				}
				list := d.list(l)
				if d.coin() {
					length := int32(d.rng.Uint32())
					list.Len = place(d, []int32{length})
				}
				lists = append(lists, list)
			}
			l := lists[0]
			dst := func(n int) kernel.Entries { return d.target(n, true) }
			array := kernel.Array{
				Ptr:    place(d, d.gradient("special", n)),
				N:      n,
				Faults: place(d, []int32{0}),
			}
			dense := place(d, make([]float32, n))
			words := func() uintptr { return place(d, make([]int32, 64)) }
			bounds := place(d, []int32{0, int32(n / 2), int32(n)})
			for name, err := range map[string]error{
				"TopKList":    d.TopKList(l, 100, dst(100), bounds, array),
				"SelectList":  d.SelectList(l, d.number(1), dst(100)),
				"CountAbove":  d.CountAbove(l, d.number(1), 1, words()),
				"Merge":       d.Merge(dense, dtype.F32, n, lists, 0.5, array.Faults, 0, kernel.Restoration{}),
				"Union":       d.Union(dst(n), n, lists, 0.5, array.Faults, d.number(1)),
				"ScatterAdd":  d.ScatterAdd(array, l, 1),
				"ScatterZero": d.ScatterZero(array, lists[1]),
				"Restore":     d.Restore(array, l, lists[1]),
				"LowerBounds": d.LowerBounds(l, bounds, 3, words(), words()),
				"Sample":      d.Sample(l, []float64{0, 0.5, 0.99}, n, words()),
				"CopyPieces": d.CopyPieces([]kernel.Piece{
					{From: l, Start: words(), End: l.Idx, To: dst(50)},
					{From: lists[1], Start: l.Idx, To: dst(n)},
					{From: l, Start: bounds, End: bounds + 4, ByIndex: true, To: dst(n)},
				}),
			} {
				require.NoError(d, err, name)
			}
			faults := readOne[int32](d, array.Faults)
			require.GreaterOrEqual(d, faults, int32(0), "faults, seed %d", Seed)
		}, "%d", round)
	}
}

// validArguments are such as kernels accept.
type validArguments struct {
	*device
	p       uintptr // of 64 float32
	q       uintptr // of 8 int32
	t       uintptr // of a float32
	f64     uintptr // of 2 float64
	src     kernel.Source
	ok      kernel.Entries
	array   kernel.Array
	near    kernel.Acceptance
	nothing kernel.Restoration
}

func (d *device) validArguments() *validArguments {
	v := &validArguments{device: d}
	v.p = place(d, make([]float32, 64))
	v.q = place(d, []int32{0, 1, 2, 3, 4, 5, 6, 7})
	v.t = d.number(1)
	v.f64 = place(d, []float64{1, 1})
	v.src = kernel.Source{X: v.p, N: 8}
	v.ok = kernel.Entries{
		Idx: v.q,
		Val: v.p,
		N:   8,
		Len: place(d, []int32{8}),
	}
	v.array = kernel.Array{Ptr: v.p, N: 8}
	return v
}

// testKernelArguments passes what kernels have to refuse.
func testKernelArguments(d *device) {
	v := d.validArguments()
	for name, failures := range map[string][]error{
		"arrays of negative length":           v.arraysOf(-1),
		"arrays that are too long":            v.arraysOf(math.MaxInt32 + 1),
		"lists of negative length":            v.listsOf(-1),
		"lists that are too long":             v.listsOf(math.MaxInt32 + 1),
		"arrays and numbers that are missing": v.withoutArrays(),
		"lists and numbers that are missing":  v.withoutLists(),
	} {
		for i, err := range failures {
			require.ErrorIs(d, err, runtime.ErrArgument, "%s, call %d", name, i)
		}
	}
	for _, dt := range []dtype.DType{dtype.Invalid, dtype.F64, dtype.I32, dtype.I16, dtype.FP8E4M3} {
		for i, err := range v.gradientsOfType(dt) {
			require.ErrorIs(d, err, runtime.ErrDType, "call %d, %v", i, dt)
		}
	}
	d.synchronize()
}

// oneCopy is a copy of n float32.
func oneCopy(dst, src uintptr, n int) []kernel.Copy {
	return []kernel.Copy{{Dst: dst, Src: src, DType: dtype.F32, N: n}}
}

// arraysOf passes arrays of n elements.
func (v *validArguments) arraysOf(n int) []error {
	long := kernel.Source{X: v.p, N: n}
	far := kernel.Entries{
		Idx: v.q,
		Val: v.p,
		N:   n,
		Len: v.ok.Len,
	}
	withGrad := kernel.Source{
		X:     v.p,
		N:     n,
		Grad:  v.p,
		DType: dtype.F32,
		From:  v.p,
	}
	return []error{
		v.Accumulate(withGrad),
		v.CopyIf(oneCopy(v.p, v.p, n), v.q, 1),
		v.CopyIf(oneCopy(v.p, v.p, 1), v.q, n),
		v.Store(v.p, dtype.F32, v.p, n, 1, 0),
		v.Scale(v.p, dtype.F32, n, v.t),
		v.SumSquares(v.p, dtype.F32, n, v.f64),
		v.TopK(long, 1, v.ok, v.t),
		v.TopK(v.src, n, v.ok, v.t),
		v.TopK(v.src, 1, far, v.t),
		v.Select(long, v.t, v.ok),
		v.Select(v.src, v.t, far),
		v.SelectNear(long, 1, v.f64, v.near, v.ok, v.t),
		v.SelectNear(v.src, n, v.f64, v.near, v.ok, v.t),
		v.SelectNear(v.src, 1, v.f64, v.near, far, v.t),
		v.Fit(long, 1, v.t),
		v.Refine(v.p, n, v.t, 1, nil),
		v.Refine(v.p, 8, v.t, n, nil),
	}
}

// listsOf passes lists of n entries, and n of other things beside lists.
func (v *validArguments) listsOf(n int) []error {
	far := kernel.Entries{
		Idx: v.q,
		Val: v.p,
		N:   n,
		Len: v.ok.Len,
	}
	wide := kernel.Array{Ptr: v.p, N: n}
	return []error{
		v.TopKList(far, 1, v.ok, 0, kernel.Array{}),
		v.TopKList(v.ok, n, v.ok, 0, kernel.Array{}),
		v.TopKList(v.ok, 1, far, 0, kernel.Array{}),
		v.TopKList(v.ok, 1, v.ok, 0, wide),
		v.SelectList(far, v.t, v.ok),
		v.SelectList(v.ok, v.t, far),
		v.CountAbove(far, v.t, 1, v.q),
		v.CountAbove(v.ok, v.t, n, v.q),
		v.Narrow(v.f64, 0, n, v.t, 1),
		v.Narrow(v.f64, 0, 1, v.t, n),
		v.Merge(v.p, dtype.F32, n, nil, 1, 0, 0, v.nothing),
		v.Merge(v.p, dtype.F32, 8, []kernel.Entries{v.ok, far}, 1, 0, 0, v.nothing),
		v.Merge(v.p, dtype.F32, 8, nil, 1, 0, 0, kernel.Restoration{Dst: v.array, L: far}),
		v.Union(v.ok, n, nil, 1, 0, 0),
		v.Union(v.ok, 8, []kernel.Entries{far}, 1, 0, 0),
		v.Union(far, 8, nil, 1, 0, 0),
		v.ScatterAdd(wide, v.ok, 1),
		v.ScatterAdd(v.array, far, 1),
		v.ScatterZero(wide, v.ok),
		v.ScatterZero(v.array, far),
		v.Restore(wide, v.ok, v.ok),
		v.Restore(v.array, far, v.ok),
		v.Restore(v.array, v.ok, far),
		v.LowerBounds(far, v.q, 2, v.q, v.q),
		v.LowerBounds(v.ok, v.q, n, v.q, v.q),
		v.CopyPieces([]kernel.Piece{{From: far, To: v.ok}}),
		v.CopyPieces([]kernel.Piece{{From: v.ok, To: far}}),
		v.Sample(far, []float64{0}, 8, v.q),
		v.Sample(v.ok, []float64{0}, n, v.q),
		v.Balance(v.q, n, 8, v.q, 1),
		v.Balance(v.q, 8, n, v.q, 1),
	}
}

// withoutArrays leaves out arrays, numbers and room.
func (v *validArguments) withoutArrays() []error {
	none := kernel.Entries{N: 1, Len: v.ok.Len}
	noX := kernel.Source{N: 1}
	noLen := kernel.Entries{
		Idx: v.q,
		Val: v.p,
		N:   8,
	}
	few := kernel.Entries{
		Idx: v.q,
		Val: v.p,
		N:   2,
		Len: v.ok.Len,
	}
	return []error{
		v.Accumulate(v.src),
		v.CopyIf(oneCopy(0, v.p, 1), v.q, 1),
		v.CopyIf(oneCopy(v.p, 0, 1), 0, 1),
		v.CopyIf(oneCopy(v.p, 0, 1), v.q, 0),
		v.CopyIf(slices.Repeat(oneCopy(v.p, 0, 1), kernel.MaxCopies+1), v.q, 1),
		v.Store(0, dtype.F32, v.p, 1, 1, 0),
		v.Store(v.p, dtype.F32, 0, 1, 1, 0),
		v.Scale(0, dtype.F32, 1, v.t),
		v.Scale(v.p, dtype.F32, 1, 0),
		v.SumSquares(0, dtype.F32, 1, v.f64),
		v.SumSquares(v.p, dtype.F32, 1, 0),
		v.ClipFactor(0, v.f64, 1, 1, 1),
		v.ClipFactor(v.t, 0, 1, 1, 1),
		v.ClipFactor(v.t, v.f64, 0, 1, 1),
		v.TopK(noX, 1, v.ok, v.t),
		v.TopK(v.src, 1, none, v.t),
		v.TopK(v.src, 3, few, v.t),
		v.Select(noX, v.t, v.ok),
		v.Select(v.src, 0, v.ok),
		v.Select(v.src, v.t, none),
		v.SelectNear(noX, 1, v.f64, v.near, v.ok, v.t),
		v.SelectNear(v.src, 1, 0, v.near, v.ok, v.t),
		v.SelectNear(v.src, 3, v.f64, v.near, few, v.t),
		v.SelectNear(v.src, 1, v.f64, v.near, noLen, v.t),
		v.Fit(noX, 1, v.t),
		v.Fit(v.src, 1, 0),
		v.Refine(0, 1, v.t, 1, nil),
		v.Refine(v.p, 1, 0, 1, nil),
		v.Refine(v.p, 1, v.t, 1, make([]float32, 65)),
	}
}

// withoutLists leaves out lists, numbers and room.
func (v *validArguments) withoutLists() []error {
	none := kernel.Entries{N: 1, Len: v.ok.Len}
	noPtr := kernel.Array{N: 1}
	noLen := kernel.Entries{
		Idx: v.q,
		Val: v.p,
		N:   8,
	}
	few := kernel.Entries{
		Idx: v.q,
		Val: v.p,
		N:   2,
		Len: v.ok.Len,
	}
	return []error{
		v.TopKList(none, 1, v.ok, 0, kernel.Array{}),
		v.TopKList(v.ok, 1, none, 0, kernel.Array{}),
		v.TopKList(v.ok, 3, few, 0, kernel.Array{}),
		v.SelectList(none, v.t, v.ok),
		v.SelectList(v.ok, 0, v.ok),
		v.SelectList(v.ok, v.t, none),
		v.CountAbove(none, v.t, 1, v.q),
		v.CountAbove(v.ok, 0, 1, v.q),
		v.CountAbove(v.ok, v.t, 1, 0),
		v.Narrow(0, 0, 1, v.t, 1),
		v.Narrow(v.f64, 0, 1, 0, 1),
		v.Merge(0, dtype.F32, 1, nil, 1, 0, 0, v.nothing),
		v.Merge(v.p, dtype.F32, 1, []kernel.Entries{none}, 1, 0, 0, v.nothing),
		v.Merge(v.p, dtype.F32, 1, nil, 1, 0, 0, kernel.Restoration{Dst: noPtr}),
		v.Merge(v.p, dtype.F32, 1, nil, 1, 0, 0, kernel.Restoration{Dst: v.array, Taken: none}),
		v.Union(none, 1, nil, 1, 0, 0),
		v.Union(noLen, 1, nil, 1, 0, 0),
		v.ScatterAdd(noPtr, v.ok, 1),
		v.ScatterAdd(v.array, none, 1),
		v.ScatterZero(noPtr, v.ok),
		v.ScatterZero(v.array, none),
		v.Restore(noPtr, v.ok, v.ok),
		v.Restore(v.array, none, v.ok),
		v.Restore(v.array, v.ok, none),
		v.LowerBounds(none, v.q, 2, v.q, v.q),
		v.LowerBounds(v.ok, 0, 2, v.q, v.q),
		v.LowerBounds(v.ok, v.q, 2, 0, v.q),
		v.CopyPieces([]kernel.Piece{{From: none, To: v.ok}}),
		v.CopyPieces([]kernel.Piece{{From: v.ok, To: none}}),
		v.CopyPieces([]kernel.Piece{{From: v.ok, To: noLen}}),
		v.CopyPieces(slices.Repeat([]kernel.Piece{{From: v.ok, To: few}}, kernel.MaxPieces+1)),
		v.Sample(none, []float64{0}, 8, v.q),
		v.Sample(v.ok, []float64{0}, 8, 0),
		v.Sample(v.ok, []float64{1}, 8, v.q),
		v.Sample(v.ok, []float64{-0.1}, 8, v.q),
		v.Sample(v.ok, []float64{math.NaN()}, 8, v.q),
		v.Sample(v.ok, make([]float64, 65), 8, v.q),
		v.Balance(0, 1, 8, v.q, 1),
		v.Balance(v.q, 1, 8, 0, 1),
		v.Balance(v.q, 0, 8, v.q, 1),
		v.Balance(v.q, 1, 8, v.q, 0),
	}
}

// gradientsOfType passes gradients of a type that they do not have.
func (v *validArguments) gradientsOfType(dt dtype.DType) []error {
	typed := kernel.Source{
		X:     v.p,
		N:     1,
		Grad:  v.p,
		DType: dt,
	}
	return []error{
		v.Accumulate(typed),
		v.Select(typed, v.t, v.ok),
		v.TopK(typed, 1, v.ok, v.t),
		v.SelectNear(typed, 1, v.f64, v.near, v.ok, v.t),
		v.Fit(typed, 1, v.t),
		v.Store(v.p, dt, v.p, 1, 1, 0),
		v.Scale(v.p, dt, 1, v.t),
		v.SumSquares(v.p, dt, 1, v.f64),
		v.Merge(v.p, dt, 1, nil, 1, 0, 0, v.nothing),
	}
}
