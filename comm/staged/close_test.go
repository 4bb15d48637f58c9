package staged_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// stagedPair returns two ranks whose communicators are staged, and the memory of what they
// take for a device. That nothing of it and of the host's is left is seen at the test's end.
func stagedPair(t *testing.T) ([]comm.Communicator, *cpu.Runtime) {
	t.Helper()
	host, memory := hosttest.NewRuntime(t), hosttest.NewRuntime(t)
	world, err := local.New(2)
	require.NoError(t, err)
	for i, c := range world {
		world[i], err = staged.New(c, apart{memory}, host)
		require.NoError(t, err)
	}
	return world, memory
}

// A sub-communicator of a staged one outlives it, as others do.
func TestStagedChildOutlivesParent(t *testing.T) {
	world, _ := stagedPair(t)
	assert.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
		child, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return err
		}
		if err := child.Barrier(ctx); err != nil {
			return err
		}
		if err := c.Close(); err != nil {
			return err
		}
		if err := child.Barrier(ctx); err != nil {
			return err
		}
		return child.Close()
	}))
}

// A sub-communicator of a staged one outlives its failure as well.
func TestStagedChildOutlivesBrokenParent(t *testing.T) {
	world, memory := stagedPair(t)
	buf := hosttest.Allocate(t, memory, 64)
	require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
		child, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			over, cancel := context.WithCancelCause(ctx)
			cancel(errors.New("changed its mind"))
			require.NoError(t, c.Recv(buf, 1, dtype.F32, 1, 1)) // which nobody sends
			assert.ErrorIs(t, c.Sync(over), comm.ErrCanceled)
		} else {
			assert.ErrorIs(t, c.Barrier(ctx), comm.ErrPeerFailed)
		}
		assert.ErrorIs(t, c.Barrier(ctx), comm.ErrBroken)
		call := comm.AllReduceCall(buf+8*uintptr(1+c.Rank()), buf+8*uintptr(3+c.Rank()), 1, dtype.F32, comm.Sum)
		return errors.Join(call.Make(child), child.Sync(ctx), child.Barrier(ctx), child.Close(), c.Close())
	}))
}
