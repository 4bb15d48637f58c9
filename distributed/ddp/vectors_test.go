package ddp_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
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

// TestVectorsAlone: rank 0 warns where a sparse pattern has nothing to reduce, as all gradients are vectors.
func TestVectorsAlone(t *testing.T) {
	before := slog.Default()
	t.Cleanup(func() { slog.SetDefault(before) })
	topkA := sparse.Config{Pattern: sparse.TopkA, Density: 0.1}
	for name, c := range map[string]struct {
		shape []int
		cfg   ddp.Config
		warns int
	}{
		"vectors":                    {nil, ddp.Config{Config: topkA}, 1},
		"a matrix":                   {[]int{4, 8}, ddp.Config{Config: topkA}, 0},
		"vectors like other tensors": {nil, ddp.Config{Config: topkA, DenseUpTo: -1}, 0},
		"dense":                      {nil, ddp.Config{}, 0},
	} {
		var log bytes.Buffer // of a handler, which writes one record at a time
		slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, world comm.Communicator) error {
			rt := cpu.New()
			var params []*runtime.Tensor
			for _, shape := range [][]int{c.shape, nil} {
				p, err := cpu.Wrap(rt, make([]float32, 32), shape...)
				require.NoError(t, err)
				params = append(params, p)
			}
			g, err := ddp.New(ctx, rt, world, params, c.cfg)
			require.NoError(t, err)
			require.NoError(t, g.Close())
			for _, p := range params {
				require.NoError(t, p.Free())
			}
			return rt.Close()
		}))
		assert.Equal(t, c.warns, strings.Count(log.String(), "DenseUpTo"), "%s: %s", name, &log)
	}
}
