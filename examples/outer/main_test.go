package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/distributed/outer"
)

// TestExchanges checks that entries of two bits, exchanged in a tenth of the steps, learn as much as dense averages
// in each step, with less than a hundredth of their bytes.
func TestExchanges(t *testing.T) {
	run := func(cfg outer.Config) (s outer.Stats, read float64) {
		world := tutti.Config{Backend: tutti.Local}
		require.NoError(t, world.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
			mine, share, err := train(ctx, r, cfg)
			if r.Comm.Rank() == 0 {
				s, read = mine, share
			}
			return err
		}))
		return s, read
	}
	often, most := run(outer.Config{Every: 1})
	cfg := outer.Config{Every: 11}
	cfg.Reduce.Pattern, cfg.Reduce.Values, cfg.Reduce.Density = "chunked", "i2", 0.05
	rarely, read := run(cfg)
	assert.Equal(t, often.Steps/11, rarely.Rounds)
	assert.Greater(t, read, most-0.02)
	assert.Less(t, 100*rarely.SentBytes, often.SentBytes)
}
