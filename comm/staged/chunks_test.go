package staged_test

import (
	"context"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestLongCalls: calls that are done in chunks give the bits of the same calls without a device.
func TestLongCalls(t *testing.T) {
	const n, ranks, root = 1<<13 + 7, 3, 1
	staged.ShortChunks(t, 8<<13)
	calls := map[string]func(c comm.Communicator, send, recv uintptr) error{
		"allreduce": func(c comm.Communicator, send, recv uintptr) error {
			return c.AllReduce(send, recv, n, dtype.F64, comm.Sum)
		},
		"allreduce in place": func(c comm.Communicator, _, recv uintptr) error {
			return c.AllReduce(recv, recv, n, dtype.F64, comm.Sum)
		},
		"reduce": func(c comm.Communicator, send, recv uintptr) error {
			return c.Reduce(send, recv, n, dtype.F64, comm.Sum, root)
		},
		"broadcast": func(c comm.Communicator, _, recv uintptr) error {
			return c.Broadcast(recv, n, dtype.F64, root)
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			host := cpu.New()
			device := &pinning{apart: apart{cpu.New()}, bytes: map[uintptr]int{}}
			results := func(world []comm.Communicator) [][]float64 {
				all := make([][]float64, ranks)
				require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
					send := make([]float64, n)
					recv := make([]float64, n)
					for i := range send {
						send[i] = float64(i*(c.Rank()+3)%1009) / 7
						recv[i] = float64(i*(c.Rank()+5)%2003) / 11
					}
					if err := call(c, hostmem.Addr(send), hostmem.Addr(recv)); err != nil {
						return err
					}
					all[c.Rank()] = recv
					err := c.Sync(ctx)
					runtime.KeepAlive(send)
					return err
				}))
				return all
			}
			plain, err := local.New(ranks)
			require.NoError(t, err)
			world, err := local.New(ranks)
			require.NoError(t, err)
			for i, c := range world {
				world[i], err = staged.New(c, device, host)
				require.NoError(t, err)
			}
			want, got := results(plain), results(world)
			for rank := range want {
				assert.True(t, slices.Equal(want[rank], got[rank]), "rank %d", rank)
			}
			assert.Empty(t, device.bytes, "pinned memory is left")
			require.NoError(t, host.Close())
			require.NoError(t, device.Runtime.Close())
		})
	}
}

// TestLongCallsDisagree: ranks whose numbers of elements differ find it out, also where chunks are as long as a call.
func TestLongCallsDisagree(t *testing.T) {
	const n = 1 << 13
	staged.ShortChunks(t, 8*n)
	for _, other := range []int{n / 4, n + 1, n + 4} {
		host := cpu.New()
		device := apart{cpu.New()}
		world, err := local.New(2)
		require.NoError(t, err)
		for i, c := range world {
			world[i], err = staged.New(c, device, host)
			require.NoError(t, err)
		}
		err = comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
			count := n
			if c.Rank() == 1 {
				count = other
			}
			x := make([]float64, count)
			if err := c.AllReduce(hostmem.Addr(x), hostmem.Addr(x), count, dtype.F64, comm.Sum); err != nil {
				return err
			}
			err := c.Sync(ctx)
			runtime.KeepAlive(x)
			return err
		})
		assert.ErrorIs(t, err, comm.ErrMismatch, "%d and %d elements", n, other)
		require.NoError(t, host.Close())
		require.NoError(t, device.Runtime.Close())
	}
}
