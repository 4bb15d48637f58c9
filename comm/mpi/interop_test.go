package mpi_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// compile builds a C program with the compiler wrapper of an MPI
// implementation.
func (l launcher) compile(t testing.TB, source string, flags ...string) string {
	t.Helper()
	made, err := cc.Build(t, strings.Join(l.mpicc, " "), source, "", append([]string{"-O3"}, flags...)...)
	require.NoError(t, err)
	return made
}

// TestInterop runs jobs of a C program and this test binary.
func TestInterop(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		peer := l.compile(t, "testdata/peer.c")
		l.mustRun(t, job{ranks: 2, first: peer, test: "TestRankInterop"})
	})
}

// TestRankInterop is rank 1 of a job whose rank 0 is testdata/peer.c.
func TestRankInterop(t *testing.T) {
	const n, tagToGo, tagFromGo = 1000, 11, 22
	t.Setenv(mpi.CollectivesVariable, "interop")
	r := newRank(t)
	require.Equal(t, 1, r.world.Rank())
	require.Equal(t, 2, r.world.WorldSize())

	send, _ := r.floats(n, func(i int) float32 { return float32(2 * i) })
	recv, sum := r.floats(n, func(int) float32 { return -1 })
	require.NoError(t, r.world.AllReduce(send, recv, n, dtype.F32, comm.Sum))

	numbers, err := r.rt.Allocate(8 * n)
	require.NoError(t, err)
	require.NoError(t, r.world.Recv(numbers, n, dtype.I64, 0, tagToGo))

	back, err := r.rt.Allocate(8 * n)
	require.NoError(t, err)
	for i := range n {
		hostmem.Slice[float64](back, n)[i] = float64(i) / 4
	}
	require.NoError(t, r.world.Send(back, n, dtype.F64, 0, tagFromGo))
	r.sync()
	for i := range n {
		require.Equal(t, float32(3*i), sum[i], "allreduce, element %d", i)
		require.Equal(t, int64(7*i)-1<<40, hostmem.Slice[int64](numbers, n)[i], "message, element %d", i)
	}
	assert.NoError(t, r.world.Close())
}
