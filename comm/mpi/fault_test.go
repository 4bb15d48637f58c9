//go:build unix

package mpi_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/internal/env"
)

// faultsElsewhere are the tests of faults that a rank cannot cause by its calls.
var faultsElsewhere = map[string]func(*testing.T){
	"dead": TestKilledRank, "exit": TestExitedRank, "stopped": TestStoppedRank,
	"no library": TestMissingLibrary, "another launcher": TestMixedUp,
}

// TestFaults has the matrix, and faults that are not in it. [TestNative] has the matrix with the library's collectives.
func TestFaults(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		for _, env := range l.transports() {
			l.mustRun(t, job{ranks: 3, test: "TestRankFaults|TestRankDisagreement|TestRankAborting", env: env})
		}
	})
}

func TestSoak(t *testing.T) {
	if os.Getenv(faulttest.SoakVariable) == "" {
		t.Skipf("runs with %s=1000000", faulttest.SoakVariable)
	}
	forEachMPI(t, func(t *testing.T, l launcher) {
		for _, test := range []string{"TestRankSoak", "TestRankSoakOfTrees"} {
			l.mustRun(t, job{ranks: 2, test: test, limit: 20 * time.Minute})
		}
	})
}

// TestRankSoak and TestRankSoakOfTrees are one rank of TestSoak.
func TestRankSoak(t *testing.T)        { faulttest.Soak(t, soaked(t)) }
func TestRankSoakOfTrees(t *testing.T) { faulttest.SoakTrees(t, soaked(t)) }

func soaked(t *testing.T) faulttest.Backend {
	r := newRank(t)
	f, err := faulttest.NewRank(r.world, r.rt)
	require.NoError(t, err)
	return faulttest.Backend{
		Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error { return body(ctx, f) }}
}

// TestRankFaults is one rank of TestFaults.
func TestRankFaults(t *testing.T) {
	r := newRank(t)
	f, err := faulttest.NewRank(r.world, r.rt)
	require.NoError(t, err)
	b := faulttest.Backend{Elsewhere: faultsElsewhere,
		Each: func(ctx context.Context, body func(context.Context, faulttest.Rank) error) error { return body(ctx, f) }}
	if os.Getenv(env.MPICollectives) != "" {
		// The library may find a message of another length, Open MPI without a class.
		b.Also = map[string]error{"count": comm.ErrPeerFailed}
	}
	faulttest.Run(t, "mpi", b)
}
