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
	"github.com/tutti-go/tutti/runtime/cpu"
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

// foreign hides what a communicator has beside the methods of [comm.Communicator].
type foreign struct{ comm.Communicator }

// A call arrives as it was, as a value as well as through the methods of a communicator, which alone a
// foreign one has.
func TestMakeIsTheMethod(t *testing.T) {
	var got comm.Call
	c := struct {
		comm.Methods
		comm.Wrapped
	}{comm.Methods{Do: func(c comm.Call) error { got = c; return nil }}, comm.Wrapped{}}
	seen := map[comm.Op]bool{}
	for _, test := range calls {
		for _, target := range []comm.Communicator{c, foreign{c}} {
			got = comm.Call{}
			require.NoError(t, test.call.Make(target))
			assert.Equal(t, test.call, got)
		}
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
		assert.ErrorIs(t, comm.Call{Op: op}.Make(foreign{c}), comm.ErrArgument)
	}
}

// A call goes through decorators as a value: no method but the outermost is called. Below a foreign
// communicator it goes on so.
func TestDecoratorsForwardTheValue(t *testing.T) {
	values, methods := 0, 0
	base := &callsCounted{Wrapped: comm.Wrap(noop.New(hosttest.NewRuntime(t))), methods: &methods}
	base.Methods = comm.Methods{Do: func(call comm.Call) error {
		values++
		return call.Make(base.Communicator)
	}}
	c := metered.New(metered.New(base))
	require.NoError(t, c.AllReduce(0, 0, 0, dtype.F32, comm.Sum))
	assert.Equal(t, []int{1, 0}, []int{values, methods})
	c = metered.New(foreign{metered.New(base)})
	require.NoError(t, c.AllReduce(0, 0, 0, dtype.F32, comm.Sum))
	assert.Equal(t, []int{2, 0}, []int{values, methods})
	c = metered.New(foreign{base})
	require.NoError(t, c.AllReduce(0, 0, 0, dtype.F32, comm.Sum))
	assert.Equal(t, []int{2, 1}, []int{values, methods})
	require.NoError(t, c.Close())
}

// callsCounted counts the calls of a method, which does not make one of its values.
type callsCounted struct {
	comm.Methods
	comm.Wrapped
	methods *int
}

func (c *callsCounted) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	*c.methods++
	return c.Communicator.AllReduce(send, recv, count, dt, op)
}

// A stack of decorators allocates nothing for a call, whether its communicators are foreign or not.
func TestDecoratorsAllocateNothing(t *testing.T) {
	for name, wrap := range stacks {
		c := wrap(noop.New(hosttest.NewRuntime(t)))
		allocations := testing.AllocsPerRun(100, func() {
			if err := c.AllReduce(bufA, bufA, 2, dtype.F32, comm.Sum); err != nil {
				t.Error(err)
			}
		})
		assert.Zero(t, allocations, name)
		require.NoError(t, c.Close())
	}
}

// stacks put three decorators around a communicator, by name of what calls go through.
var stacks = map[string]func(c comm.Communicator) comm.Communicator{
	"values": func(c comm.Communicator) comm.Communicator { return metered.New(metered.New(metered.New(c))) },
	"methods": func(c comm.Communicator) comm.Communicator {
		return metered.New(foreign{metered.New(foreign{metered.New(foreign{c})})})
	},
}

// BenchmarkDecorators is an allreduce of 8 bytes on one rank through three meters.
func BenchmarkDecorators(b *testing.B) {
	for _, name := range []string{"values", "methods"} {
		b.Run(name, func(b *testing.B) {
			err := local.Run(b.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
				rt := cpu.New()
				defer rt.Close() //nolint:errcheck // a benchmark
				p, err := rt.Allocate(8)
				c = stacks[name](c)
				b.ReportAllocs()
				for b.Loop() {
					err = errors.Join(err, c.AllReduce(p, p, 2, dtype.F32, comm.Sum))
				}
				return errors.Join(err, c.Sync(ctx))
			})
			require.NoError(b, err)
		})
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

// Memory for communication comes from the runtime if a communicator has none.
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
