package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// gpu simulates a device that runs a rank's allreduces. Its clock advances by one tick per allreduce.
type gpu struct {
	comm.Communicator
	tick     time.Duration
	calls    int             // made so far
	captured *[]func() error // not nil during a capture
	graphs   []int           // number of calls in each
	closed   int             // number of closed graphs
}

func (g *gpu) Unwrap() comm.Communicator { return g.Communicator }

func (g *gpu) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	call := func() error {
		g.calls++
		return g.Communicator.AllReduce(send, recv, count, dt, op)
	}
	if g.captured != nil {
		*g.captured = append(*g.captured, call)
		return nil
	}
	return call()
}

func (g *gpu) Time(ctx context.Context, submit func() error) (time.Duration, error) {
	before := g.calls
	if err := submit(); err != nil {
		return 0, err
	}
	if err := g.Sync(ctx); err != nil {
		return 0, err
	}
	return time.Duration(g.calls-before) * g.tick, nil
}

func (g *gpu) Capture(submit func() error) (backend.Graph, error) {
	var calls []func() error
	g.captured = &calls
	defer func() { g.captured = nil }()
	if err := submit(); err != nil {
		return nil, err
	}
	g.graphs = append(g.graphs, len(calls))
	return &replay{g, calls}, nil
}

// replay is a graph of a gpu.
type replay struct {
	gpu   *gpu
	calls []func() error
}

func (r *replay) Launch() error {
	for _, call := range r.calls {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

func (r *replay) Close() error {
	r.gpu.closed++
	return nil
}

// onGPUs measures on two ranks: a call takes 2 µs on the first and 4 µs on the second.
func onGPUs(t *testing.T, cfg Config) (results []Result, gpus []*gpu) {
	t.Helper()
	gpus = make([]*gpu, 2)
	onRanks(t, 2, nil, func(ctx context.Context, r backend.Rank) error {
		g := &gpu{Communicator: r.Comm, tick: time.Duration(2+2*r.Comm.Rank()) * time.Microsecond}
		gpus[r.Comm.Rank()] = g
		r.Comm, r.Stream, r.Location = g, g, "a device"
		return runAlone(ctx, r, cfg, func(all []Result) { results = append(results, all...) })
	})
	return results, gpus
}

func TestDeviceTimesAreThoseOfItsClock(t *testing.T) {
	for _, graph := range []bool{false, true} {
		for _, iterations := range []int{0, 1, GraphCalls, GraphCalls + 7} {
			cfg := Config{Collective: named("allreduce"), Sizes: []int{4, 4096}, DType: dtype.F32, Op: comm.Sum, Places: named("allreduce").Places(),
				Repeats: Repeats{Warmup: 3, Iterations: iterations, Rounds: 3}, Verify: true, Graph: graph}
			results, gpus := onGPUs(t, cfg)
			require.Len(t, results, 4)
			for _, r := range results {
				assert.InEpsilon(t, 4, r.Time, 1e-9, "graph %t, %d iterations: of the slower rank", graph, iterations)
				assert.Zero(t, *r.Wrong, "graph %t, %d iterations, %d bytes, %s", graph, iterations, r.Bytes, r.Place)
				assert.Equal(t, graph, r.Graph)
				assert.Equal(t, []string{"a device", "a device"}, r.Locations)
			}
			for _, g := range gpus {
				assert.Equal(t, len(g.graphs), g.closed)
				if graph {
					assert.Equal(t, []int{GraphCalls, 1, GraphCalls, 1, GraphCalls, 1, GraphCalls, 1}, g.graphs, "one to time and one to verify, each time")
				} else {
					assert.Empty(t, g.graphs)
				}
			}
		}
	}
}

func TestCancellationEndsSubmissions(t *testing.T) {
	onRanks(t, 1, nil, func(ctx context.Context, r backend.Rank) error {
		g := &gpu{Communicator: r.Comm}
		r.Comm, r.Stream = g, g
		ctx, cancel := context.WithCancel(ctx)
		_, err := timeSubmissions(r, func() error {
			g.calls++
			if g.calls == 10 {
				cancel()
			}
			return nil
		})(ctx, 1000)
		assert.ErrorIs(t, err, comm.ErrCanceled)
		assert.Equal(t, 10, g.calls)
		return nil
	})
}

// Filling and comparing buffers of gigabytes takes seconds.
func TestBuffersAreLeftWhenTheContextEnds(t *testing.T) {
	onRanks(t, 1, nil, func(ctx context.Context, r backend.Rank) error {
		k := named("allreduce")
		const count = 4 * chunkBytes
		buffer, err := r.Runtime.Allocate(4 * count)
		require.NoError(t, err)
		defer r.Runtime.Deallocate(buffer) //nolint:errcheck // nothing is lost
		for name, walk := range map[string]func(*tables, context.Context, runtime.Runtime) error{
			"fill": func(t *tables, ctx context.Context, rt runtime.Runtime) error {
				return t.fill(ctx, rt, 0, buffer, count)
			},
			"wrong": func(t *tables, ctx context.Context, rt runtime.Runtime) error {
				_, err := t.wrong(ctx, rt, 0, buffer, count)
				return err
			},
		} {
			ctx, cancel := context.WithCancel(ctx)
			rt := &copies{Runtime: r.Runtime, then: cancel}
			assert.ErrorIs(t, walk(newTables(k, dtype.F32, comm.Sum, 1), ctx, rt), comm.ErrCanceled, name)
			assert.Equal(t, 1, rt.made, name)
		}
		return nil
	})
}

// copies counts copies from and to the host and calls then after each.
type copies struct {
	runtime.Runtime
	made int
	then func()
}

func (c *copies) CopyIn(dst uintptr, src []byte) error {
	defer c.then()
	c.made++
	return c.Runtime.CopyIn(dst, src)
}

func (c *copies) CopyOut(dst []byte, src uintptr) error {
	defer c.then()
	c.made++
	return c.Runtime.CopyOut(dst, src)
}

func TestBatchesCountTheirCalls(t *testing.T) {
	for calls, want := range map[int]int{0: 0, 1: 1, 20: 1, 21: 2, 100: 5} {
		run := 0
		seconds, err := inBatches(func(_ context.Context, n int) (float64, error) {
			run = n
			return 20 * float64(n), nil // one second per call
		}, 20)(t.Context(), calls)
		require.NoError(t, err)
		assert.Equal(t, want, run)
		assert.InDelta(t, float64(calls), seconds, 1e-9)
	}
	failure := errors.New("failure")
	_, err := inBatches(func(context.Context, int) (float64, error) { return 0, failure }, 20)(t.Context(), 1)
	assert.ErrorIs(t, err, failure)
}

// symmetric is a communicator that allocates memory and counts unfreed buffers.
type symmetric struct {
	comm.Communicator
	runtime runtime.Runtime
	live    *sync.Map
	fail    error // of every allreduce with elements
}

func (s symmetric) AllocateSymmetric(_ context.Context, bytes int) (uintptr, error) {
	p, err := s.runtime.Allocate(bytes)
	s.live.Store(p, true)
	return p, err
}

func (s symmetric) FreeSymmetric(ctx context.Context, p uintptr) error {
	if s.fail != nil && ctx.Err() == nil {
		return errors.New("would wait for ranks that failed")
	}
	s.live.Delete(p)
	return s.runtime.Deallocate(p)
}

func (s symmetric) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if s.fail != nil && count > 0 {
		return s.fail
	}
	return s.Communicator.AllReduce(send, recv, count, dt, op)
}

func TestBuffersAreSymmetricWhereThatIsThere(t *testing.T) {
	cfg := Config{Collective: named("allreduce"), Backend: "fake", Sizes: []int{64}, DType: dtype.F32, Op: comm.Sum, Places: named("allreduce").Places(), Repeats: quick, Verify: true}
	var failure error
	measureOn := func(with bool) (results []Result, live int, err error) {
		var left sync.Map
		onRanks(t, 1, nil, func(ctx context.Context, r backend.Rank) error {
			if with {
				r.Comm = symmetric{r.Comm, r.Runtime, &left, failure}
			}
			err = runAlone(ctx, r, cfg, func(all []Result) { results = append(results, all...) })
			return nil
		})
		left.Range(func(_, _ any) bool { live++; return true })
		return results, live, err
	}
	for _, c := range []struct {
		choice     Choice
		with, want bool
	}{{IfThere, true, true}, {IfThere, false, false}, {Always, true, true}, {Never, true, false}} {
		cfg.Symmetric = c.choice
		results, live, err := measureOn(c.with)
		require.NoError(t, err)
		require.Len(t, results, 2)
		for _, r := range results {
			assert.Equal(t, c.want, r.Symmetric, "%+v", c)
			assert.Zero(t, *r.Wrong)
		}
		assert.Zero(t, live)
	}
	cfg.Symmetric = Always
	var refused *backend.OptionError
	_, _, err := measureOn(false)
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, "fake: --symmetric needs a backend with symmetric memory: nccl", err.Error())

	failure = errors.New("the device fell over")
	_, live, err := measureOn(true)
	assert.ErrorIs(t, err, failure)
	assert.NotContains(t, err.Error(), "would wait")
	assert.Zero(t, live, "freed without waiting for the others")
}

func TestGraphsNeedAStream(t *testing.T) {
	cfg := Config{Collective: named("allreduce"), Backend: "local", Sizes: []int{8}, DType: dtype.F32, Places: named("allreduce").Places(), Repeats: quick, Graph: true}
	onRanks(t, 2, nil, func(ctx context.Context, r backend.Rank) error {
		err := runAlone(ctx, r, cfg, nil)
		var refused *backend.OptionError
		assert.ErrorAs(t, err, &refused)
		assert.ErrorContains(t, err, "local: --graph needs a backend with CUDA graphs: nccl")
		return nil
	})
}

// Reductions that a backend lacks are reported before buffers are allocated.
func TestUnsupportedTypesAreRefusedFirst(t *testing.T) {
	cfg := Config{Collective: named("allreduce"), Backend: "fake", Sizes: []int{1 << 60}, DType: dtype.I16, Op: comm.Sum, Places: named("allreduce").Places(), Repeats: quick}
	onRanks(t, 1, nil, func(ctx context.Context, r backend.Rank) error {
		r.Comm = floatsOnly{r.Comm}
		var refused *backend.OptionError
		assert.ErrorAs(t, runAlone(ctx, r, cfg, nil), &refused)
		assert.Equal(t, &backend.OptionError{Backend: "fake", Reason: "allreduce: unsupported: no integers"}, refused, "without the rank")
		return nil
	})
}

type floatsOnly struct{ comm.Communicator }

func (f floatsOnly) AllReduce(_, _ uintptr, _ int, dt dtype.DType, _ comm.ReduceOp) error {
	if !dt.IsFloat() {
		return &comm.OpError{Backend: "fake", Op: "allreduce", Rank: f.Rank(), Err: fmt.Errorf("%w: no integers", comm.ErrUnsupported)}
	}
	return nil
}

// peers is a communicator that does some operations over peer memory.
type peers struct {
	comm.Communicator
	most map[comm.Op]int
}

func (p peers) HandOver(op comm.Op, _ dtype.DType, _ comm.ReduceOp) int { return p.most[op] }

func TestResultsSayWhatWentOverPeerMemory(t *testing.T) {
	for _, c := range []struct {
		collective string
		upTo       int
		over       []bool
	}{
		{"allreduce", 4096, []bool{true, true, false}},
		{"allgather", 65536, []bool{true, true, true}}, // 32 KiB from each rank
		{"alltoall", -1, []bool{false, false, false}},
		{"sendrecv", -1, []bool{false, false, false}},
	} {
		cfg := Config{Collective: named(c.collective), Sizes: []int{64, 4096, 65536}, DType: dtype.F32, Op: comm.Sum, Places: named(c.collective).Places()[:1],
			Repeats: Repeats{Iterations: 1, Rounds: 1}}
		var results []Result
		onRanks(t, 2, nil, func(ctx context.Context, r backend.Rank) error {
			r.Comm = peers{r.Comm, map[comm.Op]int{comm.OpAllReduce: 4096, comm.OpAllGather: 32768}}
			return runAlone(ctx, r, cfg, func(all []Result) { results = append(results, all...) })
		})
		require.Len(t, results, 3)
		for i, r := range results {
			assert.Equal(t, c.over[i], r.PeerMemory, "%s of %d bytes", c.collective, r.Bytes)
			assert.Equal(t, c.upTo, *r.HandOver, "%s", c.collective)
		}
	}
}
