package nccl_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
)

// Run closes the GPUs that it opens, whether a body succeeds or fails, and so does New if the ranks cannot connect.
// What a body that failed has not freed is not in its error.
func TestStandInRunClosesGPUs(t *testing.T) {
	s, _ := openStandIns(t)
	open := func() int32 { return s.driver.Alive.Int(0) } // contexts
	before := open()
	ctx := t.Context()
	require.NoError(t, nccl.Run(ctx, 0, func(ctx context.Context, c *nccl.Comm) error {
		assert.Greater(t, open(), before)
		return c.Barrier(ctx)
	}))
	assert.Equal(t, before, open())

	failure := errors.New("no disk space")
	err := nccl.Run(ctx, 1, func(_ context.Context, c *nccl.Comm) error {
		_, err := c.Runtime().Allocate(64)
		return errors.Join(err, failure)
	})
	assert.EqualError(t, err, "rank 0: no disk space")
	assert.Equal(t, before, open())

	_, err = nccl.New(ctx, 2)
	assert.ErrorIs(t, err, comm.ErrUnavailable)
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	_, err = nccl.New(canceled, 1)
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.Equal(t, before, open())
}
