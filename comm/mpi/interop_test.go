package mpi_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// compile builds a C program with the compiler wrapper of an MPI
// implementation.
func (l launcher) compile(t testing.TB, source string) string {
	t.Helper()
	mpicc, ok := l.mpiccPath()
	if !ok {
		t.Skipf("no mpicc of %s found; install its development package (libopenmpi-dev, libmpich-dev)", l.name)
	}
	program := filepath.Join(t.TempDir(), "program")
	out, err := exec.Command(mpicc, "-O3", "-o", program, source).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

// mpiccPath finds the implementation's compiler wrapper: its own name, or the
// common one if there is no other implementation to mix it up with.
func (l launcher) mpiccPath() (string, bool) {
	for _, name := range l.mpicc {
		if path, err := exec.LookPath(name); err == nil {
			return path, true
		}
	}
	return "", false
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
