package nccl_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/faulttest"
	"github.com/tutti-go/tutti/comm/nccl"
)

func TestFaults(t *testing.T) {
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
	each := func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error {
		errs := make([]error, len(ranks))
		var all sync.WaitGroup
		for i, r := range ranks {
			all.Go(func() { errs[i] = body(ctx, r) })
		}
		all.Wait()
		return errors.Join(errs...)
	}
	t.Run("nccl", func(t *testing.T) {
		faulttest.Run(t, "nccl", faulttest.Backend{Each: each, Elsewhere: map[string]func(*testing.T){
			"dead": TestAKilledRank, "no library": TestALibraryThatDoesNotServe,
		}})
	})
	t.Run("checked", func(t *testing.T) { faulttest.Run(t, faulttest.Checked, faulttest.Backend{Each: each}) })
	for i, c := range comms {
		assert.NoError(t, c.Close())
		assert.NoError(t, ranks[i].Free())
	}
}
