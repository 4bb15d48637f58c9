package mpi

import (
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
)

// abi is all that differs between the binary interfaces of MPI libraries: how
// wide handles are, where a status keeps what, and the values of constants.
type abi struct {
	name       string
	handleSize int // bytes of an MPI_Request in memory

	// Layout of MPI_Status. received reads the number of bytes of a message
	// from one, where the layout is known; nil means asking MPI_Get_count.
	statusSize, statusError int
	received                func(status []byte) int64

	tagUB                            uintptr // attribute key MPI_TAG_UB
	undefined                        int32   // MPI_UNDEFINED
	inPlace                          uintptr // MPI_IN_PLACE
	threadSerialized, threadMultiple int32
	errTruncate, errInStatus         int32 // error classes
	errPending                       int32

	world, errorsReturn, bytes constant
	types                      [numTypes]constant
	ops                        [numNative]constant
}

// constant is a predefined handle: a number, or the address of a variable that
// the library exports.
type constant struct {
	value  uintptr
	symbol string
}

func number(value uintptr) constant { return constant{value: value} }
func symbol(name string) constant   { return constant{symbol: name} }

// The datatypes that tables list.
const (
	typeDouble = iota
	typeFloat
	typeInt64
	typeInt32
	typeInt16
	typeInt8
	typeUint64
	typeUint32
	typeUint16
	typeUint8
	typeBool
	numTypes
)

// nativeTypes says which datatype carries elements of a dtype.
var nativeTypes = [...]int{
	dtype.F64: typeDouble, dtype.F32: typeFloat,
	dtype.F16: typeUint16, dtype.BF16: typeUint16,
	dtype.FP8E4M3: typeUint8, dtype.FP8E5M2: typeUint8,
	dtype.I64: typeInt64, dtype.I32: typeInt32, dtype.I16: typeInt16, dtype.I8: typeInt8,
	dtype.U64: typeUint64, dtype.U32: typeUint32, dtype.U16: typeUint16, dtype.U8: typeUint8,
	dtype.Bool: typeBool,
}

// The reductions that tables list.
const (
	opSum = iota
	opProd
	opMin
	opMax
	opOr
	opAnd
	numNative
)

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
	h.world, h.errorsReturn, h.bytes = value(a.world), value(a.errorsReturn), value(a.bytes)
	for i, c := range a.types {
		h.types[i] = value(c)
	}
	for i, c := range a.ops {
		h.ops[i] = value(c)
	}
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
