package nccl

import (
	"testing"

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
	const waits = "waits for allreduce of 16 f32, sum (collective #2)"
	const silent = "rank 4 reported nothing"
	const late = "rank 3 reported: called broadcast of 4 f32, root 1 (collective #1) last, which is done; "
	assert.Equal(t, "ranks 1, 2 reported: "+waits+"; "+late+silent, reporters[0].others(ranks[0]))
	ranks[1].aborts(comm.ErrTimeout)
	reporters[2].remove(ranks[2], "closed its communicator")
	reporters[1].others(ranks[1])
	assert.Equal(t, "rank 1 reported: aborted: timed out; rank 2 reported: closed its communicator; "+late+silent, reporters[0].others(ranks[0]))
	for r := range ranks {
		reporters[r].remove(ranks[r], "closed its communicator")
	}
	assert.Equal(t, "ranks 1-4 reported nothing", reporters[0].others(&submissions{group: "0", size: len(ranks)}))
}
