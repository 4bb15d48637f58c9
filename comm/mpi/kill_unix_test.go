//go:build unix

package mpi_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// killVariable says in which call of a step TestRankKilledInStep kills a process, and
// with which pattern it begins: "3 7".
const killVariable = "TUTTI_MPI_TEST_KILL"

// killsVariable, when set to "all", has TestKilledInStep go through every call of
// every pattern under each MPI library.
const killsVariable = "TUTTI_KILLS"

// killedSize is how many ranks a job has. They die one after the other, so that steps
// of 8, 7, … 2 ranks lose one.
const killedSize = 8

// TestKilledInStep kills processes in the middle of sparse steps, at a call of every
// pattern. The survivors go on with communicators that were split before. On those
// whose step failed, gradient and residual are as before it, and when they repeat the
// step without the dead rank, nothing of their gradients gets lost, nor in the next one.
func TestKilledInStep(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		var total kills
		run := func(at, first int) (reached bool) {
			dir := t.TempDir()
			out, verdicts := l.losing(t, job{ranks: killedSize, test: "TestRankKilledInStep", dir: dir,
				env: []string{fmt.Sprintf("%s=%d %d", killVariable, at, first)}}, deaths(at, first)[killedSize-1])
			verdict := verdicts[0]
			var k kills
			_, err := fmt.Sscanf(verdict, killsFormat, &k.repeated, &k.mixed, &k.completed, &k.beyond)
			for _, rank := range deaths(at, first) { // what others found before they died in their turn
				if other, _ := os.ReadFile(verdictOf(dir, rank)); err != nil {
					out += fmt.Sprintf("\nrank %d: %s", rank, other)
				}
			}
			require.NoError(t, err, "call %d, from pattern %d on: %s\n%s", at, first, verdict, out)
			total.add(k)
			return k.beyond < killedSize-1
		}
		switch {
		case os.Getenv(killsVariable) == "all":
			for at, more := 0, true; more; at++ { // one job of each library at a time: 18 minutes on two processors
				more = false
				for first := range sparsity.Patterns() {
					more = run(at, first) || more
				}
			}
		case testing.Short():
			run(2, 0)
		case extended: // seven patterns each: all, under either library
			first := map[string]int{"openmpi": 0, "mpich": 1}[l.name]
			for i := first; i < 4; i += 2 {
				run(1+2*i, 3*i)
			}
		default: // seven patterns under one library, the others under the other
			i := map[string]int{"openmpi": 0, "mpich": 1}[l.name]
			run(1+4*i, (killedSize-1)*i)
		}
		t.Logf("%s: %+v", l.name, total)
		assert.Positive(t, total.repeated)
	})
}

// kills counts what became of steps that lost a rank.
type kills struct {
	repeated  int // on all survivors they failed, and were repeated
	mixed     int // some had all of the result
	completed int // all had
	beyond    int // the step has fewer calls: the rank died after it
}

const killsFormat = "ok repeated=%d mixed=%d completed=%d beyond=%d"

func (k *kills) add(o kills) {
	k.repeated, k.mixed, k.completed, k.beyond = k.repeated+o.repeated, k.mixed+o.mixed, k.completed+o.completed, k.beyond+o.beyond
}

// deaths is the order in which ranks die; the last one stays.
func deaths(at, first int) []int {
	return rand.New(rand.NewPCG(uint64(at), uint64(first))).Perm(killedSize)
}

// deadly is a communicator whose call number at kills this process.
type deadly struct {
	comm.Methods
	comm.Wrapped
	calls, at int // at < 0: none does
}

func newDeadly(c comm.Communicator) *deadly {
	d := &deadly{Wrapped: comm.Wrap(c), at: -1}
	d.Methods = comm.Methods{
		Do:       func(call comm.Call) error { d.count(); return call.Make(c) },
		Together: func(calls []comm.Call) error { d.count(); return c.Group(calls...) },
	}
	return d
}

func (d *deadly) count() {
	if d.calls++; d.calls-1 == d.at {
		die()
	}
}

func (d *deadly) Sync(ctx context.Context) error { d.count(); return d.Communicator.Sync(ctx) }

func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// TestRankKilledInStep is one rank of TestKilledInStep.
func TestRankKilledInStep(t *testing.T) {
	onlyChild(t)
	signal.Ignore(syscall.SIGPIPE) // the launcher may be gone
	var at, first int
	_, err := fmt.Sscan(os.Getenv(killVariable), &at, &first)
	require.NoError(t, err)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	k, err := survive(world, at, first)
	verdict := fmt.Sprintf(killsFormat, k.repeated, k.mixed, k.completed, k.beyond)
	if err != nil {
		verdict = err.Error()
	}
	tell(t, world.Rank(), verdict)
	os.Exit(1) // as a program does that cannot go on
}

// survive makes steps in which one rank after the other dies. Of the ranks but the
// last, it returns errors alone.
func survive(world comm.Communicator, at, first int) (k kills, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), rankTimeout)
	defer cancel()
	order := deaths(at, first)
	comms := []comm.Communicator{world} // without the first rank that dies, without the first two, …
	for i := 1; i < len(order); i++ {
		color := 0
		if slices.Contains(order[:i], world.Rank()) {
			color = -1
		}
		c, err := world.Split(ctx, color, world.Rank())
		if err != nil {
			return k, err
		}
		comms = append(comms, c)
	}
	rt := cpu.New()
	for i, victim := range order[:len(order)-1] {
		pattern := sparsity.Patterns()[(first+i)%len(sparsity.Patterns())]
		r := &mourner{ctx: ctx, rt: rt, before: comms[i], after: comms[i+1], at: at, mortal: world.Rank() == victim}
		became, err := r.run(pattern, world.Rank())
		if err != nil {
			err = fmt.Errorf("%s, %d ranks, call %d, rank %d: %w", pattern, len(order)-i, at, world.Rank(), err)
			_ = comms[i+1].Close() // the others end, too
			return k, err
		}
		k.add(became)
	}
	return k, nil
}

// splitsKilled is how many Splits of a job lose a rank.
const splitsKilled = 4

// TestKilledInSplit kills processes inside MPI_Comm_split, at a random moment.
func TestKilledInSplit(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		seed := time.Now().UnixNano()
		_, verdicts := l.losing(t, job{ranks: splitsKilled + 3, test: "TestRankKilledInSplit", env: []string{fmt.Sprintf("%s=%d", killVariable, seed)}}, 0, 1, 2)
		for rank, verdict := range verdicts {
			assert.Equal(t, "ok", verdict, "rank %d, seed %d", rank, seed)
		}
	})
}

// TestRankKilledInSplit is one rank of TestKilledInSplit. The context of rank 0 ends the Split,
// which the library need not do. The others learn that from rank 0.
func TestRankKilledInSplit(t *testing.T) {
	ctx, world, _ := splitWorld(t)
	signal.Ignore(syscall.SIGPIPE) // the launcher may be gone
	var seed uint64
	_, err := fmt.Sscan(os.Getenv(killVariable), &seed)
	require.NoError(t, err)
	moments := rand.New(rand.NewPCG(seed, 0))
	comms := []comm.Communicator{world} // without the last rank, without the last two, …
	for i := 1; i <= splitsKilled; i++ {
		c, err := world.Split(ctx, min(0, world.WorldSize()-i-1-world.Rank()), 0)
		require.NoError(t, err)
		comms = append(comms, c)
	}
	verdict := "ok"
	for i, c := range comms[:splitsKilled] {
		moment := time.Duration(moments.Int64N(int64(time.Millisecond)))
		from, cancel := context.WithCancel(ctx)
		if c.Rank() == 0 {
			from, cancel = context.WithTimeout(ctx, 500*time.Millisecond)
		}
		_, err := c.Split(&inSplit{Context: from, enter: func() context.Context {
			if c.Rank() == c.WorldSize()-1 {
				time.AfterFunc(moment, die)
			}
			return from
		}}, 0, 0)
		cancel()
		switch {
		case c.Rank() == c.WorldSize()-1:
			die() // afterwards, at the latest
		case err == nil, errors.Is(err, comm.ErrPeerFailed), c.Rank() == 0 && errors.Is(err, comm.ErrTimeout):
		default:
			verdict = fmt.Sprintf("Split %d: %v", i, err)
		}
	}
	tell(t, world.Rank(), verdict)
	os.Exit(1) // as a program does that cannot go on
}

// mourner is a rank in a round in which one dies.
type mourner struct {
	ctx           context.Context
	rt            *cpu.Runtime
	before, after comm.Communicator
	at            int
	mortal        bool
}

const mournedElements = 1500

func (m *mourner) run(pattern string, id int) (became kills, err error) {
	d := newDeadly(m.before)
	// The norm is exchanged, and nothing clipped.
	s, err := sparse.New(m.rt, d, mournedElements, sparse.Config{Pattern: pattern, Density: 0.1, ClipNorm: 1e6, ClipGlobal: true})
	if err != nil {
		return became, err
	}
	x, err := runtime.New(m.rt, dtype.F32, mournedElements)
	if err != nil {
		return became, err
	}
	load := func(step int) error {
		g, rng := make([]float32, mournedElements), rand.New(rand.NewPCG(uint64(id), uint64(step)))
		for i := range g {
			g[i] = float32(rng.NormFloat64())
		}
		return runtime.CopyIn(x, g)
	}
	if err := errors.Join(load(0), s.AllReduce(m.ctx, x), m.before.Barrier(m.ctx), load(1)); err != nil {
		return became, fmt.Errorf("before the fault: %w", err)
	}
	given := m.state(s, x)
	if d.calls = 0; m.mortal {
		d.at = m.at
	}
	ctx, cancel := context.WithTimeout(m.ctx, 100*time.Millisecond)
	defer cancel()
	failed := s.AllReduce(ctx, x)
	beyond := d.calls <= m.at
	if m.mortal {
		die()
	}
	if failed != nil {
		if !errors.Is(failed, comm.ErrPeerFailed) && !errors.Is(failed, comm.ErrTimeout) || !strings.Contains(failed.Error(), "rolled back") {
			return became, fmt.Errorf("the error is %w", failed)
		}
		if !slices.Equal(given, m.state(s, x)) {
			return became, fmt.Errorf("gradient or residual is not as before, after %w", failed)
		}
	}
	_ = m.before.Close() // it says what is unfinished
	if err := s.Rebind(m.after); err != nil {
		return became, err
	}
	votes, err := m.sum([]float64{btof(failed == nil), btof(beyond)})
	if err != nil {
		return became, fmt.Errorf("among the survivors: %w", err)
	}
	size := m.after.WorldSize()
	switch completed := int(votes[0]); {
	case completed == 0:
		became.repeated = 1
		if err := m.repeat(s, x, given); err != nil {
			return became, fmt.Errorf("repeated: %w", err)
		}
	case completed < size:
		became.mixed = 1 // they cannot repeat it together
	default:
		became.completed = 1
	}
	became.beyond = int(votes[1]) / size
	// The next step is right as well. Where ranks are out of step, it is a first one.
	if became.mixed > 0 {
		if err := s.Close(); err != nil {
			return became, err
		}
		if s, err = sparse.New(m.rt, m.after, mournedElements, sparse.Config{Pattern: pattern, Density: 0.1}); err != nil {
			return became, err
		}
	}
	if err := load(2); err != nil {
		return became, err
	}
	if err := m.repeat(s, x, m.state(s, x)); err != nil {
		return became, fmt.Errorf("the next step: %w", err)
	}
	return became, errors.Join(s.Close(), x.Free())
}

func btof(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// repeat makes a step on the remaining ranks. For every element, the sum over the ranks of gradient and residual
// before it equals the sum of result and residual after it.
func (m *mourner) repeat(s *sparse.Reducer, x *runtime.Tensor, given []float32) error {
	if err := s.AllReduce(m.ctx, x); err != nil {
		return err
	}
	add := func(values []float32) []float64 {
		sum := make([]float64, mournedElements)
		for i, v := range values {
			sum[i%mournedElements] += float64(v)
		}
		return sum
	}
	all, err := m.sum(slices.Concat(add(given), add(m.state(s, x)), add(m.state(nil, x))))
	if err != nil {
		return err
	}
	size := m.after.WorldSize()
	result := m.state(nil, x)
	for i := range mournedElements {
		in, out, same := all[i], all[mournedElements+i], all[2*mournedElements+i]
		if math.Abs(in-out) > 1e-5*float64(size) {
			return fmt.Errorf("at %d, %v went in and %v came out", i, in, out)
		}
		if same != float64(size)*float64(result[i]) {
			return fmt.Errorf("at %d, this rank has %v, and all together %v", i, result[i], same)
		}
	}
	return nil
}

// state is the tensor and, of s, the residual, if there is one.
func (m *mourner) state(s *sparse.Reducer, x *runtime.Tensor) []float32 {
	values, err := runtime.ToSlice[float32](x)
	if err != nil {
		panic(err)
	}
	if s == nil {
		return values
	}
	residual, err := s.Residual()
	if errors.Is(err, comm.ErrUnsupported) {
		return values
	}
	more, err := runtime.ToSlice[float32](residual)
	if err != nil {
		panic(err)
	}
	return append(values, more...)
}

// sum adds numbers up over the survivors, by the communicator itself.
func (m *mourner) sum(values []float64) ([]float64, error) {
	p, err := m.rt.Allocate(8 * len(values))
	if err != nil {
		return nil, err
	}
	shared := hostmem.Slice[float64](p, len(values))
	copy(shared, values)
	err = m.after.AllReduce(p, p, len(values), dtype.F64, comm.Sum)
	if err == nil {
		err = m.after.Sync(m.ctx)
	}
	if err != nil {
		return nil, err // somebody may still write there
	}
	return slices.Clone(shared), m.rt.Deallocate(p)
}
