package comm_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A communicator that was split off a staged one outlives it, as others do.
func TestStagedChildOutlivesParent(t *testing.T) {
	host, device := cpu.New(), apart{cpu.New()}
	world, err := local.New(2)
	assert.NoError(t, err)
	for i, c := range world {
		world[i], err = comm.NewStaged(c, device, host)
		assert.NoError(t, err)
	}
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
	assert.NoError(t, host.Close())
	assert.NoError(t, device.Runtime.Close())
}
