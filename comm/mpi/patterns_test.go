package mpi_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestPatterns runs the suite of package distributed over MPI: what is not of one pattern, and gradients that two
// patterns conserve, on three ranks of one library. [TestKilledInStep] goes through all patterns. With TUTTI_EXTENDED
// set all of it runs on two ranks and on three, under both. Coded steps have the bits of those over package local,
// whose tests say what holds for these.
func TestPatterns(t *testing.T) {
	if testing.Short() {
		t.Skip("is what the patterns do, not how ranks wait for each other")
	}
	forEachMPI(t, func(t *testing.T, l launcher) {
		sizes := map[string][]int{"openmpi": {3}}[l.name]
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
	distributedtest.Run(t, backend(world, rt), distributedtest.SameBits(func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
		return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
			return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
		})
	}), distributedtest.Cases(func(_ int, name string) bool {
		return extended || !strings.Contains(name, "/") || name == "topkA/Conservation" || name == "oktopk/Conservation"
	}))
	require.NoError(t, rt.Close())
	require.NoError(t, mpi.Finalize(context.Background()))
}
