package ddp_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestFirstBucket: the first bucket is smaller than the others.
func TestFirstBucket(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		const length = 1 << 18 // 1 MiB
		params := make([]*runtime.Tensor, 7)
		for i := range params {
			var err error
			params[i], err = runtime.New(rt, dtype.F32, length)
			require.NoError(t, err)
		}
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketBytes: 3 << 20})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{6}, {5, 4, 3}, {2, 1, 0}}, g.Buckets())
		require.NoError(t, g.Close())
		standin.Free(t, params)
		return nil
	})
}
