package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// job has the reports of ranks over an invitation; the first keeps the store.
func job(t *testing.T, ranks int) []*Reports {
	kv, in, err := Invite(true)
	require.NoError(t, err)
	all := make([]*Reports, ranks)
	for rank := range all {
		if rank > 0 {
			kv, err = in.Accept(t.Context(), rank)
			require.NoError(t, err)
		}
		all[rank], err = NewReports(t.Context(), kv)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, errors.Join(all[rank].Close(), all[rank].kv.Close())) })
	}
	return all
}

// local has the reports of the ranks of one process.
func local(t *testing.T) *Reports {
	r, err := NewReports(t.Context(), store.NewServer(store.Options{}).Local("all"))
	require.NoError(t, err)
	return r
}

// last is the last reports of a group.
func last(t *testing.T, r *Reports, group string) map[int]Report {
	got, err := r.Last(t.Context(), group)
	require.NoError(t, err)
	return got
}

// eventually asks for the reports of a group until they are as wanted: each rank's come on its own connection.
func eventually(t *testing.T, r *Reports, group string, want func(last map[int]Report) bool) {
	t.Helper()
	require.Eventually(t, func() bool { return want(last(t, r, group)) }, 10*time.Second, time.Millisecond)
}

// Reports of all ranks are known to all of them; who has gone is known, and who has left is none of those.
func TestReports(t *testing.T) {
	all := job(t, 3)
	zero, one, two := all[0], all[1], all[2]
	for rank, r := range all {
		r.Report("0", rank, "called nothing")
		r.Report("0", rank, "waits") // the last counts
		r.Report("0/1.0", rank, "elsewhere")
	}
	for _, r := range all {
		eventually(t, r, "0", func(last map[int]Report) bool {
			return len(last) == 3 && last[0].Text == "waits" && last[1].Text == "waits" && last[2].Text == "waits"
		})
	}
	two.Leave("0", 2, "closed")
	require.NoError(t, two.kv.Close())
	eventually(t, one, "0/1.0", func(last map[int]Report) bool { return last[2].Gone && last[2].Text == "elsewhere" })
	eventually(t, one, "0", func(last map[int]Report) bool { return last[2].Text == "closed" && !last[2].Gone })
	zero.Leave("0", 0, "closed")
	one.Leave("0", 1, "closed")
	assert.Empty(t, last(t, one, "0"))

	require.NoError(t, zero.kv.Close())
	require.Eventually(t, func() bool {
		_, err := one.Last(t.Context(), "0")
		return errors.Is(err, comm.ErrPeerFailed)
	}, 10*time.Second, time.Millisecond)
	for group := range 100 { // to nobody
		one.Report(strconv.Itoa(group), 1, "waits")
		one.Leave(strconv.Itoa(group), 1, "closed")
	}
}

// A rank that aborts goes on when all others know, in the groups that they are in. It does not wait for a rank that is
// gone.
func TestRanksThatAbort(t *testing.T) {
	all := job(t, 3)
	zero, one, two := all[0], all[1], all[2]
	for rank, r := range all {
		r.Report("0", rank, "waits")
		r.Report("0/1.0", rank, "waits")
	}
	eventually(t, zero, "0/1.0", func(last map[int]Report) bool { return len(last) == 3 })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
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
	require.NoError(t, two.kv.Close())
	one.Abort(ctx, "0", 1, "once more", 1)
	require.NoError(t, ctx.Err())
	require.ErrorContains(t, zero.Failed("0", 0, 2), "rank 1 aborted: once more")
	require.NoError(t, zero.kv.Close())
	one.Abort(ctx, "0", 1, "when nobody is there", 0)
	require.NoError(t, ctx.Err())
}

// A rank that does not answer delays one that aborts until its context ends.
func TestAnAbortIsBounded(t *testing.T) {
	all := job(t, 2)
	release := make(chan struct{})
	_, err := all[1].kv.Watch(t.Context(), abortedKeys, func(store.Event) { <-release })
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	all[0].Abort(ctx, "0", 0, "changed its mind", 5)
	require.Error(t, ctx.Err())
	close(release)
	require.Eventually(t, func() bool { return all[1].Failed("0", 1, 6) != nil }, 10*time.Second, time.Millisecond)
}

// A rank that reaches the store late, past addresses of which one is silent, knows which ranks aborted before.
func TestALateRankLearnsOfAborts(t *testing.T) {
	logged(t)
	kv, in, err := Invite(true)
	require.NoError(t, err)
	defer kv.Close() //nolint:errcheck // nothing is lost
	first, err := NewReports(t.Context(), kv)
	require.NoError(t, err)
	first.Abort(t.Context(), "0", 2, "changed its mind", 5)
	in.Addresses = append([]string{freeAddress(t)}, in.Addresses...)
	kv, err = in.Accept(t.Context(), 1)
	require.NoError(t, err)
	late, err := NewReports(t.Context(), kv)
	require.NoError(t, err)
	defer kv.Close() //nolint:errcheck // nothing is lost
	require.NoError(t, late.Failed("0", 1, 5))
	err = late.Failed("0", 1, 6)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorContains(t, err, "rank 2 aborted: changed its mind")

	in.Secret = []byte("another one")
	in.Addresses = in.Addresses[1:]
	_, err = in.Accept(t.Context(), 3)
	require.ErrorIs(t, err, store.ErrRefused)
}

// When the process of the store ends, ranks no longer learn of aborts. That is a failure of the groups that it takes
// part in and has not left, and of no others.
func TestTheEndOfRankZero(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		all := job(t, 2)
		zero, one := all[0], all[1]
		zero.Report("before", 4, "waits")
		one.Report("before", 1, "waits")
		zero.Report("behind", 2, "waits")
		for _, group := range []string{"behind", "left", "of others"} {
			one.Report(group, 1, "waits")
		}
		zero.Report("left", 3, "waits")
		zero.Leave("left", 3, "closed")
		if leaves {
			zero.Leave("before", 4, "closed")
			zero.Leave("behind", 2, "closed")
		}
		require.NoError(t, zero.kv.Close())
		<-one.kv.Done()
		for group, rank := range map[string]string{"before": "rank 4", "behind": "rank 2"} {
			if leaves {
				require.NoError(t, one.Failed(group, 1, 1))
				continue
			}
			var err error
			require.Eventually(t, func() bool { err = one.Failed(group, 1, 1); return err != nil }, 10*time.Second, time.Millisecond)
			require.ErrorIs(t, err, comm.ErrPeerFailed)
			require.ErrorContains(t, err, rank)
		}
		require.NoError(t, one.Failed("left", 1, 100))
		require.NoError(t, one.Failed("of others", 1, 100))
	}
}

// The reports of one process are bounded. Beyond the bound they are dropped, no rank has failed, and ranks still learn
// of aborts.
func TestReportsAreBounded(t *testing.T) {
	all := job(t, 3)
	zero, flood, friend := all[0], all[1], all[2]
	final := strconv.Itoa(mostGroups)
	for group := range mostGroups + 1 {
		flood.Report(strconv.Itoa(group), 1, "waits")
	}
	zero.Report("0", 0, "waits")
	friend.Report("0", 2, "waits")
	friend.Report(final, 2, "waits")
	eventually(t, zero, final, func(last map[int]Report) bool { return last[2].Text == "waits" })
	assert.NotContains(t, last(t, flood, final), 1)
	assert.Contains(t, last(t, flood, "0"), 1)
	require.NoError(t, flood.Failed("0", 1, 100))
	flood.Abort(t.Context(), final, 1, "has too many", 5)
	assert.ErrorContains(t, zero.Failed(final, 0, 6), "rank 1 aborted: has too many")
}

// The name of a group tells of many ranks where a communicator was made without those.
func TestReportsOfALongName(t *testing.T) {
	all := job(t, 2)
	excluded := make([]int, 5000)
	for i := range excluded {
		excluded[i] = i
	}
	name := fmt.Sprint("without ", excluded)
	for rank, r := range all {
		r.Report(name, rank, "waits")
	}
	eventually(t, all[1], name, func(last map[int]Report) bool { return len(last) == 2 })
}

// A rank that aborted fails later collectives than those that it had seen done, until its group is forgotten,
// whatever it reports later.
func TestReportsOfOneProcess(t *testing.T) {
	l := local(t)
	for rank := range 4 {
		l.Report("0", rank, "waits")
	}
	require.NoError(t, l.Failed("0", 0, 100))
	l.Abort(t.Context(), "0", 3, "timed out", 7)
	l.Abort(t.Context(), "0", 2, "changed its mind", 5)
	l.Report("0", 2, "waits")
	l.Leave("0", 3, "closed")
	require.NoError(t, l.Failed("0", 0, 5), "they did their part in those")
	for collectives, want := range map[uint64]string{6: "rank 2 aborted: changed its mind", 8: "rank 2 aborted: changed its mind"} {
		err := l.Failed("0", 0, collectives)
		require.ErrorIs(t, err, comm.ErrPeerFailed)
		require.ErrorContains(t, err, want, collectives)
	}
	require.NoError(t, l.Failed("0/1.0", 0, 100), "another group")
	require.ErrorContains(t, l.Failed("0", 2, 8), "rank 3 aborted: timed out", "it knows what it does itself")
	require.NoError(t, l.Failed("0", 2, 7))
	assert.Equal(t, "closed", last(t, l, "0")[3].Text)
	for rank := range 3 {
		l.Leave("0", rank, "closed")
	}
	assert.NoError(t, l.Failed("0", 0, 100))
	all, err := l.kv.List(t.Context(), "")
	require.NoError(t, err)
	assert.Empty(t, all, "all is forgotten")
}

// What no rank reports is ignored.
func TestForgedReports(t *testing.T) {
	log := logged(t)
	server := store.NewServer(store.Options{})
	r, err := NewReports(t.Context(), server.Local("rank 0"))
	require.NoError(t, err)
	forger := server.Local("forger")
	for key, value := range map[string]string{
		abortedKeys:                    `{"text":"no group"}`,
		abortedKeys + "g":              `{"text":"no rank"}`,
		abortedKeys + "g\x00one":       `{"text":"no number"}`,
		abortedKeys + "g\x00-1":        `{"text":"no rank"}`,
		reportKey(abortedKeys, "g", 3): `{"text":`,
		homeKeys + "g":                 "",
		statusKeys + "g\x00one":        "no number",
	} {
		require.NoError(t, forger.Set(t.Context(), key, []byte(value)))
	}
	assert.NoError(t, r.Failed("g", 0, 10))
	last, err := r.Last(t.Context(), "g")
	require.NoError(t, err)
	assert.Empty(t, last)
	assert.Contains(t, log.String(), "no report's")
	require.NoError(t, forger.Set(t.Context(), reportKey(abortedKeys, "g", 1), []byte(`{"text":"disk\u001b[2J full"}`)))
	assert.ErrorContains(t, r.Failed("g", 0, 10), `rank 1 aborted: disk\x1b[2J full`)
	require.NoError(t, errors.Join(r.Close(), forger.Close(), server.Close()))
}
