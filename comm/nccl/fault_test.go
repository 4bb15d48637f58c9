package nccl_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/faulttest"
	"github.com/tutti-go/tutti/comm/nccl"
)

func TestFaults(t *testing.T) {
	each := goroutinesOnGPUs(t)
	t.Run("nccl", func(t *testing.T) {
		faulttest.Run(t, "nccl", faulttest.Backend{Each: each, Elsewhere: map[string]func(*testing.T){
			"dead": TestAKilledRank, "exit": TestAnExitedRank, "stopped": TestAStoppedRank, "no library": TestALibraryThatDoesNotServe,
		}})
	})
	t.Run("checked", func(t *testing.T) { faulttest.Run(t, faulttest.Checked, faulttest.Backend{Each: each}) })
}

func TestSoak(t *testing.T) {
	if os.Getenv(faulttest.SoakVariable) == "" {
		t.Skipf("runs with %s=1000000", faulttest.SoakVariable)
	}
	faulttest.Soak(t, faulttest.Backend{Each: goroutinesOnGPUs(t)})
}

// goroutinesOnGPUs makes a world of up to three GPUs, and closes it when the test
// ends.
func goroutinesOnGPUs(t *testing.T) func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
	gpus := openGPUs(t)
	if len(gpus) < 2 {
		t.Skip("needs two GPUs")
	}
	gpus = gpus[:min(len(gpus), 3)]
	comms, err := nccl.InProcess(t.Context(), gpus)
	require.NoError(t, err)
	ranks := make([]faulttest.Rank, len(comms))
	for i, c := range comms {
		ranks[i], err = faulttest.NewRank(c, gpus[i])
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		for i, c := range comms {
			assert.NoError(t, c.Close())
			assert.NoError(t, ranks[i].Free())
		}
	})
	return func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
		errs := make([]error, len(ranks))
		var all sync.WaitGroup
		for i, r := range ranks {
			all.Go(func() { errs[i] = body(ctx, r) })
		}
		all.Wait()
		return errors.Join(errs...)
	}
}
