package p2p_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// queue is a stream of the host: what is submitted runs one after the other.
type queue struct {
	mu     sync.Mutex
	last   chan struct{} // closed when all is done
	failed atomic.Bool   // nothing runs any more
}

func newQueue() *queue {
	q := &queue{last: make(chan struct{})}
	close(q.last)
	return q
}

func (q *queue) submit(work func() error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	before, done := q.last, make(chan struct{})
	q.last = done
	go func() {
		defer close(done)
		if <-before; !q.failed.Load() && work() != nil {
			q.failed.Store(true)
		}
	}()
}

// end is closed when all is done that was submitted before.
func (q *queue) end() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.last
}

func (q *queue) idle() bool {
	select {
	case <-q.end():
		return true
	default:
		return false
	}
}

// wait waits for the end, or for an error, which leaves work in flight.
func (q *queue) wait(ctx context.Context, failed func() error) error {
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for !q.idle() { // also when ctx has ended already
		select {
		case <-q.end():
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-look.C:
			if err := failed(); err != nil {
				return err
			}
		}
	}
	return nil
}

// queued is a communicator of goroutines that submits to a queue, as those of GPUs to a stream.
type queued struct {
	comm.Wrapped
	comm.Methods
	comm.Waits
	comm.StreamOrder
	comm.StreamSyncOps
}

func (queued) CommStream() uintptr   { return 0 }
func (queued) SyncCommStream() error { return nil }

func onQueue(q *queue, c comm.Communicator) queued {
	var pending atomic.Bool
	run := func(work func() error) error {
		err := c.Err()
		if err == nil {
			pending.Store(true)
			q.submit(func() error { return errors.Join(work(), c.Sync(context.Background())) })
		}
		return err
	}
	return queued{Wrapped: comm.Wrap(c), Methods: comm.Methods{
		Do: func(x comm.Call) error {
			own := backend.Clone(x)
			return run(func() error { return own.Make(c) })
		},
		Together: func(calls []comm.Call) error {
			var own []comm.Call
			for _, x := range calls {
				own = append(own, backend.Clone(x))
			}
			return run(func() error { return c.Group(own...) })
		},
	}, Waits: comm.Waits{Wait: func(ctx context.Context, w comm.Wait) (child comm.Communicator, err error) {
		switch w.Op {
		case comm.OpSplit:
			return c.Split(ctx, w.Color, w.Key)
		case comm.OpBarrier:
			err = run(func() error { return c.Barrier(context.Background()) })
		}
		if err == nil {
			err = q.wait(ctx, c.Err)
		}
		if err == nil && w.Op != comm.OpSplit && pending.Swap(false) {
			err = c.Sync(ctx)
		}
		if err != nil && err == context.Cause(ctx) {
			err = comm.ContextError(ctx)
			c.Abort(err)
		}
		return nil, err
	}}}
}

// inLevels makes two levels of a communicator of goroutines with so many ranks on each host.
func inLevels(ctx context.Context, base comm.Communicator, rt *cpu.Runtime, each int) (comm.Communicator, error) {
	if base.WorldSize()%each != 0 || base.WorldSize() == each {
		return base, nil
	}
	host, index := base.Rank()/each, base.Rank()%each
	within, err := base.Split(ctx, host, index)
	if err != nil {
		return nil, err
	}
	between, err := base.Split(ctx, index, host)
	if err != nil {
		return nil, err
	}
	q := newQueue()
	return p2p.NewLevels(onQueue(q, base), onQueue(q, within), onQueue(q, between), each, q.idle, rt.Allocate, rt.Deallocate,
		func(ctx context.Context, base comm.Communicator) (comm.Communicator, error) {
			return inLevels(ctx, base, rt, each)
		})
}

// onHosts runs body on the ranks of so many hosts.
func onHosts(ctx context.Context, rt *cpu.Runtime, size, each int, body func(ctx context.Context, c comm.Communicator) error) error {
	return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
		l, err := inLevels(ctx, c, rt, each)
		if err != nil {
			return err
		}
		return errors.Join(body(ctx, l), l.Close())
	})
}

// Two levels give what one does, and end as one does: with two and three hosts, and two and three ranks on each, of
// which averages of three go to the base. TUTTI_EXTENDED adds worlds of four and eight.
func TestLevels(t *testing.T) {
	worlds := []struct{ hosts, each int }{{2, 3}, {3, 2}, {2, 2}, {2, 4}}
	if os.Getenv("TUTTI_EXTENDED") == "" {
		worlds = worlds[:2]
	}
	for _, w := range worlds {
		t.Run(fmt.Sprintf("%d hosts of %d", w.hosts, w.each), func(t *testing.T) {
			rt := cpu.New()
			t.Cleanup(func() { assert.NoError(t, rt.Close()) })
			commtest.Run(t, commtest.Backend{
				Sizes: []int{w.hosts * w.each}, NoMismatch: true,
				Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
					return onHosts(ctx, rt, size, w.each, func(ctx context.Context, c comm.Communicator) error {
						return body(ctx, commtest.Rank{Comm: struct{ comm.Communicator }{c}, Runtime: rt}) // without streams
					})
				},
			})
		})
	}
}

// unordered is a communicator of one rank that passes for one of a GPU.
type unordered struct {
	comm.Communicator
	comm.StreamOrder
	comm.StreamSyncOps
}

func (unordered) CommStream() uintptr { return 0 }

func TestLevelsDoNotAllocate(t *testing.T) {
	rt := cpu.New()
	one := func() comm.Communicator { return unordered{Communicator: noop.New(rt)} }
	c, err := p2p.NewLevels(one(), one(), one(), 1, func() bool { return true }, rt.Allocate, rt.Deallocate, nil)
	require.NoError(t, err)
	buf, err := rt.Allocate(8192)
	require.NoError(t, err)
	for _, x := range []comm.Call{
		comm.AllReduceCall(buf, buf, 1001, dtype.F32, comm.Sum), comm.BroadcastCall(buf, 1001, dtype.F32, 0),
		comm.ReduceScatterCall(buf, buf+4096, 1001, dtype.F32, comm.Sum), comm.AllGatherCall(buf, buf+4096, 1001, dtype.F32),
	} {
		race.NoAllocs(t, 100, func() error { return x.Make(c) }, "%v", x)
	}
	assert.NoError(t, errors.Join(c.Sync(t.Context()), c.Close(), rt.Deallocate(buf), rt.Close()))
}

// noted is a communicator that notes what it is told about an abort.
type noted struct {
	unordered
	name string
	note func(what string)
}

func (n noted) Tell(error)        { n.note("tell") }
func (n noted) Abort(cause error) { n.note("abort " + n.name); n.unordered.Abort(cause) }

// All ranks know that one aborts before it ends anything that they may wait for: after an Abort, and when a
// context ends while there is something to wait for.
func TestLevelsTellBeforeTheyAbort(t *testing.T) {
	for _, way := range []string{"abort", "sync"} {
		t.Run(way, func(t *testing.T) {
			rt := cpu.New()
			var mu sync.Mutex
			var notes []string
			member := func(name string) comm.Communicator {
				return noted{unordered{Communicator: noop.New(rt)}, name, func(what string) {
					mu.Lock()
					defer mu.Unlock()
					notes = append(notes, what)
				}}
			}
			c, err := p2p.NewLevels(member("base"), member("within"), member("between"), 1, func() bool { return false }, rt.Allocate, rt.Deallocate, nil)
			require.NoError(t, err)
			if way == "abort" {
				c.Abort(nil)
			} else {
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				require.ErrorIs(t, c.Sync(ctx), comm.ErrCanceled)
			}
			assert.Equal(t, "tell", notes[0])
			assert.Subset(t, notes, []string{"abort base", "abort within", "abort between"})
			assert.ErrorIs(t, c.Err(), comm.ErrBroken)
			assert.NoError(t, errors.Join(c.Close(), rt.Close()))
		})
	}
}

// A process per rank, two of which are on what they take for a host, when a launcher started the test binary
// and set a variable:
//
//	TUTTI_TEST_PER_HOST=2 PER_HOST=2 mpirun -n 4 docs/as-a-host.sh ./p2p.test -test.run TestLevelsOfProcesses
func TestLevelsOfProcesses(t *testing.T) {
	each, _ := strconv.Atoi(os.Getenv("TUTTI_TEST_PER_HOST"))
	if each == 0 {
		t.Skip("runs with TUTTI_TEST_PER_HOST, the number of ranks of a host")
	}
	host := p2p.WithHost(fmt.Sprint(gputest.Job(t).Rank / each))
	over := conforms // what the base has, which carries shares between hosts
	over.Unsupported = func(dt dtype.DType, op comm.ReduceOp) bool {
		switch dt {
		case dtype.I16, dtype.U16, dtype.Bool:
			return true
		}
		return op == comm.Avg && (dt == dtype.FP8E4M3 || dt == dtype.FP8E5M2)
	}
	gputest.Processes(t, over, func(ctx context.Context, rt *cuda.Runtime) (comm.Communicator, error) {
		base, err := nccl.FromEnv(ctx, rt)
		if err != nil {
			return nil, err
		}
		opts := []p2p.Option{host}
		if os.Getenv("TUTTI_TEST_MEASURED") == "" {
			opts = append(opts, p2p.WithLimit(1<<40))
		}
		c, err := p2p.NewHierarchical(ctx, base, rt, opts...)
		if err == nil {
			for _, x := range []comm.Call{{Op: comm.OpAllReduce}, {Op: comm.OpReduceScatter}, {Op: comm.OpAllGather}, {Op: comm.OpBroadcast}} {
				x.DType = dtype.F32
				least, most := p2p.BytesOf(c, x)
				t.Logf("%v in levels from %d to %d bytes", x.Op, least, most)
			}
		}
		return c, err
	}, func(t *testing.T, b commtest.Backend) { distributedtest.Run(t, b) })
}

// Graphs with calls in two levels, and a rank that is missing, whom all ranks hear of.
func TestLevelsOfAJob(t *testing.T) {
	each, _ := strconv.Atoi(os.Getenv("TUTTI_TEST_PER_HOST"))
	if each == 0 {
		t.Skip("runs with TUTTI_TEST_PER_HOST, the number of ranks of a host")
	}
	j := gputest.Job(t)
	rt := gputest.Own(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	base, err := nccl.FromEnv(ctx, rt)
	require.NoError(t, err)
	c, err := p2p.NewHierarchical(ctx, base, rt, p2p.WithHost(fmt.Sprint(j.Rank/each)), p2p.WithLimit(1<<40))
	require.NoError(t, err)
	const n = 1<<18 + 3
	buf, err := rt.Allocate(n * 4)
	require.NoError(t, err)
	stream := rt.WrapStream(c.(comm.StreamOrder).CommStream())
	reduce := func() error { return c.AllReduce(buf, buf, n, dtype.F32, comm.Avg) }
	require.NoError(t, rt.Fill(buf, n, dtype.F32, float64(j.Rank+1)))
	require.NoError(t, rt.Synchronize(ctx))
	graph, err := stream.Capture(reduce)
	require.NoError(t, err)
	check := func(want float32) {
		t.Helper()
		got := make([]byte, n*4)
		require.NoError(t, rt.CopyOut(got, buf))
		for i := range n {
			require.Equal(t, want, math.Float32frombits(binary.NativeEndian.Uint32(got[i*4:])), "element %d", i)
		}
	}
	for range 3 {
		require.NoError(t, rt.Fill(buf, n, dtype.F32, float64(j.Rank+1)))
		require.NoError(t, rt.Synchronize(ctx))
		require.NoError(t, graph.Launch(stream))
		require.NoError(t, c.Sync(ctx))
		check(float32(j.WorldSize+1) / 2)
	}
	require.NoError(t, c.Barrier(ctx))
	if j.Rank == j.WorldSize-1 { // stays away for longer than the others wait
		time.Sleep(4 * time.Second)
	} else {
		require.NoError(t, reduce())
		wait, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		began := time.Now()
		err := c.Sync(wait)
		t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
		assert.Error(t, err)
		assert.Less(t, time.Since(began), 8*time.Second)
		assert.ErrorIs(t, reduce(), comm.ErrBroken)
	}
	assert.NoError(t, graph.Close())
	_ = c.Close()
	assert.NoError(t, rt.Deallocate(buf))
	assert.NoError(t, rt.Close())
}

// splitting is a base whose sub-communicators have the stream of a GPU as well.
type splitting struct{ streamed }

func (s splitting) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := s.streamed.Split(ctx, color, key)
	if err != nil {
		return nil, err
	}
	return splitting{streamed{Communicator: c, rt: s.rt}}, nil
}

// onFour runs body on four ranks of two GPUs, and returns their errors.
func onFour(t *testing.T, gpus []*cuda.Runtime, body func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error) [4]error {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var errs [4]error
	require.NoError(t, local.Run(ctx, 4, func(ctx context.Context, c comm.Communicator) error {
		rt := gpus[c.Rank()%2]
		errs[c.Rank()] = body(ctx, splitting{streamed{Communicator: c, rt: rt}}, rt)
		return nil
	}))
	return errs
}

// Hosts have equally many successive ranks, or all ranks get an error and the base is as it was.
func TestHosts(t *testing.T) {
	_, gpus := openStandIn(t)
	for _, c := range []struct {
		hosts [4]string
		want  error
	}{
		{[4]string{"a", "a", "b", "b"}, nil},
		{[4]string{"a", "b", "a", "b"}, comm.ErrUnsupported},
		{[4]string{"a", "b", "b", "a"}, comm.ErrUnsupported},
		{[4]string{"a", "a", "a", "b"}, comm.ErrUnsupported},
		{[4]string{"a", "b", "c", "d"}, comm.ErrUnsupported},
	} {
		errs := onFour(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
			l, err := p2p.NewHierarchical(ctx, base, rt, p2p.WithLimit(1<<20), p2p.WithHost(c.hosts[base.Rank()]))
			if err != nil {
				return errors.Join(err, base.Barrier(ctx))
			}
			return l.Close()
		})
		for _, err := range errs {
			if c.want == nil {
				assert.NoError(t, err, "%v", c.hosts)
			} else {
				assert.ErrorIs(t, err, c.want, "%v", c.hosts)
			}
		}
	}
}

// When one rank cannot make its part, all get an error at once, and nothing is left.
func TestHostsARankThatFails(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onFour(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		if base.Rank() == 0 {
			s.nth("cuMemImportFromShareableHandle", outOfMemory, 1)
		}
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		_, err := p2p.NewHierarchical(ctx, base, rt, p2p.WithLimit(1<<20), p2p.WithHost([]string{"a", "b"}[base.Rank()/2]))
		return err
	})
	for _, err := range errs {
		assert.Error(t, err)
		assert.NotErrorIs(t, err, comm.ErrTimeout, "nobody waits for a deadline")
	}
	assert.ErrorContains(t, errors.Join(errs[:]...), "CUDA_ERROR_OUT_OF_MEMORY")
}
