package nccl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/dtype"
)

// What the others are known to do is put together, rank by rank.
func TestWhatTheOthersDo(t *testing.T) {
	reports, err := rendezvous.NewReports(t.Context(), store.NewServer(store.Options{}).Local("all ranks"))
	require.NoError(t, err)
	ranks := make([]*submissions, 5)
	reporters := make([]*reporter, len(ranks))
	for r := range ranks {
		ranks[r] = &submissions{group: "0", rank: r, size: len(ranks)}
		reporters[r] = &reporter{reports: reports, close: noClose}
		if r != 4 {
			reporters[r].add(ranks[r])
		}
	}
	calls := []comm.Call{comm.BroadcastCall(0, 4, dtype.F32, 1), comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum)}
	for r, s := range ranks[:4] {
		s.add(&calls[0])
		drain(s)
		if r != 3 {
			s.add(&calls[1])
			s.begin()
		}
	}
	for r, s := range ranks[:4] {
		s.tell(reporters[r].reports) // as it does now and then
	}
	others := func(r *reporter, s *submissions) string {
		text, err := r.others(s)
		require.NoError(t, err)
		return text
	}
	const waits = "waits for allreduce of 16 f32, sum (collective #2)"
	const silent = "rank 4 reported nothing"
	const late = "rank 3 reported: called broadcast of 4 f32, root 1 (collective #1) last, which is done; "
	assert.Equal(t, "ranks 1, 2 reported: "+waits+"; "+late+silent, others(reporters[0], ranks[0]))
	ranks[1].aborts(comm.ErrTimeout)
	reporters[2].remove(ranks[2], "closed its communicator")
	others(reporters[1], ranks[1])
	assert.Equal(t, "rank 1 reported: aborted: timed out; rank 2 reported: closed its communicator; "+late+silent, others(reporters[0], ranks[0]))
	for r := range ranks {
		reporters[r].remove(ranks[r], "closed its communicator")
	}
	assert.Equal(t, "ranks 1-4 reported nothing", others(reporters[0], &submissions{group: "0", size: len(ranks)}))
}

// lost is a store that has ended with the rank that kept it, which is noticed after so many looks.
type lost struct {
	reports
	looks int
}

func (l *lost) Report(string, int, string) {}

func (l *lost) Last(context.Context, string) (map[int]rendezvous.Report, error) {
	return nil, errors.New("connection lost")
}

func (l *lost) Failed(_ string, _ int, collectives uint64) error {
	l.looks--
	if l.looks >= 0 || collectives != math.MaxUint64 {
		return nil
	}
	return fmt.Errorf("%w: rank 0 aborted: its process has ended", comm.ErrPeerFailed)
}

// NCCL's error names an address: what is known of the ranks is added to it.
func TestWhoIsGone(t *testing.T) {
	s := &submissions{group: "0", rank: 1, size: 3}
	remote := &Error{Status: statusRemote, Text: "remote process exited"}

	kv := store.NewServer(store.Options{}).Local("all ranks")
	reports, err := rendezvous.NewReports(t.Context(), kv)
	require.NoError(t, err)
	r := &reporter{reports: reports, close: noClose}
	reports.Report("0", 2, "called allreduce last")
	err = r.name(fmt.Errorf("allreduce: %w", remote), s)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "remote process exited")
	assert.ErrorContains(t, err, "rank 2 reported: called allreduce last")
	for _, other := range []error{comm.ErrTimeout, &Error{Status: statusInvalidArg}} {
		assert.Equal(t, other, r.name(other, s), "nobody is gone")
	}

	r = &reporter{reports: &lost{looks: 3}, close: noClose}
	err = r.name(remote, s)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorAs(t, err, new(*Error))
	assert.ErrorContains(t, err, "rank 0 aborted: its process has ended")

	r = &reporter{reports: &lost{looks: math.MaxInt}, close: noClose}
	err = r.name(remote, s)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "what the others do is not known: connection lost")
}

// Calls that are aborted end one after the other, which takes longer the more there are.
func TestTimeOfCallsThatEnd(t *testing.T) {
	s := new(submissions)
	reduce, send := comm.AllReduceCall(0, 0, 16, dtype.F32, comm.Sum), comm.SendCall(0, 3, dtype.F32, 1, 7)
	assert.Zero(t, s.inFlight())
	for range 60 {
		s.add(&reduce)
	}
	for range 3 {
		s.add(&send)
		s.addOwn()
	}
	require.EqualValues(t, 63, s.inFlight())
	assert.Greater(t, endingTime(s.inFlight(), false), 9*time.Second, "63 calls took 8.8 s on a GPU that three processes shared")
	assert.Greater(t, endingTime(0, true), 5*time.Second, "of graphs nothing is known")
	drain(s)
	assert.Zero(t, endingTime(s.inFlight(), false))
	assert.LessOrEqual(t, endingTime(1<<40, true), endingMost)
}
