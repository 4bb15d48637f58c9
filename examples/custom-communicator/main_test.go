package main

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestConformance is all that a new backend needs to find out whether it keeps
// the contract.
func TestConformance(t *testing.T) {
	commtest.Run(t, commtest.Backend{Name: "custom", Sizes: []int{1, 3}, Run: runWorld})
}

// runWorld makes a world and calls body for each rank.
func runWorld(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
	rt := cpu.New()
	err := comm.Run(ctx, newWorld(size, rt), func(ctx context.Context, c comm.Communicator) error {
		return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
	})
	return errors.Join(err, rt.Close())
}

func TestMainProgram(t *testing.T) {
	require.NoError(t, run(t.Context(), 3))
}
