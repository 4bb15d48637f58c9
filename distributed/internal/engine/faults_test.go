package engine_test

import (
	"cmp"
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
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
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
	sizes := []int{2, 5, 8, 3}
	if testing.Short() {
		sizes = sizes[3:]
	}
	rt := cpu.New()
	tuning.Set(t, tuning.Tuning{TrimFrom: 16}) // messages that are coded travel in two parts
	for p, pattern := range sparsity.Patterns() {
		for i, size := range sizes {
			// Unless extended, each pattern has three ranks and one other number of them.
			if size != 3 && (p+i)%3 != 0 && !standin.Extended {
				continue
			}
			// The norm is exchanged, and nothing clipped.
			cfg := engine.Config{Pattern: pattern, Density: density, ClipNorm: 1e6, ClipGlobal: true}
			for kind := range 2 * numKind {
				cfg.Values = sparsity.F32
				if kind >= numKind {
					cfg.Values = []string{sparsity.I8, sparsity.I2, sparsity.Lossless}[kind%numKind]
				}
				if kind >= numKind && size != 3 {
					continue
				}
				repeated := 0
				for at, more := 0, true; more; at++ {
					more = false
					label := fmt.Sprintf("%s, %s, %d ranks, call %d, fault %d", pattern, cfg.Values, size, at, kind)
					require.NoError(t, fault(t, rt, cfg, n, size, at, kind%numKind, label, &more, &repeated), label)
				}
				assert.Positive(t, repeated, "%s, %d ranks, fault %d", pattern, size, kind)
			}
		}
	}
	require.NoError(t, rt.Close())
}

// fault has call number at of the second step fail. more: there was such a call.
func fault(t *testing.T, rt *cpu.Runtime, cfg engine.Config, n, size, at, kind int, label string, more *bool, repeated *int) error {
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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
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
			assert.ErrorContains(t, failed[rank], "rolled back", label)
			standin.SameBits(t, gradient, standin.Bits(u.T), "gradient: %s, rank %d", label, rank)
			standin.SameBits(t, residual, u.State(), "residual: %s, rank %d", label, rank)
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

// outcome is what becomes of a step, or of an attempt to make it.
type outcome uint8

const (
	passes    outcome = iota
	wontBegin         // an error; nothing was begun
	undone            // an error; gradient and residual are as before
	skips             // no error; the residual is as before, and the gradient zero
	refused           // ErrNonFinite; gradient and residual are as before
)

// faultyStep is a row of the table: a fault, in a phase of a step, and what its attempts come to.
type faultyStep struct {
	phase, fault string
	policy       engine.NonFinitePolicy
	spoil        func(g []float32)                  // of rank 1
	arm          func(f *rig, cancel func())        // before the first attempt
	of           func(pattern string, s setup) bool // nil: all
	outcomes     []outcome
	err          error // of the first
}

// setup is a column: how a rank works.
type setup struct {
	name     string
	streams  bool
	from, to int // steps for which the allocator is frozen, as for the capture of a graph
}

// rig is a rank whose calls fail when they are told to.
type rig struct {
	*standin.Stumbling
	comm  *standin.Faulty
	waits standin.Waits
}

// onHost is a runtime without streams that fails as told. Frozen, it says that addresses are to stay, and
// still has memory: lists whose lengths vary may need some.
type onHost struct {
	standin.Copying
	frozen bool
}

func (*onHost) ComputeStream() uintptr { return 0 }

func (o *onHost) Stats() runtime.Stats {
	stats := o.Copying.Stats()
	stats.Frozen = stats.Frozen || o.frozen
	return stats
}

// TestFaultTable has a fault in each phase of a step: an error that rolls it back, after which the same call
// repeats it, or a gradient that is not finite, which skips or refuses it. The steps around have the
// bits of ranks to which nothing happened, also while addresses are fixed, on streams, and with fewer
// ranks in the end.
func TestFaultTable(t *testing.T) {
	kernel := func(call string, in int) func(*rig, func()) {
		return func(f *rig, _ func()) { f.Call, f.In = call, in }
	}
	message := func(at int) func(*rig, func()) {
		return func(f *rig, _ func()) { f.comm.Calls, f.comm.At = 0, at }
	}
	selects := func(pattern string, _ setup) bool { return pattern != sparsity.Dense }
	hostSkips := func(pattern string, s setup) bool { return !s.streams && pattern == sparsity.TopkA } // copies before the undo: one
	everywhere := func(g []float32) {
		for i := range g {
			g[i] = float32(math.Inf(1))
		}
	}
	oneNaN := func(g []float32) { g[len(g)/2] = float32(math.NaN()) }
	sums := func(g []float32) { g[7] = math.MaxFloat32 }
	table := []faultyStep{
		{phase: "idle", fault: "context is over", arm: func(_ *rig, cancel func()) { cancel() }, outcomes: []outcome{wontBegin, passes}, err: context.Canceled},
		{phase: "begun", fault: "kernel that adds the gradient", arm: kernel("select", 1), of: selects, outcomes: []outcome{undone, passes}, err: standin.ErrKernel},
		{phase: "selected", fault: "first call", arm: message(0), outcomes: []outcome{undone, passes}, err: standin.ErrFault},
		{phase: "selected", fault: "second call", arm: message(1), of: func(pattern string, s setup) bool { return !s.streams && pattern != sparsity.Gtopk }, outcomes: []outcome{undone, passes}, err: standin.ErrFault},
		{phase: "judged", fault: "kernel that merges", arm: kernel("merge", 1), of: func(pattern string, _ setup) bool {
			return pattern == sparsity.TopkA || pattern == sparsity.Gtopk || pattern == sparsity.Gaussiank
		}, outcomes: []outcome{undone, passes}, err: standin.ErrKernel},
		{phase: "judged", fault: "copy that skips", spoil: oneNaN, arm: kernel("copy", 2), of: hostSkips, outcomes: []outcome{undone, skips}, err: standin.ErrKernel},
	}
	for name, spoil := range map[string]func([]float32){"everywhere": everywhere, "one NaN": oneNaN, "sums": sums} {
		table = append(table,
			faultyStep{phase: "judged", fault: name, spoil: spoil, outcomes: []outcome{skips}},
			faultyStep{phase: "judged", fault: name, spoil: spoil, policy: engine.FailNonFinite, outcomes: []outcome{refused}, err: engine.ErrNonFinite})
	}
	for i, pattern := range sparsity.Patterns() {
		var want [2][][]uint64 // with the step, and without it
		for without, o := range []outcome{passes, skips} {
			want[without] = faultyStep{outcomes: []outcome{o}}.run(t, pattern, setup{}, true, pattern)
		}
		for j, s := range []setup{{name: "host"}, {name: "one frozen", from: 2, to: 3}, {name: "frozen", from: 2, to: 6}, {name: "that frozen", from: 4, to: 5}, {name: "streams", streams: true}} {
			for k, f := range table {
				if f.of != nil && !f.of(pattern, s) {
					continue
				}
				// Unless extended, each two of pattern, setup and fault meet.
				if !standin.Extended && (i+j+k)%3 != 0 {
					continue
				}
				label := fmt.Sprintf("%s, %s: %s (%s, policy %d)", pattern, s.name, f.fault, f.phase, f.policy)
				reference := want[0]
				if last := f.outcomes[len(f.outcomes)-1]; last != passes {
					reference = want[1]
				}
				assert.Equal(t, reference, f.run(t, pattern, s, false, label), label)
			}
		}
	}
}

// run makes steps, of which number 4 has the fault unless it is the reference, and returns digests of
// result and residual of the others, and of that if it passes.
func (f faultyStep) run(t *testing.T, pattern string, s setup, reference bool, label string) [][]uint64 {
	const ranks, n, bad, steps = 3, 1500, 4, 7
	cfg := engine.Config{Pattern: pattern, Density: 0.1, NonFinite: cmp.Or(f.policy, engine.SkipNonFinite)}
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 3, RebalanceInterval: 2})
	fewer, err := local.New(ranks - 1)
	require.NoError(t, err)
	all := make([][]uint64, ranks)
	standin.FreshWorld(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		rank := c.Rank()
		r := &rig{Stumbling: &standin.Stumbling{Kernels: rt.Kernels()}, comm: standin.NewFaulty(c)}
		ordered := func(c comm.Communicator) comm.Communicator { return c }
		copying := standin.NewCopying(rt, &r.waits, r.Stumbling, nil)
		host := &onHost{Copying: copying}
		memory := runtime.Runtime(host)
		if s.streams {
			memory, ordered = copying, func(c comm.Communicator) comm.Communicator { return watched{standin.NewOrdered(ctx, c), &r.waits} }
		}
		u, err := standin.NewTrainee(memory, ordered(r.comm), cfg, n)
		if err != nil {
			return err
		}
		fixed := uintptr(0)
		for step := range steps {
			outcomes := []outcome{passes}
			if step == bad {
				outcomes = f.outcomes
			}
			if step == steps-1 {
				if rank == ranks-1 {
					break
				}
				defer fewer[rank].Close()
				if err := u.S.Rebind(ordered(fewer[rank])); err != nil {
					return err
				}
			}
			g, before := u.Gradient(step), u.State()
			// The backend decides where results of the dense pattern become infinite.
			if step == bad && f.spoil != nil && (rank == 1 || pattern == sparsity.Dense && f.fault == "sums") {
				f.spoil(g)
			}
			if err := runtime.CopyIn(u.T, g); err != nil {
				return err
			}
			given := standin.Bits(u.T)
			for attempt, want := range outcomes {
				if reference && want == skips {
					break
				}
				attempted, cancel := context.WithTimeout(ctx, time.Minute)
				if step == bad && attempt == 0 && f.arm != nil {
					f.arm(r, cancel)
				}
				if !reference && s.from <= step && step < s.to && (attempt == 0 || step < s.to-1) {
					host.frozen = true
					if slices.Contains([]string{sparsity.Dense, sparsity.TopkA, sparsity.TopkA2, sparsity.Gtopk}, pattern) { // whose lists are equally long
						rt.Freeze()
					}
				}
				r.waits.Comm.Store(0)
				r.waits.Copies.Store(0)
				err := u.S.AllReduce(attempted, u.T)
				waits := r.waits.Comm.Load() + r.waits.Copies.Load()
				rt.Unfreeze()
				host.frozen = false
				cancel()
				r.In, r.comm.At = 0, -1
				stats, statsErr := u.S.Stats(ctx)
				assert.NoError(t, statsErr, label)
				assert.Equal(t, want == skips, stats.Skipped, "%s, rank %d, step %d", label, rank, step)
				result, after := standin.Bits(u.T), u.State()
				switch want {
				case passes:
					if err != nil {
						return fmt.Errorf("%s, step %d: %w", label, step, err)
					}
					all[rank] = append(all[rank], standin.Digest(result, after))
					continue
				case skips:
					assert.NoError(t, err, label)
					assert.Zero(t, stats.SelectedGlobal, label)
					given = make([]uint32, n)
					if s.streams && !sparsity.NeedsHost(pattern) {
						assert.Zero(t, waits, "%s: the device skips the step", label)
					}
					if pattern != sparsity.Dense {
						sums, err := runtime.New(memory, dtype.F32, n)
						require.NoError(t, errors.Join(err, sums.Fill(0), u.S.AddResult(sums, 1)))
						standin.SameBits(t, given, standin.Bits(sums), "%s: the result of a step that was skipped", label)
						require.NoError(t, sums.Free())
					}
				case wontBegin:
					assert.ErrorIs(t, err, comm.ErrCanceled, label)
					assert.NotContains(t, fmt.Sprint(err), "rolled back", label)
				default:
					assert.ErrorContains(t, err, "rolled back", label)
				}
				assert.ErrorIs(t, err, f.errOf(want), "%s, rank %d", label, rank)
				standin.SameBits(t, given, result, "gradient: %s, rank %d", label, rank)
				standin.SameBits(t, before, after, "residual: %s, rank %d", label, rank)
			}
			if s.to > 0 && !reference && pattern != sparsity.Dense {
				residual, err := u.S.Residual()
				require.NoError(t, err)
				if step == s.from && step != bad { // where the attempt that fails is frozen alone, it may be before the first that counts
					fixed = standin.Pointer(residual)
				}
				assert.True(t, fixed == 0 || fixed == standin.Pointer(residual), "%s, step %d", label, step)
			}
		}
		return u.Close()
	})
	return all
}

// errOf is the error of an attempt.
func (f faultyStep) errOf(o outcome) error {
	if o == skips {
		return nil
	}
	return f.err
}

// strayIndices is a communicator whose lists have an index that no tensor of n
// elements has, once.
type strayIndices struct {
	comm.Methods
	comm.Wrapped
	armed bool
	n     int
}

func newStray(c comm.Communicator, n int) *strayIndices {
	s := &strayIndices{Wrapped: comm.Wrap(c), n: n}
	s.Methods = comm.Methods{
		Do: func(call comm.Call) error {
			if err := call.Make(c); err != nil || !s.armed || call.DType != dtype.I32 || call.Count < 10 {
				return err
			}
			if err := c.Sync(context.Background()); err != nil {
				return err
			}
			s.armed = false
			hostmem.Slice[int32](call.Recv, 1)[0] = int32(s.n)
			return nil
		},
		Together: func(calls []comm.Call) error { return c.Group(calls...) },
	}
	return s
}

// TestStrayIndices: indices that the tensor does not have are left out, and every
// step that follows says so, whatever its exchange reads and policies ask for.
func TestStrayIndices(t *testing.T) {
	const n, bad, steps = 3000, 1, 4
	for _, cfg := range []engine.Config{
		{Pattern: "topkA", Density: 0.1}, {Pattern: "topkA", Density: 0.1, NonFinite: engine.PassNonFinite},
		{Pattern: "topkA", Density: 0.1, NoUndo: true}, {Pattern: "gtopk", Density: 0.1, NonFinite: engine.PassNonFinite},
	} {
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			stray := newStray(c, n)
			u, err := standin.NewTrainee(rt, stray, cfg, n)
			require.NoError(t, err)
			var errs []error
			for step := range steps {
				stray.armed = step == bad && (c.Rank() == 0 || cfg.Pattern == "topkA")
				ctx, cancel := context.WithTimeout(ctx, time.Minute)
				errs = append(errs, u.Step(ctx, step))
				cancel()
				if errs[step] != nil && c.Rank() == 0 {
					_ = c.Close() // the other one waits otherwise
				}
			}
			if c.Rank() == 0 {
				assert.NoError(t, errs[0], "%+v", cfg)
				assert.ErrorIs(t, errs[bad+1], comm.ErrMismatch, "%+v", cfg)
				assert.ErrorContains(t, errs[bad+1], "indices", "%+v", cfg)
				assert.Error(t, errs[bad+2], "%+v", cfg)
			}
			_ = c.Close() // it may say what is unfinished
			return u.Close()
		})
	}
}

// liar is a communicator of which one rank changes the number of entries in what it sends.
func liar(c comm.Communicator, count uint32) comm.Communicator {
	type changed struct {
		comm.Methods
		comm.Waits
		comm.Wrapped
	}
	l := &changed{Wrapped: comm.Wrap(c)}
	l.Waits = comm.Waits{Wait: func(ctx context.Context, w comm.Wait) (comm.Communicator, error) { return w.Make(ctx, c) }}
	l.Methods = comm.Methods{Do: func(call comm.Call) error {
		if (call.Op == comm.OpAllGather || call.Op == comm.OpAllGatherV) && c.Rank() == 1 {
			hostmem.Slice[uint32](call.Send, 1)[0] = count
		}
		return call.Make(c)
	}, Together: func(calls []comm.Call) error { return c.Group(calls...) }}
	return l
}

// TestCountOfAnother: messages with other numbers of entries than the ranks have agreed on are found, on all ranks, and the step has
// not happened.
func TestCountOfAnother(t *testing.T) {
	const n = 3000
	for _, trim := range []int{16, 1 << 20} {
		tuning.Set(t, tuning.Tuning{TrimFrom: trim})
		for _, count := range []uint32{0, 299, 301, 1 << 30} {
			standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				s, err := engine.New(rt, liar(c, count), n, engine.Config{Pattern: sparsity.TopkA, Density: 0.1, Values: sparsity.I8})
				require.NoError(t, err)
				g, err := runtime.New(rt, dtype.F32, n)
				require.NoError(t, err)
				require.NoError(t, runtime.CopyIn(g, standin.Normal(n, c.Rank(), 0)))
				before := standin.Bits(g)
				err = s.AllReduce(ctx, g)
				assert.ErrorIs(t, err, comm.ErrMismatch, "%d entries, in two parts from %d bytes", count, trim)
				standin.SameBits(t, before, standin.Bits(g))
				return errors.Join(s.Close(), g.Free())
			})
		}
	}
}
