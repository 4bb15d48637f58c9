package checked_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestCheckedConformance(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	commtest.Run(t, commtest.Backend{
		Name:  "checked",
		Sizes: []int{1, 3},
		// A collective waits for the others when it is called, with a separate timeout instead of Sync's context.
		Synchronous: true,
		Run: hosttest.Decorated(local.Run, rt, func(ctx context.Context, c comm.Communicator) (comm.Communicator, error) {
			return checked.New(ctx, c, rt, 0)
		}),
	})
}

// onCheckedRanks runs body on each rank of a checked world and returns what it
// returned, by rank. A rank that fails leaves the others alone.
func onCheckedRanks(t testing.TB, rt *cpu.Runtime, size int, timeout time.Duration,
	body func(ctx context.Context, c *checked.Communicator) error,
) []error {
	errs := make([]error, size)
	require.NoError(t, local.Run(t.Context(), size, func(ctx context.Context, c comm.Communicator) error {
		inner, err := c.Split(ctx, 0, c.Rank()) // to be broken
		if err != nil {
			return err
		}
		k, err := checked.New(ctx, inner, rt, timeout)
		if err != nil {
			return err
		}
		errs[c.Rank()] = body(ctx, k)
		// Nobody closes before everybody is done.
		if err := c.Barrier(ctx); err != nil {
			return err
		}
		return k.Close()
	}))
	return errs
}

func TestCheckedSaysWhoCalledWhat(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 1024)
	errs := onCheckedRanks(t, rt, 4, 0, func(ctx context.Context, c *checked.Communicator) error {
		if c.Rank() == 2 {
			return c.Barrier(ctx)
		}
		return c.AllReduce(buf, buf, 10+c.Rank()/3, dtype.F32, comm.Sum)
	})
	for r, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
		assert.ErrorContains(t, err, fmt.Sprintf("checked: %s on rank %d: ", []string{"allreduce", "barrier"}[r/2-r/3], r))
		assert.ErrorContains(t, err, "collective #1: ranks disagree: ranks 0, 1 called allreduce of 10 f32, sum; "+
			"rank 2 called barrier; rank 3 called allreduce of 11 f32, sum")
	}
}

func TestCheckedNamesThePairOfAllToAllV(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	send, recv := hosttest.Allocate(t, rt, 1024), hosttest.Allocate(t, rt, 1024)
	errs := onCheckedRanks(t, rt, 3, 0, func(_ context.Context, c *checked.Communicator) error {
		sendCounts, recvCounts, displs := []int{1, 1, 1}, []int{1, 1, 1}, []int{0, 2, 4}
		if c.Rank() == 1 {
			sendCounts[2] = 2
		}
		return c.AllToAllV(send, sendCounts, displs, recv, recvCounts, displs, dtype.I64)
	})
	for r, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
		assert.ErrorContains(t, err, "rank 1 sends 2 elements to rank 2, which receives 1")
	}
}

func TestCheckedTimesOut(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	done := make(chan struct{})
	errs := onCheckedRanks(t, rt, 2, 20*time.Millisecond, func(_ context.Context, c *checked.Communicator) error {
		if c.Rank() == 1 {
			<-done // comes only after rank 0 has aborted
			return nil
		}
		defer close(done)
		err := c.Broadcast(buf, 1, dtype.F32, 0)
		assert.ErrorIs(t, c.Broadcast(buf, 1, dtype.F32, 0), comm.ErrBroken)
		return err
	})
	assert.ErrorIs(t, errs[0], comm.ErrTimeout)
	assert.ErrorContains(t, errs[0], "waiting for the other ranks to call broadcast of 1 f32, root 0")
	assert.NoError(t, errs[1])
}

// action is one collective, drawn from a few bytes.
type action struct {
	kind, count, root int
	dt                dtype.DType
	op                comm.ReduceOp
}

// normal returns an action without the arguments that its kind does not have,
// so that equal actions are those on which ranks agree.
func (a action) normal() action {
	switch a.kind {
	case 0: // allreduce
		a.root = 0
	case 1: // broadcast
		a.op = 0
	case 2: // allgather
		a.op, a.root = 0, 0
	case 3: // barrier
		a = action{kind: 3}
	}
	return a
}

func (a action) run(ctx context.Context, c comm.Communicator, send, recv uintptr) error {
	switch a.kind {
	case 0:
		return c.AllReduce(send, recv, a.count, a.dt, a.op)
	case 1:
		return c.Broadcast(recv, a.count, a.dt, a.root)
	case 2:
		return c.AllGather(send, recv, a.count, a.dt)
	}
	return c.Barrier(ctx)
}

// script reads what each rank calls: a byte gives the number of ranks, each
// further one an action, which the ranks share but for those that deviate.
func script(data []byte) [][]action {
	next := func() int {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return int(b)
	}
	size := 2 + next()%3
	ranks := make([][]action, size)
	draw := func() action {
		b, d := next(), next()
		return action{
			kind: b % 4, count: b / 4 % 5, root: b / 32 % size,
			dt: []dtype.DType{dtype.F32, dtype.I32, dtype.BF16, dtype.U8}[d%4],
			op: []comm.ReduceOp{comm.Sum, comm.Max}[d/4%2],
		}.normal()
	}
	for range 1 + next()%4 {
		common := draw()
		deviant := next()
		for r := range ranks {
			a := common
			if deviant%(2*size) == r {
				a = draw()
			}
			ranks[r] = append(ranks[r], a)
		}
	}
	return ranks
}

// FuzzChecked lets ranks disagree at random: never a hang, always ErrMismatch
// on every rank, at the call where they part, and no error before.
func FuzzChecked(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{1, 2, 4, 0, 9, 8, 4, 9})
	f.Add([]byte{2, 3, 5, 5, 200, 6, 6, 1, 3, 3})
	f.Add([]byte{0, 1, 3, 0, 0, 4, 0})
	f.Add([]byte{1, 0, 8, 1, 2, 8, 2})
	rt := hosttest.NewRuntime(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		ranks := script(data)
		part := 0 // the first call that is not the same everywhere
		for part < len(ranks[0]) && !slices.ContainsFunc(ranks, func(a []action) bool { return a[part] != ranks[0][part] }) {
			part++
		}
		send, recv := make([]uintptr, len(ranks)), make([]uintptr, len(ranks))
		for r := range ranks {
			send[r], recv[r] = hosttest.Allocate(t, rt, 256), hosttest.Allocate(t, rt, 256)
		}
		errs := onCheckedRanks(t, rt, len(ranks), 10*time.Second, func(ctx context.Context, c *checked.Communicator) error {
			r := c.Rank()
			for i, a := range ranks[r] {
				if err := a.run(ctx, c, send[r], recv[r]); err != nil {
					if i != part {
						return fmt.Errorf("call %d instead of %d: %w", i, part, err)
					}
					return err
				}
			}
			return c.Sync(ctx)
		})
		for r, err := range errs {
			if part == len(ranks[0]) {
				require.NoError(t, err, "rank %d of %v", r, ranks)
				continue
			}
			require.ErrorIs(t, err, comm.ErrMismatch, "rank %d of %v", r, ranks)
			require.NotContains(t, err.Error(), "instead of", "rank %d of %v", r, ranks)
		}
	})
}

// Run ends a Checked as Close does.
func TestRunGivesMemoryOfCheckedBack(t *testing.T) {
	for _, cause := range []error{nil, errors.New("aborts")} {
		rt := cpu.New()
		worlds, err := local.New(2)
		require.NoError(t, err)
		err = comm.Run(t.Context(), worlds, func(ctx context.Context, c comm.Communicator) error {
			k, err := checked.New(ctx, c, rt, 0)
			if err != nil {
				return err
			}
			return comm.Run(ctx, []comm.Communicator{k}, func(context.Context, comm.Communicator) error { return cause })
		})
		assert.ErrorIs(t, err, cause)
		assert.NoError(t, rt.Close())
	}
}

// latecomer is a communicator whose Sync says that it has come, and begins when a
// channel is closed, and so do those of its sub-communicators.
type latecomer struct {
	comm.Communicator
	came chan<- struct{}
	open <-chan struct{}
}

func (l latecomer) Unwrap() comm.Communicator { return l.Communicator }

func (l latecomer) Sync(ctx context.Context) error {
	l.came <- struct{}{}
	select {
	case <-l.open:
	case <-ctx.Done():
	}
	return l.Communicator.Sync(ctx)
}

func (l latecomer) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := l.Communicator.Split(ctx, color, key)
	return latecomer{c, l.came, l.open}, err
}

// A rank whose peer aborts while it waits to compare a call has made that call: its error differs from the error of
// one that came too late.
func TestCheckedCallInWhichAPeerGivesUp(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	failure := errors.New("no disk space")
	came, gone := make(chan struct{}, 10), make(chan struct{})
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		k, err := checked.New(ctx, latecomer{c, came, gone}, rt, 0)
		if err != nil {
			return err
		}
		return comm.Run(ctx, []comm.Communicator{k}, func(ctx context.Context, _ comm.Communicator) error {
			if k.Rank() == 1 {
				<-came // in a call
				k.Abort(failure)
				close(gone)
				return nil
			}
			err := k.AllReduce(0, 0, 0, dtype.F32, comm.Sum)
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorIs(t, err, failure)
			assert.NotErrorIs(t, err, comm.ErrBroken)
			assert.ErrorIs(t, k.AllReduce(0, 0, 0, dtype.F32, comm.Sum), comm.ErrBroken)
			return nil
		})
	})
	assert.NoError(t, err)
}

// Messages, alone and in a group, pass a collective that waits for the rank that waits for them.
func TestMessagesPassAWaitingCollective(t *testing.T) {
	for name, send := range map[string]func(comm.Communicator, comm.Call) error{
		"call":  func(c comm.Communicator, call comm.Call) error { return call.Make(c) },
		"group": func(c comm.Communicator, call comm.Call) error { return c.Group(call) },
	} {
		t.Run(name, func(t *testing.T) {
			rt := hosttest.NewRuntime(t)
			buf := hosttest.Allocate(t, rt, 128)
			waiting, open := make(chan struct{}, 10), make(chan struct{})
			close(open)
			require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
				if c.Rank() == 0 {
					c = latecomer{c, waiting, open}
				}
				k, err := checked.New(ctx, c, rt, 0)
				if err != nil {
					return err
				}
				if k.Rank() == 1 {
					err := send(k, comm.RecvCall(buf+64, 4, dtype.F32, 0, 3))
					return errors.Join(err, c.Sync(ctx), k.AllReduce(0, 0, 0, dtype.F32, comm.Sum), k.Close())
				}
				reduced := make(chan error, 1)
				go func() { reduced <- k.AllReduce(0, 0, 0, dtype.F32, comm.Sum) }()
				<-waiting // the collective compares
				err = send(k, comm.SendCall(buf, 4, dtype.F32, 1, 3))
				return errors.Join(err, <-reduced, k.Close())
			}))
		})
	}
}

// stalled is a runtime of a device whose stream has not come to what is asked of it,
// because it waits for a message, for instance.
type stalled struct {
	runtime.Runtime
	entered chan struct{} // has an element for each that is to find it so
}

func (s stalled) Synchronize(ctx context.Context) error {
	select {
	case s.entered <- struct{}{}:
		<-ctx.Done()
		return ctx.Err()
	default:
		return s.Runtime.Synchronize(ctx)
	}
}

// An error says that it is the device that a call waited for in vain.
func TestCheckedNamesTheDevice(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	synctest.Test(t, func(t *testing.T) {
		k, err := checked.New(t.Context(), noop.New(rt), stalled{rt, make(chan struct{}, 1)}, time.Hour)
		require.NoError(t, err)
		err = k.AllReduce(buf, buf, 1, dtype.F32, comm.Sum)
		require.ErrorIs(t, err, comm.ErrTimeout)
		assert.ErrorContains(t, err, "waiting for the device")
		require.NoError(t, k.Close())
	})
}

// Close ends a collective that waits for the device, too.
func TestCheckedClosesWhileTheDeviceIsBusy(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	synctest.Test(t, func(t *testing.T) {
		device := stalled{rt, make(chan struct{}, 1)}
		k, err := checked.New(t.Context(), noop.New(rt), device, 0)
		require.NoError(t, err)
		first := make(chan error)
		go func() { first <- k.AllReduce(buf, buf, 1, dtype.F32, comm.Sum) }()
		synctest.Wait()
		require.Len(t, device.entered, 1)
		require.NoError(t, k.Close())
		assert.ErrorIs(t, <-first, comm.ErrClosed)
	})
}

// forking is a device with room beside its stream.
type forking struct{ stalled }

func (forking) ForkStream() (runtime.Runtime, error) { return cpu.New(), nil }

// If a device runs several streams of work, the comparison uses a separate one: the program's computation may wait for
// communication that comes later.
func TestCheckedDoesNotWaitForWhatIsComputed(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	sent, received := hosttest.Allocate(t, rt, 64), hosttest.Allocate(t, rt, 64)
	busy := forking{stalled{rt, make(chan struct{}, 1000)}}
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		k, err := checked.New(ctx, c, busy, time.Minute)
		if err != nil {
			return err
		}
		part, err := k.Split(ctx, 0, 1-c.Rank())
		if err != nil {
			return err
		}
		call := comm.SendCall(sent, 4, dtype.F32, 1, 3)
		if c.Rank() == 1 {
			call = comm.RecvCall(received, 4, dtype.F32, 0, 3)
		}
		return errors.Join(call.Make(k), k.Sync(ctx), part.AllReduce(0, 0, 0, dtype.F32, comm.Sum), part.Barrier(ctx), part.Close(), k.Close())
	}))
	assert.Empty(t, busy.entered)
}

// leaves is a communicator of which rank 0 has its context canceled, while what a Split has made is split for the first
// time. The others come when it has aborted.
type leaves struct {
	comm.Waits
	comm.Wrapped
	cancel context.CancelFunc
	gone   chan struct{}
}

func leave(c comm.Communicator, cancel context.CancelFunc, gone chan struct{}, depth int) comm.Communicator {
	l := &leaves{Wrapped: comm.Wrap(c), cancel: cancel, gone: gone}
	l.Waits = comm.Waits{Wait: func(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
		if w.Op == comm.OpSplit && depth == 1 {
			if c.Rank() == 0 {
				cancel()
			} else {
				<-gone
			}
		}
		child, err := w.Make(ctx, c)
		if err != nil || child == nil {
			return nil, err
		}
		return leave(child, cancel, gone, depth+1), nil
	}}
	return l
}

// The communicators that a Split makes beside its own wait for its context, too.
func TestCheckedSplitEndsWithItsContext(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	gone := make(chan struct{})
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, world comm.Communicator) error {
		short, cancel := context.WithCancel(ctx)
		defer cancel()
		k, err := checked.New(ctx, leave(world, cancel, gone, 0), rt, 0)
		if err != nil {
			return err
		}
		_, err = k.Split(short, 0, 0)
		if k.Rank() == 0 {
			assert.ErrorIs(t, err, comm.ErrCanceled)
			close(gone)
		} else {
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
		}
		assert.ErrorIs(t, k.Barrier(ctx), comm.ErrBroken, "as by any wait that its context has ended")
		return k.Close()
	}))
}

// A rank whose peer aborts learns why, also where it waits in the communicator that is checked.
func TestAbortReachesWhatIsChecked(t *testing.T) {
	enough := errors.New("enough")
	require.ErrorIs(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		defer rt.Close()
		k, err := checked.New(ctx, c, rt, 0)
		require.NoError(t, err)
		defer k.Close()
		if c.Rank() == 0 {
			k.Abort(enough)
			return nil
		}
		err = c.Barrier(ctx)
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "enough")
		return err
	}), comm.ErrPeerFailed)
}

// An abort with nothing in flight reaches what is checked as well: a goroutine that is about to make a call there gets no memory written
// any more.
func TestAbortWithNothingInFlight(t *testing.T) {
	cause := errors.New("a rank has had enough")
	onCheckedRanks(t, hosttest.NewRuntime(t), 2, 0, func(_ context.Context, k *checked.Communicator) error {
		k.Abort(cause)
		assert.ErrorIs(t, k.Communicator.Err(), comm.ErrBroken)
		return nil
	})
}

// late waits for something before it waits for a comparison.
type late struct {
	comm.Wrapped
	what func()
}

func (l *late) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := l.Wrapped.Split(ctx, color, key)
	return &late{comm.Wrap(c), l.what}, err
}

func (l *late) Sync(ctx context.Context) error {
	l.what()
	return l.Wrapped.Sync(ctx)
}

// A rank to which the other one comes first with what both find out says the same.
func TestFoundByAnotherFirst(t *testing.T) {
	found := make(chan struct{})
	var says [2]error
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		wait := func() {}
		if c.Rank() == 0 {
			c = &late{comm.Wrap(c), func() { wait() }}
		}
		k, err := checked.New(ctx, c, cpu.New(), 0)
		require.NoError(t, err)
		wait = func() { <-found }
		err = k.AllReduce(0, 0, 0, []dtype.DType{dtype.F32, dtype.BF16}[k.Rank()], comm.Sum)
		if says[k.Rank()] = errors.Unwrap(err); k.Rank() == 1 {
			close(found)
		}
		assert.ErrorIs(t, err, comm.ErrMismatch)
		_ = k.Close()
		return nil
	}))
	assert.Equal(t, says[1].Error(), says[0].Error())
}
