package runtimetest

import (
	"math"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

func testAccumulate(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, dt := range gradientTypes {
			for _, factor := range []float32{1, -0.3, 0, inf} {
				grad, ptr := d.narrow(x, dt)
				acc := d.gradient("normal", len(x))
				src := kernel.Source{
					X:     place(d, acc),
					N:     len(x),
					Grad:  ptr,
					DType: dt,
					Take:  true,
				}
				if factor != 1 {
					src.Factor = d.number(factor)
				}
				if d.coin() {
					src.From = src.X
					src.X = place(d, x)
				}
				if d.coin() {
					src.Keep = place(d, x)
				}
				require.NoError(d, d.Accumulate(src))
				if src.Keep != 0 {
					d.equalArray(acc, src.Keep, "what was kept")
				}
				for i := range acc {
					added := product(grad[i], factor)
					acc[i] = sum(acc[i], added)
				}
				d.equalArray(acc, src.X, "%v times %v", dt, factor)
			}
		}
	})
}

func testStore(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, dt := range gradientTypes {
			for _, scale := range []float32{1, .25, -3.7} {
				scaled := make([]float32, len(x))
				for i, v := range x {
					scaled[i] = product(v, scale)
				}
				scaled, excess, check := d.excess(scaled, dt)
				want, dst := d.narrow(scaled, dt)
				src := place(d, x)
				require.NoError(d, d.Store(dst, dt, src, len(x), scale, excess))
				check()
				d.equalFloats(want, d.readNarrow(dst, dt, len(x)), "%v times %v", dt, scale)
				d.equalArray(x, src, "the source")
				if dt == dtype.F32 {
					require.NoError(d, d.Store(src, dt, src, len(x), scale, 0))
					d.equalArray(want, src, "in place, times %v", scale)
				}
			}
		}
	})
}

func testCopyIf(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, dt := range gradientTypes {
			for _, flags := range [][]int32{{0}, {1}, {0, 0, 0}, {0, 0, -7}} {
				raised := slices.Max(flags) > 0 || slices.Min(flags) < 0
				// Copies of several lengths and types, one of them of zeros.
				var copies []kernel.Copy
				var want [][]float32
				for len(copies) < kernel.MaxCopies-d.rng.IntN(3) {
					n := len(x) / (1 + len(copies)*d.rng.IntN(4))
					background := d.gradient("normal", n)
					old, dst := d.narrow(background, dt)
					values, src := d.narrow(x[:n], dt)
					if len(copies)%2 == 1 {
						values = make([]float32, n)
						src = 0
					}
					if !raised {
						values = old
					}
					copies = append(copies, kernel.Copy{
						Dst:   dst,
						Src:   src,
						DType: dt,
						N:     n,
					})
					want = append(want, values)
					dt = draw(d, gradientTypes...)
				}
				require.NoError(d, d.CopyIf(copies, place(d, flags), len(flags)))
				for i, x := range copies {
					got := d.readNarrow(x.Dst, x.DType, x.N)
					d.equalFloats(want[i], got, "copy %d of %d, %v, flags %v", i, len(copies), x.DType, flags)
				}
			}
		}
	})
}

func testScale(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, dt := range gradientTypes {
			for _, factor := range []float32{0, 1, -.3, inf} {
				values, ptr := d.narrow(x, dt)
				for i, v := range values {
					values[i] = product(v, factor)
				}
				want, _ := d.narrow(values, dt)
				require.NoError(d, d.Scale(ptr, dt, len(x), d.number(factor)))
				d.equalFloats(want, d.readNarrow(ptr, dt, len(x)), "%v times %v", dt, factor)
			}
		}
	})
}

// near compares a result of float64 arithmetic whose order of additions is the
// device's; infinite and NaN references only ask for the same kind of result.
func (d *device) near(want, got, scale float64, name string) {
	if math.IsNaN(want) || math.IsInf(want, 0) {
		require.True(d, math.IsNaN(got) || math.IsInf(got, 0), "%s: got %v, want %v", name, got, want)
		return
	}
	require.InDelta(d, want, got, scale, "%s (seed %d)", name, Seed)
}

func testSumSquares(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, dt := range gradientTypes {
			values, ptr := d.narrow(x, dt)
			var want float64
			for _, v := range values {
				want += float64(v) * float64(v)
			}
			sum := place(d, []float64{-1})
			require.NoError(d, d.SumSquares(ptr, dt, len(x), sum))
			d.near(want, readOne[float64](d, sum), 1e-12*want, dt.String())
		}
	})
}

func testClipFactor(d *device) {
	for _, squares := range []float64{0, 1e-300, 1, 2, 4, 9e10, 1e300, math.Inf(1), math.NaN()} {
		for _, share := range []float64{1, 0.25, 1e-8} {
			for _, limit := range []float64{0, 1e-3, 1, 2, 1e9} {
				want := float32(1)
				norm := math.Sqrt(squares * share)
				if norm > limit && !math.IsInf(norm, 0) {
					want = float32(limit / norm)
				}
				parts := []float64{squares}
				if d.coin() { // whose sum is exact
					parts = []float64{0, squares / 4, squares / 2, squares / 4}
				}
				factor := d.number(-1)
				require.NoError(d, d.ClipFactor(factor, place(d, parts), len(parts), share, limit))
				got := read[float32](d, factor, 1)
				d.equalFloats([]float32{want}, got, "%v times %v, at most %v", squares, share, limit)
			}
		}
	}
}

// topKCounts are how many of n elements are selected.
func topKCounts(n int) []int {
	return slices.Compact([]int{0, min(1, n), n / 100, n / 3, max(n-1, 0), n, n + 5})
}

// checkTopK compares TopK with the ranking of its input.
func (d *device) checkTopK(in input, order []int32, count int, zeros bool, g *guessCase) {
	order = order[:min(count, in.N)]
	threshold := float32(0)
	if len(order) > 0 {
		lowest := in.x[order[len(order)-1]]
		threshold = math.Float32frombits(magnitude(lowest))
		if !zeros {
			threshold = max(threshold, tiny)
			if math.IsNaN(float64(lowest)) {
				threshold = nan
			}
		}
	}
	if !zeros {
		order = slices.DeleteFunc(order, func(i int32) bool { return in.x[i] == 0 })
	}
	want := pick(in.x, order)
	room := min(count, in.N) + d.rng.IntN(50)
	dst := d.target(room, !zeros)
	ptr := uintptr(0)
	if g != nil {
		ptr = place(d, []float32{g.threshold, g.margin})
	}
	require.NoError(d, d.Kernels.TopK(in.Source, count, dst, ptr))
	d.equalEntries(want, len(want.idx), dst, "top %d, guess %+v, zeros %v", count, g, zeros)
	if g != nil {
		previous := *g
		g.step(threshold)
		got := read[float32](d, ptr, 2)
		d.equalFloats([]float32{g.threshold, g.margin}, got, "threshold and margin of top %d, guess %+v", count, previous)
	}
	d.equalSource(in, want)
}

// guessCase is an account of what becomes of a guess.
type guessCase struct {
	threshold float32
	margin    float32
}

func (g *guessCase) step(found float32) {
	if !(g.margin >= 1./512 && g.margin <= 1./8) {
		g.margin = 1. / 32
	}
	if g.threshold > 0 && g.threshold <= math.MaxFloat32 {
		difference := sum(g.threshold, -found)
		change := float32(float64(difference) / float64(g.threshold))
		wide := []float32{product(g.margin, 31./32), product(change, 1.5)}
		if math.IsNaN(float64(change)) {
			wide = wide[:1]
		}
		g.margin = min(max(slices.Max(wide), 1./512), 1./8)
	}
	g.threshold = found
}

// margins are such as steps leave, and others.
var margins = []float32{0, 1. / 512, 1. / 100, 1. / 32, 1. / 8, 1, -1, nan, inf}

func testTopK(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, count := range topKCounts(len(x)) {
			in := d.source(x)
			order := ranking(in.x)
			good := float32(0)
			if 0 < count && count <= len(order) {
				last := order[count-1]
				good = math.Float32frombits(magnitude(in.x[last]))
			}
			guesses := []float32{0, good, good, good * 0.97, good * 1.001, good * 1.05, good / 2, good * 2,
				tiny, math.MaxFloat32, inf, nan, -1}
			g := &guessCase{
				threshold: draw(d, guesses...),
				margin:    draw(d, margins...),
			}
			if d.rng.IntN(10) == 0 {
				g = nil
			}
			d.checkTopK(in, order, count, d.coin(), g)
		}
	})
}

// testTopKSteps has guesses and margins follow thresholds that move little, much, and
// to what is not finite.
func testTopKSteps(d *device) {
	d.eachSmallGradient(func(d *device, x []float32) {
		g := &guessCase{}
		count := len(x) / 10
		zeros := d.coin()
		for _, factor := range []float32{1, 0.999, 1.001, 0.99, 0.98, 0.95, 1, 0.8, 0.7, 1.5, 1, 1, 0, 1, inf, 1, 1} {
			in := d.source(scaled(x, factor))
			d.checkTopK(in, ranking(in.x), count, zeros, g)
		}
	})
}

// scaled returns x times a factor, with one kind of NaN.
func scaled(x []float32, factor float32) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = product(v, factor)
		if math.IsNaN(float64(y[i])) {
			y[i] = nan
		}
	}
	return y
}

// thresholds are such that many, few or no elements of the gradients pass.
var thresholds = []float32{-1, 0, tiny, .5, 1.5, 3, 1000, math.MaxFloat32, inf, nan}

func testSelect(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, threshold := range thresholds {
			in := d.source(x)
			positions := passing(in.x, threshold)
			total := len(positions)
			room := draw(d, len(x)+40, total, total/2, min(1, total), 0)
			want := pick(in.x, positions).first(room)
			hasLength := d.rng.IntN(4) > 0
			dst := d.target(room, hasLength)
			require.NoError(d, d.Select(in.Source, d.number(threshold), dst))
			d.equalEntries(want, total, dst, "threshold %v, room for %d", threshold, room)
			d.equalSource(in, want)
		}
	})
}

// nearCase is an account of what SelectNear should do.
type nearCase struct {
	threshold float32
	age       int32
}

func (s *nearCase) step(x []float32, k int, o kernel.Acceptance, room int) (want entries, total int, used float32) {
	t := s.threshold
	fresh := o.Interval == 0 || int(s.age) < o.Interval-1
	if t > 0 && t <= math.MaxFloat32 && fresh {
		passed := passing(x, t)
		m := len(passed)
		if o.Min <= m && m <= room {
			s.age++
			switch {
			case o.Step == 0:
			case 3*m < 2*k:
				s.threshold = max(t/o.Step, tiny)
			case 4*m > 5*k:
				s.threshold = max(t*o.Step, tiny)
			}
			return pick(x, passed), m, t
		}
	}
	order := ranking(x)[:min(k, len(x))]
	*s = nearCase{}
	if len(order) > 0 {
		last := order[len(order)-1]
		s.threshold = math.Float32frombits(max(magnitude(x[last]), 1))
	}
	want = pick(x, slices.DeleteFunc(order, func(i int32) bool { return x[i] == 0 }))
	return want, len(want.idx), s.threshold
}

func testSelectNear(d *device) {
	d.eachSmallGradient(func(d *device, x []float32) {
		count := draw(d, 0, len(x)/100, len(x)/10, len(x))
		o := kernel.Acceptance{
			Min:      (count + 3) / 4,
			Interval: d.rng.IntN(6),
			Step:     draw[float32](d, 0, 1.02),
		}
		room := min(len(x), 2*count)
		s := nearCase{
			threshold: draw(d, thresholds...),
			age:       d.rng.Int32N(4),
		}
		state := place(d, []uint32{math.Float32bits(s.threshold), uint32(s.age)})
		for step := range 8 {
			factor := draw[float32](d, 1, 1, 0.98, 0.9, 0.5, 1.1, 3)
			in := d.source(scaled(x, factor))
			want, total, used := s.step(in.x, count, o, room)
			dst := d.target(room, true)
			ptr := d.number(-1)
			require.NoError(d, d.SelectNear(in.Source, count, state, o, dst, ptr))
			d.equalEntries(want, total, dst, "step %d, %d wanted, %+v", step, count, o)
			d.equalArray([]float32{used}, ptr, "threshold used, step %d", step)
			got := read[uint32](d, state, 2)
			threshold := []float32{math.Float32frombits(got[0])}
			d.equalFloats([]float32{s.threshold}, threshold, "threshold, step %d, %+v", step, o)
			require.EqualValues(d, s.age, got[1], "age, step %d, seed %d", step, Seed)
			d.equalSource(in, want)
		}
	})
}

func testFit(d *device) {
	d.eachGradient(func(d *device, x []float32) {
		for _, z := range []float64{0, 2.5, -1} {
			in := d.source(x)
			n := float64(max(len(x), 1))
			var sum, deviations, size float64
			for _, v := range in.x {
				sum += float64(v)
				size = max(size, math.Abs(float64(v)))
			}
			mean := sum / n
			for _, v := range in.x {
				deviation := float64(v) - mean
				deviations += deviation * deviation
			}
			cut := float32(math.Abs(mean) + z*math.Sqrt(deviations/n))
			want := max(float64(cut), tiny)
			threshold := d.number(-1)
			require.NoError(d, d.Fit(in.Source, z, threshold))
			got := float64(readOne[float32](d, threshold))
			// Rounding to float32 may go the other way, and the mean may cancel.
			d.near(want, got, 2e-7*math.Abs(want)+1e-10*size+tiny, "threshold")
			in.Take = false
			d.equalSource(in, entries{})
		}
	})
}

func testRefine(d *device) {
	var wide []float32
	for f := range 64 {
		wide = append(wide, float32(math.Exp2(float64(f-32)/4)))
	}
	d.eachGradient(func(d *device, x []float32) {
		ptr := place(d, x)
		for _, count := range topKCounts(len(x)) {
			threshold := draw(d, thresholds...)
			if d.rng.IntN(3) == 0 && len(x) > 0 {
				element := draw(d, x...)
				threshold = math.Float32frombits(magnitude(element))
			}
			factors := draw[[]float32](d, wide, wide[30:34], wide[40:41], nil)
			want := threshold
			enough := func(t float32) bool {
				return 4*len(passing(x, t)) <= 5*count
			}
			passed := passing(x, threshold)
			good := enough(threshold) && 4*len(passed) >= 3*count
			if !good && math.Abs(float64(threshold)) <= math.MaxFloat32 {
				for _, f := range factors {
					want = product(threshold, f)
					if enough(want) {
						break
					}
				}
			}
			t := d.number(threshold)
			require.NoError(d, d.Refine(ptr, len(x), t, count, factors))
			got := read[float32](d, t, 1)
			d.equalFloats([]float32{want}, got, "%v, %d wanted, %d factors", threshold, count, len(factors))
		}
		d.equalArray(x, ptr, "the array")
	})
}

// testLong goes through more elements than fit in a cache or a grid of threads.
func testLong(d *device) {
	n := longSize()
	x := d.gradient("normal", n)
	rounds := 2
	if extended {
		rounds = 4
	}
	for range rounds {
		in := d.source(x)
		guess := &guessCase{threshold: draw[float32](d, 0, 2.5758)}
		d.checkTopK(in, ranking(in.x), n/100, false, guess)
		in = d.source(x)
		want := pick(in.x, passing(in.x, 2.5))
		dst := d.target(n/20, true)
		require.NoError(d, d.Select(in.Source, d.number(2.5), dst))
		d.equalEntries(want.first(n/20), len(want.idx), dst, "select")
		d.equalSource(in, want.first(n/20))
	}
	all := []entries{
		d.random(n/50, n, "normal"),
		d.random(n/10, n, "normal"),
		d.random(3, n, "normal"),
	}
	d.checkMerge(all, n, 0.5)
	d.checkUnion(all, n, 0.5)
}
