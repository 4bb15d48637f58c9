package rendezvous_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
)

// A rank that aborted fails later collectives than those that it had seen done, until its
// group is forgotten, whatever it reports later.
func TestLocalReportsOfRanksThatAbort(t *testing.T) {
	l := new(rendezvous.LocalReports)
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
	last, err := l.Last(t.Context(), "0")
	require.NoError(t, err)
	assert.Equal(t, "closed", last[3].Text)
	for rank := range 3 {
		l.Leave("0", rank, "closed")
	}
	assert.NoError(t, l.Failed("0", 0, 100))
}

// More reports than a job has are not kept, and those of groups that are forgotten make
// room.
func TestLocalReportsAreBounded(t *testing.T) {
	l := new(rendezvous.LocalReports)
	has := func(group string) bool {
		last, err := l.Last(t.Context(), group)
		require.NoError(t, err)
		return len(last) > 0
	}
	const most = 1 << 18
	for rank := range most - 1 {
		l.Report("0", rank, "waits")
	}
	l.Report("the last", 3, "waits")
	l.Report("one more", 3, "waits")
	assert.True(t, has("the last"))
	assert.False(t, has("one more"))
	l.Leave("the last", 3, "closed")
	assert.False(t, has("the last"))
	l.Report("one more", 3, "waits")
	assert.True(t, has("one more"))
}
