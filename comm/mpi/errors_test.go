package mpi

import (
	"io/fs"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

// TestSentinels translates the classes of every implementation on the machine, by the names of its mpi.h.
func TestSentinels(t *testing.T) {
	other := map[string]error{
		"TRUNCATE": comm.ErrMismatch,
		"NO_MEM":   comm.ErrExhausted, "NO_SPACE": comm.ErrExhausted, "QUOTA": comm.ErrExhausted,
		"ACCESS": fs.ErrPermission, "READ_ONLY": fs.ErrPermission,
		"UNSUPPORTED_OPERATION": comm.ErrUnsupported,
		"OTHER":                 comm.ErrPeerFailed, "INTERN": comm.ErrPeerFailed, "UNKNOWN": comm.ErrPeerFailed,
	}
	for _, c := range []struct {
		mpicc string
		table *abi
	}{{"mpicc.openmpi", &openMPI}, {"mpicc.mpich", &mpich}} {
		t.Run(c.mpicc, func(t *testing.T) {
			if _, err := exec.LookPath(c.mpicc); err != nil {
				t.Skip("not installed")
			}
			program := filepath.Join(t.TempDir(), "classes")
			out, err := exec.Command(c.mpicc, "-w", "-o", program, "testdata/classes.c").CombinedOutput()
			require.NoError(t, err, "%s", out)
			out, err = exec.Command(program).Output()
			require.NoError(t, err)
			for line := range strings.Lines(string(out)) {
				name, number, _ := strings.Cut(strings.TrimSpace(line), " ")
				class, err := strconv.ParseInt(number, 10, 32)
				require.NoError(t, err)
				want, ok := other[name]
				if !ok {
					want = comm.ErrArgument
				}
				err = translate(&library{abi: c.table}, &callError{function: "MPI_Test", class: int32(class), text: "a text"})
				assert.ErrorIs(t, err, want, name)
				assert.ErrorContains(t, err, "MPI_Test: a text")
			}
		})
	}
}

// A library that has no room for a communicator says so in a text.
func TestSentinelOfText(t *testing.T) {
	const other = 15
	text := "Other MPI error, error stack:\ninternal_Comm_split(86): failed\nMPIR_Get_contextid(591): Too many communicators (0/2048 free)\n"
	err := translate(&library{abi: &mpich}, &callError{function: "MPI_Comm_split", class: other, text: text})
	assert.ErrorIs(t, err, comm.ErrExhausted)
	assert.NotErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "error stack:; internal_Comm_split(86): failed; MPIR_Get_contextid(591): Too", "one line")
}
