package distributed_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var errFault = errors.New("injected fault")

// faulty is a communicator whose call number at fails, before it is made.
type faulty struct {
	comm.Methods
	comm.Wrapped
	calls, at int // at < 0: none fails
}

func newFaulty(c comm.Communicator) *faulty {
	f := &faulty{Wrapped: comm.Wrap(c), at: -1}
	f.Methods = comm.Methods{
		Do: func(call comm.Call) error {
			if err := f.count(); err != nil {
				return err
			}
			return call.Make(c)
		},
		Together: func(calls []comm.Call) error {
			if err := f.count(); err != nil {
				return err
			}
			return c.Group(calls...)
		},
	}
	return f
}

func (f *faulty) count() error {
	f.calls++
	if f.calls-1 == f.at {
		return errFault
	}
	return nil
}

// Sync also fails before it waits.
func (f *faulty) Sync(ctx context.Context) error {
	if err := f.count(); err != nil {
		return err
	}
	return f.Communicator.Sync(ctx)
}

// trainee is a rank that reduces a sequence of gradients.
type trainee struct {
	s        *distributed.Sparse
	t        *runtime.Tensor
	gradient func(step int) []float32
}

func newTrainee(rt runtime.Runtime, c comm.Communicator, cfg distributed.Config, n int) (*trainee, error) {
	s, err := distributed.NewSparse(rt, c, n, cfg)
	if err != nil {
		return nil, err
	}
	rank := c.Rank()
	u := &trainee{s: s, gradient: func(step int) []float32 { return normal(n, rank, step) }}
	u.t, err = runtime.FromSlice(rt, u.gradient(0), n)
	return u, err
}

func (u *trainee) load(step int) error { return runtime.CopyIn(u.t, u.gradient(step)) }

func (u *trainee) step(ctx context.Context, step int) error {
	return errors.Join(u.load(step), u.s.AllReduce(ctx, u.t))
}

// state are the bits of the residual, if there is one.
func (u *trainee) state() []uint32 {
	r, err := u.s.Residual()
	if errors.Is(err, comm.ErrUnsupported) {
		return nil
	}
	if err != nil {
		panic(err)
	}
	return bits(r)
}

func (u *trainee) close() error { return errors.Join(u.s.Close(), u.t.Free()) }

// ledger adds up what the ranks put in and what came out.
type ledger struct {
	mu      sync.Mutex
	in, out []float64
}

func (l *ledger) add(to *[]float64, x []uint32, factor float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if *to == nil {
		*to = make([]float64, len(x))
	}
	for i, b := range x {
		(*to)[i] += factor * float64(math.Float32frombits(b))
	}
}

// Where a fault is.
const (
	onAll  = iota // on all ranks
	onOne         // on one of them
	deadly        // on one, which is gone then
	numKind
)

// TestFaults makes each communication call of a step fail, on all ranks or on
// one. A rank whose step failed has gradient and residual as before, bit for bit,
// and repeats the step on another communicator, as if nothing had happened, also
// without the rank that failed. Then nothing of what the ranks have got lost.
func TestFaults(t *testing.T) {
	const n, density = 1500, 0.1
	sizes := []int{2, 3, 5, 8}
	if testing.Short() {
		sizes = sizes[1:2]
	}
	rt := cpu.New()
	for _, pattern := range distributed.Patterns() {
		for _, size := range sizes {
			// The norm is exchanged, and nothing clipped.
			cfg := distributed.Config{Pattern: pattern, Density: density, ClipNorm: 1e6, Clip: distributed.ClipGlobal}
			for kind := range numKind {
				repeated := 0
				for at, more := 0, true; more; at++ {
					more = false
					label := fmt.Sprintf("%s, %d ranks, call %d, fault %d", pattern, size, at, kind)
					require.NoError(t, fault(t, rt, cfg, n, size, at, kind, label, &more, &repeated), label)
				}
				assert.Positive(t, repeated, "%s, %d ranks, fault %d", pattern, size, kind)
			}
		}
	}
	require.NoError(t, rt.Close())
}

// fault has call number at of the second step fail. more: there was such a call.
func fault(t *testing.T, rt *cpu.Runtime, cfg distributed.Config, n, size, at, kind int, label string, more *bool, repeated *int) error {
	others, err := local.New(size)
	if kind == deadly {
		others, err = local.New(size - 1)
		others = slices.Insert(others, at%size, nil)
	}
	if err != nil {
		return err
	}
	closeOther := func(rank int) error {
		if others[rank] == nil {
			return nil
		}
		return others[rank].Close()
	}
	var l ledger
	var met sync.WaitGroup
	met.Add(size)
	failed := make([]error, size)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err = local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
		rank := c.Rank()
		f := newFaulty(c)
		u, err := newTrainee(rt, f, cfg, n)
		if err == nil {
			err = errors.Join(u.step(ctx, 0), u.load(1))
		}
		if err != nil {
			met.Done()
			return err
		}
		gradient, residual := bits(u.t), u.state()
		f.calls = 0
		if kind == onAll || rank == at%size {
			f.at = at
		}
		failed[rank] = u.s.AllReduce(ctx, u.t)
		l.mu.Lock()
		*more = *more || f.calls > at
		l.mu.Unlock()
		f.at = -1
		if failed[rank] != nil {
			assert.ErrorContains(t, failed[rank], "undone", label)
			assert.Equal(t, gradient, bits(u.t), "gradient: %s, rank %d", label, rank)
			assert.Equal(t, residual, u.state(), "residual: %s, rank %d", label, rank)
			_ = c.Close() // it may say what is unfinished
		}
		met.Done()
		met.Wait()
		first := slices.IndexFunc(failed, func(err error) bool { return err != nil })
		if first < 0 || slices.Contains(failed, nil) || others[rank] == nil {
			// Nobody failed, or it was this rank's last wait and all data has come, or
			// this rank is gone.
			return errors.Join(u.close(), closeOther(rank))
		}
		c = others[rank]
		defer c.Close()
		if err := u.s.Rebind(c); err != nil {
			return err
		}
		if err := u.s.AllReduce(ctx, u.t); err != nil {
			return fmt.Errorf("repeated: %w", err)
		}
		stats, err := u.s.Stats(ctx)
		assert.Equal(t, 1, stats.Step, label)
		l.add(&l.in, gradient, 1)
		l.add(&l.out, bits(u.t), 1)
		if residual != nil {
			l.add(&l.in, residual, 1)
			l.add(&l.out, u.state(), 1)
		}
		return errors.Join(err, u.step(ctx, 2), u.close())
	})
	if l.in != nil {
		*repeated++
	}
	for i := range l.in {
		if math.Abs(l.in[i]-l.out[i]) > 1e-5*float64(size) {
			return fmt.Errorf("%s: at %d, %v went in and %v came out", label, i, l.in[i], l.out[i])
		}
	}
	for _, err := range failed {
		if err != nil && !errors.Is(err, errFault) && !errors.Is(err, comm.ErrPeerFailed) {
			return err
		}
	}
	return err
}

// TestStepsApart has ranks of which one has completed a step more than the other go on
// together: where a schedule is not over, that is an error until they are at one step.
func TestStepsApart(t *testing.T) {
	for _, at := range []struct {
		schedule distributed.Schedule
		says     string // of the rank that is ahead
	}{
		{distributed.Schedule{}, ""},
		{distributed.Schedule{WarmupSteps: 1}, ""},
		{distributed.Schedule{WarmupSteps: 2}, "no schedule any more"},
		{distributed.Schedule{Densities: []float64{0.5}, StepsPerEpoch: 9}, "step 2 of the schedule"},
	} {
		cfg := distributed.Config{Pattern: distributed.TopkA, Density: 0.1, Schedule: at.schedule}
		world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			alone, err := c.Split(ctx, c.Rank(), 0)
			require.NoError(t, err)
			u, err := newTrainee(rt, alone, cfg, 100)
			require.NoError(t, err)
			m, err := newModel(ctx, rt, alone, distributed.GradientConfig{Config: cfg})
			require.NoError(t, err)
			one := func() error { return u.step(ctx, 1) }
			all := func() error { return errors.Join(m.load(1), m.sync.ReduceAll(ctx, m.params)) }
			require.NoError(t, errors.Join(one(), all()))
			sparse, err := u.s.State(ctx)
			require.NoError(t, err)
			gradients, err := m.sync.State(ctx)
			require.NoError(t, err)
			if c.Rank() == 1 {
				require.NoError(t, errors.Join(one(), all()))
			}
			require.NoError(t, errors.Join(u.s.Rebind(c), m.sync.Rebind(ctx, c)))
			for _, step := range []func() error{one, all} {
				err := step()
				if at.says == "" {
					require.NoError(t, err)
					continue
				}
				require.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorContains(t, err, "step 1 of the schedule")
				assert.ErrorContains(t, err, at.says)
			}
			require.NoError(t, errors.Join(u.s.Restore(ctx, sparse), m.sync.Restore(ctx, gradients), one(), all()))
			return errors.Join(u.close(), m.close(), alone.Close())
		})
	}
}

// TestRepeat repeats a step on the same communicator, after a context that was
// over before it and after a call that failed on all ranks, and goes on with
// fewer ranks. The results are those of ranks to which nothing happened.
func TestRepeat(t *testing.T) {
	const ranks, n, steps = 3, 1500, 4
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for _, pattern := range distributed.Patterns() {
		rt := cpu.New()
		run := func(faults bool) (all [ranks][][]uint32) {
			fewer, err := local.New(ranks - 1)
			require.NoError(t, err)
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				rank := c.Rank()
				f := newFaulty(c)
				u, err := newTrainee(rt, f, distributed.Config{Pattern: pattern, Density: 0.1}, n)
				for step := range steps {
					if step == steps-1 {
						if rank == ranks-1 {
							break
						}
						defer fewer[rank].Close()
						err = errors.Join(err, u.s.Rebind(fewer[rank]))
					}
					err = errors.Join(err, u.load(step))
					if faults && step == 1 {
						gone := u.s.AllReduce(over, u.t)
						assert.ErrorIs(t, gone, comm.ErrCanceled)
						assert.ErrorIs(t, gone, context.Canceled)
					}
					if faults && step == 2 {
						f.calls, f.at = 0, 0
						assert.ErrorIs(t, u.s.AllReduce(ctx, u.t), errFault)
					}
					if err = errors.Join(err, u.s.AllReduce(ctx, u.t)); err != nil {
						return err
					}
					all[rank] = append(all[rank], bits(u.t), u.state())
				}
				return u.close()
			}))
			return all
		}
		assert.Equal(t, run(false), run(true), pattern)
		require.NoError(t, rt.Close())
	}
}

// TestFixedAddresses runs one step or several while the allocator is frozen, as the
// capture of a graph does it: from the first of them on the residual stays where it is. The
// bits are those of steps that exchange its memory, also around a step that fails
// and one that is dropped.
func TestFixedAddresses(t *testing.T) {
	const ranks, n, steps = 2, 1500, 7
	for _, pattern := range distributed.Patterns()[1:] {
		rt := cpu.New()
		run := func(frozenFrom, frozenTo int) (all [ranks][][]uint32) {
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				f := newFaulty(c)
				u, err := newTrainee(rt, f, distributed.Config{Pattern: pattern, Density: 0.1}, n)
				if err != nil {
					return err
				}
				var fixed uintptr
				for step := range steps {
					g := u.gradient(step)
					if step == 5 {
						g[3] = float32(math.NaN())
					}
					if err := runtime.CopyIn(u.t, g); err != nil {
						return err
					}
					frozen := frozenFrom <= step && step < frozenTo
					if frozen {
						rt.Freeze()
					}
					if step == 4 {
						f.calls, f.at = 0, 1
						assert.ErrorIs(t, u.s.AllReduce(ctx, u.t), errFault)
					}
					err := u.s.AllReduce(ctx, u.t)
					if frozen {
						rt.Unfreeze()
					}
					if err != nil {
						return err
					}
					residual, err := u.s.Residual()
					if err != nil {
						return err
					}
					at, err := residual.Ptr()
					if step == frozenFrom {
						fixed = at
					}
					assert.True(t, fixed == 0 || at == fixed, "%s, step %d", pattern, step)
					all[c.Rank()] = append(all[c.Rank()], bits(u.t), u.state())
					if err != nil {
						return err
					}
				}
				return u.close()
			}))
			return all
		}
		want := run(-1, -1)
		assert.Equal(t, want, run(2, 3), pattern)
		assert.Equal(t, want, run(2, steps), "%s, all frozen", pattern)
		require.NoError(t, rt.Close())
	}
}

// TestFailureBeforeTheGradient lets a step fail while the allocator is frozen, before any
// kernel has added the gradient: the residual is as before, bit for bit.
func TestFailureBeforeTheGradient(t *testing.T) {
	const n, steps = 1500, 4
	for _, pattern := range distributed.Patterns()[1:] {
		rt := &refusing{Runtime: cpu.New()}
		run := func(fails bool) (all [][]uint32) {
			require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
				u, err := newTrainee(rt, c, distributed.Config{Pattern: pattern, Density: 0.1}, n)
				if err != nil {
					return err
				}
				for step := range steps {
					rt.refuses = fails && step == 2
					if rt.refuses {
						rt.Freeze()
						assert.ErrorIs(t, u.step(ctx, step), errFault)
						rt.Unfreeze()
						rt.refuses = false
					}
					if err := u.step(ctx, step); err != nil {
						return err
					}
					all = append(all, bits(u.t), u.state())
				}
				return u.close()
			}))
			return all
		}
		assert.Equal(t, run(false), run(true), pattern)
		require.NoError(t, rt.Close())
	}
}

// refusing has kernels that fail before they do anything, where they would add a gradient.
type refusing struct {
	*cpu.Runtime
	refuses bool
}

func (r *refusing) Kernels() runtime.Kernels { return refusingKernels{r.Runtime.Kernels(), r} }

type refusingKernels struct {
	runtime.Kernels
	r *refusing
}

func (k refusingKernels) unless(f func() error) error {
	if k.r.refuses {
		return errFault
	}
	return f()
}

func (k refusingKernels) TopK(src runtime.Source, count int, dst runtime.Entries, threshold uintptr) error {
	return k.unless(func() error { return k.Kernels.TopK(src, count, dst, threshold) })
}

func (k refusingKernels) SelectNear(src runtime.Source, count int, state uintptr, o runtime.Near, dst runtime.Entries, used uintptr) error {
	return k.unless(func() error { return k.Kernels.SelectNear(src, count, state, o, dst, used) })
}

func (k refusingKernels) Fit(src runtime.Source, z float64, threshold uintptr) error {
	return k.unless(func() error { return k.Kernels.Fit(src, z, threshold) })
}

// TestFailureOfADrop: a step with an overflow that cannot be undone at once is undone
// behind its error, and the gradient is still there.
func TestFailureOfADrop(t *testing.T) {
	world(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		dropping := &dropping{Runtime: rt, at: -1}
		u, err := newTrainee(dropping, c, distributed.Config{Pattern: "topkA", Density: 0.1}, 1000)
		require.NoError(t, err)
		require.NoError(t, u.step(ctx, 0))
		before := u.state()
		g := u.gradient(1)
		g[3] = float32(math.Inf(1))
		require.NoError(t, runtime.CopyIn(u.t, g))
		given := bits(u.t)
		dropping.calls, dropping.at = 0, 1 // the first keeps what the second brings back
		assert.ErrorIs(t, u.s.AllReduce(ctx, u.t), errFault)
		assert.Equal(t, given, bits(u.t))
		assert.Equal(t, before, u.state())
		require.NoError(t, u.s.AllReduce(ctx, u.t))
		stats, err := u.s.Stats(ctx)
		assert.True(t, stats.Skipped)
		return errors.Join(err, u.close())
	})
}

// dropping is a runtime whose copy number at fails.
type dropping struct {
	*cpu.Runtime
	calls, at int
}

func (d *dropping) Copy(dst, src uintptr, bytes int) error {
	if d.calls++; d.calls-1 == d.at {
		return errFault
	}
	return d.Runtime.Copy(dst, src, bytes)
}

// TestContextOverBefore: a step that does not begin, because its context is over, leaves
// everything usable, also where steps cannot be undone.
func TestContextOverBefore(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	world(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		const n = 100
		cfg := distributed.Config{Pattern: "topkA", Density: 0.1, NoUndo: true}
		u, err := newTrainee(rt, c, cfg, n)
		require.NoError(t, err)
		buckets, err := distributed.NewGradientSync(ctx, rt, c, []*runtime.Tensor{u.t}, distributed.GradientConfig{Config: cfg})
		require.NoError(t, err)
		plain, err := distributed.NewGradientSync(ctx, rt, c, []*runtime.Tensor{u.t}, distributed.GradientConfig{})
		require.NoError(t, err)
		for name, step := range map[string]func(ctx context.Context) error{
			"sparse":  func(ctx context.Context) error { return u.s.AllReduce(ctx, u.t) },
			"buckets": func(ctx context.Context) error { return buckets.ReduceAll(ctx, []*runtime.Tensor{u.t}) },
			"plain":   func(ctx context.Context) error { return plain.ReduceAll(ctx, []*runtime.Tensor{u.t}) },
		} {
			before := bits(u.t)
			assert.ErrorIs(t, step(over), comm.ErrCanceled, name)
			assert.Equal(t, before, bits(u.t), name)
		}
		_, stateErr := u.s.State(ctx)
		_, bucketsErr := buckets.State(ctx)
		_, plainErr := plain.State(ctx)
		require.NoError(t, errors.Join(stateErr, bucketsErr, plainErr))
		require.NoError(t, errors.Join(u.step(ctx, 0), buckets.ReduceAll(ctx, []*runtime.Tensor{u.t}), plain.ReduceAll(ctx, []*runtime.Tensor{u.t})))
		return errors.Join(buckets.Close(), plain.Close(), u.close())
	})
}
