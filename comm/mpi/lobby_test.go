package mpi_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// nativeVariable lists the ranks of TestRankLobby with native collectives.
const nativeVariable = "TUTTI_MPI_TEST_NATIVE"

const lobbyRanks = 4

// TestLobby has native collectives on some ranks only, the only ones of their kind or
// neighbors.
func TestLobby(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		for _, native := range []string{"0", "3", "1 2", "0 1 3"} {
			t.Run("native="+native, func(t *testing.T) {
				t.Parallel()
				l.mustPass(t, job{ranks: lobbyRanks, test: "TestRankLobby", env: []string{nativeVariable + "=" + native}})
			})
		}
	})
}

// TestRankLobby is one of these ranks: each learns which ranks disagree, in its Init or in
// what it waits for.
func TestRankLobby(t *testing.T) {
	onlyChild(t)
	me, err := strconv.Atoi(cmp.Or(os.Getenv("OMPI_COMM_WORLD_RANK"), os.Getenv("PMI_RANK")))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), rankTimeout)
	defer cancel()
	var opts []mpi.Option
	native := strings.Fields(os.Getenv(nativeVariable))
	if slices.Contains(native, fmt.Sprint(me)) {
		opts = append(opts, mpi.WithNativeCollectives())
	}
	world, err := mpi.Init(ctx, opts...)
	if opts != nil {
		require.NoError(t, err)
		var buf uintptr
		buf, err = cpu.New().Allocate(4)
		require.NoError(t, err)
		if err = world.AllReduce(buf, buf, 1, dtype.F32, comm.Sum); err == nil {
			err = world.Sync(ctx)
		}
	}
	if assert.ErrorIs(t, err, comm.ErrMismatch) {
		assert.Regexp(t, `rank \d works with native collectives and rank \d without`, err)
		assert.ErrorContains(t, err, mpi.CollectivesVariable)
	}
	if opts == nil {
		_, err = mpi.Init(ctx)
		assert.ErrorIs(t, err, comm.ErrClosed)
		assert.NoError(t, mpi.Finalize(ctx))
	} else {
		assert.ErrorIs(t, mpi.Finalize(ctx), comm.ErrBroken)
	}
	passedAs(t, me, lobbyRanks)
}
