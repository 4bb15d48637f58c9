package mpi_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestPatterns runs the suite of package distributed (conservation, identical
// bits, volume) over MPI, on two ranks of one library and three of the other. With
// TUTTI_EXTENDED set both run under both.
func TestPatterns(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		sizes := map[string][]int{"openmpi": {3}, "mpich": {2}}[l.name]
		if extended {
			sizes = []int{2, 3}
		}
		for _, ranks := range sizes {
			t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
				t.Parallel()
				l.mustRun(t, job{ranks: ranks, test: "TestRankPatterns"})
			})
		}
	})
}

// TestRankPatterns is one rank of TestPatterns.
func TestRankPatterns(t *testing.T) {
	onlyChild(t)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	rt := cpu.New()
	distributedtest.Run(t, backend(world, rt))
	require.NoError(t, rt.Close())
	require.NoError(t, mpi.Finalize(context.Background()))
}
