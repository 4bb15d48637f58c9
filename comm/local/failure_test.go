package local_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
)

// TestDeadline waits for a rank that never comes.
func TestDeadline(t *testing.T) {
	type pending func(c comm.Communicator, buf uintptr) error
	for name, tc := range map[string]struct {
		call pending
		says string
	}{
		"collective": {func(c comm.Communicator, b uintptr) error {
			return c.AllReduce(b, b, 4, dtype.I32, comm.Sum)
		}, "allreduce of 4 i32, sum (collective #1), nothing from rank 2"},
		"message": {func(c comm.Communicator, b uintptr) error {
			return c.Recv(b, 4, dtype.I32, 2, 5)
		}, "recv of 4 i32 from rank 2, tag 5"},
	} {
		t.Run(name, func(t *testing.T) {
			_, addr := perRank(newMemory(t), 3, 4, rankPlusOne)
			comms := world(t, 3)
			ctx, cancel := context.WithCancelCause(t.Context())
			called := make(chan struct{})
			errs := onAll(comms[:2], func(c comm.Communicator) error {
				if err := tc.call(c, addr[c.Rank()]); err != nil {
					return err
				}
				if c.Rank() == 1 {
					close(called)
					return c.Sync(within(t))
				}
				<-called
				cancel(errTest)
				return c.Sync(ctx)
			})
			require.ErrorIs(t, errs[0], comm.ErrCanceled)
			require.ErrorIs(t, errs[0], errTest)
			require.NotErrorIs(t, errs[0], comm.ErrPeerFailed)
			assert.Contains(t, errs[0].Error(), tc.says)
			require.ErrorIs(t, errs[1], comm.ErrPeerFailed)
			assert.Contains(t, errs[1].Error(), "rank 0 aborted")
			requireBroken(t, comms, addr, comm.ErrCanceled)
		})
	}
}

// TestLimit bounds a wait whose context has no end.
func TestLimit(t *testing.T) {
	_, addr := perRank(newMemory(t), 2, 1, rankPlusOne)
	comms := world(t, 2)
	require.NoError(t, comms[0].AllReduce(addr[0], addr[0], 1, dtype.I32, comm.Sum))
	err := comm.Limit(comms[0], time.Millisecond, nil).Sync(context.Background())
	require.ErrorIs(t, err, comm.ErrTimeout)
	requireBroken(t, comms, addr, comm.ErrTimeout)
}

// TestNobodyTouchesMemoryAfterAnError lets each rank write into its buffer as
// soon as it hears that the world broke, which happens at any moment.
func TestNobodyTouchesMemoryAfterAnError(t *testing.T) {
	const n = 1 << 16
	for rounds := range int64(20) {
		data, addr := perRank(newMemory(t), 2, n, constant(1))
		comms := world(t, 2)
		ctx, cancel := context.WithCancel(t.Context())
		var done atomic.Int64 // collectives of rank 1
		var canceler sync.WaitGroup
		canceler.Go(func() {
			for done.Load() < rounds {
				runtime.Gosched()
			}
			cancel()
		})
		errs := onAll(comms, func(c comm.Communicator) error {
			r := c.Rank()
			for {
				err := c.AllReduce(addr[r], addr[r], n, dtype.I32, comm.Max)
				if err == nil {
					err = c.Sync(ctx)
				}
				if err != nil {
					for i := range data[r] {
						data[r][i] = -7
					}
					return err
				}
				if r == 0 && ctx.Err() != nil {
					return nil // the other one waits in vain
				}
				if r == 1 {
					done.Add(1)
				}
			}
		})
		canceler.Wait()
		require.ErrorIs(t, errs[1], comm.ErrCanceled)
		for r, err := range errs {
			if err != nil {
				requireFilled(t, data[r], n, -7, "rounds %d, rank %d", rounds, r)
			}
		}
	}
}

// TestNobodyTouchesMemoryAfterARefusal has a collective ready to be carried out
// when a rank is lost. A rank that hears of it from a later call, not from
// Sync, may use its buffers at once, whatever the others do then.
func TestNobodyTouchesMemoryAfterARefusal(t *testing.T) {
	const n = 1 << 20
	capturedLog(t)
	ctx := within(t)
	data, addr := perRank(newMemory(t), 3, n, rankPlusOne)
	comms, err := local.New(3)
	require.NoError(t, err)
	defer comms[0].Close()
	defer comms[2].Close()
	for r, c := range comms {
		require.NoError(t, c.AllReduce(addr[r], addr[r], n, dtype.I32, comm.Sum))
	}
	comms[1] = nil
	require.Eventually(t, func() bool {
		runtime.GC()
		err = comms[0].Broadcast(addr[0], 1, dtype.I32, 0)
		return err != nil
	}, patience, time.Millisecond)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	for i := range data[0] {
		data[0][i] = -7
	}
	_ = comms[2].Sync(ctx)
	requireFilled(t, data[0], n, -7)
}

// TestCloseDuringSplit closes a communicator that another goroutine splits:
// whatever comes first, nothing is lost.
func TestCloseDuringSplit(t *testing.T) {
	collect() // what earlier tests have lost
	logged := capturedLog(t)
	for range 200 {
		ctx := within(t)
		comms := world(t, 1)
		closed := make(chan error, 1)
		go func() { closed <- comms[0].Close() }()
		child, err := comms[0].Split(ctx, 0, 0)
		require.NoError(t, <-closed)
		if err != nil {
			require.ErrorIs(t, err, comm.ErrClosed)
			require.Nil(t, child)
			continue
		}
		require.NoError(t, child.Close())
	}
	collect()
	require.NotContains(t, logged(), "never closed")
}

// TestClosedPeer lets a rank leave while others need it.
func TestClosedPeer(t *testing.T) {
	for name, call := range map[string]func(c comm.Communicator, buf uintptr) error{
		"collective": func(c comm.Communicator, b uintptr) error { return c.AllReduce(b, b, 1, dtype.I32, comm.Sum) },
		"send":       func(c comm.Communicator, b uintptr) error { return c.Send(b, 1, dtype.I32, 1, 0) },
		"recv":       func(c comm.Communicator, b uintptr) error { return c.Recv(b, 1, dtype.I32, 1, 0) },
	} {
		for _, early := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/before=%v", name, early), func(t *testing.T) {
				ctx := within(t)
				_, addr := perRank(newMemory(t), 2, 1, rankPlusOne)
				comms := world(t, 2)
				if early {
					require.NoError(t, comms[1].Close())
				}
				require.NoError(t, call(comms[0], addr[0]))
				if !early {
					require.NoError(t, comms[1].Close())
				}
				err := comms[0].Sync(ctx)
				require.ErrorIs(t, err, comm.ErrPeerFailed)
				assert.Contains(t, err.Error(), "rank 1 closed")
				require.ErrorIs(t, comms[1].Sync(ctx), comm.ErrClosed)
				require.NoError(t, comms[1].Close())
			})
		}
	}
}

// TestClosingIsNoFailure closes ranks that nobody needs any more.
func TestClosingIsNoFailure(t *testing.T) {
	ctx := within(t)
	data, addr := perRank(newMemory(t), 3, 1, rankPlusOne)
	comms := world(t, 3)
	for r, c := range comms {
		require.NoError(t, c.AllReduce(addr[r], addr[r], 1, dtype.I32, comm.Sum))
	}
	require.NoError(t, comms[2].Close())
	require.NoError(t, comms[0].Sync(ctx))
	require.NoError(t, comms[0].Send(addr[0], 1, dtype.I32, 1, 0))
	require.NoError(t, comms[1].Recv(addr[1], 1, dtype.I32, 0, 0))
	require.NoError(t, comms[1].Sync(ctx))
	require.Equal(t, int32(6), data[1][0])
}

// capturedLog collects what is logged with slog until the test ends.
func capturedLog(t *testing.T) func() string {
	var mu sync.Mutex
	var text bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(lockedWriter{&mu, &text}, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return func() string {
		mu.Lock()
		defer mu.Unlock()
		return text.String()
	}
}

type lockedWriter struct {
	mu  *sync.Mutex
	out *bytes.Buffer
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(p)
}

// TestCloseWithPendingWork closes after a bounded time, and says what was in flight.
func TestCloseWithPendingWork(t *testing.T) {
	logged := capturedLog(t)
	_, addr := perRank(newMemory(t), 2, 1, rankPlusOne)
	comms := world(t, 2)
	local.CloseWithin(comms[0], time.Millisecond)
	require.NoError(t, comms[0].AllReduce(addr[0], addr[0], 1, dtype.I32, comm.Sum))
	require.ErrorIs(t, comms[0].Close(), comm.ErrTimeout)
	assert.Contains(t, logged(), "closed with an error")
	assert.Contains(t, logged(), "allreduce of 1 i32")
	require.ErrorIs(t, comms[1].AllReduce(addr[1], addr[1], 1, dtype.I32, comm.Sum), comm.ErrPeerFailed)
}

// collect has the garbage collector look, and call what it calls of others.
func collect() {
	for range 5 {
		collected := make(chan bool)
		runtime.AddCleanup(new([64]byte), func(c chan bool) { close(c) }, collected)
		runtime.GC()
		<-collected
	}
}

// TestCloseIsNoLeak closes a communicator to which nobody refers meanwhile.
func TestCloseIsNoLeak(t *testing.T) {
	collect() // what earlier tests have lost
	logged := capturedLog(t)
	comms, err := local.New(2)
	require.NoError(t, err)
	other := comms[1]
	require.NoError(t, comms[0].Broadcast(0, 0, dtype.F32, 0))
	began, closed := make(chan bool), make(chan error)
	go func(c comm.Communicator) {
		close(began)
		closed <- c.Close()
	}(comms[0])
	comms[0], comms[1] = nil, nil
	<-began
	collect()
	require.NoError(t, other.Broadcast(0, 0, dtype.F32, 0))
	require.NoError(t, <-closed)
	require.NoError(t, other.Close())
	assert.NotContains(t, logged(), "never closed")
}

// TestLeak forgets a communicator.
func TestLeak(t *testing.T) {
	logged := capturedLog(t)
	comms, err := local.New(2)
	require.NoError(t, err)
	defer comms[0].Close()
	comms[1] = nil
	require.Eventually(t, func() bool {
		runtime.GC()
		return strings.Contains(logged(), "rank 1 of 2, made at ") // of another test, there may be a line before
	}, patience, time.Millisecond)
	assert.Contains(t, logged(), "never closed")
	require.ErrorIs(t, comms[0].Barrier(within(t)), comm.ErrPeerFailed)
}
