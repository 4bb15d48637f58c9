package mpi_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/internal/env"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestConformance runs the contract's suite in jobs of two and three processes, under one MPI library each: over
// shared memory the job of three, whose schedules differ, and through MPI the job of two. With TUTTI_EXTENDED set
// there are jobs of four and five as well, and all run under all libraries.
func TestConformance(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		through, sizes := map[string]int{"mpich": 2}[l.name], map[string][]int{"openmpi": {3}}[l.name]
		if extended {
			through, sizes = 3, []int{1, 2, 3, 4, 5}
		}
		if through > 0 {
			t.Run("through MPI", func(t *testing.T) {
				t.Parallel()
				l.mustRun(t, job{ranks: through, test: "TestRankConformance", env: withoutSharing})
			})
		}
		for _, ranks := range sizes {
			t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
				t.Parallel()
				l.mustRun(t, job{ranks: ranks, test: "TestRankConformance"})
			})
		}
	})
}

// TestRankConformance is one rank of TestConformance.
func TestRankConformance(t *testing.T) {
	onlyChild(t)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	rt := cpu.New()
	commtest.Run(t, backend(world, rt), commtest.Timeout(90*time.Second))
	require.NoError(t, rt.Close())
	require.NoError(t, mpi.Finalize(context.Background()))
}

// backend is this process's part of an MPI job, for the suites.
func backend(world comm.Communicator, rt *cpu.Runtime) commtest.Backend {
	// Where processes outnumber processors, a call waits for turns of the processor, some 400 µs: all
	// calls of the suite would take half a minute.
	calls := 1000
	communicators := 48 // a Split takes several waits
	if extended {
		calls = 0
		communicators = 0
	}
	return commtest.Backend{
		Calls:         calls,
		Communicators: communicators,
		Name:          "mpi",
		Sizes:         []int{world.WorldSize()},
		Run: func(ctx context.Context, _ int, body func(context.Context, commtest.Rank) error) error {
			return body(ctx, commtest.Rank{Comm: world, Runtime: rt})
		},
		LateMismatch: true,
		NoFixedOrder: os.Getenv(env.MPICollectives) != "",
	}
}
