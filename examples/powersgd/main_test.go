package main

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestReducer is all that a reducer needs to find out whether it keeps its contract.
func TestReducer(t *testing.T) {
	world := func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
		rt := cpu.New()
		err := local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
			return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
		})
		return errors.Join(err, rt.Close())
	}
	distributedtest.RunReducer(t, commtest.Backend{Name: "local", Sizes: []int{1, 2, 3}, Run: world}, newPowerSGD)
}

func TestMainProgram(t *testing.T) {
	require.NoError(t, run(t.Context()))
}
