package mpi

// standard is the ABI of the MPI standard itself, from version 5.0 on
// (chapter "Application Binary Interface"; libmpi_abi.so.0): handles are
// pointer-sized, predefined ones small numbers. The values are those of the
// Forum's mpi.h, https://github.com/mpi-forum/mpi-abi-stubs.
var standard = abi{
	name:       "MPI-5",
	handleSize: 8,

	// int MPI_SOURCE, MPI_TAG, MPI_ERROR, reserved[5]: the count is private.
	statusSize: 32, statusError: 8,

	tagUB:            501,
	undefined:        -32766,
	inPlace:          1,
	threadSerialized: 2048, threadMultiple: 4096,
	errTruncate: 15, errInStatus: 19, errPending: 18,

	world:        number(0x101),
	errorsReturn: number(0x142),
	bytes:        number(0x247),
	types: [numTypes]constant{
		typeDouble: number(0x214), typeFloat: number(0x210),
		typeInt64: number(0x258), typeInt32: number(0x250),
		typeInt16: number(0x248), typeInt8: number(0x240),
		typeUint64: number(0x259), typeUint32: number(0x251),
		typeUint16: number(0x249), typeUint8: number(0x241),
		typeBool: number(0x238),
	},
	ops: [numNative]constant{
		opSum: number(0x21), opProd: number(0x24),
		opMin: number(0x22), opMax: number(0x23),
		opOr: number(0x31), opAnd: number(0x30),
	},
}
