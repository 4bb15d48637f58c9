package local_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
)

// TestNestedSplits builds a 4 × 3 mesh out of 13 ranks (one is left over), and
// splits its rows again, reversed.
func TestNestedSplits(t *testing.T) {
	m := newMemory(t)
	_, addr := perRank(m, 13, 1, func(r, _ int) int32 { return int32(r) })
	sums, sumAt := perRank(m, 13, 1, constant(-1))
	require.NoError(t, local.Run(within(t), 13, func(ctx context.Context, c comm.Communicator) error {
		r := c.Rank()
		color := r / 3
		if r == 12 {
			color = -1
		}
		row, err := c.Split(ctx, color, 0)
		if err != nil {
			return err
		}
		if r == 12 {
			if row != nil {
				return fmt.Errorf("a negative color got %v", row)
			}
			return nil
		}
		if row.Rank() != r%3 || row.WorldSize() != 3 {
			return fmt.Errorf("rank %d is %d of %d", r, row.Rank(), row.WorldSize())
		}
		reversed, err := row.Split(ctx, 5, -r)
		if err != nil {
			return err
		}
		if reversed.Rank() != 2-r%3 {
			return fmt.Errorf("rank %d is %d in reverse", r, reversed.Rank())
		}
		if err := row.Close(); err != nil { // the child does not need it
			return err
		}
		if err := reversed.AllReduce(addr[r], sumAt[r], 1, dtype.I32, comm.Sum); err != nil {
			return err
		}
		return reversed.Sync(ctx)
	}))
	for r := range 12 {
		require.Equal(t, int32(9*(r/3)+3), sums[r][0], "rank %d", r)
	}
	require.Equal(t, int32(-1), sums[12][0])
}

// TestWorldsAreIndependent aborts one part of a world; the other goes on.
func TestWorldsAreIndependent(t *testing.T) {
	require.NoError(t, local.Run(within(t), 4, func(ctx context.Context, c comm.Communicator) error {
		part, err := c.Split(ctx, c.Rank()%2, 0)
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			if err := part.Close(); err != nil {
				return err
			}
		} else if err := part.Barrier(ctx); (err != nil) != (c.Rank() == 2) {
			return fmt.Errorf("rank %d: %w", c.Rank(), err)
		}
		return c.Barrier(ctx)
	}))
}
