package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	goruntime "runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/p2p"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// TestOnStandIns runs without a GPU everything but what kernels compute: the suite
// with one rank, as NCCL's stand-in has, and how two ranks meet. The capability is
// 8.0: the driver's stand-in has no launches with attributes.
func TestOnStandIns(t *testing.T) {
	t.Run("suite", func(t *testing.T) {
		gputest.OnStandIns(t, "^TestConformance$", "//^(allreduce|reduce|reducescatter)$", "FAKE_CUDA_MAJOR=8")
	})
	t.Run("fixed order", func(t *testing.T) {
		gputest.OnStandIns(t, "^TestConformanceOfFixedOrder$//^order:_declared$", "", "FAKE_CUDA_MAJOR=8")
	})
	t.Run("two ranks", func(t *testing.T) {
		gputest.OnStandIns(t, "^TestStandIn", "", "FAKE_CUDA_MAJOR=8", "FAKE_CUDA_DEVICES=2")
	})
	t.Run("two ranks out of reach", func(t *testing.T) {
		gputest.OnStandIns(t, "^TestNoStandInReachesAnother$", "",
			"FAKE_CUDA_MAJOR=8", "FAKE_CUDA_DEVICES=2", "FAKE_CUDA_PEERS=0")
	})
}

// standIn is what the driver's stand-in exports beside its API.
type standIn struct {
	Fail       dl.Func `sym:"fake_fail"`
	Hold       dl.Func `sym:"fake_hold"`
	Stall      dl.Func `sym:"fake_stall"`
	Violations dl.Func `sym:"fake_violations"`
	Submitted  dl.Func `sym:"fake_submitted"`
	Waited     dl.Func `sym:"fake_waited"`
}

// next lets the next call of a function fail, on whatever rank.
func (s *standIn) next(function string, status uintptr) { s.nth(function, status, 1) }

// nth does that with the call of that number.
func (s *standIn) nth(function string, status uintptr, n int) {
	name := append([]byte(function), 0)
	s.Fail.Call(hostmem.Addr(name), status, uintptr(-n))
	goruntime.KeepAlive(name)
}

const outOfMemory = 2 // CUDA_ERROR_OUT_OF_MEMORY

// openStandIn opens two GPUs that are none, and sees at the end that nothing is left
// there.
func openStandIn(t *testing.T) (*standIn, []*cuda.Runtime) {
	if os.Getenv(gputest.StandInVariable) == "" {
		t.Skip("needs the stand-ins; see TestOnStandIns")
	}
	s := &standIn{}
	lib, err := dl.Open(os.Getenv(gputest.DriverVariable))
	require.NoError(t, err)
	require.NoError(t, lib.Bind(s))
	return s, gputest.Open(t)
}

// streamed is a communicator of goroutines with the stream of a GPU, whose memory is
// the host's. All else of streams is left out.
type streamed struct {
	comm.Communicator
	comm.StreamOrder
	comm.StreamSyncOps
	rt *cuda.Runtime
}

func (s streamed) CommStream() uintptr { return s.rt.Stream().Handle() }

// openBoth opens two GPUs, which the test closes.
func openBoth(t *testing.T) (gpus []*cuda.Runtime) {
	t.Helper()
	for i := range 2 {
		rt, err := cuda.Open(i)
		require.NoError(t, err)
		gpus = append(gpus, rt)
	}
	return gpus
}

// onBoth runs body on two ranks, and returns their errors.
func onBoth(
	t *testing.T, gpus []*cuda.Runtime, body func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error,
) [2]error {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var errs [2]error
	require.NoError(t, local.Run(ctx, 2, func(ctx context.Context, c comm.Communicator) error {
		rt := gpus[c.Rank()]
		errs[c.Rank()] = body(ctx, streamed{Communicator: c, rt: rt}, rt)
		return nil
	}))
	return errs
}

// onOne makes a communicator, and has rank 0 do something with it and with 4 KiB of memory
// while the other rank waits, because counts are of the process.
func onOne(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, body func(c *p2p.Comm, buf uintptr)) error {
	c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
	if err != nil {
		return err
	}
	buf, err := rt.Allocate(4096)
	if err != nil {
		return err
	}
	if err := base.Barrier(ctx); err != nil {
		return err
	}
	if c.Rank() == 0 {
		body(c, buf)
	}
	return errors.Join(base.Barrier(ctx), rt.Deallocate(buf), c.Close())
}

// Kernels bear with a rank that is minutes behind.
func TestStandInPatience(t *testing.T) {
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		return onOne(ctx, base, rt, func(c *p2p.Comm, _ uintptr) { assert.Equal(t, 10*time.Minute, p2p.Patience(c)) })
	})
	require.NoError(t, errors.Join(errs[:]...))
}

// When one rank cannot make its part, wherever that is, both get an error at once
// and nothing is left.
func TestStandInARankThatFails(t *testing.T) {
	s, gpus := openStandIn(t)
	for _, at := range []struct {
		function string
		n        int
	}{
		{"cuMemCreate", 1}, {"cuMemHostAlloc", 1}, {"cuMemImportFromShareableHandle", 1},
		{"cuLaunchKernel", 1}, {"cuLaunchKernel", 40},
	} {
		t.Run(fmt.Sprint(at.function, " ", at.n), func(t *testing.T) {
			errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
				if err := base.Barrier(ctx); err != nil {
					return err
				}
				if base.Rank() == 0 {
					s.nth(at.function, outOfMemory, at.n)
				}
				if err := base.Barrier(ctx); err != nil {
					return err
				}
				_, err := p2p.New(ctx, base, rt)
				return err
			})
			require.Error(t, errs[0])
			require.Error(t, errs[1])
			failed, told := errs[0], errs[1]
			if errors.Is(failed, comm.ErrPeerFailed) {
				failed, told = told, failed
			}
			assert.NotErrorIs(t, failed, comm.ErrPeerFailed)
			assert.NotErrorIs(t, errors.Join(errs[:]...), comm.ErrTimeout, "nobody waits for a deadline")
			assert.ErrorContains(t, failed, "CUDA_ERROR_OUT_OF_MEMORY")
			assert.ErrorIs(t, told, comm.ErrPeerFailed)
		})
	}
	// After all that it works.
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.New(ctx, base, rt)
		if err != nil {
			return err
		}
		part, err := c.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		return errors.Join(part.Close(), c.Close())
	})
	assert.Equal(t, [2]error{}, errs)
}

// Where a GPU does not reach the memory of another one, both ranks get one kind of error, and nothing is left.
func TestStandInGPUsOutOfReach(t *testing.T) {
	const invalidDevice, peerAccessUnsupported = 101, 217
	s, gpus := openStandIn(t)
	for _, status := range []uintptr{invalidDevice, peerAccessUnsupported} {
		s.nth("cuMemSetAccess", status, 3) // behind those of the ranks' own memory
		errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
			_, err := p2p.New(ctx, base, rt)
			return err
		})
		for _, err := range errs {
			assert.ErrorIs(t, err, comm.ErrUnsupported)
		}
	}
}

// A driver that says that no GPU reaches another one is believed.
func TestNoStandInReachesAnother(t *testing.T) {
	if os.Getenv("FAKE_CUDA_PEERS") != "0" {
		t.Skip("needs stand-ins out of reach; see TestOnStandIns")
	}
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		_, err := p2p.New(ctx, base, rt)
		return err
	})
	for _, err := range errs {
		assert.ErrorIs(t, err, comm.ErrUnsupported)
	}
}

// A call that cannot be launched aborts the communicator, a barrier as well, and with it the base,
// which tells the other ranks.
func TestStandInABarrierThatFails(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
		if err != nil {
			return err
		}
		assert.Equal(t, 1<<20, c.HandOver(comm.OpAllReduce, dtype.F32, comm.Sum))
		assert.Equal(t, 0, c.HandOver(comm.OpSend, dtype.F32, comm.Sum))
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			s.next("cuLaunchKernel", outOfMemory)
			before := s.Submitted.Call(c.CommStream())
			assert.ErrorContains(t, c.Barrier(ctx), "CUDA_ERROR_OUT_OF_MEMORY")
			assert.Equal(t, before+1, s.Submitted.Call(c.CommStream()), "a kernel tells those of the peers")
			assert.ErrorIs(t, c.Barrier(ctx), comm.ErrBroken)
			assert.ErrorIs(t, c.AllGather(0, 0, 0, dtype.F32), comm.ErrBroken)
			return c.Close()
		}
		assert.ErrorIs(t, base.Barrier(ctx), comm.ErrPeerFailed)
		assert.ErrorIs(t, c.Close(), comm.ErrPeerFailed)
		return nil
	})
	assert.Equal(t, [2]error{}, errs)
}

// poor is a base that lacks a reduction on one rank.
type poor struct{ streamed }

func (p poor) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if dt == dtype.F16 && op == comm.Prod {
		return [2]error{1: comm.ErrUnsupported}[p.Rank()]
	}
	return p.streamed.AllReduce(send, recv, count, dt, op)
}

// The offload table is the one for two GPUs with NVLink, which the stand-ins claim to have, and the same on both
// ranks, also if a base of one rank lacks something. A sub-communicator of one rank has another one.
func TestStandInHandOver(t *testing.T) {
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.New(ctx, poor{base.(streamed)}, rt)
		if err != nil {
			return err
		}
		for _, x := range []struct {
			op     comm.Op
			dt     dtype.DType
			reduce comm.ReduceOp
			want   int
		}{
			{comm.OpAllReduce, dtype.F32, comm.Sum, math.MaxInt},
			{comm.OpAllReduce, dtype.FP8E4M3, comm.Sum, 1 << 20},
			{comm.OpReduceScatter, dtype.FP8E4M3, comm.Sum, 1 << 19},
			{comm.OpBroadcast, dtype.U8, comm.Sum, math.MaxInt},
			{comm.OpReduce, dtype.F16, comm.Sum, 0},
			{comm.OpReduce, dtype.F16, comm.Prod, math.MaxInt}, // which rank 1 lacks
			{comm.OpSend, dtype.F32, comm.Sum, 0},
		} {
			assert.Equal(t, x.want, c.HandOver(x.op, x.dt, x.reduce), "rank %d, %+v", c.Rank(), x)
		}
		return c.Close()
	})
	assert.Equal(t, [2]error{}, errs)
}

// grouping is a base that counts what it gets.
type grouping struct {
	streamed
	single, grouped atomic.Int32
}

func (g *grouping) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	g.single.Add(1)
	return nil
}

func (g *grouping) Group(calls ...comm.Call) error {
	g.grouped.Add(int32(len(calls)))
	return nil
}

// A call that is faster through peer memory goes there by itself, and in a group to the base, however
// many there are: ranks may have different messages beside it.
func TestStandInGroups(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		g := &grouping{streamed: base.(streamed)}
		c, err := p2p.NewWithLimit(ctx, g, rt, 1<<20)
		if err != nil {
			return err
		}
		buf, err := rt.Allocate(4096)
		if err != nil {
			return err
		}
		g.single.Store(0)
		before := s.Submitted.Call(c.CommStream())
		x := comm.AllReduceCall(buf, buf, 1024, dtype.F32, comm.Sum)
		assert.NoError(t, x.Make(c))
		assert.Equal(t, before+1, s.Submitted.Call(c.CommStream()))
		assert.NoError(t, c.Group(x))
		assert.NoError(t, c.Group(x, x))
		assert.Equal(t, before+1, s.Submitted.Call(c.CommStream()))
		assert.EqualValues(t, 3, g.grouped.Load())
		assert.Zero(t, g.single.Load())
		return errors.Join(rt.Deallocate(buf), c.Close())
	})
	assert.Equal(t, [2]error{}, errs)
}

// With a fixed order no reduction reaches the base, at any size, alone or in a group, nor from a sub-communicator. One
// rank that asks for it is enough, by the variable too. Calls that only move data go where they went before.
func TestStandInFixedOrder(t *testing.T) {
	s, gpus := openStandIn(t)
	makers := []maker{p2p.NewFixedOrder, p2p.New}
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		g := &grouping{streamed: base.(streamed)}
		c, err := makers[base.Rank()](ctx, g, rt)
		if err != nil {
			return err
		}
		assert.True(t, c.FixedOrder())
		for _, dt := range dtype.All() {
			for _, op := range reductions.All() {
				for _, collective := range []comm.Op{comm.OpAllReduce, comm.OpReduce, comm.OpReduceScatter} {
					if op.Defined(dt) {
						assert.Equal(t, math.MaxInt, c.HandOver(collective, dt, op), "%v %v %v", collective, dt, op)
					}
				}
			}
		}
		assert.Zero(t, c.HandOver(comm.OpSend, dtype.F32, comm.Sum))
		buf, err := rt.Allocate(4096)
		if err != nil {
			return err
		}
		g.single.Store(0)
		before := s.Submitted.Call(c.CommStream())
		sum := comm.AllReduceCall(buf, buf, 1024, dtype.F32, comm.Sum)
		part := comm.ReduceScatterCall(buf, buf+2048*uintptr(c.Rank()), 512, dtype.F32, comm.Avg)
		assert.NoError(t, sum.Make(c))
		assert.NoError(t, c.Group(sum))
		assert.NoError(t, c.Group(part, comm.ReduceCall(buf, buf, 8, dtype.BF16, comm.Sum, 1)))
		assert.Equal(t, before+4, s.Submitted.Call(c.CommStream()))
		assert.Zero(t, g.grouped.Load())
		assert.Zero(t, g.single.Load())
		return errors.Join(rt.Deallocate(buf), c.Close())
	})
	assert.Equal(t, [2]error{}, errs)
}

// Without a fixed order, a communicator does not claim one, and the variable has two values.
func TestStandInOrderVariable(t *testing.T) {
	_, gpus := openStandIn(t)
	made := func(want bool) [2]error {
		return onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
			c, err := p2p.New(ctx, base, rt)
			if err != nil {
				return err
			}
			assert.Equal(t, want, comm.FixedOrder(c))
			return c.Close()
		})
	}
	assert.Equal(t, [2]error{}, made(false))
	t.Setenv(env.P2POrder, "fixed")
	assert.Equal(t, [2]error{}, made(true))
	t.Setenv(env.P2POrder, "fixd")
	for _, err := range made(false) {
		assert.ErrorContains(t, err, `TUTTI_P2P_ORDER is "fixd", want fixed or nothing`)
	}
}

// Where sub-communicators of the base have no stream, those of a fixed order are not the base's.
func TestStandInFixedOrderOfASplit(t *testing.T) {
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewFixedOrder(ctx, base, rt)
		if err != nil {
			return err
		}
		child, err := c.Split(ctx, 0, c.Rank())
		assert.Nil(t, child)
		assert.ErrorIs(t, err, comm.ErrUnsupported)
		return c.Close()
	})
	assert.Equal(t, [2]error{}, errs)
}

// Healthy is what NCCL's communicator tells beside the API.
func (s streamed) Healthy() bool { return true }

// Before anybody waits, the stream tells how far it has come, with the base's calls.
func TestStandInProgress(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		return onOne(ctx, base, rt, func(c *p2p.Comm, buf uintptr) {
			before := c.Progress()
			done := func(collectives uint64) {
				t.Helper()
				assert.Equal(t, collectives, c.Progress().Collectives.Done-before.Collectives.Done)
			}
			reduce := func(n int) {
				for range n {
					assert.NoError(t, c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum))
				}
			}
			reduce(3)
			done(3)
			s.Stall.Call(c.CommStream(), 1)
			reduce(4)
			done(7)
			s.Hold.Call(1)
			reduce(2)
			done(7)
			s.Hold.Call(0)
			done(9)
			assert.ErrorIs(t, c.AllReduce(buf, buf, -1, dtype.F32, comm.Sum), comm.ErrArgument)
			assert.EqualValues(t, 9, c.Progress().Collectives.Submitted-before.Collectives.Submitted)
			s.Stall.Call(c.CommStream(), 0)
			done(9)
			race.NoAllocs(t, 100, func() error { return c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum) })
		})
	})
	assert.Equal(t, [2]error{}, errs)
}

// A stream that the base has left is not asked: it may be idle, and gone.
func TestStandInProgressOnAnotherStream(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		first, err := rt.NewStream(0)
		if err != nil {
			return err
		}
		second, err := rt.NewStream(0)
		if err != nil {
			return err
		}
		switching := &switching{streamed: base.(streamed), stream: first}
		err = onOne(ctx, switching, rt, func(c *p2p.Comm, buf uintptr) {
			assert.NoError(t, c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum))
			before := c.Progress().Collectives.Done
			switching.stream = second
			s.Hold.Call(1)
			assert.NoError(t, rt.CopyInAsync(second, buf, make([]byte, 8)))
			assert.NoError(t, c.Group()) // the base's: what it submits is on the stream that stalls
			assert.NoError(t, c.AllReduce(0, 0, 0, dtype.F32, comm.Sum))
			assert.Equal(t, before, c.Progress().Collectives.Done)
			violations := s.Violations.Int()
			assert.NoError(t, first.Close())
			c.Progress()
			assert.Equal(t, violations, s.Violations.Int(), "a stream that was destroyed is asked")
			s.Hold.Call(0)
			assert.Equal(t, before+1, c.Progress().Collectives.Done)
		})
		return errors.Join(err, first.Close(), second.Close())
	})
	assert.Equal(t, [2]error{}, errs)
}

// switching has a stream that changes, as NCCL's communicator.
type switching struct {
	streamed
	stream *cuda.Stream
}

func (s *switching) CommStream() uintptr { return s.stream.Handle() }

// A graph with operations of a communicator is ordered with others of it, whatever stream it is
// launched in: they would take each other's memory for theirs.
func TestStandInGraphsInOrder(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		return onOne(ctx, base, rt, func(c *p2p.Comm, buf uintptr) {
			other, err := rt.NewStream(0)
			require.NoError(t, err)
			reduce := func() error { return c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum) }
			g, err := c.Stream().Capture(reduce)
			require.NoError(t, err)
			for range 2 {
				assert.NoError(t, reduce())
				assert.NoError(t, g.Launch(other))
				assert.Equal(t, s.Submitted.Call(c.CommStream()), s.Waited.Call(other.Handle(), c.CommStream()))
				assert.Equal(t, s.Submitted.Call(other.Handle()), s.Waited.Call(c.CommStream(), other.Handle()))
			}
			assert.NoError(t, errors.Join(g.Close(), other.Close()))
		})
	})
	assert.Equal(t, [2]error{}, errs)
}

// Close frees the memory that kernels write. A dump may come after it, or at the same time.
func TestStandInProgressAfterClose(t *testing.T) {
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
		if err != nil {
			return err
		}
		if err := c.AllReduce(0, 0, 0, dtype.F32, comm.Sum); err != nil {
			return err
		}
		before := c.Progress()
		assert.Equal(t, before.Collectives.Submitted, before.Collectives.Done)
		looked, stop := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(looked)
			for {
				select {
				case <-stop:
					return
				default:
					if now := c.Progress(); now != before { // the other rank counts allocations
						assert.Equal(t, before, now)
					}
				}
			}
		}()
		err = base.Barrier(ctx)
		if c.Rank() == 0 { // counts are of the process
			race.NoAllocs(t, 100, func() error { c.Progress(); return nil })
		}
		err = errors.Join(err, base.Barrier(ctx), c.Close())
		close(stop)
		<-looked
		assert.Equal(t, before, c.Progress())
		return err
	})
	assert.Equal(t, [2]error{}, errs)
}

// held is a base whose Sync, once it is held, lasts until it is released.
type held struct {
	streamed
	holds          atomic.Bool
	waits, release chan struct{}
}

func (h *held) Sync(ctx context.Context) error {
	if !h.holds.Swap(false) {
		return h.streamed.Sync(ctx)
	}
	close(h.waits)
	<-h.release
	return nil
}

// A wait in flight while Close frees the memory that kernels write returns ErrClosed.
func TestStandInSyncBesideClose(t *testing.T) {
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		h := &held{streamed: base.(streamed), waits: make(chan struct{}), release: make(chan struct{})}
		c, err := p2p.NewWithLimit(ctx, h, rt, 1<<20)
		if err != nil {
			return err
		}
		waited, cancelled := make(chan error), make(chan struct{})
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		context.AfterFunc(ctx, func() { close(cancelled) })
		h.holds.Store(true)
		go func() { waited <- c.Sync(ctx) }()
		<-h.waits
		err = c.Close()
		cancel() // which would have its kernels stop waiting
		<-cancelled
		close(h.release)
		assert.ErrorIs(t, <-waited, comm.ErrClosed)
		return err
	})
	assert.Equal(t, [2]error{}, errs)
}

// ending is a base whose stream is in flight until the base is aborted, as when NCCL waits for
// a rank.
type ending struct {
	switching
	end   func() error
	cause error
}

func (e *ending) Abort(cause error) {
	e.cause = cause
	_ = e.end()
}

// A rank that aborts aborts the base, which tells the others.
func TestStandInEnd(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		stream, err := rt.NewStream(0)
		if err != nil {
			return err
		}
		e := &ending{switching: switching{streamed: base.(streamed), stream: stream}}
		e.end = func() error {
			s.Stall.Call(stream.Handle(), 0)
			return errors.Join(stream.Synchronize(ctx), stream.Close())
		}
		c, err := p2p.NewWithLimit(ctx, e, rt, 1<<20)
		if err != nil {
			return err
		}
		buf, err := rt.Allocate(64)
		if err != nil {
			return err
		}
		s.Stall.Call(stream.Handle(), 1)
		cause := errors.New("aborted")
		err = errors.Join(rt.CopyInAsync(stream, buf, make([]byte, 64)), comm.CloseAll(c, cause))
		assert.Equal(t, cause, e.cause)
		return errors.Join(err, rt.Deallocate(buf))
	})
	assert.Equal(t, [2]error{}, errs)
}

// A launch that blocks behind work in flight does not delay an abort.
func TestStandInEndBesideALaunch(t *testing.T) {
	s, _ := openStandIn(t)
	gpus := openBoth(t)
	ended := make(chan struct{})
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
		if err != nil {
			return err
		}
		if base.Rank() != 0 {
			<-ended
			assert.ErrorIs(t, c.Close(), comm.ErrPeerFailed)
			return nil
		}
		defer close(ended)
		buf, err := rt.Allocate(4096)
		if err != nil {
			return err
		}
		s.Hold.Call(2)
		launched := make(chan error)
		go func() { launched <- c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum) }()
		for !p2p.Launching(c) {
			goruntime.Gosched()
		}
		p2p.CloseWithin(c, 100*time.Millisecond)
		assert.ErrorContains(t, comm.CloseAll(c, errors.New("aborted")), "memory of peers stays mapped")
		s.Hold.Call(0)
		return errors.Join(<-launched, rt.Deallocate(buf))
	})
	assert.Equal(t, [2]error{}, errs)
	assert.ErrorContains(t, gpus[0].Close(), "1 pinned allocations")
	assert.NoError(t, gpus[1].Close())
}

// interrupted is a base that does something else first when it is asked for its stream.
type interrupted struct {
	streamed
	first func()
}

func (i *interrupted) CommStream() uintptr {
	if first := i.first; first != nil {
		i.first = nil
		first()
	}
	return i.streamed.CommStream()
}

// Nothing is launched on memory that Close has freed.
func TestStandInLaunchBesideClose(t *testing.T) {
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		i := &interrupted{streamed: base.(streamed)}
		c, err := p2p.NewWithLimit(ctx, i, rt, 1<<20)
		if err != nil {
			return err
		}
		buf, err := rt.Allocate(4096)
		if err != nil {
			return err
		}
		i.first = func() { assert.NoError(t, c.Close()) }
		assert.ErrorIs(t, c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum), comm.ErrClosed)
		return rt.Deallocate(buf)
	})
	assert.Equal(t, [2]error{}, errs)
}

// Rounded sums are one launch, and one that fails aborts the communicator. A codec without a kernel is left
// to others.
func TestStandInRounded(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
		if err != nil {
			return err
		}
		buf, err := rt.Allocate(4096)
		if err != nil {
			return err
		}
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			round := func(codec kernel.Codec) error {
				src := kernel.Source{X: buf, N: 512, Grad: buf + 2048, DType: dtype.F32, Take: true}
				return c.AllReduceRounded(src, buf+2048, codec, comm.Avg)
			}
			before := s.Submitted.Call(c.CommStream())
			assert.NoError(t, round(kernel.CodecI8))
			assert.NoError(t, round(kernel.CodecFP8))
			assert.ErrorIs(t, round(kernel.CodecI4), comm.ErrUnsupported)
			assert.ErrorIs(t, c.AllReduceRounded(kernel.Source{N: 512}, buf, kernel.CodecI8, comm.Sum), comm.ErrArgument)
			assert.Equal(t, before+2, s.Submitted.Call(c.CommStream()))
			race.NoAllocs(t, 100, func() error { return round(kernel.CodecI8) })
			s.next("cuLaunchKernel", outOfMemory)
			assert.ErrorContains(t, round(kernel.CodecI8), "CUDA_ERROR_OUT_OF_MEMORY")
			assert.ErrorIs(t, round(kernel.CodecI8), comm.ErrBroken)
		} else {
			assert.ErrorIs(t, base.Barrier(ctx), comm.ErrPeerFailed)
		}
		_ = c.Close()
		return rt.Deallocate(buf)
	})
	assert.Equal(t, [2]error{}, errs)
}

// Lists that ranks share are memory that each rank maps of all others. When one rank cannot make its part, both get an
// error, and nothing is left. A Gather is a launch, or two where the list is still to be written to the other ranks, and
// one that fails aborts the communicator.
func TestStandInLists(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
		if err != nil {
			return err
		}
		meter := metered.New(c)
		_, err = meter.ShareLists(ctx, 0)
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = meter.ShareLists(ctx, 1<<28)
		assert.ErrorIs(t, err, comm.ErrUnsupported, "too much memory")
		_, err = meter.ShareLists(ctx, 1000+c.Rank()*1<<20)
		assert.ErrorIs(t, err, comm.ErrMismatch)
		for _, function := range []string{"cuMemCreate", "cuMemImportFromShareableHandle"} {
			if err := base.Barrier(ctx); err != nil {
				return err
			}
			if c.Rank() == 0 {
				s.next(function, outOfMemory)
			}
			if err := base.Barrier(ctx); err != nil {
				return err
			}
			_, err = meter.ShareLists(ctx, 1001)
			assert.Error(t, err)
			assert.NotErrorIs(t, err, comm.ErrTimeout, "nobody waits for a deadline")
		}
		lists, err := meter.ShareLists(ctx, 1001)
		if err != nil {
			return err
		}
		all := lists.Lists()
		assert.Len(t, all, 2)
		own := all[c.Rank()]
		assert.NotZero(t, own.Shared)
		assert.Zero(t, all[1-c.Rank()].Shared)
		assert.Equal(t, 1001, own.N)
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			apart := own
			apart.Shared = 0
			before, sent := s.Submitted.Call(c.CommStream()), meter.Totals().SentElements
			assert.NoError(t, lists.Gather(own))
			assert.Equal(t, before+1, s.Submitted.Call(c.CommStream()))
			assert.NoError(t, lists.Gather(apart))
			assert.Equal(t, before+3, s.Submitted.Call(c.CommStream()))
			assert.EqualValues(t, 2*2*1001, meter.Totals().SentElements-sent, "as two allgathers of lists with all their room")
			race.NoAllocs(t, 100, func() error { return lists.Gather(own) })
			s.next("cuLaunchKernel", outOfMemory)
			assert.ErrorContains(t, lists.Gather(own), "CUDA_ERROR_OUT_OF_MEMORY")
			assert.ErrorIs(t, lists.Gather(own), comm.ErrBroken)
		} else {
			assert.ErrorIs(t, base.Barrier(ctx), comm.ErrPeerFailed)
		}
		err = lists.Close()
		_ = c.Close()
		return err
	})
	assert.Equal(t, [2]error{}, errs)
}

// A list that is not the rank's own, or longer, would be written over those of other ranks. It is
// refused before anything is launched, and does not abort the communicator.
func TestStandInListsOfOthers(t *testing.T) {
	s, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
		if err != nil {
			return err
		}
		lists, err := c.ShareLists(ctx, 1001)
		if err != nil {
			return err
		}
		own, peer := lists.Lists()[c.Rank()], lists.Lists()[1-c.Rank()]
		if err := base.Barrier(ctx); err != nil {
			return err
		}
		if c.Rank() == 0 {
			before := s.Submitted.Call(c.CommStream())
			for what, change := range map[string]func(*kernel.Entries){
				"longer than the room":           func(l *kernel.Entries) { l.N = 1002 },
				"much longer, known to be":       func(l *kernel.Entries) { l.N, l.Len = 1<<20, 0 },
				"negative":                       func(l *kernel.Entries) { l.N = -1 },
				"of a peer":                      func(l *kernel.Entries) { *l = peer },
				"elsewhere":                      func(l *kernel.Entries) { l.Idx, l.Val = l.Idx+4, l.Val+4 },
				"with the length of a peer":      func(l *kernel.Entries) { l.Len = peer.Len },
				"written through another memory": func(l *kernel.Entries) { l.Shared++ },
			} {
				for _, shared := range []uintptr{own.Shared, 0} {
					l := own
					l.Shared = shared
					change(&l)
					assert.ErrorIs(t, lists.Gather(l), comm.ErrArgument, what)
				}
			}
			assert.Equal(t, before, s.Submitted.Call(c.CommStream()), "nothing was launched")
			for _, n := range []int{0, 1, 1001} {
				l := own
				l.N, l.Len = n, 0
				assert.NoError(t, lists.Gather(l))
			}
		}
		err = errors.Join(base.Barrier(ctx), lists.Close(), c.Err())
		assert.ErrorIs(t, lists.Gather(own), comm.ErrClosed)
		return errors.Join(err, c.Close())
	})
	assert.Equal(t, [2]error{}, errs)
}

// Lists stay mapped as long as kernels that use them may be in flight, also when the communicator was
// closed in vain, before or meanwhile.
func TestStandInListsInFlight(t *testing.T) {
	s, others := openStandIn(t)
	gpus := openBoth(t)
	for _, order := range []string{"after", "beside"} {
		errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
			stream, err := rt.NewStream(0)
			if err != nil {
				return err
			}
			c, err := p2p.NewWithLimit(ctx, &switching{streamed: base.(streamed), stream: stream}, rt, 1<<20)
			if err != nil {
				return err
			}
			lists, err := c.ShareLists(ctx, 100)
			if err != nil {
				return err
			}
			if err := base.Barrier(ctx); err != nil {
				return err
			}
			s.Stall.Call(stream.Handle(), 1)
			assert.NoError(t, lists.Gather(lists.Lists()[c.Rank()]))
			p2p.CloseWithin(c, 50*time.Millisecond)
			closed := make(chan error, 1)
			go func() { closed <- c.Close() }()
			if order == "after" {
				closed <- <-closed
			}
			assert.ErrorContains(t, lists.Close(), "stays mapped", order)
			assert.ErrorContains(t, <-closed, "stays mapped", order)
			assert.ErrorContains(t, lists.Close(), "stays mapped", "nothing is known of the stream any more")
			s.Stall.Call(stream.Handle(), 0)
			return errors.Join(stream.Synchronize(ctx), stream.Close())
		})
		assert.Equal(t, [2]error{}, errs)
	}
	for _, rt := range gpus {
		assert.ErrorIs(t, rt.Close(), runtime.ErrLeak, "what the communicators kept")
	}
	// A drained communicator can be closed in any order.
	errs := onBoth(t, others, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.NewWithLimit(ctx, base, rt, 1<<20)
		if err != nil {
			return err
		}
		lists, err := c.ShareLists(ctx, 100)
		if err != nil {
			return err
		}
		return errors.Join(lists.Gather(lists.Lists()[c.Rank()]), base.Barrier(ctx), c.Close(), lists.Close())
	})
	assert.Equal(t, [2]error{}, errs)
}

func TestStandInDoesNotAllocate(t *testing.T) {
	_, gpus := openStandIn(t)
	errs := onBoth(t, gpus, func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		return onOne(ctx, base, rt, func(c *p2p.Comm, buf uintptr) {
			race.NoAllocs(t, 100, func() error { return c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum) })
		})
	})
	assert.Equal(t, [2]error{}, errs)
}

// A communicator that is forgotten is found, and its rank named; one that is closed is not.
func TestStandInLeak(t *testing.T) {
	if os.Getenv(gputest.StandInVariable) == "" {
		t.Skip("needs the stand-ins; see TestOnStandIns")
	}
	logged := logtest.Capture(t)
	errs := onBoth(t, openBoth(t), func(ctx context.Context, base comm.Communicator, rt *cuda.Runtime) error {
		c, err := p2p.New(ctx, base, rt)
		if err != nil {
			return err
		}
		err = errors.Join(c.Barrier(ctx), base.Barrier(ctx))
		if c.Rank() == 0 { // whose runtime has the memory from now on
			return err
		}
		return errors.Join(err, c.Close())
	})
	require.NoError(t, errors.Join(errs[:]...))
	require.Eventually(t, func() bool {
		goruntime.GC()
		return len(logged.Lines("never closed")) > 0
	}, time.Minute, time.Millisecond)
	assert.Len(t, logged.Lines("communicators were never closed\" backend=p2p count=1 first=\"rank 0 of 2, made at "), 1)
	assert.Len(t, logged.Lines("never closed"), 1)
}
