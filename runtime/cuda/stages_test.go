package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// stage is a call that is timed.
type stage struct {
	name  string
	bytes int // that it cannot do without
	run   func() error
}

// stages are what the benchmarks of this file have in common.
type stages struct {
	testing.TB
	rt      *Runtime
	kernels kernel.Kernels
	n       int       // elements: 26,214,400, or TUTTI_TEST_SIZES
	values  []float32 // normally distributed, some more than n
}

func newStages(t testing.TB) *stages {
	rt := openGPU(t)
	s := &stages{
		TB:      t,
		rt:      rt,
		kernels: rt.Kernels(),
		n:       26_214_400,
	}
	if n, err := strconv.Atoi(os.Getenv("TUTTI_TEST_SIZES")); err == nil {
		s.n = n
	}
	rng := rand.New(rand.NewPCG(52, 0))
	s.values = make([]float32, s.n+256)
	for i := range s.values {
		s.values[i] = float32(rng.NormFloat64())
	}
	return s
}

// room is memory of zeros.
func (s *stages) room(bytes int) uintptr {
	p, err := s.rt.Allocate(bytes)
	require.NoError(s, err)
	require.NoError(s, s.rt.Fill(p, bytes, dtype.U8, 0))
	s.Cleanup(func() { require.NoError(s, s.rt.Deallocate(p)) })
	return p
}

func (s *stages) floats(values ...float32) uintptr {
	p := s.room(4 * len(values))
	require.NoError(s, s.rt.CopyIn(p, hostmem.Bytes(values)))
	return p
}

// print prints what stages take on the device's clock, some calls to a graph, in turns: the median, the least, and the
// time in which a copy, which is the first stage, moves the bytes of the stage.
func (s *stages) print(calls int, all []stage) {
	const rounds = 11
	graphs := make([]*Graph, len(all))
	times := make([][]time.Duration, len(all))
	for i, c := range all {
		for range 3 {
			require.NoError(s, c.run(), c.name)
		}
		var err error
		graphs[i], err = s.rt.Stream().Capture(func() (err error) {
			for range calls {
				err = errors.Join(err, c.run())
			}
			return err
		})
		require.NoError(s, err, c.name)
	}
	for range rounds {
		for i, graph := range graphs {
			require.NoError(s, graph.Launch(s.rt.Stream())) // the cache is as the same calls leave it
			times[i] = append(times[i], s.launch(graph)/time.Duration(calls))
		}
	}
	fmt.Println("| stage | µs | least | floor | times the floor |\n| --- | ---: | ---: | ---: | ---: |")
	var speed float64 // bytes a microsecond
	for i, c := range all {
		slices.Sort(times[i])
		least := float64(times[i][0].Nanoseconds()) / 1e3
		us := float64(times[i][rounds/2].Nanoseconds()) / 1e3
		if i == 0 {
			speed = float64(c.bytes) / us
		}
		floor := float64(c.bytes) / speed
		fmt.Printf("| %s | %.1f | %.1f | %.1f | %.2f |\n", c.name, us, least, floor, us/floor)
		require.NoError(s, graphs[i].Close())
	}
}

func (s *stages) launch(graph *Graph) time.Duration {
	begin, err := s.rt.NewTimingEvent()
	require.NoError(s, err)
	end, err := s.rt.NewTimingEvent()
	require.NoError(s, err)
	stream := s.rt.Stream()
	require.NoError(s, errors.Join(stream.Record(begin), graph.Launch(stream), stream.Record(end)))
	require.NoError(s, s.rt.Synchronize(context.Background()))
	took, err := end.Since(begin)
	require.NoError(s, errors.Join(err, begin.Close(), end.Close()))
	return took
}

// BenchmarkStages times selections of 1 % with a gradient, and leaves stages out: what the gradient alone takes, and
// what listing, sift, cut and Merge add to it. Residuals and thresholds are as they are after many steps.
func BenchmarkStages(b *testing.B) {
	const fresh = 64 // gradients, each by 16 bytes further into the array than the one before
	s := newStages(b)
	n, k := s.n, s.n/100
	work := &s.rt.sparse
	grad := s.floats(s.values...)
	steps := 0
	source := func(x uintptr) kernel.Source {
		steps++
		return kernel.Source{X: x, N: n, Grad: grad + uintptr(16*(steps%fresh)), DType: dtype.F32, Take: true}
	}
	near := kernel.Entries{Idx: s.room(8 * k), Val: s.room(8 * k), N: 2 * k, Len: s.room(4)}
	top := near
	top.N = k
	guess := s.floats(2.5, 0)
	topK := func(x uintptr) error { return s.kernels.TopK(source(x), k, top, guess) }
	steady := s.room(4 * n)
	for range 300 {
		require.NoError(b, topK(steady))
	}
	settled := make([]float32, 2) // threshold and margin
	require.NoError(b, s.rt.CopyOut(hostmem.Bytes(settled), guess))
	threshold, state := s.floats(settled[0]), s.floats(settled[0], 0)
	residual := func() uintptr {
		x := s.room(4 * n)
		require.NoError(b, s.rt.Copy(x, steady, 4*n))
		return x
	}
	residually := func(call func(x uintptr) error) func() error {
		x := residual()
		return func() error { return call(x) }
	}
	part := func(mode pickMode, keeps bool, after func(p *selection) error) func() error {
		x, passing := residual(), s.floats(settled...)
		return func() error {
			p := selection{src: source(x), mode: mode, k: k, dst: near, threshold: passing}
			p.src.Take = !keeps
			return errors.Join(work.growStatus(n), work.prepare(&p), work.pick(&p), after(&p))
		}
	}
	nothing := func(*selection) error { return nil }
	clearing := func(*selection) error { return work.zero(control) }
	selectNear := func(x uintptr) error {
		return s.kernels.SelectNear(source(x), k, state, kernel.Acceptance{Min: k / 4, Step: 1.02}, near, 0)
	}
	dense := s.room(4 * n)
	merge := func(l kernel.Entries) error {
		return s.kernels.Merge(dense, dtype.F32, n, []kernel.Entries{l, l}, 0.5, 0, 0, kernel.Restoration{})
	}
	s.print(fresh, []stage{
		{"copy", 8 * n, func() error { return s.rt.Copy(dense, steady, 4*n) }},
		{"clear", controlBytes, func() error { return work.zero(control) }},
		{"pick: r += g", 12 * n, part(pickNone, true, nothing)},
		{"pick: lists and leaves", 12 * n, part(pickList, true, nothing)},
		{"pick: lists and takes", 12 * n, part(pickList, false, nothing)},
		{"Select: pick, cut", 12 * n, residually(func(x uintptr) error { return s.kernels.Select(source(x), threshold, near) })},
		{"SelectNear: pick, sift, cut", 12 * n, residually(selectNear)},
		{"pick with a margin and a histogram, clear", 12 * n, part(pickTop, false, clearing)},
		{"the same, sift, clear", 12 * n, part(pickTop, false, func(p *selection) error {
			return errors.Join(work.sift(p), work.zero(control))
		})},
		{"TopK: pick, sift, cut", 12 * n, residually(topK)},
		{"TopK, Merge", 16 * n, residually(func(x uintptr) error { return errors.Join(topK(x), merge(top)) })},
		{"SelectNear, Merge", 16 * n, residually(func(x uintptr) error { return errors.Join(selectNear(x), merge(near)) })},
		{"Merge", 4 * n, func() error { return merge(top) }},
	})
}

// BenchmarkZeroing times a step of oktopk between two ranks without its messages: with the result zeroed by Merge, at the
// end, and beside the kernels of the exchange, which leave the memory idle, so that the end only writes what was listed.
func BenchmarkZeroing(b *testing.B) {
	s := newStages(b)
	n, k := s.n, s.n/100
	rng := rand.New(rand.NewPCG(52, 1))
	list := func(from, to, count int) kernel.Entries {
		var idx []int32
		for i := from; i < to; i++ {
			if rng.IntN(to-from) < count {
				idx = append(idx, int32(i))
			}
		}
		l := kernel.Entries{Idx: s.room(4 * len(idx)), Val: s.floats(s.values[:len(idx)]...), N: len(idx)}
		require.NoError(s, s.rt.CopyIn(l.Idx, hostmem.Bytes(idx)))
		return l
	}
	entries := func(n int) kernel.Entries {
		return kernel.Entries{Idx: s.room(4 * n), Val: s.room(4 * n), N: n, Len: s.room(4)}
	}
	x, grad, dense := s.floats(s.values[:n]...), s.floats(s.values[:n]...), s.room(4*n)
	zeros := s.room(4 * n) // what gradients are added to
	near, sent, own, passed := entries(2*k), entries(k), entries(2*k), entries(2*k)
	picks, received, gathered := list(0, n, k), list(0, n/2, k/2), list(n/2, n, k/2)
	bounds := s.room(8)
	require.NoError(b, s.rt.CopyIn(bounds, hostmem.Bytes([]int32{0, int32(n / 2)})))
	passing, faults, state := s.floats(1), s.room(4), s.floats(2.576, 0)
	residual := kernel.Array{Ptr: x, N: n, Faults: faults}
	back := kernel.Restoration{Dst: residual, L: sent, Taken: gathered}
	result := []kernel.Entries{passed, gathered}
	branch, err := s.rt.ForkStream()
	require.NoError(b, err)
	side := branch.(*Runtime)
	b.Cleanup(func() { require.NoError(b, side.Close()) })

	selects := func() error {
		src := kernel.Source{X: x, N: n, Grad: grad, DType: dtype.F32, From: zeros, Take: true}
		return s.kernels.SelectNear(src, k, state, kernel.Acceptance{Min: k / 4}, near, 0)
	}
	exchange := func() error {
		both := []kernel.Entries{own, received}
		return errors.Join(
			s.kernels.TopKList(picks, k, sent, bounds, residual),
			s.kernels.CopyPieces([]kernel.Piece{{From: picks, Start: bounds, End: bounds + 4, ByIndex: true, To: own}}),
			s.kernels.Union(passed, n, both, 1, faults, passing),
			s.kernels.Restore(residual, own, passed))
	}
	merge := func() error { return s.kernels.Merge(dense, dtype.F32, n, result, 0.5, faults, 0, back) }
	zero := func(r *Runtime) error { return r.Fill(dense, n, dtype.F32, 0) }
	scatter := func() error {
		to := kernel.Array{Ptr: dense, N: n, Faults: faults}
		return errors.Join(
			s.kernels.ScatterAdd(to, result[0], 0.5),
			s.kernels.ScatterAdd(to, result[1], 0.5),
			s.kernels.Restore(residual, sent, gathered))
	}
	beside := func(f func() error) error {
		return errors.Join(
			side.Stream().WaitFor(s.rt.Stream()),
			zero(side),
			f(),
			s.rt.Stream().WaitFor(side.Stream()))
	}
	s.print(10, []stage{
		{"copy", 8 * n, func() error { return s.rt.Copy(dense, grad, 4*n) }},
		{"select", 12 * n, selects},
		{"kernels of the exchange", 1, exchange},
		{"Merge", 4 * n, merge},
		{"zero", 4 * n, func() error { return zero(s.rt) }},
		{"scatter", 1, scatter},
		{"kernels of the exchange beside zeroing", 4 * n, func() error { return beside(exchange) }},
		{"select, exchange, Merge", 16 * n, func() error {
			return errors.Join(selects(), exchange(), merge())
		}},
		{"select, exchange beside zeroing, scatter", 16 * n, func() error {
			return errors.Join(selects(), beside(exchange), scatter())
		}},
		{"select, zero, exchange, scatter", 16 * n, func() error {
			return errors.Join(selects(), zero(s.rt), exchange(), scatter())
		}},
	})
}

// BenchmarkFixed times the kernels of sums in fixed point.
func BenchmarkFixed(b *testing.B) {
	s := newStages(b)
	n := s.n
	x, half, result, sum := s.floats(s.values[:n]...), s.room(2*n), s.room(4*n), s.room(8)
	require.NoError(b, s.kernels.Store(half, dtype.BF16, x, n, 1, 0))
	f := kernel.Fixed{Sums: s.room(4 * n), N: n, Bits: 24}
	f.Exponents = s.room(f.Blocks())
	require.NoError(b, s.kernels.RaiseExponents(f, x, dtype.F32))
	require.NoError(b, s.kernels.StoreFixed(f, x, dtype.F32, false))
	all := []stage{{"copy", 8 * n, func() error { return s.rt.Copy(result, x, 4*n) }}}
	for _, e := range []struct {
		p  uintptr
		dt dtype.DType
	}{{x, dtype.F32}, {half, dtype.BF16}} {
		name := e.dt.String() + " "
		size := e.dt.Size()
		all = append(all,
			stage{name + "RaiseExponents", size*n + f.Blocks(), func() error { return s.kernels.RaiseExponents(f, e.p, e.dt) }},
			stage{name + "StoreFixed", (size+4)*n + f.Blocks(), func() error { return s.kernels.StoreFixed(f, e.p, e.dt, false) }},
			stage{name + "StoreFixed adds", (size+8)*n + f.Blocks(), func() error { return s.kernels.StoreFixed(f, e.p, e.dt, true) }},
			stage{name + "LoadFixed", (size+4)*n + f.Blocks(), func() error { return s.kernels.LoadFixed(result, e.dt, f, 2, 0) }})
	}
	s.print(10, append(all,
		stage{"SquareFixed", 8*n + 2*f.Blocks(), func() error { return s.kernels.SquareFixed(f, 2, sum) }}))
}

// TestCounters launches kernels of selections, of sums in fixed point and of codecs by themselves, for a profiler:
//
//	TUTTI_TEST_TIMES=counters ncu --clock-control none ./cuda.test -test.run TestCounters
func TestCounters(t *testing.T) {
	if !strings.Contains(os.Getenv("TUTTI_TEST_TIMES"), "counters") {
		t.Skip("for a profiler")
	}
	s := newStages(t)
	n, k := s.n, s.n/100
	x, grad, result, sum := s.floats(s.values[:n]...), s.floats(s.values[:n]...), s.room(4*n), s.room(8)
	f := kernel.Fixed{Sums: s.room(4 * n), N: n, Bits: 24}
	f.Exponents = s.room(f.Blocks())
	top := kernel.Entries{Idx: s.room(4 * k), Val: s.room(4 * k), N: k, Len: s.room(4)}
	guess := s.floats(3.64, 0) // of the sum of two
	src := kernel.Source{X: x, N: n, Grad: grad, DType: dtype.F32, Take: true}
	codecs := []kernel.Codec{kernel.CodecPositions, kernel.CodecI8, kernel.CodecI2}
	bytes := kernel.CodecF32.Bound(k, n)
	message := kernel.Message{Ptr: s.room(bytes), Bytes: bytes}
	lost := kernel.Array{Ptr: grad, N: n}
	for range 2 {
		require.NoError(t, s.rt.CopyIn(x, hostmem.Bytes(s.values[:n])))
		require.NoError(t, errors.Join(
			s.kernels.TopK(src, k, top, guess),
			s.kernels.Merge(result, dtype.F32, n, []kernel.Entries{top, top}, 0.5, 0, 0, kernel.Restoration{}),
			s.kernels.RaiseExponents(f, x, dtype.F32),
			s.kernels.StoreFixed(f, x, dtype.F32, false),
			s.kernels.LoadFixed(result, dtype.F32, f, 2, 0),
			s.kernels.SquareFixed(f, 2, sum),
			s.kernels.Quantize(result, kernel.CodecI8, x, n, 0),
			s.kernels.Quantize(result, kernel.CodecI2, x, n, 0),
			s.kernels.Dequantize(x, kernel.CodecI8, result, n, true)))
		for _, codec := range codecs {
			require.NoError(t, errors.Join(
				s.kernels.Encode(top, codec, n, message, lost),
				s.kernels.Decode(message, codec, top)))
		}
		require.NoError(t, s.rt.Synchronize(context.Background()))
	}
}
