package ddp_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestCloseAfterPeerLeft closes a Gradients whose bucket can never be
// completed.
func TestCloseAfterPeerLeft(t *testing.T) {
	rt := cpu.New()
	left := errors.New("left")
	stepped := make(chan struct{})
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		params := standin.Gradients(t, rt, 2)
		defer standin.Free(t, params)
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{})
		if err != nil {
			return err
		}
		if err := g.ReduceAll(ctx, params); err != nil {
			return err
		}
		if c.Rank() == 1 {
			<-stepped
			return errors.Join(left, g.Close())
		}
		close(stepped)
		if err := errors.Join(g.Ready(ctx, 0, params[0]), g.Ready(ctx, 1, params[1])); err != nil {
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
		} else if err := g.Close(); err != nil { // nothing was in flight where the worker was refused
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
		}
		return errors.Join(c.Close(), g.Close())
	})
	assert.ErrorIs(t, err, left)
	assert.NoError(t, rt.Close(), "all memory is free")
}
