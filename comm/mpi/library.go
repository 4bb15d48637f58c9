package mpi

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/env"
)

// family is a kind of MPI implementation: the file names under which its
// library is installed, and the environment variables that its launcher sets
// for the processes it starts.
type family struct {
	name      string   // as users know it
	launcher  []string // any of them set: started by this family's launcher
	size      []string // the number of processes the launcher started
	libraries []string // file names, the first one that opens is used
}

// families lists what is looked for, most specific launcher first. PMI and
// PMIx variables come from several launchers (Slurm's too), so the families
// that use them stand behind.
var families = []family{
	{
		name:      "Open MPI",
		launcher:  []string{"OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE"},
		size:      []string{"OMPI_COMM_WORLD_SIZE"},
		libraries: []string{"libmpi.so.40", "libmpi.40.dylib"},
	},
	{
		name:     "MPICH",
		launcher: []string{"PMI_RANK", "PMI_SIZE", "PMI_FD", "HYDI_CONTROL_FD", "MV2_COMM_WORLD_SIZE"},
		size:     []string{"PMI_SIZE", "MV2_COMM_WORLD_SIZE"},
		libraries: []string{
			"libmpich.so.12", "libmpi.so.12", "libmpich.so", "libmpi.12.dylib", "libmpich.12.dylib",
			"msmpi.dll", "impi.dll",
		},
	},
	{
		name:      "MPI-5 ABI",
		launcher:  []string{"PMIX_RANK", "PMIX_NAMESPACE"},
		libraries: []string{"libmpi_abi.so.0", "libmpi_abi.0.dylib", "mpi_abi.dll"},
	},
}

// lastResort is a name that any family may have.
var lastResort = []string{"libmpi.so", "libmpi.dylib"}

// candidates lists the libraries to try: the one that the user names and no
// other, else those of the launcher's family, then the rest.
func candidates(getenv func(string) string) []string {
	if name := getenv(env.MPILibrary); name != "" {
		return []string{name}
	}
	first, ok := launchedBy(getenv)
	var names []string
	if ok {
		names = append(names, first.libraries...)
	}
	for _, f := range families {
		names = append(names, f.libraries...)
	}
	names = append(names, lastResort...)
	var unique []string
	for _, name := range names {
		if !slices.Contains(unique, name) {
			unique = append(unique, name)
		}
	}
	return unique
}

// launchedBy finds the family of the launcher that started this process.
func launchedBy(getenv func(string) string) (family, bool) {
	for _, f := range families {
		for _, name := range f.launcher {
			if getenv(name) != "" {
				return f, true
			}
		}
	}
	return family{}, false
}

// launchedSize is the number of processes that the launcher says it started,
// 1 if there was none or it does not say.
func launchedSize(getenv func(string) string) int {
	f, _ := launchedBy(getenv)
	for _, name := range f.size {
		if n, err := strconv.Atoi(getenv(name)); err == nil {
			return n
		}
	}
	return 1
}

// openLibrary opens the MPI library and finds out what it is. It does not
// initialize MPI.
func openLibrary() (*library, error) {
	var lib *dl.Library
	var err error
	keepSignals(func() {
		lib, err = dl.Open(candidates(os.Getenv)...)
	})
	if err != nil {
		hint := "install Open MPI (openmpi-bin libopenmpi3) or MPICH (mpich libmpich12), or set " + env.MPILibrary
		return nil, fmt.Errorf("%w: no MPI library: %w; %s", comm.ErrUnavailable, err, hint)
	}
	l := &library{file: lib.Name()}
	if err := lib.Bind(&l.api); err != nil {
		return nil, fmt.Errorf("%w: %w", comm.ErrUnavailable, err)
	}
	l.version = l.text(func(buffer, length uintptr) int32 {
		return l.GetLibraryVersion.Int(buffer, length)
	})
	if l.abi, err = identify(lib, l.version); err == nil {
		l.handles, err = l.abi.resolve(lib)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", comm.ErrUnavailable, err)
	}
	return l, nil
}

// errMixed: the processes were started by another family's launcher than the
// library's, so that each is alone.
var errMixed = errors.New("launcher and MPI library do not belong together")

// firstLine returns the first line of a version text, shortened.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	if len(line) > 120 {
		line = line[:120]
	}
	return strings.Join(strings.Fields(line), " ")
}
