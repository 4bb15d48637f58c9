package mpi

import (
	"encoding/binary"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/reductions"
)

// named returns the numbers of a table under the names of mpi.h. Handles that
// are addresses of variables are left out.
func (a *abi) named() map[string]int64 {
	numbers := map[string]int64{
		"sizeof(MPI_Request)":             int64(a.handleSize),
		"sizeof(MPI_Status)":              int64(a.statusSize),
		"offsetof(MPI_Status, MPI_ERROR)": int64(a.statusError),
		"MPI_TAG_UB":                      int64(a.tagUB),
		"MPI_UNDEFINED":                   int64(a.undefined),
		"MPI_IN_PLACE":                    int64(a.inPlace),
		"MPI_THREAD_SERIALIZED":           int64(a.threadSerialized),
		"MPI_THREAD_MULTIPLE":             int64(a.threadMultiple),
		"MPI_ERR_IN_STATUS":               int64(a.errInStatus),
		"MPI_ERR_PENDING":                 int64(a.errPending),
	}
	handles := map[string]constant{
		"MPI_COMM_WORLD": a.world, "MPI_ERRORS_RETURN": a.errorsReturn, "MPI_BYTE": a.bytes,
		"MPI_DOUBLE": a.types[dtype.F64], "MPI_FLOAT": a.types[dtype.F32],
		"MPI_INT64_T": a.types[dtype.I64], "MPI_INT32_T": a.types[dtype.I32],
		"MPI_INT16_T": a.types[dtype.I16], "MPI_INT8_T": a.types[dtype.I8],
		"MPI_UINT64_T": a.types[dtype.U64], "MPI_UINT32_T": a.types[dtype.U32],
		"MPI_UINT16_T": a.types[dtype.U16], "MPI_UINT8_T": a.types[dtype.U8],
		"MPI_C_BOOL": a.types[dtype.Bool],
		"MPI_SUM":    a.ops[reductions.Sum], "MPI_PROD": a.ops[reductions.Prod],
		"MPI_MIN": a.ops[reductions.Min], "MPI_MAX": a.ops[reductions.Max],
		"MPI_LOR": a.or, "MPI_LAND": a.and,
	}
	for name, c := range handles {
		if c.symbol == "" {
			numbers[name] = int64(c.value)
		}
	}
	return numbers
}

// TestConstantsOfHeaders compares the tables with the mpi.h of every
// implementation on the machine.
func TestConstantsOfHeaders(t *testing.T) {
	for _, c := range []struct {
		mpicc string
		table *abi
	}{{"mpicc.openmpi", &openMPI}, {"mpicc.mpich", &mpich}} {
		t.Run(c.mpicc, func(t *testing.T) {
			if _, err := exec.LookPath(c.mpicc); err != nil {
				t.Skip("not installed")
			}
			program := filepath.Join(t.TempDir(), "constants")
			out, err := exec.Command(c.mpicc, "-w", "-o", program, "testdata/constants.c").CombinedOutput()
			require.NoError(t, err, "%s", out)
			out, err = exec.Command(program).Output()
			require.NoError(t, err)
			header := map[string]int64{}
			for line := range strings.Lines(string(out)) {
				at := strings.LastIndex(line, " ")
				value, err := strconv.ParseInt(strings.TrimSpace(line[at:]), 10, 64)
				require.NoError(t, err)
				header[line[:at]] = value
			}
			assert.Equal(t, header, c.table.named())
		})
	}
}

// TestConstantsOfStandard compares the table of the MPI-5 ABI with the values
// that the standard gives (MPI 5.0, chapter "Application Binary Interface" and
// appendix "Language Bindings Summary"), written down a second time.
func TestConstantsOfStandard(t *testing.T) {
	assert.Equal(t, map[string]int64{
		"sizeof(MPI_Request)": 8, "sizeof(MPI_Status)": 32, "offsetof(MPI_Status, MPI_ERROR)": 8,
		"MPI_TAG_UB": 501, "MPI_UNDEFINED": -32766, "MPI_IN_PLACE": 1,
		"MPI_THREAD_SERIALIZED": 2048, "MPI_THREAD_MULTIPLE": 4096,
		"MPI_ERR_IN_STATUS": 19, "MPI_ERR_PENDING": 18,
		"MPI_COMM_WORLD": 0x101, "MPI_ERRORS_RETURN": 0x142, "MPI_BYTE": 0x247,
		"MPI_DOUBLE": 0x214, "MPI_FLOAT": 0x210,
		"MPI_INT64_T": 0x258, "MPI_INT32_T": 0x250, "MPI_INT16_T": 0x248, "MPI_INT8_T": 0x240,
		"MPI_UINT64_T": 0x259, "MPI_UINT32_T": 0x251, "MPI_UINT16_T": 0x249, "MPI_UINT8_T": 0x241,
		"MPI_C_BOOL": 0x238,
		"MPI_SUM":    0x21, "MPI_MIN": 0x22, "MPI_MAX": 0x23, "MPI_PROD": 0x24,
		"MPI_LAND": 0x30, "MPI_LOR": 0x31,
	}, standard.named())
	// The standard builds the code of a fixed-size type from its size: bits 3
	// to 5 are the logarithm of the number of bytes.
	for _, dt := range []dtype.DType{dtype.I8, dtype.I16, dtype.I32, dtype.I64, dtype.U8, dtype.U16, dtype.U32, dtype.U64} {
		code := standard.types[dt].value
		assert.Equal(t, dt.Size(), 1<<(code>>3&7), "size in handle %#x", code)
	}
}

func TestReceivedBytes(t *testing.T) {
	const bytes = 5<<32 + 77
	status := make([]byte, 32)
	binary.NativeEndian.PutUint64(status[16:], bytes)
	assert.EqualValues(t, bytes, openMPI.received(status))

	binary.NativeEndian.PutUint32(status, 77)
	binary.NativeEndian.PutUint32(status[4:], 5<<1|1) // and canceled
	assert.EqualValues(t, bytes, mpich.received(status))
}

func TestEveryTypeHasItsSize(t *testing.T) {
	h, err := standard.resolve(nil) // whose handles are numbers
	require.NoError(t, err)
	sizes := map[uintptr]int{
		0x214: 8, 0x210: 4, 0x258: 8, 0x250: 4, 0x248: 2, 0x240: 1,
		0x259: 8, 0x251: 4, 0x249: 2, 0x241: 1, 0x238: 1,
	}
	for _, dt := range dtype.All() {
		assert.Equal(t, dt.Size(), sizes[h.types[dt]], "%v", dt)
	}
}

func TestCandidates(t *testing.T) {
	variables := func(pairs ...string) func(string) string {
		return func(name string) string {
			for i := 0; i < len(pairs); i += 2 {
				if pairs[i] == name {
					return pairs[i+1]
				}
			}
			return ""
		}
	}
	for name, c := range map[string]struct {
		env   func(string) string
		first string
		size  int
	}{
		"no launcher":      {variables(), "libmpi.so.40", 1},
		"Open MPI":         {variables("OMPI_COMM_WORLD_SIZE", "4"), "libmpi.so.40", 4},
		"Hydra":            {variables("PMI_RANK", "0", "PMI_SIZE", "3"), "libmpich.so.12", 3},
		"MVAPICH":          {variables("MV2_COMM_WORLD_SIZE", "2"), "libmpich.so.12", 2},
		"PMIx alone":       {variables("PMIX_RANK", "0"), "libmpi_abi.so.0", 1},
		"Open MPI's PMIx":  {variables("PMIX_RANK", "0", "OMPI_COMM_WORLD_SIZE", "2"), "libmpi.so.40", 2},
		"the user decides": {variables("OMPI_COMM_WORLD_SIZE", "2", env.MPILibrary, "/opt/libmpi.so"), "/opt/libmpi.so", 2},
	} {
		got := candidates(c.env)
		assert.Equal(t, c.first, got[0], name)
		assert.Equal(t, c.size, launchedSize(c.env), name)
		if c.env(env.MPILibrary) != "" {
			assert.Len(t, got, 1, "%s: nothing else is tried", name)
		} else {
			assert.Contains(t, got, "libmpi.so", name)
			assert.Contains(t, got, "libmpi_abi.so.0", name)
		}
	}
}
