package local_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/internal/dump"
	device "github.com/tutti-go/tutti/runtime"
)

// TestRun checks what becomes of ranks that fail, in the world and in one that
// was split from it.
func TestRun(t *testing.T) {
	for name, tc := range map[string]struct {
		fail func() error
		want error
		says string
	}{
		"error":  {func() error { return errTest }, errTest, "test"},
		"panic":  {func() error { panic(errTest) }, errTest, "run_test.go"},
		"goexit": {func() error { runtime.Goexit(); return nil }, nil, "rank 1: the goroutine ended"},
	} {
		for _, inChild := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/split=%v", name, inChild), func(t *testing.T) {
				var seen [3]error
				err := local.Run(within(t), 3, func(ctx context.Context, c comm.Communicator) error {
					r := c.Rank()
					if inChild {
						var err error
						if c, err = c.Split(ctx, 0, 0); err != nil {
							return err
						}
					}
					if r == 1 {
						return tc.fail()
					}
					seen[r] = c.Barrier(ctx)
					return seen[r]
				})
				require.ErrorContains(t, err, tc.says)
				for _, r := range []int{0, 2} {
					require.ErrorIs(t, seen[r], comm.ErrPeerFailed, "rank %d", r)
					require.ErrorIs(t, err, seen[r])
					assert.NotContains(t, seen[r].Error(), "run_test.go", "rank %d has another rank's stack", r)
					if tc.want != nil {
						require.ErrorIs(t, seen[r], tc.want)
					}
				}
				if name != "error" {
					var p *comm.PanicError
					require.ErrorAs(t, err, &p)
					assert.Equal(t, 1, p.Rank)
				}
			})
		}
	}
}

// TestRunCloses checks that nothing of a world outlives Run.
func TestRunCloses(t *testing.T) {
	var kept []comm.Communicator
	require.NoError(t, local.Run(within(t), 1, func(ctx context.Context, c comm.Communicator) error {
		for range 3 {
			kept = append(kept, c)
			child, err := c.Split(ctx, 0, 0)
			if err != nil {
				return err
			}
			c = child
		}
		kept = append(kept, c)
		return kept[1].Close() // what was split from it goes on
	}))
	for _, c := range kept {
		require.ErrorIs(t, c.Sync(context.Background()), comm.ErrClosed)
	}
}

func TestNewChecksSize(t *testing.T) {
	for _, n := range []int{0, -1} {
		_, err := local.New(n)
		require.ErrorIs(t, err, comm.ErrArgument)
		require.ErrorIs(t, local.Run(t.Context(), n, nil), comm.ErrArgument)
	}
}

func TestCheckDevice(t *testing.T) {
	c, ok := comm.As[backend.MemoryChecker](world(t, 1)[0])
	require.True(t, ok)
	require.NoError(t, c.CheckDevice(device.Device{Kind: device.CPU}))
	err := c.CheckDevice(device.Device{Kind: device.CUDA, Index: 3})
	require.ErrorIs(t, err, comm.ErrDevice)
	require.ErrorContains(t, err, "cuda:3")
	require.ErrorContains(t, err, "comm/nccl")
}

// The ranks of a world have a name in flight records that no other world has, even in this process, and do not change
// the process's name.
func TestWorldsAreNamed(t *testing.T) {
	const process = "agreed on with other processes"
	dump.Agree(process)
	name := func(c comm.Communicator) string {
		world, ok := comm.As[interface{ RunName() string }](c)
		require.True(t, ok)
		return world.RunName()
	}
	names := map[string]bool{}
	for range 3 {
		worlds := world(t, 2)
		first := name(worlds[0])
		assert.Equal(t, first, name(worlds[1]))
		names[first] = true
		var ran string
		require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
			ran = name(c)
			child, err := c.Split(ctx, 0, 0)
			if err != nil {
				return err
			}
			assert.Equal(t, ran, name(child))
			return child.Close()
		}))
		names[ran] = true
	}
	assert.Len(t, names, 6)
	assert.NotContains(t, names, "")
	assert.Equal(t, process, dump.RunName(func(string) string { return "" }))
}
