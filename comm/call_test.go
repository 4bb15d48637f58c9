package comm_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
)

// Addresses are only compared, so any will do: far apart.
const (
	bufA = uintptr(0x10000)
	bufB = uintptr(0x90000)
)

// calls has one of each operation, with all its fields set.
var calls = []struct {
	call comm.Call
	text string
}{
	{comm.AllReduceCall(bufA, bufB, 4, dtype.F32, comm.Max), "allreduce of 4 f32, max"},
	{comm.BroadcastCall(bufA, 4, dtype.I8, 2), "broadcast of 4 i8, root 2"},
	{comm.ReduceCall(bufA, bufB, 4, dtype.F16, comm.Avg, 1), "reduce of 4 f16, avg, root 1"},
	{comm.AllGatherCall(bufA, bufB, 4, dtype.F32), "allgather of 4 f32"},
	{comm.AllGatherVCall(bufA, bufB, []int{1, 2, 3}, []int{0, 1, 3}, dtype.U8), "allgatherv of u8"},
	{comm.ReduceScatterCall(bufA, bufB, 4, dtype.F64, comm.Min), "reducescatter of 4 f64, min"},
	{comm.AllToAllCall(bufA, bufB, 4, dtype.F32), "alltoall of 4 f32"},
	{comm.AllToAllVCall(bufA, []int{1, 2, 3}, []int{0, 1, 3}, bufB, []int{1, 2, 1}, []int{0, 1, 3}, dtype.I64), "alltoallv of i64"},
	{comm.GatherCall(bufA, bufB, 4, dtype.F32, 1), "gather of 4 f32, root 1"},
	{comm.ScatterCall(bufA, bufB, 4, dtype.F32, 2), "scatter of 4 f32, root 2"},
	{comm.SendCall(bufA, 4, dtype.F32, 2, 7), "send of 4 f32 to rank 2, tag 7"},
	{comm.RecvCall(bufA, 4, dtype.F32, 0, 9), "recv of 4 f32 from rank 0, tag 9"},
}

// A call made through the methods of a communicator arrives as it was.
func TestMakeIsTheMethod(t *testing.T) {
	var got comm.Call
	c := struct {
		comm.Methods
		comm.Wrapped
	}{comm.Methods{Do: func(c comm.Call) error { got = c; return nil }}, comm.Wrapped{}}
	seen := map[comm.Op]bool{}
	for _, test := range calls {
		require.NoError(t, test.call.Make(c))
		assert.Equal(t, test.call, got)
		assert.Equal(t, test.text, test.call.String())
		assert.True(t, test.call.Op.MovesData())
		seen[test.call.Op] = true
	}
	for op := range comm.OpSync {
		assert.True(t, seen[op], "no test calls %v", op)
	}
	for _, op := range []comm.Op{comm.OpSync, comm.OpBarrier, comm.OpSplit, 200} {
		assert.False(t, op.MovesData())
		assert.ErrorIs(t, comm.Call{Op: op}.Make(c), comm.ErrArgument)
	}
}

// A limit ends a wait whose context does not, also on a sub-communicator.
func TestLimit(t *testing.T) {
	cause := errors.New("the flag says so")
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	for name, wait := range map[string]func(ctx context.Context, c comm.Communicator) error{
		"sync": func(ctx context.Context, c comm.Communicator) error {
			return errors.Join(c.Recv(buf, 1, dtype.F32, 0, 0), c.Sync(ctx))
		},
		"barrier": func(ctx context.Context, c comm.Communicator) error {
			return errors.Join(c.Recv(buf, 1, dtype.F32, 0, 0), c.Barrier(ctx))
		},
	} {
		t.Run(name, func(t *testing.T) {
			limited := comm.Limit(noop.New(rt), time.Millisecond, cause)
			child, err := limited.Split(t.Context(), 0, 0)
			require.NoError(t, err)
			for _, c := range []comm.Communicator{limited, child} {
				err := wait(t.Context(), c)
				assert.ErrorIs(t, err, comm.ErrTimeout)
				assert.ErrorIs(t, err, cause)
				require.NoError(t, c.Close())
			}
		})
	}
	none := comm.Limit(noop.New(rt), 0, nil)
	assert.NoError(t, none.Sync(t.Context()))
	require.NoError(t, none.Close())
}

// plain hides what a communicator can do beyond its methods.
type plain struct{ comm.Communicator }

// Run tells the other ranks of one that failed, whether their communicators know
// how to or not.
func TestRun(t *testing.T) {
	mine := errors.New("rank 1 has a problem")
	for name, hide := range map[string]bool{"ender": false, "plain": true} {
		for how, fail := range map[string]func() error{
			"error": func() error { return mine },
			"panic": func() error { panic(mine) },
		} {
			t.Run(name+"/"+how, func(t *testing.T) {
				comms, err := local.New(3)
				require.NoError(t, err)
				if hide {
					for i := range comms {
						comms[i] = plain{comms[i]}
					}
				}
				waits := make([]error, 3)
				err = comm.Run(t.Context(), comms, func(ctx context.Context, c comm.Communicator) error {
					if c.Rank() == 1 {
						return fail()
					}
					waits[c.Rank()] = c.Barrier(ctx)
					return waits[c.Rank()]
				})
				assert.ErrorIs(t, err, mine)
				var p *comm.PanicError
				assert.Equal(t, how == "panic", errors.As(err, &p))
				for _, r := range []int{0, 2} {
					assert.ErrorIs(t, waits[r], comm.ErrPeerFailed, "rank %d", r)
					assert.ErrorIs(t, comms[r].Sync(t.Context()), comm.ErrClosed)
				}
			})
		}
	}
}

// Memory for communication comes from the runtime where a communicator has none
// of its own.
func TestAllocate(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	c := metered.New(noop.New(rt))
	defer c.Close()
	b, err := comm.Allocate(t.Context(), c, rt, 100)
	require.NoError(t, err)
	assert.Equal(t, int64(1), rt.Stats().LiveBlocks)
	require.NoError(t, c.AllReduce(b.Ptr, b.Ptr, 25, dtype.F32, comm.Sum))
	require.NoError(t, b.Free(t.Context()))
	require.NoError(t, b.Free(t.Context()))
	assert.Zero(t, rt.Stats().LiveBlocks)
}
