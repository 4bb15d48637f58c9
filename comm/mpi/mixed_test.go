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
	"github.com/tutti-go/tutti/internal/env"
)

// nativeVariable lists the ranks of TestRankMixedCollectives with native collectives.
const nativeVariable = "TUTTI_MPI_TEST_NATIVE"

const mixedRanks = 4

// TestMixedCollectives has native collectives on some ranks only. TestStandardABI has them on one.
func TestMixedCollectives(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		for _, native := range []string{"1 2", "0 1 3"} {
			l.mustPass(t, job{ranks: mixedRanks, test: "TestRankMixedCollectives", env: []string{nativeVariable + "=" + native}})
		}
	})
}

// TestRankMixedCollectives is one of these ranks: each learns in Init which ranks disagree.
func TestRankMixedCollectives(t *testing.T) {
	onlyChild(t)
	me, err := strconv.Atoi(cmp.Or(os.Getenv("OMPI_COMM_WORLD_RANK"), os.Getenv("PMI_RANK")))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), rankTimeout)
	defer cancel()
	native := strings.Fields(os.Getenv(nativeVariable))
	if slices.Contains(native, fmt.Sprint(me)) {
		t.Setenv(env.MPICollectives, "native")
	}
	without := 0
	for slices.Contains(native, fmt.Sprint(without)) {
		without++
	}
	_, err = mpi.Init(ctx)
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, fmt.Sprintf("rank %s has native collectives and rank %d has not; set %s", native[0], without, env.MPICollectives))
	_, err = mpi.Init(ctx)
	assert.ErrorIs(t, err, comm.ErrClosed)
	assert.NoError(t, mpi.Finalize(ctx))
	passedAs(t, me, mixedRanks)
}

// TestMixedVersions has a rank with another version of the library.
func TestMixedVersions(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		l.mustPass(t, job{ranks: mixedRanks, test: "TestRankMixedVersions"})
	})
}

// TestRankMixedVersions is one of these ranks: each learns in Init which versions meet.
func TestRankMixedVersions(t *testing.T) {
	onlyChild(t)
	me, err := strconv.Atoi(cmp.Or(os.Getenv("OMPI_COMM_WORLD_RANK"), os.Getenv("PMI_RANK")))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), rankTimeout)
	defer cancel()
	version := 7
	if me == 1 {
		version = 9
	}
	mpi.SetProtocol(version)
	_, err = mpi.Init(ctx)
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, fmt.Sprintf("ranks speak versions 7 to 9 of this library's messages, this one %d", version))
	assert.NoError(t, mpi.Finalize(ctx))
	passedAs(t, me, mixedRanks)
}
