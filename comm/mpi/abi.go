package mpi

import (
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/reductions"
)

// abi is all that differs between the binary interfaces of MPI libraries: how
// wide handles are, where a status keeps what, and the values of constants.
type abi struct {
	name       string // of the ABI, in errors and Info
	handleSize int    // bytes of an MPI_Request in memory

	// Layout of MPI_Status. received reads the number of bytes of a message
	// from one, where the layout is known; nil means asking MPI_Get_count.
	statusSize, statusError int
	received                func(status []byte) int64

	tagUB                            uintptr         // attribute key MPI_TAG_UB
	undefined                        int32           // MPI_UNDEFINED
	inPlace                          uintptr         // MPI_IN_PLACE
	threadSerialized, threadMultiple int32           // MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE
	errInStatus, errPending          int32           // error classes
	sentinels                        map[int32]error // of other classes; nobody changes it

	world        constant          // MPI_COMM_WORLD
	errorsReturn constant          // MPI_ERRORS_RETURN
	bytes        constant          // MPI_BYTE
	types        typesOf[constant] // zero for those that MPI lacks
	ops          opsOf[constant]   // the same
	or, and      constant          // of truth values
}

// typesOf has something for each element type, opsOf for each reduction. MPI has no types for floats of 16 and 8
// bits, and no averages.
type (
	typesOf[T any] [dtype.Bool + 1]T
	opsOf[T any]   [reductions.Max + 1]T
)

// constant is a predefined handle: a number, or the address of a variable that
// the library exports.
type constant struct {
	value  uintptr // 0 where symbol has it
	symbol string  // whose address it is; "" where value is it
}

func number(value uintptr) constant { return constant{value: value} }
func symbol(name string) constant   { return constant{symbol: name} }

// resolve looks up the predefined handles in lib.
func (a *abi) resolve(lib *dl.Library) (h handles, err error) {
	var missing []string
	value := func(c constant) uintptr {
		if c.symbol == "" {
			return c.value
		}
		address, ok := lib.Lookup(c.symbol)
		if !ok {
			missing = append(missing, c.symbol)
		}
		return address
	}
	h.world = value(a.world)
	h.errorsReturn = value(a.errorsReturn)
	h.bytes = value(a.bytes)
	for i, c := range a.types {
		h.types[i] = value(c)
	}
	// These travel as unsigned integers of their size.
	h.types[dtype.F16] = h.types[dtype.U16]
	h.types[dtype.BF16] = h.types[dtype.U16]
	h.types[dtype.FP8E4M3] = h.types[dtype.U8]
	h.types[dtype.FP8E5M2] = h.types[dtype.U8]
	for i, c := range a.ops {
		h.ops[i] = value(c)
	}
	or := value(a.or)
	and := value(a.and)
	h.boolOps = opsOf[uintptr]{reductions.Sum: or, reductions.Prod: and, reductions.Min: and, reductions.Max: or}
	if len(missing) > 0 {
		err = fmt.Errorf("%s lacks %s of the %s ABI", lib.Name(), strings.Join(missing, ", "), a.name)
	}
	return h, err
}

// identify tells which ABI an open library has: by the data symbols that only
// Open MPI exports, by the file name that the standard ABI prescribes, or by
// what the library says of itself.
func identify(lib *dl.Library, version string) (*abi, error) {
	if _, ok := lib.Lookup(openMPI.world.symbol); ok {
		return &openMPI, nil
	}
	if strings.Contains(lib.Name(), "libmpi_abi") {
		return &standard, nil
	}
	for _, family := range []string{"MPICH", "Intel(R) MPI", "MVAPICH"} {
		if strings.Contains(version, family) {
			return &mpich, nil
		}
	}
	return nil, fmt.Errorf("%s is an MPI library of an unknown kind: %.80q", lib.Name(), version)
}
