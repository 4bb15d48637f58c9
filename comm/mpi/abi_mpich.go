package mpi

import (
	"encoding/binary"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// mpich is the ABI that MPICH, Intel MPI and MVAPICH share since 2013 (the
// MPICH ABI Compatibility Initiative; libmpi.so.12, libmpich.so.12): handles
// are 32-bit integers.
var mpich = abi{
	name:       "MPICH",
	handleSize: 4,

	// int count_lo, count_hi_and_cancelled, MPI_SOURCE, MPI_TAG, MPI_ERROR; the lowest bit of count_hi_and_cancelled is
	// the canceled flag.
	statusSize: 20, statusError: 16,
	received: func(status []byte) int64 {
		low := binary.NativeEndian.Uint32(status)
		high := binary.NativeEndian.Uint32(status[4:]) >> 1
		return int64(high)<<32 | int64(low)
	},

	tagUB:            0x64400001,
	undefined:        -32766,
	inPlace:          ^uintptr(0),
	threadSerialized: 2, threadMultiple: 3,
	errInStatus: 17, errPending: 18,
	sentinels: errorClasses{
		truncate:    14,
		arguments:   []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 19},
		exhausted:   []int32{34, 36, 39},
		permission:  []int32{20, 40},
		unsupported: []int32{44},
	}.sentinels(),

	world:        number(0x44000000),
	errorsReturn: number(0x54000001),
	bytes:        number(0x4c00010d),
	types: typesOf[constant]{
		dtype.F64:  number(0x4c00080b),
		dtype.F32:  number(0x4c00040a),
		dtype.I64:  number(0x4c00083a),
		dtype.I32:  number(0x4c000439),
		dtype.I16:  number(0x4c000238),
		dtype.I8:   number(0x4c000137),
		dtype.U64:  number(0x4c00083e),
		dtype.U32:  number(0x4c00043d),
		dtype.U16:  number(0x4c00023c),
		dtype.U8:   number(0x4c00013b),
		dtype.Bool: number(0x4c00013f),
	},
	ops: opsOf[constant]{
		reductions.Sum:  number(0x58000003),
		reductions.Prod: number(0x58000004),
		reductions.Min:  number(0x58000002),
		reductions.Max:  number(0x58000001),
	},
	or: number(0x58000007), and: number(0x58000005),
}
