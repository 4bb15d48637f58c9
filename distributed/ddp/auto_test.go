package ddp_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
)

// The buckets of a model that are alike have one choice, made before the first
// step, and a dense one is a plain allreduce.
func TestAutoBuckets(t *testing.T) {
	const ranks = 2
	var text bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	defer slog.SetDefault(before)
	b := standin.Backend(t, ranks)
	lens := []int{1000, 20_000, 20_100, 19_900}
	var patterns [ranks][]string
	require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		var params []*runtime.Tensor
		for i, n := range lens {
			p, err := runtime.FromSlice(r.Runtime, standin.Normal(n, r.Comm.Rank(), i))
			if err != nil {
				return err
			}
			defer p.Free()
			params = append(params, p)
		}
		g, err := ddp.New(ctx, r.Runtime, r.Comm, params, ddp.Config{
			BucketBytes: 4 * 20_000,
			DenseUpTo:   -1,
			Config:      sparse.Config{Pattern: sparse.Auto, Density: 0.01},
		})
		if err != nil {
			return err
		}
		defer g.Close()
		patterns[r.Comm.Rank()] = g.Patterns()
		for range 3 {
			if err := g.ReduceAll(ctx, params); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, patterns[0], patterns[1])
	require.Len(t, patterns[0], len(lens))
	assert.NotContains(t, patterns[0], sparse.Auto)
	assert.Equal(t, patterns[0][0], patterns[0][1], "alike")
	assert.Equal(t, 2, bytes.Count(text.Bytes(), []byte("chose a pattern")), "for 20,000 and for 1000")
}
