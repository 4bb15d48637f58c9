package rendezvous_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
)

// eventually asks for the reports of a group until they are as wanted.
func eventually(t *testing.T, r rendezvous.Reports, group string, want func(last map[int]rendezvous.Report) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var last map[int]rendezvous.Report
	for ctx.Err() == nil {
		got, err := r.Last(ctx, group)
		if last = got; err == nil && want(last) {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("the last reports are %v", last)
}

// Reports of all ranks are known to all of them, through rank 0; who has gone is
// known, and who has left is none of those.
func TestReports(t *testing.T) {
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	defer keeper.Close() //nolint:errcheck // nothing is lost
	for _, a := range invitation.Addresses {
		require.True(t, strings.HasPrefix(a, "127.0.0.1:"), a)
	}
	one, two := rendezvous.FollowReports(invitation, 1, 3), rendezvous.FollowReports(invitation, 2, 3)
	all := []rendezvous.Reports{keeper, one, two}
	for rank, r := range all {
		r.Report("0", rank, "called nothing")
		r.Report("0", rank, "waits") // the last counts
		r.Report("0/1.0", rank, "elsewhere")
	}
	for _, r := range all {
		eventually(t, r, "0", func(last map[int]rendezvous.Report) bool {
			return len(last) == 3 && last[0].Text == "waits" && last[1].Text == "waits" && last[2].Text == "waits"
		})
	}
	two.Leave("0", 2, "closed")
	require.NoError(t, two.Close())
	eventually(t, one, "0/1.0", func(last map[int]rendezvous.Report) bool { return last[2].Gone && last[2].Text == "elsewhere" })
	eventually(t, one, "0", func(last map[int]rendezvous.Report) bool { return last[2].Text == "closed" && !last[2].Gone })
	keeper.Leave("0", 0, "closed")
	one.Leave("0", 1, "closed")
	eventually(t, one, "0", func(last map[int]rendezvous.Report) bool { return len(last) == 0 })

	require.NoError(t, keeper.Close())
	require.Eventually(t, func() bool {
		_, err := one.Last(t.Context(), "0")
		return err != nil && strings.Contains(err.Error(), "rank 0 does not answer")
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, one.Close())
}

// A rank that aborts goes on when all others know, in the groups that they are in. It waits
// a bounded time for a rank that does not answer or is gone.
func TestRanksThatAbort(t *testing.T) {
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	defer keeper.Close()     //nolint:errcheck // nothing is lost
	const long = time.Minute // so that a loaded machine is no rank that does not answer
	rendezvous.SetTellTime(keeper, long)
	one, two := rendezvous.FollowReports(invitation, 1, 3), rendezvous.FollowReports(invitation, 2, 3)
	all := []rendezvous.Reports{keeper, one, two}
	for rank, r := range all {
		r.Report("0", rank, "waits")
		r.Report("0/1.0", rank, "waits")
	}
	eventually(t, keeper, "0/1.0", func(last map[int]rendezvous.Report) bool { return len(last) == 3 })
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	for i, group := range []string{"0", "0/1.0"} {
		for _, r := range all {
			require.NoError(t, r.Failed(group, -1, 100))
		}
		all[i].Abort(ctx, group, i, "changed its mind", 5)
		for rank, r := range all {
			require.NoError(t, r.Failed(group, rank, 5))
			if rank == i {
				require.NoError(t, r.Failed(group, rank, 6))
				continue
			}
			err := r.Failed(group, rank, 6)
			require.ErrorIs(t, err, comm.ErrPeerFailed, "rank %d", rank)
			require.ErrorContains(t, err, "rank "+strconv.Itoa(i)+" aborted: changed its mind")
		}
	}
	// All at once, as a rank does that ends with many communicators.
	var aborting sync.WaitGroup
	for rank, r := range all {
		for n := range 100 {
			aborting.Go(func() { r.Abort(ctx, "0", rank, "again", uint64(4-n%2)) })
		}
	}
	aborting.Wait()
	for rank, r := range all {
		require.Error(t, r.Failed("0", rank, 5))
	}
	require.NoError(t, ctx.Err())

	two.Leave("0", 2, "closed")
	require.NoError(t, two.Failed("0", 2, 100), "it has left")
	require.NoError(t, two.Close())
	one.Abort(ctx, "0", 1, "once more", 1)
	require.NoError(t, ctx.Err())
	require.ErrorContains(t, keeper.Failed("0", 0, 2), "rank 1 aborted: once more")
	require.NoError(t, keeper.Close())
	one.Abort(ctx, "0", 1, "when nobody is there", 0)
	require.NoError(t, ctx.Err())
	require.NoError(t, one.Close())
}

// A rank that reaches rank 0 late is told which ranks aborted before.
func TestALateRankLearnsOfAborts(t *testing.T) {
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	defer keeper.Close() //nolint:errcheck // nothing is lost
	keeper.Report("0", 0, "waits")
	// The first address that it tries is silent until that listener is closed.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	held := make(chan net.Conn, 1)
	go func() {
		if conn, err := silent.Accept(); err == nil {
			held <- conn
		}
	}()
	late := rendezvous.FollowReports(rendezvous.Invitation{
		Addresses: append([]string{silent.Addr().String()}, invitation.Addresses...), Secret: invitation.Secret}, 1, 3)
	late.Report("0", 1, "waits")
	conn := <-held
	keeper.Abort(t.Context(), "0", 2, "changed its mind", 5)
	select {
	case <-late.Told():
		t.Fatal("it is told although it is not connected")
	default:
	}
	require.NoError(t, errors.Join(conn.Close(), silent.Close()))
	<-late.Told()
	require.NoError(t, late.Failed("0", 1, 5))
	err = late.Failed("0", 1, 6)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorContains(t, err, "rank 2 aborted: changed its mind")
	require.NoError(t, late.Close())

	never := rendezvous.FollowReports(rendezvous.Invitation{Addresses: []string{silent.Addr().String()}}, 1, 3)
	require.NoError(t, never.Close())
	<-never.Told() // there is nothing to wait for
}

// When rank 0's process ends, ranks no longer learn of aborts. That is a failure of the
// groups that it takes part in and has not left, and of no others.
func TestTheEndOfRankZero(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		keeper, invitation, err := rendezvous.KeepReports(true)
		require.NoError(t, err)
		keeper.Report("before", 4, "waits")
		one := rendezvous.FollowReports(invitation, 1, 3)
		one.Report("before", 1, "waits")
		<-one.Told()
		keeper.Report("behind", 2, "waits")
		for _, group := range []string{"behind", "left", "of others"} {
			one.Report(group, 1, "waits")
		}
		keeper.Report("left", 3, "waits")
		keeper.Leave("left", 3, "closed")
		if leaves {
			keeper.Leave("before", 4, "closed")
			keeper.Leave("behind", 2, "closed")
		}
		require.NoError(t, keeper.Close())
		<-rendezvous.Ended(one)
		for group, rank := range map[string]string{"before": "rank 4", "behind": "rank 2"} {
			err := one.Failed(group, 1, 1)
			if leaves {
				require.NoError(t, err)
				continue
			}
			require.ErrorIs(t, err, comm.ErrPeerFailed)
			require.ErrorContains(t, err, rank)
		}
		require.NoError(t, one.Failed("left", 1, 100))
		require.NoError(t, one.Failed("of others", 1, 100))
		require.NoError(t, one.Close())
	}
}

// The reports of one rank are bounded. Beyond the bound they are dropped, no rank has failed,
// and ranks still learn of aborts.
func TestReportsAreBounded(t *testing.T) {
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	defer keeper.Close() //nolint:errcheck // nothing is lost
	const bound = 1 << 12
	last := strconv.Itoa(bound)
	flood, friend := rendezvous.FollowReports(invitation, 1, 3), rendezvous.FollowReports(invitation, 2, 3)
	for group := range bound + 1 {
		flood.Report(strconv.Itoa(group), 1, "waits")
	}
	keeper.Report("0", 0, "waits")
	for _, group := range []string{"0", last} {
		friend.Report(group, 2, "waits")
	}
	eventually(t, keeper, last, func(last map[int]rendezvous.Report) bool { return last[2].Text == "waits" })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	known, err := flood.Last(ctx, last)
	require.NoError(t, err)
	assert.NotContains(t, known, 1)
	require.NoError(t, flood.Failed("0", 1, 100))
	flood.Abort(ctx, last, 1, "has too many", 5)
	require.NoError(t, ctx.Err())
	assert.ErrorContains(t, keeper.Failed(last, 0, 6), "rank 1 aborted: has too many")
	assert.NoError(t, flood.Close())
	assert.NoError(t, friend.Close())
}

// The name of a group tells of many ranks where a communicator was made without those.
func TestReportsOfALongName(t *testing.T) {
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	defer keeper.Close() //nolint:errcheck // nothing is lost
	excluded := make([]int, 5000)
	for i := range excluded {
		excluded[i] = i
	}
	one := rendezvous.FollowReports(invitation, 1, 3)
	name := fmt.Sprint("without ", excluded)
	keeper.Report(name, 0, "waits")
	one.Report(name, 1, "waits")
	eventually(t, one, name, func(last map[int]rendezvous.Report) bool { return len(last) == 2 })
	require.NoError(t, one.Failed(name, 1, 100))
	require.NoError(t, one.Close())
}

// A rank that has no connection any more goes on, and keeps nothing to be sent.
func TestReportsToNobody(t *testing.T) {
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	one := rendezvous.FollowReports(invitation, 1, 3)
	<-one.Told()
	require.NoError(t, keeper.Close())
	<-rendezvous.Ended(one)
	for group := range 100 {
		one.Report(strconv.Itoa(group), 1, "waits")
		one.Leave(strconv.Itoa(group), 1, "closed")
	}
	require.Zero(t, rendezvous.Pending(one))
	require.NoError(t, one.Close())
}

// Silent connections, also more than rank 0 keeps, keep no rank from its reports: the
// oldest give way, and the log names the reason.
func TestSilentConnectionsKeepNoReports(t *testing.T) {
	log := rendezvous.Logged(t)
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	defer keeper.Close() //nolint:errcheck // nothing is lost
	for range rendezvous.MostStrangers + 50 {
		silent, err := net.Dial("tcp", invitation.Addresses[0])
		require.NoError(t, err)
		defer silent.Close() //nolint:errcheck // nothing is lost
	}
	friend := rendezvous.FollowReports(invitation, 2, 3)
	friend.Report("0", 2, "waits")
	eventually(t, keeper, "0", func(last map[int]rendezvous.Report) bool { return last[2].Text == "waits" })
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "it did not say who it is") }, 10*time.Second, time.Millisecond)
	assert.NoError(t, friend.Close())
}

// busyListener closes the first connections.
type busyListener struct {
	net.Listener
	closes int
}

func (l *busyListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil && l.closes > 0 {
		l.closes--
		_ = conn.Close()
	}
	return conn, err
}

// A rank whose first connections fail tries again, says so in the log, and sends what it
// reported meanwhile, but nothing of a communicator that it has closed by then.
func TestAFollowerTriesAgain(t *testing.T) {
	log := rendezvous.Logged(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	keeper, invitation := rendezvous.KeepReportsOn(&busyListener{listener, 3})
	defer keeper.Close() //nolint:errcheck // nothing is lost
	one := rendezvous.FollowReports(invitation, 1, 3)
	one.Report("0", 1, "waits")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	one.Abort(ctx, "0/1.0", 1, "changed its mind", 5) // waits for the connection
	require.NoError(t, ctx.Err())
	<-one.Told()
	require.ErrorContains(t, keeper.Failed("0/1.0", 0, 6), "rank 1 aborted: changed its mind")
	eventually(t, keeper, "0", func(last map[int]rendezvous.Report) bool { return last[1].Text == "waits" })
	assert.Contains(t, log.String(), "no connection to rank 0 for status reports")
	require.NoError(t, one.Close())
}

// A rank that has no connection yet keeps a bounded number of messages.
func TestReportsWithoutAConnectionAreBounded(t *testing.T) {
	rendezvous.Logged(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, silent.Close())
	one := rendezvous.FollowReports(rendezvous.Invitation{Addresses: []string{silent.Addr().String()}}, 1, 3)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for group := range 1 << 13 {
		one.Report(strconv.Itoa(group), 1, "waits")
		one.Leave(strconv.Itoa(group), 1, "closed")
	}
	require.Zero(t, rendezvous.Pending(one))
	for group := range 1 << 13 {
		one.Abort(ctx, strconv.Itoa(group), 1, "changed its mind", 0)
	}
	require.Equal(t, 1<<12, rendezvous.Pending(one))
	require.NoError(t, one.Close())
	<-one.Told()
}

// Someone without the secret is not listened to, and who says nothing keeps nobody.
func TestReportsOfStrangers(t *testing.T) {
	keeper, invitation, err := rendezvous.KeepReports(true)
	require.NoError(t, err)
	defer keeper.Close() //nolint:errcheck // nothing is lost
	silent, err := net.Dial("tcp", invitation.Addresses[0])
	require.NoError(t, err)
	defer silent.Close() //nolint:errcheck // nothing is lost
	other := rendezvous.Invitation{Addresses: invitation.Addresses, Secret: []byte("another one")}
	stranger := rendezvous.FollowReports(other, 1, 3)
	stranger.Report("0", 1, "lies")
	require.Eventually(t, func() bool {
		_, err := stranger.Last(t.Context(), "0")
		return err != nil && strings.Contains(err.Error(), "it did not answer")
	}, 10*time.Second, time.Millisecond)
	friend := rendezvous.FollowReports(invitation, 2, 3)
	friend.Report("0", 2, "waits")
	eventually(t, keeper, "0", func(last map[int]rendezvous.Report) bool { return len(last) == 1 && last[2].Text == "waits" })
	assert.NoError(t, stranger.Close())
	assert.NoError(t, friend.Close())
}
