package ddp_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestVectorsAlone: a sparse pattern that has nothing to reduce, as all gradients are vectors, is an error, unless the
// program has said what becomes of vectors.
func TestVectorsAlone(t *testing.T) {
	topkA := sparse.Config{Pattern: sparse.TopkA, Density: 0.1}
	for name, c := range map[string]struct {
		shape   []int
		cfg     ddp.Config
		refused bool
	}{
		"vectors":                    {nil, ddp.Config{Config: topkA}, true},
		"a matrix":                   {[]int{4, 8}, ddp.Config{Config: topkA}, false},
		"vectors like other tensors": {nil, ddp.Config{Config: topkA, DenseUpTo: -1}, false},
		"vectors that stay dense":    {nil, ddp.Config{Config: topkA, DenseUpTo: 100}, false},
		"dense":                      {nil, ddp.Config{}, false},
	} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, world comm.Communicator) error {
			rt := cpu.New()
			var params []*runtime.Tensor
			for _, shape := range [][]int{c.shape, nil} {
				p, err := cpu.Wrap(rt, make([]float32, 32), shape...)
				require.NoError(t, err)
				params = append(params, p)
			}
			g, err := ddp.New(ctx, rt, world, params, c.cfg)
			if c.refused {
				assert.ErrorIs(t, err, comm.ErrArgument, name)
				assert.ErrorContains(t, err, "cpu.Wrap(rt, data, rows, cols)", name)
				assert.NoError(t, world.Err(), "%s: the communicator can be used", name)
			} else {
				require.NoError(t, err, name)
				require.NoError(t, g.Close())
			}
			for _, p := range params {
				require.NoError(t, p.Free())
			}
			return rt.Close()
		}))
	}
}
