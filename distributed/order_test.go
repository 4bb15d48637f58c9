package distributed_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestTwoRuntimesWithoutStreams: without streams all work is done when a method
// returns, so there is nothing to order.
func TestTwoRuntimesWithoutStreams(t *testing.T) {
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		one, two := cpu.New(), cpu.New()
		dst, src := standin.Gradients(t, one, 1), standin.Gradients(t, two, 1)
		require.NoError(t, src[0].Fill(3))
		require.NoError(t, distributed.AllGather(ctx, c, dst[0], src[0]))
		values, err := runtime.ToSlice[float32](dst[0])
		require.NoError(t, err)
		assert.EqualValues(t, 3, values[99])
		standin.Free(t, dst)
		standin.Free(t, src)
		return errors.Join(one.Close(), two.Close())
	}))
}
