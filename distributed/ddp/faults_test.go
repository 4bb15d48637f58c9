package ddp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// model is a rank with the gradients of a small model: matrices, and vectors that
// have dense buckets.
type model struct {
	sync   *ddp.Gradients
	params []*runtime.Tensor
	rank   int
}

var modelShapes = [][]int{{40, 50}, {50}, {30, 20}, {7, 100}, {100}, {3}}

func newModel(ctx context.Context, rt runtime.Runtime, c comm.Communicator, cfg ddp.Config) (*model, error) {
	m := &model{rank: c.Rank()}
	for _, shape := range modelShapes {
		t, err := runtime.New(rt, dtype.F32, shape...)
		if err != nil {
			return nil, err
		}
		m.params = append(m.params, t)
	}
	if cfg.BucketBytes == 0 {
		cfg.BucketBytes = 6000 // several sparse buckets, of one and of two gradients
	}
	var err error
	m.sync, err = ddp.New(ctx, rt, c, m.params, cfg)
	return m, err
}

// load writes the gradients of a step.
func (m *model) load(step int) error {
	var err error
	for i, t := range m.params {
		err = errors.Join(err, runtime.CopyIn(t, standin.Normal(t.Len(), m.rank, step, i)))
	}
	return err
}

// bits are the bits of all gradients.
func (m *model) bits() (all []uint32) {
	for _, t := range m.params {
		all = append(all, standin.Bits(t)...)
	}
	return all
}

func (m *model) close() error {
	err := m.sync.Close()
	for _, t := range m.params {
		err = errors.Join(err, t.Free())
	}
	return err
}

var sparseModel = ddp.Config{Config: sparse.Config{Pattern: "oktopk", Density: 0.1}}

// TestDenseVectors: small gradients of one dimension have dense buckets.
func TestDenseVectors(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		m, err := newModel(ctx, rt, c, sparseModel)
		if err != nil {
			return err
		}
		assert.Equal(t, [][]int{{3, 2}, {5, 4, 1}, {0}}, m.sync.Buckets())
		if err := errors.Join(m.load(0), m.sync.ReduceAll(ctx, m.params)); err != nil {
			return err
		}
		stats, err := m.sync.Stats(ctx)
		require.NoError(t, err)
		assert.Equal(t, []string{"oktopk", "dense", "oktopk"}, stats.Patterns)
		return m.close()
	})
}

// TestGradientOverflow gives one rank a gradient that is not finite, in a sparse or
// in a dense bucket. All buckets of all ranks drop the step, or report the error,
// and what follows has the bits of a run without it.
func TestGradientOverflow(t *testing.T) {
	const ranks, bad, steps = 3, 2, 5
	for _, pattern := range []string{sparse.Dense, "topkA", "gtopk", "topkSA", "gaussiank", "oktopk"} {
		for _, policy := range []sparse.NonFinitePolicy{sparse.SkipNonFinite, sparse.FailNonFinite} {
			for _, where := range []int{0, 4} {
				rt := cpu.New()
				label := fmt.Sprintf("%s, policy %d, gradient %d", pattern, policy, where)
				run := func(with bool) (all [ranks][][]uint32) {
					require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
						m, err := newModel(ctx, rt, c, ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.1, NonFinite: policy}})
						for step := range steps {
							if step == bad && !with {
								continue
							}
							if err = errors.Join(err, m.load(step)); err != nil {
								return err
							}
							if step == bad && c.Rank() == 1 {
								g := standin.Normal(m.params[where].Len(), 1)
								g[2] = float32(math.Inf(1))
								require.NoError(t, runtime.CopyIn(m.params[where], g))
							}
							given := m.bits()
							err := m.sync.ReduceAll(ctx, m.params)
							stats, statsErr := m.sync.Stats(ctx)
							assert.NoError(t, statsErr)
							switch {
							case step != bad:
								assert.NoError(t, err, label)
								assert.False(t, stats.Skipped, label)
								all[c.Rank()] = append(all[c.Rank()], m.bits())
							case policy == sparse.FailNonFinite:
								assert.ErrorIs(t, err, sparse.ErrNonFinite, label)
								standin.SameBits(t, given, m.bits(), label)
							default:
								assert.NoError(t, err, label)
								assert.True(t, stats.Skipped, label)
								standin.SameBits(t, make([]uint32, len(given)), m.bits(), label)
							}
						}
						return m.close()
					}))
					return all
				}
				assert.Equal(t, run(false), run(true), label)
				require.NoError(t, rt.Close())
			}
		}
	}
}

// TestGradientOverflowOnDevice: where the host does not wait, the device drops the
// step in all buckets.
func TestGradientOverflowOnDevice(t *testing.T) {
	standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
		m, err := newModel(ctx, s, c, ddp.Config{Config: sparse.Config{Pattern: "topkA", Density: 0.1, ClipNorm: 1e9}})
		require.NoError(t, err)
		for step := range 4 {
			require.NoError(t, m.load(step))
			if step%2 == 1 {
				require.NoError(t, m.params[4].Fill(math.NaN()))
			}
			s.Take()
			require.NoError(t, m.sync.ReduceAll(ctx, m.params))
			assert.NotContains(t, s.Take(), "HOST-WAITS")
			stats, err := m.sync.Stats(ctx)
			require.NoError(t, err)
			assert.Equal(t, step%2 == 1, stats.Skipped, "step %d", step)
			if stats.Skipped {
				standin.SameBits(t, make([]uint32, len(m.bits())), m.bits())
			} else {
				assert.NotEqual(t, make([]uint32, len(m.bits())), m.bits())
			}
		}
		require.NoError(t, m.close())
	})
}

// TestGradientClip: one factor for all buckets. Everything is sent, so that results
// are averages of scaled gradients.
func TestGradientClip(t *testing.T) {
	const ranks, norm = 2, 5.0
	for _, global := range []bool{false, true} {
		for _, pattern := range []string{sparse.Dense, "topkA"} {
			standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				cfg := sparse.Config{Pattern: pattern, Density: 1, ClipNorm: norm, ClipGlobal: global}
				m, err := newModel(ctx, rt, c, ddp.Config{Config: cfg})
				if err != nil {
					return err
				}
				if err := errors.Join(m.load(0), m.sync.ReduceAll(ctx, m.params)); err != nil {
					return err
				}
				var squares [ranks]float64
				for r := range squares {
					for i, p := range m.params {
						for _, v := range standin.Normal(p.Len(), r, 0, i) {
							squares[r] += float64(v) * float64(v)
						}
					}
				}
				for i, p := range m.params {
					got, err := runtime.ToSlice[float32](p)
					if err != nil {
						return err
					}
					want := make([]float64, len(got))
					for r, s := range squares {
						factor := norm / math.Sqrt(ranks) / math.Sqrt(s)
						if global {
							factor = norm / math.Sqrt((squares[0]+squares[1])/ranks)
						}
						for j, v := range standin.Normal(p.Len(), r, 0, i) {
							want[j] += float64(v) * factor / ranks
						}
					}
					for j := range got {
						assert.InDelta(t, want[j], float64(got[j]), 1e-6, "%s, gradient %d", pattern, i)
					}
				}
				return m.close()
			})
		}
	}
}

// TestGradientFaults makes each communication call of a step of several buckets
// fail, on all ranks or on one: gradients are as before, and the step, repeated on
// another communicator, gives what it gives without a fault, as do those that follow. With a mesh, calls along its
// dimensions fail as well.
func TestGradientFaults(t *testing.T) {
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 3})
	const steps, bad = 4, 1
	sizes := []int{2, 3}
	if testing.Short() {
		sizes = sizes[:1]
	}
	for _, cfg := range []ddp.Config{
		sparseModel,
		{Config: sparse.Config{Pattern: "topkSA", Density: 0.1, ClipNorm: 3, ClipGlobal: true}},
		{Config: sparse.Config{ClipNorm: 3}},
		{Config: sparse.Config{Pattern: "topkA", Density: 0.1, Momentum: 0.9}, Mesh: hosts(2)},
		{Reducer: newAlternating, Mesh: hosts(2)},
	} {
		sizes := sizes
		if cfg.Mesh != nil {
			sizes = []int{4}
		}
		for _, size := range sizes {
			rt := cpu.New()
			run := func(at int, everywhere bool) (all [][][]uint32, more bool) {
				label := fmt.Sprintf("%s, %d ranks, call %d, on all: %v", cfg.Pattern, size, at, everywhere)
				others, err := local.New(size)
				require.NoError(t, err)
				all = make([][][]uint32, size)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				var mu sync.Mutex
				var began, met sync.WaitGroup
				began.Add(size)
				met.Add(size)
				failed, completed := 0, 0
				err = local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
					rank := c.Rank()
					defer others[rank].Close()
					f := standin.NewFaulty(c)
					cfg := cfg
					if cfg.Mesh != nil {
						cfg.Mesh = faultyHosts(f)
					}
					m, err := newModel(ctx, rt, f, cfg)
					for step := range steps {
						if err = errors.Join(err, m.load(step)); err != nil {
							return err
						}
						given := m.bits()
						if step == bad && at >= 0 {
							began.Done() // otherwise a rank that closes its communicator may end the step before of another one
							began.Wait()
							f.Calls = 0
							if everywhere || rank == at%size {
								f.At = at
							}
						}
						err = m.sync.ReduceAll(ctx, m.params)
						if step == bad && at >= 0 {
							f.At = -1
							if err != nil {
								assert.ErrorContains(t, err, "rolled back", label)
								standin.SameBits(t, given, m.bits(), label)
								_ = comm.CloseAll(c, nil)
							}
							mu.Lock()
							more = more || f.Calls > at
							if err != nil {
								failed++
							} else {
								completed++
							}
							mu.Unlock()
							met.Done()
							met.Wait()
							if failed > 0 && completed > 0 { // the last wait of some
								return m.close()
							}
							if failed > 0 {
								if err := m.sync.Rebind(ctx, others[rank]); err != nil {
									return fmt.Errorf("%s: %w", label, err)
								}
								err = m.sync.ReduceAll(ctx, m.params)
							}
						}
						if err != nil {
							return fmt.Errorf("%s, step %d: %w", label, step, err)
						}
						all[rank] = append(all[rank], m.bits())
					}
					return m.close()
				})
				if failed > 0 && completed > 0 {
					return nil, more
				}
				require.NoError(t, err, label)
				return all, more
			}
			want, _ := run(-1, false)
			for _, everywhere := range []bool{true, false} {
				// Unless extended, calls fail on all of two ranks, on one of three, and both ways with a mesh.
				if size < 4 && everywhere != (size == 2) && !standin.Extended && !testing.Short() {
					continue
				}
				for at, more := 0, true; more; at++ {
					var got [][][]uint32
					// Thresholds of oktopk start over with another communicator.
					if got, more = run(at, everywhere); got != nil && cfg.Pattern != sparse.Oktopk {
						for rank := range want {
							for step := range want[rank] {
								assert.True(t, slices.Equal(want[rank][step], got[rank][step]), "%s, mesh %v, %d ranks, call %d, on all: %v: rank %d, step %d has other bits", cfg.Pattern, cfg.Mesh != nil, size, at, everywhere, rank, step)
							}
						}
					}
				}
			}
			require.NoError(t, rt.Close())
		}
	}
}

// faultyHosts are hosts of two ranks whose calls are counted with those of f, while f is the communicator.
func faultyHosts(f *standin.Faulty) func(context.Context, comm.Communicator) (*distributed.Mesh, error) {
	return func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
		m, err := hosts(2)(ctx, c)
		if found, _ := comm.As[*standin.Faulty](c); err != nil || found != f {
			return m, err
		}
		var names []string
		var comms []comm.Communicator
		for _, d := range m.Dims() {
			sub, err := m.Comm(d.Name)
			if err != nil {
				return nil, err
			}
			faulty := standin.NewFaulty(sub)
			faulty.CountedBy = f
			names = append(names, d.Name)
			comms = append(comms, faulty)
		}
		return distributed.JoinMesh(names, comms)
	}
}

// TestGradientResume interrupts a run of several buckets after each of its steps.
func TestGradientResume(t *testing.T) {
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 3})
	const ranks, steps = 2, 6
	rt := cpu.New()
	run := func(cut int) (all [ranks][][]uint32) {
		require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			m, err := newModel(ctx, rt, c, sparseModel)
			for step := range steps {
				if step == cut {
					var state []byte
					if state, err = m.sync.State(ctx); err != nil {
						return err
					}
					if err = m.close(); err != nil {
						return err
					}
					if m, err = newModel(ctx, rt, c, sparseModel); err != nil {
						return err
					}
					for i := 0; i < len(state); i += 97 {
						assert.ErrorIs(t, m.sync.Restore(ctx, state[:i]), comm.ErrArgument)
					}
					err = m.sync.Restore(ctx, state)
				}
				if err = errors.Join(err, m.load(step)); err != nil {
					return err
				}
				if err = m.sync.ReduceAll(ctx, m.params); err != nil {
					return err
				}
				all[c.Rank()] = append(all[c.Rank()], m.bits())
			}
			stats, err := m.sync.Stats(ctx)
			assert.Equal(t, steps-1, stats.Step)
			return errors.Join(err, m.close())
		}))
		return all
	}
	want := run(-1)
	for cut := range steps {
		assert.Equal(t, want, run(cut), "cut before step %d", cut)
	}
	require.NoError(t, rt.Close())
}

// Where a gradient that is not finite spoils the norm that clips all ranks, all of them skip the step
// in all buckets, in an epoch that sends nothing as well.
func TestGlobalNormIsNotFinite(t *testing.T) {
	const bad = 1
	cfg := ddp.Config{BucketBytes: 400, DenseUpTo: -1, Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1, ClipNorm: 1, ClipGlobal: true,
		Schedule: sparse.Schedule{Densities: []float64{0}, StepsPerEpoch: bad + 2}}}
	for _, streams := range []bool{false, true} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			memory := runtime.Runtime(rt)
			if streams {
				memory, c = standin.NewOnStream(rt), standin.NewOrdered(ctx, c)
			}
			all := standin.Gradients(t, memory, 3)
			g, err := ddp.New(ctx, memory, c, all, cfg)
			if err != nil {
				return err
			}
			for step := range bad + 2 {
				for i, x := range all {
					values := standin.Normal(x.Len(), c.Rank(), step, i)
					if step == bad && i == 2 && c.Rank() == 1 {
						values[7] = float32(math.NaN())
					}
					if err := runtime.CopyIn(x, values); err != nil {
						return err
					}
				}
				if err := g.ReduceAll(ctx, all); err != nil {
					return err
				}
				stats, err := g.Stats(ctx)
				if err != nil {
					return err
				}
				assert.Equal(t, step == bad, stats.Skipped, "streams %v, rank %d, step %d", streams, c.Rank(), step)
			}
			standin.Free(t, all)
			return g.Close()
		})
	}
}

// TestLostResiduals: a line of the log says that ranks are gone with their residuals, one line for all buckets, and
// nothing where nothing is lost.
func TestLostResiduals(t *testing.T) {
	const ranks = 3
	var text bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	defer slog.SetDefault(before)
	for _, k := range []struct {
		pattern string
		fewer   int
		lines   int
	}{{"topkA", 1, 2}, {"topkA", 0, 0}, {sparse.Dense, 1, 0}} {
		others, err := local.New(ranks - k.fewer)
		require.NoError(t, err)
		text.Reset()
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			u, err := standin.NewTrainee(rt, c, engine.Config{Pattern: k.pattern, Density: 0.1}, 500)
			require.NoError(t, err)
			m, err := newModel(ctx, rt, c, ddp.Config{Config: sparse.Config{Pattern: k.pattern, Density: 0.1, ClipNorm: 9}})
			require.NoError(t, err)
			require.NoError(t, errors.Join(u.Step(ctx, 0), m.load(0), m.sync.ReduceAll(ctx, m.params)))
			if rank := c.Rank(); rank < len(others) {
				defer others[rank].Close()
				require.NoError(t, errors.Join(u.S.Rebind(others[rank]), m.sync.Rebind(ctx, others[rank])))
				require.NoError(t, errors.Join(u.Step(ctx, 1), m.load(1), m.sync.ReduceAll(ctx, m.params)))
			}
			return errors.Join(u.Close(), m.close())
		})
		const lost = `are lost unless they handed them over" `
		assert.Equal(t, k.lines, bytes.Count(text.Bytes(), []byte(lost)), "%+v: %s", k, text.String())
		if k.lines > 0 {
			assert.Contains(t, text.String(), lost+"elements=500 ranks=2 lost=1 rank=0 times=1", "of the tensor")
			assert.Regexp(t, lost+`gradients="?\[[0-9 ]+\]"? ranks=2 lost=1 rank=0 times=1`, text.String(), "of all gradients that are sparse")
		}
	}
}

// TestContextOverBefore: a step that does not begin, because its context is over, leaves
// everything usable, also where steps cannot be rolled back.
func TestContextOverBefore(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		const n = 100
		cfg := sparse.Config{Pattern: "topkA", Density: 0.1, NoUndo: true}
		u, err := standin.NewTrainee(rt, c, engine.Config(cfg), n)
		require.NoError(t, err)
		buckets, err := ddp.New(ctx, rt, c, []*runtime.Tensor{u.T}, ddp.Config{Config: cfg, DenseUpTo: -1})
		require.NoError(t, err)
		plain, err := ddp.New(ctx, rt, c, []*runtime.Tensor{u.T}, ddp.Config{})
		require.NoError(t, err)
		for name, step := range map[string]func(ctx context.Context) error{
			"sparse":  func(ctx context.Context) error { return u.S.AllReduce(ctx, u.T) },
			"buckets": func(ctx context.Context) error { return buckets.ReduceAll(ctx, []*runtime.Tensor{u.T}) },
			"plain":   func(ctx context.Context) error { return plain.ReduceAll(ctx, []*runtime.Tensor{u.T}) },
		} {
			before := standin.Bits(u.T)
			assert.ErrorIs(t, step(over), comm.ErrCanceled, name)
			standin.SameBits(t, before, standin.Bits(u.T), name)
		}
		_, stateErr := u.S.State(ctx)
		_, bucketsErr := buckets.State(ctx)
		_, plainErr := plain.State(ctx)
		require.NoError(t, errors.Join(stateErr, bucketsErr, plainErr))
		require.NoError(t, errors.Join(u.Step(ctx, 0), buckets.ReduceAll(ctx, []*runtime.Tensor{u.T}), plain.ReduceAll(ctx, []*runtime.Tensor{u.T})))
		return errors.Join(buckets.Close(), plain.Close(), u.Close())
	})
}

// failsAt is a communicator of whose calls of StreamWaitEvent one fails.
type failsAt struct {
	standin.ByEvents
	calls *int // until then; below 0: none
}

func (f failsAt) StreamWaitEvent(_, _ uintptr) error {
	if *f.calls--; *f.calls == 0 {
		return standin.ErrKernel
	}
	return nil
}

// The same of the buckets of a model, after whose results the compute stream waits.
func TestFailureBehindResults(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		calls := 0
		memory := standin.NewForking(rt)
		all := standin.Gradients(t, memory, 2)
		g, err := ddp.New(ctx, memory, failsAt{standin.NewByEvents(ctx, c), &calls}, all,
			ddp.Config{Config: sparse.Config{Pattern: "topkA", Density: 0.1}, DenseUpTo: -1})
		require.NoError(t, err)
		require.NoError(t, g.ReduceAll(ctx, all))
		calls = 0
		require.NoError(t, g.ReduceAll(ctx, all))
		calls = -calls // the last one
		err = g.ReduceAll(ctx, all)
		assert.ErrorIs(t, err, standin.ErrKernel)
		assert.NotContains(t, err.Error(), "rolled back")
		assert.ErrorIs(t, g.ReduceAll(ctx, all), standin.ErrKernel, "it stays")
		err = g.Close()
		standin.Free(t, all)
		return err
	})
}

// A Rebind in the middle of a step whose communicator is in use, and whose peers may not be in
// the step, is an error at once. It changes nothing: the step goes on.
func TestRebindInAStep(t *testing.T) {
	for _, pattern := range []string{sparse.Dense, sparse.TopkA} {
		refused := make(chan struct{})
		others, err := local.New(2)
		require.NoError(t, err)
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.1}})
			require.NoError(t, err)
			require.NoError(t, m.sync.ReduceAll(ctx, m.params)) // the first step compares what the ranks reduce
			if c.Rank() == 1 {
				<-refused
			}
			for i := range m.params {
				require.NoError(t, m.sync.Ready(ctx, i, m.params[i]))
			}
			if c.Rank() == 0 {
				err := m.sync.Rebind(ctx, others[0])
				assert.ErrorIs(t, err, comm.ErrArgument)
				assert.ErrorContains(t, err, "in the middle of a step")
				close(refused)
			}
			require.NoError(t, m.sync.Wait(ctx))
			require.NoError(t, m.sync.Rebind(ctx, others[c.Rank()]), "after Wait")
			require.NoError(t, m.sync.ReduceAll(ctx, m.params))
			return errors.Join(m.close(), others[c.Rank()].Close())
		})
	}
}

// TestRebindEndsAStep: a program that leaves a step on an error of Ready, or in its middle, is moved to another communicator as
// after Wait. The step has not happened then.
func TestRebindEndsAStep(t *testing.T) {
	const ranks, steps, left = 2, 4, 2
	cfg := ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}}
	run := func(leave func(ctx context.Context, c comm.Communicator, m *model)) (all [ranks][][]uint32) {
		others, err := local.New(ranks)
		require.NoError(t, err)
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			m, err := newModel(ctx, rt, c, cfg)
			for step := range steps {
				if err = errors.Join(err, m.load(step)); err != nil {
					return err
				}
				if step == left && leave != nil {
					given := m.bits()
					leave(ctx, c, m)
					require.NoError(t, m.sync.Rebind(ctx, others[c.Rank()]))
					standin.SameBits(t, given, m.bits())
				}
				err = m.sync.ReduceAll(ctx, m.params)
				all[c.Rank()] = append(all[c.Rank()], m.bits())
			}
			return errors.Join(err, m.close(), others[c.Rank()].Close())
		})
		return all
	}
	want := run(nil)
	for parts, name := range []string{"before", "after the first gradient", "after two", "after three", "after four", "after five", "before Wait"} {
		for _, aborts := range []bool{false, true} {
			var reached, refused sync.WaitGroup
			reached.Add(ranks)
			refused.Add(ranks)
			assert.Equal(t, want, run(func(ctx context.Context, c comm.Communicator, m *model) {
				reached.Done()
				reached.Wait() // no rank is in the step before
				if aborts && c.Rank() == 1 {
					_ = comm.CloseAll(c, errors.New("lost"))
				}
				for i := range parts {
					i = len(m.params) - 1 - i
					if m.sync.Ready(ctx, i, m.params[i]) != nil {
						break
					}
				}
				if !aborts && parts > 0 {
					err := m.sync.Rebind(ctx, c)
					assert.ErrorIs(t, err, comm.ErrArgument)
					assert.ErrorContains(t, err, "in the middle of a step")
				}
				refused.Done()
				refused.Wait() // no rank has closed its communicator before
				_ = comm.CloseAll(c, nil)
			}), "left %s, aborted: %v", name, aborts)
		}
	}
}

// told is a Reducer that tells when it has reduced.
type told struct {
	ddp.Reducer
	done chan struct{}
}

func (r told) Reduce(ctx context.Context, b ddp.Bucket) error {
	defer close(r.done)
	return r.Reducer.Reduce(ctx, b)
}

// stingy is a runtime whose copies fail when it is told to.
type stingy struct {
	*cpu.Runtime
	copiesFail atomic.Bool
}

func (s *stingy) Copy(dst, src uintptr, bytes int) error {
	if s.copiesFail.Load() {
		return errStingy
	}
	return s.Runtime.Copy(dst, src, bytes)
}

var errStingy = errors.New("copy told to fail")

// TestRebindCannotRollBack: where a Rebind ends a sound step, and what its Reducer keeps cannot be restored, the error says why
// the step ended.
func TestRebindCannotRollBack(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, memory *cpu.Runtime) error {
		others, err := local.New(1)
		require.NoError(t, err)
		rt := &stingy{Runtime: memory}
		done := make(chan struct{})
		all := standin.Gradients(t, rt, 1)
		g, err := ddp.New(ctx, rt, c, all, ddp.Config{Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
			r, err := newAlternating(b)
			return told{r, done}, err
		}})
		require.NoError(t, err)
		require.NoError(t, g.Ready(ctx, 0, all[0]))
		<-done
		require.NoError(t, c.Close())
		rt.copiesFail.Store(true)
		err = g.Rebind(ctx, others[0])
		assert.ErrorIs(t, err, errStingy)
		assert.ErrorIs(t, err, comm.ErrClosed)
		rt.copiesFail.Store(false)
		err = errors.Join(g.Close(), others[0].Close())
		standin.Free(t, all)
		return err
	})
}

// TestRebindAborted: a communicator that was aborted in the middle of a step works on no memory any more, so the step goes on
// with another one.
func TestRebindAborted(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"plain":  {},
		"judged": {Config: sparse.Config{NonFinite: sparse.SkipNonFinite}, Uneven: true},
		"sparse": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1},
	} {
		others, err := local.New(1)
		require.NoError(t, err)
		rebound := make(chan struct{})
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := standin.Gradients(t, rt, 2)
			g, err := ddp.New(ctx, rt, c, all, cfg)
			require.NoError(t, err)
			require.NoError(t, errors.Join(g.ReduceAll(ctx, all), c.Barrier(ctx)), name)
			if c.Rank() == 1 {
				<-rebound
			} else {
				for i, x := range all {
					require.NoError(t, errors.Join(x.Fill(3), g.Ready(ctx, i, x)), name)
				}
				comm.AbortAll(c, errors.New("lost"))
				assert.NoError(t, g.Rebind(ctx, others[0]), name)
				close(rebound)
				for _, x := range all {
					require.NoError(t, x.Fill(5))
				}
				require.NoError(t, g.ReduceAll(ctx, all), name)
				values, err := cpu.Slice[float32](all[1])
				require.NoError(t, err)
				assert.EqualValues(t, 5, values[99], name)
			}
			err = g.Close()
			standin.Free(t, all)
			return err
		})
		require.NoError(t, others[0].Close())
	}
}
