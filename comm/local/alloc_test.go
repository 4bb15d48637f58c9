package local_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// TestNoAllocations counts what both ranks of a world allocate per operation
// in the steady state: nothing.
func TestNoAllocations(t *testing.T) {
	const n = 1 << 17 // half a MiB: several chunks
	ctx := context.Background()
	m := newMemory(t)
	_, a := perRank(m, 2, 2*n, rankPlusOne)
	_, b := perRank(m, 2, 2*n, rankPlusOne)
	counts, displs := []int{n, n / 2}, []int{0, n}
	var exchange [2][]comm.Call
	both := []int{n / 2, n / 2}
	sums, _ := fixedSums(m, 2, 2, n, 100)
	for name, call := range map[string]func(c comm.Communicator, r int) error{
		"allreduce":  func(c comm.Communicator, r int) error { return c.AllReduce(a[r], b[r], n, dtype.F32, comm.Sum) },
		"small":      func(c comm.Communicator, r int) error { return c.AllReduce(a[r], b[r], 2, dtype.BF16, comm.Avg) },
		"cells":      func(c comm.Communicator, r int) error { return c.AllReduce(a[r], b[r], 60, dtype.F32, comm.Sum) },
		"broadcast":  func(c comm.Communicator, r int) error { return c.Broadcast(a[r], n, dtype.F32, 1) },
		"allgatherv": func(c comm.Communicator, r int) error { return c.AllGatherV(a[r], b[r], counts, displs, dtype.I32) },
		"alltoallv": func(c comm.Communicator, r int) error {
			return c.AllToAllV(a[r], both, displs, b[r], both, displs, dtype.I32)
		},
		"fixed":    func(c comm.Communicator, r int) error { return allReduceFixed(c, sums[r]) },
		"barrier":  func(c comm.Communicator, r int) error { return c.Barrier(ctx) },
		"exchange": func(c comm.Communicator, r int) error { return c.Group(exchange[r]...) },
	} {
		t.Run(name, func(t *testing.T) {
			comms := world(t, 2)
			for r := range exchange {
				exchange[r] = []comm.Call{
					comm.SendCall(a[r], n, dtype.F32, 1-r, 3), comm.RecvCall(b[r], n, dtype.F32, 1-r, 3)}
			}
			run := func(c comm.Communicator, times int) error {
				r := c.Rank()
				for range times {
					if err := call(c, r); err != nil {
						return err
					}
					if err := c.Sync(ctx); err != nil {
						return err
					}
				}
				return nil
			}
			const times = 200
			rounds := make(chan struct{})
			failed := make(chan error, 1)
			go func() {
				for range rounds {
					if err := run(comms[1], times); err != nil {
						failed <- err
						return
					}
				}
				failed <- nil
			}()
			// Of 200 operations on two ranks, no more than a stray allocation of
			// the Go runtime's own.
			allocs := testing.AllocsPerRun(3, func() {
				rounds <- struct{}{}
				assert.NoError(t, run(comms[0], times))
			})
			close(rounds)
			assert.NoError(t, <-failed)
			assert.Less(t, allocs, 10.0, fmt.Sprintf("per %d operations", times))
		})
	}
}
