package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
)

func TestConformance(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	commtest.Run(t, commtest.Backend{
		Name:  "local",
		Sizes: []int{2},
		Run: hosttest.Decorated(local.Run, rt, func(ctx context.Context, c comm.Communicator) (comm.Communicator, error) {
			return metered.New(c), nil
		}),
	})
}

func TestCountsByTheRule(t *testing.T) {
	const ranks, n, root = 3, 10, 1
	counts, displs := []int{4, 0, 5}, []int{0, 4, 4}
	toAll := []int{1, 2, 3} // to rank 0, 1, 2 from everybody
	rt := hosttest.NewRuntime(t)
	for name, test := range map[string]struct {
		call func(c comm.Communicator, send, recv uintptr) error
		want [ranks]int64 // elements by rank
	}{
		"allreduce":     {func(c comm.Communicator, s, r uintptr) error { return c.AllReduce(s, r, n, dtype.F64, comm.Sum) }, [3]int64{13, 13, 13}},
		"reducescatter": {func(c comm.Communicator, s, r uintptr) error { return c.ReduceScatter(s, r, n, dtype.F64, comm.Sum) }, [3]int64{20, 20, 20}},
		"allgather":     {func(c comm.Communicator, s, r uintptr) error { return c.AllGather(s, r, n, dtype.F64) }, [3]int64{20, 20, 20}},
		"allgatherv":    {func(c comm.Communicator, s, r uintptr) error { return c.AllGatherV(s, r, counts, displs, dtype.F64) }, [3]int64{5, 9, 4}},
		"alltoall":      {func(c comm.Communicator, s, r uintptr) error { return c.AllToAll(s, r, n, dtype.F64) }, [3]int64{20, 20, 20}},
		"alltoallv": {func(c comm.Communicator, s, r uintptr) error {
			mine := toAll[c.Rank()]
			return c.AllToAllV(s, toAll, []int{0, 3, 6}, r, []int{mine, mine, mine}, []int{0, 3, 6}, dtype.F64)
		}, [3]int64{5, 4, 3}},
		"broadcast": {func(c comm.Communicator, s, _ uintptr) error { return c.Broadcast(s, n, dtype.F64, root) }, [3]int64{10, 0, 10}},
		"reduce":    {func(c comm.Communicator, s, r uintptr) error { return c.Reduce(s, r, n, dtype.F64, comm.Sum, root) }, [3]int64{10, 0, 10}},
		"gather":    {func(c comm.Communicator, s, r uintptr) error { return c.Gather(s, r, n, dtype.F64, root) }, [3]int64{10, 0, 10}},
		"scatter":   {func(c comm.Communicator, s, r uintptr) error { return c.Scatter(s, r, n, dtype.F64, root) }, [3]int64{0, 20, 0}},
		"send": {func(c comm.Communicator, s, r uintptr) error {
			// To oneself, and from 0 to 2.
			calls := []comm.Call{comm.SendCall(s, 7, dtype.F64, c.Rank(), 1), comm.RecvCall(r, 7, dtype.F64, c.Rank(), 1)}
			switch c.Rank() {
			case 0:
				calls = append(calls, comm.SendCall(s, n, dtype.F64, 2, 2))
			case 2:
				calls = append(calls, comm.RecvCall(r+512, n, dtype.F64, 0, 2))
			}
			return c.Group(calls...)
		}, [3]int64{10, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			send, recv := make([]uintptr, ranks), make([]uintptr, ranks)
			for r := range ranks {
				send[r], recv[r] = hosttest.Allocate(t, rt, 1024), hosttest.Allocate(t, rt, 1024)
			}
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				r := c.Rank()
				m := metered.New(c)
				if err := test.call(m, send[r], recv[r]); err != nil {
					return err
				}
				if err := m.Sync(ctx); err != nil {
					return err
				}
				total := m.Totals()
				assert.Equal(t, test.want[r], total.SentElements, "rank %d", r)
				assert.Equal(t, 8*test.want[r], total.SentBytes, "rank %d", r)
				assert.Equal(t, test.want[r], m.Totals(named(name)).SentElements, "rank %d", r)
				assert.Equal(t, int64(1), m.Totals(comm.OpSync).Calls)
				return nil
			}))
		})
	}
}

func named(name string) (op comm.Op) {
	for op.String() != name {
		op++
	}
	return op
}

func TestCountsCallsAndTime(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	m := metered.New(noop.New(rt))
	require.NoError(t, m.AllReduce(buf, buf, 4, dtype.F32, comm.Sum))
	require.NoError(t, m.AllReduce(buf, buf, 4, dtype.F32, comm.Sum))
	require.Error(t, m.AllReduce(buf, buf, -4, dtype.F32, comm.Sum))
	require.NoError(t, m.Barrier(t.Context()))
	assert.Equal(t, int64(3), m.Totals().Calls, "a failed call does not count")
	assert.Equal(t, int64(2), m.Totals(comm.OpAllReduce).Calls)
	assert.Positive(t, m.Totals().Time)
	assert.Less(t, m.Totals().Time, time.Minute)
	assert.Equal(t, metered.Traffic{}, m.Totals(comm.OpSend))
}

func TestCountsItsSplits(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	require.NoError(t, local.Run(t.Context(), 4, func(ctx context.Context, c comm.Communicator) error {
		m := metered.New(c)
		half, err := m.Split(ctx, c.Rank()%2, 0)
		if err != nil {
			return err
		}
		none, err := m.Split(ctx, -1, 0)
		if err != nil {
			return err
		}
		assert.Nil(t, none)
		quarter, err := half.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		buf, err := rt.Allocate(64)
		if err != nil {
			return err
		}
		for _, c := range []comm.Communicator{m, half, quarter} {
			if err := c.Broadcast(buf, 3, dtype.I16, 0); err != nil {
				return err
			}
			if err := c.Sync(ctx); err != nil {
				return err
			}
		}
		in := func(c comm.Communicator) int64 { return c.(*metered.Communicator).Totals(comm.OpBroadcast).Calls }
		assert.Equal(t, []int64{3, 2, 1}, []int64{in(m), in(half), in(quarter)})
		return rt.Deallocate(buf)
	}))
}

func TestDoesNotAllocate(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	m := metered.New(noop.New(rt))
	counts, displs := []int{4}, []int{0}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_ = m.AllReduce(buf, buf, 4, dtype.F32, comm.Sum)
		_ = m.AllGatherV(buf, buf, counts, displs, dtype.F32)
		_ = m.Sync(context.Background())
		_ = m.Totals()
	}))
}
