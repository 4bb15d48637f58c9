package sparse_test

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
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

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
	for _, pattern := range sparse.Patterns() {
		for _, size := range sizes {
			// The norm is exchanged, and nothing clipped.
			cfg := sparse.Config{Pattern: pattern, Density: density, ClipNorm: 1e6, Clip: sparse.ClipGlobal}
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
func fault(t *testing.T, rt *cpu.Runtime, cfg sparse.Config, n, size, at, kind int, label string, more *bool, repeated *int) error {
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
	var began, met sync.WaitGroup
	began.Add(size)
	met.Add(size)
	failed := make([]error, size)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err = local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
		rank := c.Rank()
		f := standin.NewFaulty(c)
		u, err := standin.NewTrainee(rt, f, cfg, n)
		if err == nil {
			err = errors.Join(u.Step(ctx, 0), u.Load(1))
		}
		// A rank that fails closes its communicator, and others may still wait for the end of the step before.
		began.Done()
		began.Wait()
		if err != nil {
			met.Done()
			return err
		}
		gradient, residual := standin.Bits(u.T), u.State()
		f.Calls = 0
		if kind == onAll || rank == at%size {
			f.At = at
		}
		failed[rank] = u.S.AllReduce(ctx, u.T)
		l.mu.Lock()
		*more = *more || f.Calls > at
		l.mu.Unlock()
		f.At = -1
		if failed[rank] != nil {
			assert.ErrorContains(t, failed[rank], "undone", label)
			assert.Equal(t, gradient, standin.Bits(u.T), "gradient: %s, rank %d", label, rank)
			assert.Equal(t, residual, u.State(), "residual: %s, rank %d", label, rank)
			_ = c.Close() // it may say what is unfinished
		}
		met.Done()
		met.Wait()
		first := slices.IndexFunc(failed, func(err error) bool { return err != nil })
		if first < 0 || slices.Contains(failed, nil) || others[rank] == nil {
			// Nobody failed, or it was this rank's last wait and all data has come, or
			// this rank is gone.
			return errors.Join(u.Close(), closeOther(rank))
		}
		c = others[rank]
		defer c.Close()
		if err := u.S.Rebind(c); err != nil {
			return err
		}
		if err := u.S.AllReduce(ctx, u.T); err != nil {
			return fmt.Errorf("repeated: %w", err)
		}
		stats, err := u.S.Stats(ctx)
		assert.Equal(t, 1, stats.Step, label)
		l.add(&l.in, gradient, 1)
		l.add(&l.out, standin.Bits(u.T), 1)
		if residual != nil {
			l.add(&l.in, residual, 1)
			l.add(&l.out, u.State(), 1)
		}
		return errors.Join(err, u.Step(ctx, 2), u.Close())
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
		if err != nil && !errors.Is(err, standin.ErrFault) && !errors.Is(err, comm.ErrPeerFailed) {
			return err
		}
	}
	return err
}

// TestRepeat repeats a step on the same communicator, after a context that was
// over before it and after a call that failed on all ranks, and goes on with
// fewer ranks. The results are those of ranks to which nothing happened.
func TestRepeat(t *testing.T) {
	const ranks, n, steps = 3, 1500, 4
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for _, pattern := range sparse.Patterns() {
		rt := cpu.New()
		run := func(faults bool) (all [ranks][][]uint32) {
			fewer, err := local.New(ranks - 1)
			require.NoError(t, err)
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				rank := c.Rank()
				f := standin.NewFaulty(c)
				u, err := standin.NewTrainee(rt, f, sparse.Config{Pattern: pattern, Density: 0.1}, n)
				for step := range steps {
					if step == steps-1 {
						if rank == ranks-1 {
							break
						}
						defer fewer[rank].Close()
						err = errors.Join(err, u.S.Rebind(fewer[rank]))
					}
					err = errors.Join(err, u.Load(step))
					if faults && step == 1 {
						gone := u.S.AllReduce(over, u.T)
						assert.ErrorIs(t, gone, comm.ErrCanceled)
						assert.ErrorIs(t, gone, context.Canceled)
					}
					if faults && step == 2 {
						f.Calls, f.At = 0, 0
						assert.ErrorIs(t, u.S.AllReduce(ctx, u.T), standin.ErrFault)
					}
					if err = errors.Join(err, u.S.AllReduce(ctx, u.T)); err != nil {
						return err
					}
					all[rank] = append(all[rank], standin.Bits(u.T), u.State())
				}
				return u.Close()
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
	for _, pattern := range sparse.Patterns()[1:] {
		rt := cpu.New()
		run := func(frozenFrom, frozenTo int) (all [ranks][][]uint32) {
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				f := standin.NewFaulty(c)
				u, err := standin.NewTrainee(rt, f, sparse.Config{Pattern: pattern, Density: 0.1}, n)
				if err != nil {
					return err
				}
				var fixed uintptr
				for step := range steps {
					g := u.Gradient(step)
					if step == 5 {
						g[3] = float32(math.NaN())
					}
					if err := runtime.CopyIn(u.T, g); err != nil {
						return err
					}
					frozen := frozenFrom <= step && step < frozenTo
					if frozen {
						rt.Freeze()
					}
					if step == 4 {
						f.Calls, f.At = 0, 1
						assert.ErrorIs(t, u.S.AllReduce(ctx, u.T), standin.ErrFault)
					}
					err := u.S.AllReduce(ctx, u.T)
					if frozen {
						rt.Unfreeze()
					}
					if err != nil {
						return err
					}
					residual, err := u.S.Residual()
					if err != nil {
						return err
					}
					at, err := residual.Ptr()
					if step == frozenFrom {
						fixed = at
					}
					assert.True(t, fixed == 0 || at == fixed, "%s, step %d", pattern, step)
					all[c.Rank()] = append(all[c.Rank()], standin.Bits(u.T), u.State())
					if err != nil {
						return err
					}
				}
				return u.Close()
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
	for _, pattern := range sparse.Patterns()[1:] {
		rt := &refusing{Runtime: cpu.New()}
		run := func(fails bool) (all [][]uint32) {
			require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
				u, err := standin.NewTrainee(rt, c, sparse.Config{Pattern: pattern, Density: 0.1}, n)
				if err != nil {
					return err
				}
				for step := range steps {
					rt.refuses = fails && step == 2
					if rt.refuses {
						rt.Freeze()
						assert.ErrorIs(t, u.Step(ctx, step), standin.ErrFault)
						rt.Unfreeze()
						rt.refuses = false
					}
					if err := u.Step(ctx, step); err != nil {
						return err
					}
					all = append(all, standin.Bits(u.T), u.State())
				}
				return u.Close()
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
		return standin.ErrFault
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
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		dropping := &dropping{Runtime: rt, at: -1}
		u, err := standin.NewTrainee(dropping, c, sparse.Config{Pattern: "topkA", Density: 0.1}, 1000)
		require.NoError(t, err)
		require.NoError(t, u.Step(ctx, 0))
		before := u.State()
		g := u.Gradient(1)
		g[3] = float32(math.Inf(1))
		require.NoError(t, runtime.CopyIn(u.T, g))
		given := standin.Bits(u.T)
		dropping.calls, dropping.at = 0, 1 // the first keeps what the second brings back
		assert.ErrorIs(t, u.S.AllReduce(ctx, u.T), standin.ErrFault)
		assert.Equal(t, given, standin.Bits(u.T))
		assert.Equal(t, before, u.State())
		require.NoError(t, u.S.AllReduce(ctx, u.T))
		stats, err := u.S.Stats(ctx)
		assert.True(t, stats.Skipped)
		return errors.Join(err, u.Close())
	})
}

// dropping is a runtime whose copy number at fails.
type dropping struct {
	*cpu.Runtime
	calls, at int
}

func (d *dropping) Copy(dst, src uintptr, bytes int) error {
	if d.calls++; d.calls-1 == d.at {
		return standin.ErrFault
	}
	return d.Runtime.Copy(dst, src, bytes)
}
