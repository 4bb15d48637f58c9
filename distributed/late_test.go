package distributed_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// noticing is a rank's runtime with streams and notices, whose kernels fail when they are
// told to. A notice is made as late as it may be: what is not to be written before, must not.
type noticing struct {
	waitedFor
	stumbling *stumbling
	rng       *rand.Rand // whether a notice is there when it is asked for; nil: it is
}

func (r noticing) NewNotice(bytes int) (runtime.Notice, error) {
	return &lateNotice{of: r, data: make([]byte, bytes)}, nil
}

func (r noticing) Kernels() runtime.Kernels { return r.stumbling }

func (r noticing) Fill(dst uintptr, count int, dt dtype.DType, value float64) error {
	if err := r.stumbling.due("fill"); err != nil {
		return err
	}
	return r.waitedFor.Fill(dst, count, dt, value)
}

func (r noticing) Copy(dst, src uintptr, bytes int) error {
	if err := r.stumbling.due("copy"); err != nil {
		return err
	}
	return r.waitedFor.Copy(dst, src, bytes)
}

func newNoticing(rt *cpu.Runtime, w *waits, fails *stumbling, rng *rand.Rand) noticing {
	return noticing{newWaitedFor(rt, w), fails, rng}
}

type lateNotice struct {
	of   noticing
	src  []runtime.Span // of what is posted and not read
	data []byte
}

func (n *lateNotice) Post(spans []runtime.Span) error {
	if err := n.of.stumbling.due("post"); err != nil {
		return err
	}
	n.src = slices.Clone(spans)
	return nil
}

func (n *lateNotice) Ready() (bool, error) {
	return n.src == nil || n.of.rng == nil || n.of.rng.IntN(2) == 0, nil
}

func (n *lateNotice) Read(ctx context.Context) ([]byte, error) {
	if err := n.of.stumbling.due("notice"); err != nil {
		return nil, err
	}
	for data := n.data; len(n.src) > 0; n.src = n.src[1:] {
		s := n.src[0]
		if err := n.of.Runtime.CopyOut(data[:s.Bytes], s.Ptr); err != nil {
			return nil, err
		}
		data = data[s.Bytes:]
	}
	n.src = nil
	return n.data, ctx.Err()
}

func (n *lateNotice) Close() error { return n.of.stumbling.due("close") }

// A notice that could not be closed, as its copy does not end, is closed with the Sparse, when
// that is closed again.
func TestCloseOfNoticeFails(t *testing.T) {
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		fails := &stumbling{Kernels: rt.Kernels(), call: "close"}
		memory := newNoticing(rt, new(waits), fails, nil)
		u, err := newTrainee(memory, newOrdered(ctx, c), distributed.Config{Pattern: distributed.Oktopk, Density: 0.1}, 3000)
		if err := errors.Join(err, u.step(ctx, 0)); err != nil {
			return err
		}
		live := rt.Stats().LiveBytes
		fails.in = 1
		assert.ErrorIs(t, u.s.Close(), errKernel)
		assert.Equal(t, live, rt.Stats().LiveBytes, "the copy may still read it")
		fails.in = 2
		assert.NoError(t, u.close())
		assert.Equal(t, 1, fails.in, "the notice is closed again")
		return nil
	})
}

// stumbling are kernels of which a call fails, or one of the runtime.
type stumbling struct {
	runtime.Kernels
	call string // which
	in   int    // so many calls from now; 0: none does
}

var errKernel = errors.New("this call is to fail")

func (f *stumbling) due(call string) error {
	if f.in == 0 || call != f.call {
		return nil
	}
	if f.in--; f.in == 0 {
		return errKernel
	}
	return nil
}

func (f *stumbling) GiveBack(dst runtime.Array, l, taken runtime.Entries) error {
	return errors.Join(f.due(""), f.Kernels.GiveBack(dst, l, taken))
}

func (f *stumbling) Merge(dst uintptr, dt dtype.DType, n int, lists []runtime.Entries, scale float32, faults, rest uintptr, back runtime.Back) error {
	return errors.Join(f.due(""), f.Kernels.Merge(dst, dt, n, lists, scale, faults, rest, back))
}

func (f *stumbling) CopyPieces(pieces []runtime.Piece) error {
	if err := f.due("pieces"); err != nil {
		return err
	}
	return f.Kernels.CopyPieces(pieces)
}

func (f *stumbling) CopyIf(copies []runtime.Copy, flags uintptr, m int) error {
	if err := f.due("copy if"); err != nil {
		return err
	}
	return f.Kernels.CopyIf(copies, flags, m)
}

// What fails when the result is in the gradient's place cannot be undone, and the error
// does not say that it is: it stays.
func TestFailureBehindTheResult(t *testing.T) {
	const n, steps = 24_000, 40
	for _, call := range []string{"post", "copy if"} {
		world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			fails := &stumbling{Kernels: rt.Kernels(), call: call, in: 3}
			memory := newNoticing(rt, new(waits), fails, nil)
			u, err := newTrainee(memory, newOrdered(ctx, c), distributed.Config{Pattern: distributed.Oktopk, Density: 0.1}, n)
			for step := 0; err == nil && step < steps; step++ {
				err = u.step(ctx, step)
			}
			assert.ErrorIs(t, err, errKernel, call)
			assert.ErrorContains(t, err, "the gradient is lost", call)
			assert.NotContains(t, err.Error(), "undone", call)
			assert.EqualError(t, u.step(ctx, 0), err.Error(), call)
			return u.close()
		})
	}
}

// failsAt is a communicator of whose calls of StreamWaitEvent one fails.
type failsAt struct {
	byEvents
	calls *int // until then; below 0: none
}

func (f failsAt) StreamWaitEvent(_, _ uintptr) error {
	if *f.calls--; *f.calls == 0 {
		return errKernel
	}
	return nil
}

// The same of the buckets of a model, behind whose results the compute stream waits.
func TestFailureBehindResults(t *testing.T) {
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		calls := 0
		memory := newBranching(rt)
		all := gradients(t, memory, 2)
		g, err := distributed.NewGradientSync(ctx, memory, failsAt{newByEvents(ctx, c), &calls}, all,
			distributed.GradientConfig{Config: distributed.Config{Pattern: "topkA", Density: 0.1}, DenseUpTo: -1})
		require.NoError(t, err)
		require.NoError(t, g.ReduceAll(ctx, all))
		calls = 0
		require.NoError(t, g.ReduceAll(ctx, all))
		calls = -calls // the last one
		err = g.ReduceAll(ctx, all)
		assert.ErrorIs(t, err, errKernel)
		assert.NotContains(t, err.Error(), "undone")
		assert.ErrorIs(t, g.ReduceAll(ctx, all), errKernel, "it stays")
		err = g.Close()
		free(t, all)
		return err
	})
}

// What the host reads in the step after: with it, and beside it, steps have the bits that
// they have where the host waits for everything, whatever comes between them. Nothing gets
// lost.
func TestOktopkReadsLater(t *testing.T) {
	const n, steps = 40_000, 80
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	worlds := []int{2, 3, 4}
	if testing.Short() {
		worlds = []int{2}
	}
	for _, ranks := range worlds {
		for name, cfg := range map[string]distributed.Config{
			"drop":    {},
			"pass":    {Overflow: distributed.OverflowPass},
			"error":   {Overflow: distributed.OverflowError},
			"no undo": {NoUndo: true},
		} {
			t.Run(fmt.Sprintf("%d ranks, %s", ranks, name), func(t *testing.T) {
				cfg.Pattern, cfg.Density, cfg.ThresholdInterval, cfg.RebalanceInterval = distributed.Oktopk, 0.05, 10, 25
				s := script(rand.New(rand.NewPCG(seed, uint64(ranks))), n, ranks, steps, cfg)
				want, _ := s.run(t, false, seed)
				got, unwaited := s.run(t, true, seed)
				for r := range want {
					require.Len(t, got[r], len(want[r]))
					for step := range want[r] {
						require.True(t, slices.Equal(want[r][step], got[r][step]), "seed %d, rank %d, step %d (%+v) has other bits", seed, r, step, s.steps[step])
					}
				}
				t.Logf("%d of %d steps without a wait", unwaited, steps)
			})
		}
	}
}

// act is what a step is like, and what comes before it.
type act struct {
	scale    float32
	cluster  bool // gradients of a part of the tensor are larger
	overflow int  // a rank that has one; -1: none
	value    float32
	fails    int // a call, on all ranks, if there are so many; 0: none does
	call     string
	restores bool // goes on from what was saved
	asks     bool // for the statistics
	rescales float64
}

type acts struct {
	cfg      distributed.Config
	n, ranks int
	steps    []act
}

// script draws what happens.
func script(rng *rand.Rand, n, ranks, steps int, cfg distributed.Config) *acts {
	s := &acts{cfg: cfg, n: n, ranks: ranks}
	scale := float32(1)
	for step := range steps {
		a := act{scale: scale, overflow: -1}
		switch rng.IntN(30) {
		case 0:
			scale *= 1000
		case 1:
			scale /= 1000
		case 2, 17, 18, 19:
			a.cluster = true
		case 9, 10, 11, 12: // thresholds follow
			scale *= 1.3
		case 13, 14, 15, 16:
			scale /= 1.3
		case 3:
			a.restores = true
		case 4:
			a.asks = true
		case 5:
			a.rescales = []float64{0.3, 1.7}[rng.IntN(2)]
		case 6:
			if cfg.Overflow != distributed.OverflowPass && !cfg.NoUndo {
				a.cluster = rng.IntN(2) == 0 // then messages may be cut
				a.overflow, a.value = rng.IntN(ranks), []float32{float32(math.NaN()), float32(math.Inf(-1)), math.MaxFloat32}[rng.IntN(3)]
			}
		case 7, 8:
			if !cfg.NoUndo && step > 0 {
				a.fails = 1 + rng.IntN(2)
			}
		}
		a.scale = scale
		s.steps = append(s.steps, a)
	}
	return s
}

// gradient is a rank's in a step.
func (s *acts) gradient(rank, step int) []float32 {
	a := s.steps[step]
	g := normal(s.n, rank, step)
	for i := range g {
		g[i] *= a.scale
		if a.cluster && i*8/s.n == step%8 {
			g[i] *= 100
		}
	}
	if a.overflow == rank {
		g[(step*7919)%s.n] = a.value
	}
	return g
}

// run does it. It returns the bits of result and residual of each rank after each step,
// and how many steps did without a wait.
func (s *acts) run(t *testing.T, streams bool, seed uint64) (all [][][]uint32, unwaited int) {
	rt := cpu.New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	all = make([][][]uint32, s.ranks)
	var mu sync.Mutex
	balance := make([]conserved, len(s.steps))
	require.NoError(t, local.Run(t.Context(), s.ranks, func(ctx context.Context, c comm.Communicator) error {
		w, rank := new(waits), c.Rank()
		var memory runtime.Runtime = rt
		fails := &stumbling{Kernels: rt.Kernels()}
		if streams {
			r := newNoticing(rt, w, fails, nil)
			if rank%2 == 0 {
				r.rng = rand.New(rand.NewPCG(seed, 7))
			}
			memory, c = r, watched{newOrdered(ctx, c), w}
		}
		x, err := distributed.NewSparse(memory, c, s.n, s.cfg)
		if err != nil {
			return err
		}
		tensor, err := runtime.New(memory, dtype.F32, s.n)
		if err != nil {
			return err
		}
		residual := func() []uint32 {
			r, err := x.Residual()
			require.NoError(t, err)
			return bits(r)
		}
		for step, a := range s.steps {
			switch {
			case a.restores:
				state, err := x.State(ctx)
				if err := errors.Join(err, x.Close()); err != nil {
					return err
				}
				if x, err = distributed.NewSparse(memory, c, s.n, s.cfg); err != nil {
					return err
				}
				if err := x.Restore(ctx, state); err != nil {
					return err
				}
			case a.asks:
				if _, err := x.Stats(ctx); err != nil {
					return err
				}
			case a.rescales > 0:
				if err := x.ScaleResidual(a.rescales); err != nil {
					return err
				}
			}
			g := s.gradient(rank, step)
			var before []uint32
			if step > 0 {
				before = residual()
			}
			made := false
			var err error
			if streams && a.fails > 0 {
				fails.call, fails.in = a.call, a.fails
				err = errors.Join(runtime.CopyIn(tensor, g), x.AllReduce(ctx, tensor))
				if made = fails.in > 0; made && a.call == "" { // there were no so many calls
					return fmt.Errorf("step %d did not fail: %w", step, err)
				}
				fails.in = 0
				if !made {
					if !errors.Is(err, errKernel) {
						return fmt.Errorf("step %d: %w", step, err)
					}
					if !slices.Equal(before, residual()) {
						return fmt.Errorf("step %d is not undone", step)
					}
					if err := c.Sync(ctx); err != nil {
						return err
					}
				}
			}
			if !made {
				if err := runtime.CopyIn(tensor, g); err != nil {
					return err
				}
				w.comm.Store(0)
				w.copies.Store(0)
				err = x.AllReduce(ctx, tensor)
			}
			if err != nil && !errors.Is(err, distributed.ErrOverflow) {
				return fmt.Errorf("step %d: %w", step, err)
			}
			overflowed := a.overflow >= 0
			if overflowed != (err != nil) && s.cfg.Overflow == distributed.OverflowError {
				return fmt.Errorf("step %d: overflow %v, error %v", step, overflowed, err)
			}
			mu.Lock()
			if w.copies.Load() == 0 && w.comm.Load() == 0 && rank == 1 {
				unwaited++
			}
			if !overflowed {
				balance[step].add(g, before, bits(tensor), residual())
			}
			mu.Unlock()
			all[rank] = append(all[rank], append(bits(tensor), residual()...))
		}
		return errors.Join(x.Close(), tensor.Free())
	}))
	for step := range balance {
		balance[step].check(t, seed, step)
	}
	return all, unwaited
}

// A step that fails where it reads numbers of the step before, or where it tells the device
// some, is repeated with the bits that it would have had: also what it had learned, and
// whether the step before was dropped.
func TestOktopkRepeatsWhatFailed(t *testing.T) {
	const n, steps = 24_000, 48
	for _, ranks := range []int{2, 3} {
		s := &acts{n: n, ranks: ranks,
			cfg: distributed.Config{Pattern: distributed.Oktopk, Density: 0.1, ThresholdInterval: 30, RebalanceInterval: 40}}
		for step := range steps {
			a := act{scale: []float32{1, 1.2}[step/6%2], overflow: -1} // thresholds follow
			if step%7 == 6 {
				a.overflow, a.value = 0, float32(math.NaN())
			}
			s.steps = append(s.steps, a)
		}
		want, _ := s.run(t, false, 0)
		for _, call := range []string{"notice", "fill", "pieces", "copy"} {
			for fails := 1; fails <= 3; fails++ {
				for step := 7; step < steps; step++ {
					s.steps[step].call, s.steps[step].fails = call, fails
				}
				got, _ := s.run(t, true, 0)
				for r := range want {
					for step := range want[r] {
						assert.True(t, slices.Equal(want[r][step], got[r][step]), "%d ranks, %s %d fails: rank %d, step %d has other bits", ranks, call, fails, r, step)
					}
				}
			}
		}
	}
}

// conserved adds up what ranks had before a step, and have after it.
type conserved struct{ in, out, size []float64 }

func (c *conserved) add(g []float32, before, result, after []uint32) {
	if c.in == nil {
		c.in, c.out, c.size = make([]float64, len(g)), make([]float64, len(g)), make([]float64, len(g))
	}
	for i := range g {
		x := float64(g[i])
		if before != nil {
			x += float64(math.Float32frombits(before[i]))
		}
		c.in[i] += x
		c.out[i] += float64(math.Float32frombits(result[i])) + float64(math.Float32frombits(after[i])) // the result has 1/P from each
		c.size[i] += math.Abs(x)
	}
}

func (c *conserved) check(t *testing.T, seed uint64, step int) {
	for i := range c.in {
		if math.Abs(c.in[i]-c.out[i]) > 1e-5*c.size[i] {
			require.InDelta(t, c.in[i], c.out[i], 1e-5*c.size[i], "seed %d, step %d, index %d", seed, step, i)
		}
	}
}

// Steps do not wait once thresholds serve, also those that find thresholds or regions anew.
func TestOktopkDoesNotWait(t *testing.T) {
	const n, ranks, steps, settled = 60_000, 2, 64, 24
	for _, overflow := range []distributed.OverflowPolicy{distributed.OverflowDrop, distributed.OverflowPass} {
		cfg := distributed.Config{Pattern: distributed.Oktopk, Density: 0.05, ThresholdInterval: 8, RebalanceInterval: 16, Overflow: overflow}
		s := &acts{cfg: cfg, n: n, ranks: ranks}
		for range steps {
			s.steps = append(s.steps, act{scale: 1, overflow: -1})
		}
		_, unwaited := s.run(t, true, 0)
		assert.GreaterOrEqual(t, unwaited, steps-settled, "of %d steps", steps)
	}
}

// A step that balances regions, and is dropped: what ranks announced in it may be more than the
// regions have that there are again.
func TestOktopkDropsWhatBalances(t *testing.T) {
	const n, ranks, balances, steps = 60_000, 2, 16, 20
	run := func(streams bool) [][]uint32 {
		results := make([][]uint32, ranks)
		world(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			var memory runtime.Runtime = rt
			w := new(waits)
			if streams {
				memory, c = newNoticing(rt, w, &stumbling{Kernels: rt.Kernels()}, nil), watched{newOrdered(ctx, c), w}
			}
			u, err := newTrainee(memory, c, distributed.Config{Pattern: distributed.Oktopk, Density: 0.05, ThresholdInterval: 1000, RebalanceInterval: balances}, n)
			for step := 0; err == nil && step < steps; step++ {
				g := u.gradient(step)
				for i := range g { // large ones are near the beginning, but in that step
					switch {
					case step == balances && i >= n/2:
						g[i] *= 1000
					case step != balances && i >= n/15:
						g[i] /= 1000
					}
				}
				if step == balances {
					g[n-1] = float32(math.NaN())
				}
				err = runtime.CopyIn(u.t, g)
				w.comm.Store(0)
				if err = errors.Join(err, u.s.AllReduce(ctx, u.t)); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
				if step == balances {
					assert.Zero(t, w.comm.Load(), "the host does not wait")
				}
				results[c.Rank()] = append(append(results[c.Rank()], bits(u.t)...), u.state()...)
			}
			return errors.Join(err, u.close())
		})
		return results
	}
	want, got := run(false), run(true)
	for r := range want {
		assert.True(t, slices.Equal(want[r], got[r]), "rank %d has other bits", r)
	}
}

// noticingBranches is a runtime with notices that can work beside itself.
type noticingBranches struct{ noticing }

func (b noticingBranches) Branch() (runtime.Runtime, error) {
	of := cpu.New()
	return noticingBranch{newNoticing(of, b.w, &stumbling{Kernels: of.Kernels()}, b.rng)}, nil
}

type noticingBranch struct{ noticing }

func (noticingBranch) ComputeStream() uintptr { return computeStream + 2 }

// The same in buckets that have one verdict: a step that one of them has dropped, is
// dropped in all, and what they read later is that of the step before.
func TestBucketsReadLater(t *testing.T) {
	const n, ranks, buckets, steps = 30_000, 2, 3, 40
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	overflows := rand.New(rand.NewPCG(seed, 1))
	bad := make([]int, steps) // a bucket with an overflow in a step, if it is one
	for step := range bad {
		bad[step] = overflows.IntN(4 * buckets)
	}
	run := func(streams bool) [][][]uint32 {
		all := make([][][]uint32, ranks)
		rt := cpu.New()
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			var memory runtime.Runtime = rt
			rank := c.Rank()
			if streams {
				memory = noticingBranches{noticing: newNoticing(rt, new(waits), &stumbling{Kernels: rt.Kernels()}, rand.New(rand.NewPCG(seed, 7)))}
				c = newByEvents(ctx, c)
			}
			var params []*runtime.Tensor
			for range buckets {
				p, err := runtime.New(memory, dtype.F32, n)
				if err != nil {
					return err
				}
				params = append(params, p)
			}
			cfg := distributed.GradientConfig{BucketBytes: 4 * n, DenseUpTo: -1,
				Config: distributed.Config{Pattern: distributed.Oktopk, Density: 0.05, ThresholdInterval: 10, RebalanceInterval: 25}}
			g, err := distributed.NewGradientSync(ctx, memory, c, params, cfg)
			if err != nil {
				return err
			}
			for step := range steps {
				for b, p := range params {
					x := normal(n, rank, step, b)
					if bad[step] == b && rank == 1 {
						x[step] = float32(math.NaN())
					}
					if err := runtime.CopyIn(p, x); err != nil {
						return err
					}
				}
				if err := g.ReduceAll(ctx, params); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
				if step%5 == 4 {
					stats, err := g.Stats(ctx)
					if err != nil {
						return err
					}
					if stats.Skipped != (bad[step] < buckets) {
						return fmt.Errorf("step %d: skipped %v", step, stats.Skipped)
					}
				}
				for _, p := range params {
					all[rank] = append(all[rank], bits(p))
				}
			}
			err = g.Close()
			for _, p := range params {
				err = errors.Join(err, p.Free())
			}
			return err
		}))
		require.NoError(t, rt.Close())
		return all
	}
	want, got := run(false), run(true)
	for rank := range want {
		for i := range want[rank] {
			require.True(t, slices.Equal(want[rank][i], got[rank][i]), "seed %d, rank %d, step %d, bucket %d has other bits", seed, rank, i/buckets, i%buckets)
		}
	}
}
