package mpi

import "encoding/binary"

// mpich is the ABI that MPICH, Intel MPI and MVAPICH share since 2013 (the
// MPICH ABI Compatibility Initiative; libmpi.so.12, libmpich.so.12): handles
// are 32-bit integers.
var mpich = abi{
	name:       "MPICH",
	handleSize: 4,

	// int count_lo, count_hi_and_cancelled, MPI_SOURCE, MPI_TAG, MPI_ERROR; the
	// lowest bit of count_hi_and_cancelled is the cancelled flag.
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
	errTruncate: 14, errInStatus: 17, errPending: 18,

	world:        number(0x44000000),
	errorsReturn: number(0x54000001),
	bytes:        number(0x4c00010d),
	types: [numTypes]constant{
		typeDouble: number(0x4c00080b), typeFloat: number(0x4c00040a),
		typeInt64: number(0x4c00083a), typeInt32: number(0x4c000439),
		typeInt16: number(0x4c000238), typeInt8: number(0x4c000137),
		typeUint64: number(0x4c00083e), typeUint32: number(0x4c00043d),
		typeUint16: number(0x4c00023c), typeUint8: number(0x4c00013b),
		typeBool: number(0x4c00013f),
	},
	ops: [numNative]constant{
		opSum: number(0x58000003), opProd: number(0x58000004),
		opMin: number(0x58000002), opMax: number(0x58000001),
		opOr: number(0x58000007), opAnd: number(0x58000005),
	},
}
