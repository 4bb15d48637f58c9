package main

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestConformance is all that a new backend needs to find out whether it keeps
// the contract.
func TestConformance(t *testing.T) {
	rt := cpu.New()
	t.Cleanup(func() { require.NoError(t, rt.Close()) })
	commtest.Run(t, commtest.Backend{
		Name:  backend,
		Sizes: []int{1, 3},
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			errs := make([]error, size)
			var wg sync.WaitGroup
			for r, c := range newWorld(size) {
				wg.Go(func() {
					errs[r] = errors.Join(body(ctx, commtest.Rank{Comm: c, Runtime: rt}), c.Close())
				})
			}
			wg.Wait()
			return errors.Join(errs...)
		},
	})
}

func TestMainProgram(t *testing.T) {
	require.NoError(t, run(t.Context(), 3))
}
