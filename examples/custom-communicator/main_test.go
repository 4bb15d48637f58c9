package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestConformance is all that a new backend needs to find out whether it keeps
// the contract.
func TestConformance(t *testing.T) {
	rt := cpu.New()
	t.Cleanup(func() { require.NoError(t, rt.Close()) })
	commtest.Run(t, commtest.Backend{
		Name:  "custom",
		Sizes: []int{1, 3},
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return comm.Run(ctx, communicators(size, rt), func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		},
	})
}

func TestMainProgram(t *testing.T) {
	require.NoError(t, run(t.Context(), 3))
}
