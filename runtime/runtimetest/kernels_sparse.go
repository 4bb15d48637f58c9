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

func testTopOf(d *device) {
	d.eachList(func(d *device, l entries) {
		order := ranking(l.val)
		for _, count := range topKCounts(len(l.idx)) {
			want := l.at(order[:min(count, len(order))])
			list := d.list(l)
			dst := d.target(min(count, list.N)+d.rng.IntN(40), d.rng.IntN(2) == 0)
			require.NoError(d, d.TopKList(list, count, dst, 0, kernel.Array{}))
			d.equalEntries(want, len(want.idx), dst, "top %d", count)
			if d.rng.IntN(3) == 0 {
				d.checkTopOutside(l, count)
			}
		}
	})
}

// checkTopOutside has TopKList select from a list without a part of it, and add the rest to an
// array.
func (d *device) checkTopOutside(l entries, count int) {
	n := 2 * len(l.idx)
	bounds := []int32{d.rng.Int32N(int32(n + 1)), d.rng.Int32N(int32(n + 1))}
	switch d.rng.IntN(4) { // often at one end
	case 0:
		bounds[0] = 0
	case 1:
		bounds[1] = int32(n)
	case 2:
		bounds = [][]int32{{math.MinInt32, math.MaxInt32}, {0, 0}, {-1, 0}, {int32(n), int32(n)}}[d.rng.IntN(4)]
	}
	length := d.rng.IntN(n + 1) // of the array: what is beyond is a fault
	var outside entries
	for j, i := range l.idx {
		if i < bounds[0] || i >= bounds[1] {
			outside.idx, outside.val = append(outside.idx, i), append(outside.val, l.val[j])
		}
	}
	if d.rng.IntN(3) == 0 {
		count = max(len(outside.idx)+d.rng.IntN(3)-1, 0)
	}
	order := ranking(outside.val)
	selected := order[:min(count, len(order))]
	want, x, faults := outside.at(selected), d.gradient("special", length), int32(7)
	sums, taken := slices.Clone(x), map[int32]bool{}
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
	dst := d.target(min(count, list.N), d.rng.IntN(2) == 0)
	rest := kernel.Array{Ptr: place(d, x), N: length, Faults: place(d, []int32{7})}
	require.NoError(d, d.Kernels.TopKList(list, count, dst, place(d, bounds), rest))
	d.equalEntries(want, len(want.idx), dst, "top %d outside of %v", count, bounds)
	d.equalFloats(sums, read[float32](d, rest.Ptr, length), "what is left out of top %d outside of %v", count, bounds)
	require.Equal(d, faults, readOne[int32](d, rest.Faults), "faults, seed %d", Seed)
}

func testAboveOf(d *device) {
	d.eachList(func(d *device, l entries) {
		for _, threshold := range thresholds {
			want := l.at(above(l.val, threshold))
			total := len(want.idx)
			room := []int{total + 40, total, total / 2, 0}[d.rng.IntN(4)]
			dst := d.target(room, d.rng.IntN(4) > 0)
			require.NoError(d, d.SelectList(d.list(l), d.number(threshold), dst))
			d.equalEntries(want.first(room), total, dst, "threshold %v, room for %d", threshold, room)
		}
	})
}

func testCountAbove(d *device) {
	d.eachList(func(d *device, l entries) {
		for _, m := range []int{0, 1, 2, 15, 64, 100} {
			ts, want := make([]float32, m), make([]int32, m)
			same := d.rng.IntN(4) == 0
			for j := range ts {
				ts[j] = thresholds[d.rng.IntN(len(thresholds))]
				if d.rng.IntN(2) == 0 {
					ts[j] = float32(math.Abs(3 * d.rng.NormFloat64()))
				}
				if same {
					ts[j] = ts[0]
				}
				want[j] = int32(len(above(l.val, ts[j])))
			}
			list, counts := d.list(l), place(d, slices.Repeat([]int32{-1}, m))
			list.Idx = 0
			require.NoError(d, d.CountAbove(list, place(d, ts), m, counts))
			require.Equal(d, want, read[int32](d, counts, m), "thresholds %v, seed %d", ts, Seed)
		}
	})
}

// testNarrow searches as several ranks would, and then checks the result.
func testNarrow(d *device) {
	const ranks = 3
	for _, name := range []string{"normal", "wide", "ties", "zero", "denormal", "special"} {
		for _, m := range []int{1, 7, 15, 63} {
			d.each(func(d *device) {
				var all []float32
				var lists [ranks]kernel.Entries
				for r := range lists {
					l := d.random(100*r, 1000, name)
					all = append(all, l.val...)
					lists[r] = d.list(l)
				}
				count := 1 + d.rng.IntN(len(all)+10)
				low, high := uint64(1), uint64(1)<<31
				bracket, cuts := place(d, []uint32{5, 5}), place(d, make([]uint32, m))
				counts := uintptr(0)
				for round := 0; ; round++ {
					require.NoError(d, d.Narrow(bracket, counts, count, cuts, m))
					require.Equal(d, []uint32{uint32(low), uint32(high)}, read[uint32](d, bracket, 2), "round %d, seed %d", round, Seed)
					want, sums := make([]uint32, m), make([]int32, m)
					for j := range want {
						want[j] = uint32(low + (high-low)/uint64(m+1)*uint64(j+1))
						for _, v := range all {
							if magnitude(v) >= want[j] {
								sums[j]++
							}
						}
					}
					require.Equal(d, want, read[uint32](d, cuts, m), "round %d, seed %d", round, Seed)
					if (high-low)/uint64(m+1) == 0 {
						break
					}
					got := make([]int32, m)
					for _, l := range lists {
						part := place(d, make([]int32, m))
						require.NoError(d, d.CountAbove(l, cuts, m, part))
						for j, n := range read[int32](d, part, m) {
							got[j] += n
						}
					}
					require.Equal(d, sums, got, "round %d, seed %d", round, Seed)
					counts = place(d, got)
					passed := 0
					for passed < m && int(sums[passed]) >= count {
						passed++
					}
					width := (high - low) / uint64(m+1)
					if passed < m {
						high = low + width*uint64(passed+1)
					}
					low += width * uint64(passed)
				}
				// The k-th largest is in the bracket.
				if order := ranking(all); count <= len(all) {
					kth := max(uint64(magnitude(all[order[count-1]])), 1)
					require.True(d, low <= kth && kth < high, "%d is not in [%d, %d), seed %d", kth, low, high, Seed)
				} else {
					require.EqualValues(d, 1, low)
				}
			}, "%s, %d cuts", name, m)
		}
	}
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
	d.Helper()
	sums, wrong := merged(all, n, scale)
	for _, dt := range gradientTypes {
		dense := make([]float32, n)
		for i, v := range sums {
			dense[i] = v
		}
		dense, rest, check := d.rest(dense, dt)
		want, _ := d.narrow(dense, dt)
		_, dst := d.narrow(d.gradient("normal", n), dt)
		faults := place(d, []int32{1000})
		back, checkBack := d.back(n)
		require.NoError(d, d.Kernels.Merge(dst, dt, n, d.lists(all), scale, faults, rest, back))
		check()
		checkBack()
		d.equalFloats(want, d.readNarrow(dst, dt, n), "%d lists as %v", len(all), dt)
		require.Equal(d, 1000+wrong, readOne[int32](d, faults), "faults, seed %d", Seed)
	}
}

func (d *device) checkUnion(all []entries, n int, scale float32) {
	d.Helper()
	sums, wrong := merged(all, n, scale)
	var want entries
	threshold, least := thresholds[d.rng.IntN(len(thresholds))], uintptr(0)
	if d.rng.IntN(2) == 0 {
		least = d.number(threshold)
	}
	for i, v := range sums {
		if least == 0 || passes(v, threshold) {
			want.idx = append(want.idx, i)
		}
	}
	slices.Sort(want.idx)
	for _, i := range want.idx {
		want.val = append(want.val, sums[i])
	}
	total := len(want.idx)
	lists, room := d.lists(all), 0
	for _, l := range lists {
		room += l.N
	}
	room = min(n, room)
	if d.rng.IntN(2) == 0 { // for some of them, or just for all
		room = []int{total, max(total-1, 0), total / 2, min(total, 1), 0}[d.rng.IntN(5)]
		want = want.first(room)
	}
	dst, faults := d.target(room, true), place(d, []int32{1000})
	require.NoError(d, d.Kernels.Union(dst, n, lists, scale, faults, least))
	d.equalEntries(want, total, dst, "%d lists, room for %d of %d", len(all), room, total)
	require.Equal(d, 1000+wrong, readOne[int32](d, faults), "faults, seed %d", Seed)
}

// eachLists runs f on several lists of indices below n, some of them spoiled, and a scale.
func (d *device) eachLists(f func(d *device, all []entries, n int, scale float32)) {
	for i, n := range kernelSizes() {
		for j, ranks := range []int{0, 1, 2, 3, 8} {
			for s, share := range []int{1, 3, 100, 0} {
				if once(i, j+s) {
					continue
				}
				d.each(func(d *device) {
					all := make([]entries, ranks)
					for r := range all {
						m := 2
						if share > 0 {
							m = (n + share - 1) / share
						}
						if all[r] = d.random(m, n, "special"); d.rng.IntN(3) == 0 {
							all[r], _ = d.spoiled(all[r], n)
						}
					}
					f(d, all, n, []float32{1, 0.5, 1.0 / 3}[d.rng.IntN(3)])
				}, "%d lists of 1/%d of %d", ranks, share, n)
			}
		}
	}
}

func testScatter(d *device) {
	for _, n := range kernelSizes() {
		for _, m := range []int{0, 1, n / 10, n} {
			d.each(func(d *device) {
				x, l := d.gradient("special", n), d.random(m, n, "special")
				spoiled, wrong := d.spoiled(l, n)
				list, zero := d.list(spoiled), d.list(spoiled)
				zero.Val = 0
				for _, test := range []struct {
					name string
					call func(dst kernel.Array) error
					want func(old, v float32) float32
				}{
					{"ScatterAdd", func(dst kernel.Array) error { return d.ScatterAdd(dst, list, 1) }, sum},
					{"ScatterAdd, scaled", func(dst kernel.Array) error { return d.ScatterAdd(dst, list, -0.3) },
						func(old, v float32) float32 { return sum(old, product(v, -0.3)) }},
					{"ScatterSet", func(dst kernel.Array) error { return d.ScatterSet(dst, list) }, func(_, v float32) float32 { return v }},
					{"ScatterZero", func(dst kernel.Array) error { return d.ScatterZero(dst, zero) }, func(_, _ float32) float32 { return 0 }},
				} {
					want := slices.Clone(x)
					for j, i := range l.idx {
						want[i] = test.want(want[i], l.val[j])
					}
					dst := kernel.Array{Ptr: place(d, x), N: n, Faults: place(d, []int32{7})}
					require.NoError(d, test.call(dst))
					d.equalFloats(want, read[float32](d, dst.Ptr, n), "%s", test.name)
					require.Equal(d, 7+wrong, readOne[int32](d, dst.Faults), "%s: faults, seed %d", test.name, Seed)
					dst.Faults = 0
					require.NoError(d, test.call(dst), "%s: nobody counts faults", test.name)
				}
			}, "%d of %d", m, n)
		}
	}
}

func testGiveBack(d *device) {
	for _, n := range kernelSizes() {
		for _, m := range []int{0, 1, n / 10, n} {
			for _, share := range []int{0, 1, 2, 20} {
				d.each(func(d *device) {
					b, check := d.given(n, m, share)
					require.NoError(d, d.Restore(b.Dst, b.L, b.Taken))
					check()
				}, "%d of %d, share %d", m, n, share)
			}
		}
	}
}

// given makes what Restore gives back: m of n entries, but those that are taken, one of so many
// and some others. check looks at what comes of it.
func (d *device) given(n, m, share int) (b kernel.Restoration, check func()) {
	d.Helper()
	x, l := d.gradient("special", n), d.random(m, n, "special")
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
	b = kernel.Restoration{Dst: kernel.Array{Ptr: place(d, x), N: n, Faults: place(d, []int32{7})}, L: d.list(spoiled), Taken: d.list(without)}
	return b, func() {
		d.Helper()
		d.equalFloats(want, read[float32](d, b.Dst.Ptr, n), "%d of %d, %d taken", m, n, len(taken.idx))
		require.Equal(d, 7+wrong, readOne[int32](d, b.Dst.Faults), "faults, seed %d", Seed)
	}
}

// back is given, or nothing.
func (d *device) back(n int) (b kernel.Restoration, check func()) {
	if d.rng.IntN(2) == 0 {
		return kernel.Restoration{}, func() {}
	}
	return d.given(n, d.rng.IntN(n+1), d.rng.IntN(4))
}

func testLowerBounds(d *device) {
	for _, n := range kernelSizes() {
		l := d.random(n/3, n, "zero")
		bounds := []int32{0, 1, int32(n / 2), int32(n), math.MaxInt32, 0, -1, math.MinInt32}
		for range 20 {
			bounds = append(bounds, d.rng.Int32N(int32(n+1)))
		}
		for _, m := range []int{0, 1, 2, len(bounds)} {
			want, lengths := make([]int32, m), make([]int32, max(m-1, 0))
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
			list, ptr := d.list(l), place(d, bounds)
			list.Val = 0
			got, gaps := place(d, make([]int32, m)), place(d, make([]int32, len(lengths)))
			require.NoError(d, d.LowerBounds(list, ptr, m, got, gaps))
			require.Equal(d, want, read[int32](d, got, m), "seed %d: %d entries, bounds %v", Seed, len(l.idx), bounds)
			require.Equal(d, lengths, read[int32](d, gaps, len(lengths)), "lengths, seed %d", Seed)
			require.NoError(d, d.LowerBounds(list, ptr, m, got, 0))
		}
	}
}

func testCopyPieces(d *device) {
	for s, n := range kernelSizes() {
		for round := range 10 {
			if once(s, round) {
				continue
			}
			l, lists := [2]entries{}, [2]kernel.Entries{}
			for i := range l {
				l[i] = d.random(d.rng.IntN(n+1), n, "special")
				lists[i] = d.list(l[i])
			}
			var pieces []kernel.Piece
			var wants []entries // of each destination
			var targets []kernel.Entries
			for range d.rng.IntN(12) {
				want := entries{}
				to := d.target(d.rng.IntN(3*n+1), true)
				for range 1 + d.rng.IntN(kernel.MaxPieces) {
					which := d.rng.IntN(2)
					end := len(l[which].idx)
					ends := [2]int{0, end}
					var at [2]uintptr
					byIndex := d.rng.IntN(2) == 0
					for side := range at {
						if d.rng.IntN(4) == 0 {
							continue
						}
						position := []int32{0, int32(end / 2), int32(end), int32(d.rng.IntN(end + 1)), -1, math.MinInt32, math.MaxInt32}[d.rng.IntN(7)]
						ends[side] = min(max(int(position), 0), end)
						if byIndex {
							if position = min(max(position, -1), int32(n)); ends[side] < end && d.rng.IntN(2) == 0 {
								position = l[which].idx[ends[side]]
							}
							ends[side] = 0
							for _, i := range l[which].idx {
								if i < position {
									ends[side]++
								}
							}
						}
						at[side] = place(d, []int32{position})
					}
					for j := ends[0]; j < ends[1]; j++ {
						want.idx, want.val = append(want.idx, l[which].idx[j]), append(want.val, l[which].val[j])
					}
					pieces = append(pieces, kernel.Piece{From: lists[which], Start: at[0], End: at[1], ByIndex: byIndex, To: to})
				}
				wants, targets = append(wants, want), append(targets, to)
			}
			require.NoError(d, d.CopyPieces(pieces))
			for i, want := range wants {
				d.equalEntries(want.first(targets[i].N), len(want.idx), targets[i], "list %d of %d, room for %d", i, len(wants), targets[i].N)
			}
		}
	}
}

func testSample(d *device) {
	for _, n := range kernelSizes() {
		for _, m := range []int{0, 1, n / 10, n} {
			for _, count := range []int{0, 1, 16, 64} {
				l := d.random(m, n, "zero")
				quantiles, want := make([]float64, count), make([]int32, count)
				for j := range quantiles {
					quantiles[j] = []float64{0, 0.5, d.rng.Float64(), math.Nextafter(1, 0)}[d.rng.IntN(4)]
					if len(l.idx) > 0 {
						want[j] = l.idx[int(math.Floor(float64(len(l.idx))*quantiles[j]))]
					} else {
						want[j] = int32(math.Floor(float64(n) * quantiles[j]))
					}
				}
				list, dst := d.list(l), place(d, make([]int32, count))
				list.Val = 0
				require.NoError(d, d.Sample(list, quantiles, n, dst))
				require.Equal(d, want, read[int32](d, dst, count), "%d of %d, quantiles %v, seed %d", len(l.idx), n, quantiles, Seed)
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
				if samples[i] = d.rng.Int32N(n); d.rng.IntN(10) == 0 {
					samples[i] = []int32{math.MinInt32, -1, n, math.MaxInt32}[d.rng.IntN(4)]
				}
			}
			ptr, bounds := place(d, samples), place(d, make([]int32, parts+1))
			require.NoError(d, d.Balance(ptr, m, n, bounds, parts))
			slices.Sort(samples)
			want := []int32{0}
			for r := 1; r < parts; r++ {
				want = append(want, min(max(samples[r*m/parts], 0), n))
			}
			require.Equal(d, append(want, n), read[int32](d, bounds, parts+1), "%d samples, seed %d", m, Seed)
			require.Equal(d, samples, read[int32](d, ptr, m), "samples, seed %d", Seed)
		}
	}
}

// testHostile passes lists of any content and length to whatever reads lists:
// nothing around the arrays may be written, and nothing may fail.
func testHostile(d *device) {
	const rounds = 60
	for round := range rounds {
		d.each(func(d *device) {
			n := 1 + d.rng.IntN(10_000)
			var lists []kernel.Entries
			for range 3 {
				m := d.rng.IntN(3000)
				l := entries{idx: make([]int32, m), val: d.gradient("special", m)}
				for j := range l.idx {
					if l.idx[j] = d.rng.Int32N(int32(n)); d.rng.IntN(20) == 0 {
						l.idx[j] = int32(d.rng.Uint32())
					}
				}
				list := d.list(l)
				if d.rng.IntN(2) == 0 {
					list.Len = place(d, []int32{int32(d.rng.Uint32())})
				}
				lists = append(lists, list)
			}
			l, dst := lists[0], func(n int) kernel.Entries { return d.target(n, true) }
			array := kernel.Array{Ptr: place(d, d.gradient("special", n)), N: n, Faults: place(d, []int32{0})}
			dense, words := place(d, make([]float32, n)), func() uintptr { return place(d, make([]int32, 64)) }
			bounds := place(d, []int32{0, int32(n / 2), int32(n)})
			for name, err := range map[string]error{
				"TopKList":    d.TopKList(l, 100, dst(100), bounds, array),
				"SelectList":  d.SelectList(l, d.number(1), dst(100)),
				"CountAbove":  d.CountAbove(l, d.number(1), 1, words()),
				"Merge":       d.Merge(dense, dtype.F32, n, lists, 0.5, array.Faults, 0, kernel.Restoration{}),
				"Union":       d.Union(dst(n), n, lists, 0.5, array.Faults, d.number(1)),
				"ScatterAdd":  d.ScatterAdd(array, l, 1),
				"ScatterSet":  d.ScatterSet(array, l),
				"ScatterZero": d.ScatterZero(array, lists[1]),
				"Restore":     d.Restore(array, l, lists[1]),
				"LowerBounds": d.LowerBounds(l, bounds, 3, words(), words()),
				"Sample":      d.Sample(l, []float64{0, 0.5, 0.99}, n, words()),
				"CopyPieces": d.CopyPieces([]kernel.Piece{{From: l, Start: words(), End: l.Idx, To: dst(50)}, {From: lists[1], Start: l.Idx, To: dst(n)},
					{From: l, Start: bounds, End: bounds + 4, ByIndex: true, To: dst(n)}}),
			} {
				require.NoError(d, err, name)
			}
			require.GreaterOrEqual(d, readOne[int32](d, array.Faults), int32(0), "faults, seed %d", Seed)
		}, "%d", round)
	}
}

func testKernelArguments(d *device) {
	p := place(d, make([]float32, 64))
	q := place(d, []int32{0, 1, 2, 3, 4, 5, 6, 7})
	t, f64 := d.number(1), place(d, []float64{1, 1})
	src, ok := kernel.Source{X: p, N: 8}, kernel.Entries{Idx: q, Val: p, N: 8, Len: place(d, []int32{8})}
	array, near := kernel.Array{Ptr: p, N: 8}, kernel.Acceptance{}
	copyOf := func(dst, src uintptr, n int) []kernel.Copy {
		return []kernel.Copy{{Dst: dst, Src: src, DType: dtype.F32, N: n}}
	}
	var failures []error
	fails := func(errs ...error) { failures = append(failures, errs...) }
	for _, n := range []int{-1, math.MaxInt32 + 1} {
		long, far, wide := kernel.Source{X: p, N: n}, kernel.Entries{Idx: q, Val: p, N: n, Len: ok.Len}, kernel.Array{Ptr: p, N: n}
		withGrad := long
		withGrad.Grad, withGrad.DType, withGrad.From = p, dtype.F32, p
		fails(d.Accumulate(withGrad), d.CopyIf(copyOf(p, p, n), q, 1), d.CopyIf(copyOf(p, p, 1), q, n), d.Store(p, dtype.F32, p, n, 1, 0), d.Scale(p, dtype.F32, n, t), d.SumSquares(p, dtype.F32, n, f64),
			d.TopK(long, 1, ok, t), d.TopK(src, n, ok, t), d.TopK(src, 1, far, t),
			d.Select(long, t, ok), d.Select(src, t, far),
			d.SelectNear(long, 1, f64, near, ok, t), d.SelectNear(src, n, f64, near, ok, t), d.SelectNear(src, 1, f64, near, far, t),
			d.Fit(long, 1, t), d.Refine(p, n, t, 1, nil), d.Refine(p, 8, t, n, nil),
			d.TopKList(far, 1, ok, 0, kernel.Array{}), d.TopKList(ok, n, ok, 0, kernel.Array{}), d.TopKList(ok, 1, far, 0, kernel.Array{}), d.TopKList(ok, 1, ok, 0, wide), d.SelectList(far, t, ok), d.SelectList(ok, t, far),
			d.CountAbove(far, t, 1, q), d.CountAbove(ok, t, n, q), d.Narrow(f64, 0, n, t, 1), d.Narrow(f64, 0, 1, t, n),
			d.Merge(p, dtype.F32, n, nil, 1, 0, 0, kernel.Restoration{}), d.Merge(p, dtype.F32, 8, []kernel.Entries{ok, far}, 1, 0, 0, kernel.Restoration{}), d.Merge(p, dtype.F32, 8, nil, 1, 0, 0, kernel.Restoration{Dst: array, L: far}),
			d.Union(ok, n, nil, 1, 0, 0), d.Union(ok, 8, []kernel.Entries{far}, 1, 0, 0), d.Union(far, 8, nil, 1, 0, 0),
			d.ScatterAdd(wide, ok, 1), d.ScatterAdd(array, far, 1), d.ScatterSet(wide, ok), d.ScatterSet(array, far),
			d.ScatterZero(wide, ok), d.ScatterZero(array, far), d.Restore(wide, ok, ok), d.Restore(array, far, ok), d.Restore(array, ok, far),
			d.LowerBounds(far, q, 2, q, q), d.LowerBounds(ok, q, n, q, q),
			d.CopyPieces([]kernel.Piece{{From: far, To: ok}}), d.CopyPieces([]kernel.Piece{{From: ok, To: far}}),
			d.Sample(far, []float64{0}, 8, q), d.Sample(ok, []float64{0}, n, q), d.Balance(q, n, 8, q, 1), d.Balance(q, 8, n, q, 1))
	}
	none, noX, noPtr := kernel.Entries{N: 1, Len: ok.Len}, kernel.Source{N: 1}, kernel.Array{N: 1}
	noLen := kernel.Entries{Idx: q, Val: p, N: 8}
	few := kernel.Entries{Idx: q, Val: p, N: 2, Len: ok.Len}
	fails(d.Accumulate(src), d.CopyIf(copyOf(0, p, 1), q, 1), d.CopyIf(copyOf(p, 0, 1), 0, 1), d.CopyIf(copyOf(p, 0, 1), q, 0),
		d.CopyIf(slices.Repeat(copyOf(p, 0, 1), kernel.MaxCopies+1), q, 1),
		d.Store(0, dtype.F32, p, 1, 1, 0), d.Store(p, dtype.F32, 0, 1, 1, 0), d.Scale(0, dtype.F32, 1, t), d.Scale(p, dtype.F32, 1, 0),
		d.SumSquares(0, dtype.F32, 1, f64), d.SumSquares(p, dtype.F32, 1, 0), d.ClipFactor(0, f64, 1, 1, 1), d.ClipFactor(t, 0, 1, 1, 1), d.ClipFactor(t, f64, 0, 1, 1),
		d.TopK(noX, 1, ok, t), d.TopK(src, 1, none, t), d.TopK(src, 3, few, t),
		d.Select(noX, t, ok), d.Select(src, 0, ok), d.Select(src, t, none),
		d.SelectNear(noX, 1, f64, near, ok, t), d.SelectNear(src, 1, 0, near, ok, t), d.SelectNear(src, 3, f64, near, few, t), d.SelectNear(src, 1, f64, near, noLen, t),
		d.Fit(noX, 1, t), d.Fit(src, 1, 0), d.Refine(0, 1, t, 1, nil), d.Refine(p, 1, 0, 1, nil), d.Refine(p, 1, t, 1, make([]float32, 65)),
		d.TopKList(none, 1, ok, 0, kernel.Array{}), d.TopKList(ok, 1, none, 0, kernel.Array{}), d.TopKList(ok, 3, few, 0, kernel.Array{}), d.SelectList(none, t, ok), d.SelectList(ok, 0, ok), d.SelectList(ok, t, none),
		d.CountAbove(none, t, 1, q), d.CountAbove(ok, 0, 1, q), d.CountAbove(ok, t, 1, 0), d.Narrow(0, 0, 1, t, 1), d.Narrow(f64, 0, 1, 0, 1),
		d.Merge(0, dtype.F32, 1, nil, 1, 0, 0, kernel.Restoration{}), d.Merge(p, dtype.F32, 1, []kernel.Entries{none}, 1, 0, 0, kernel.Restoration{}), d.Merge(p, dtype.F32, 1, nil, 1, 0, 0, kernel.Restoration{Dst: noPtr}),
		d.Merge(p, dtype.F32, 1, nil, 1, 0, 0, kernel.Restoration{Dst: array, Taken: none}),
		d.Union(none, 1, nil, 1, 0, 0), d.Union(noLen, 1, nil, 1, 0, 0),
		d.ScatterAdd(noPtr, ok, 1), d.ScatterAdd(array, none, 1), d.ScatterSet(noPtr, ok), d.ScatterSet(array, none),
		d.ScatterZero(noPtr, ok), d.ScatterZero(array, none), d.Restore(noPtr, ok, ok), d.Restore(array, none, ok), d.Restore(array, ok, none),
		d.LowerBounds(none, q, 2, q, q), d.LowerBounds(ok, 0, 2, q, q), d.LowerBounds(ok, q, 2, 0, q),
		d.CopyPieces([]kernel.Piece{{From: none, To: ok}}), d.CopyPieces([]kernel.Piece{{From: ok, To: none}}), d.CopyPieces([]kernel.Piece{{From: ok, To: noLen}}),
		d.CopyPieces(slices.Repeat([]kernel.Piece{{From: ok, To: few}}, kernel.MaxPieces+1)),
		d.Sample(none, []float64{0}, 8, q), d.Sample(ok, []float64{0}, 8, 0), d.Sample(ok, []float64{1}, 8, q),
		d.Sample(ok, []float64{-0.1}, 8, q), d.Sample(ok, []float64{math.NaN()}, 8, q), d.Sample(ok, make([]float64, 65), 8, q),
		d.Balance(0, 1, 8, q, 1), d.Balance(q, 1, 8, 0, 1), d.Balance(q, 0, 8, q, 1), d.Balance(q, 1, 8, q, 0))
	for i, err := range failures {
		require.ErrorIs(d, err, runtime.ErrArgument, "call %d", i)
	}
	for _, dt := range []dtype.DType{dtype.Invalid, dtype.F64, dtype.I32, dtype.I16, dtype.FP8E4M3} {
		typed := kernel.Source{X: p, N: 1, Grad: p, DType: dt}
		for i, err := range []error{d.Accumulate(typed), d.Select(typed, t, ok), d.TopK(typed, 1, ok, t), d.SelectNear(typed, 1, f64, near, ok, t),
			d.Fit(typed, 1, t), d.Store(p, dt, p, 1, 1, 0), d.Scale(p, dt, 1, t), d.SumSquares(p, dt, 1, f64), d.Merge(p, dt, 1, nil, 1, 0, 0, kernel.Restoration{})} {
			require.ErrorIs(d, err, runtime.ErrDType, "call %d, %v", i, dt)
		}
	}
	d.synchronize()
}
