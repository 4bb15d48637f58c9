package mpi

import (
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

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
	errInStatus: 19, errPending: 18,
	sentinels: errorClasses{
		truncate:  15,
		arguments: []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13},
	}.sentinels(),

	world:        number(0x101),
	errorsReturn: number(0x142),
	bytes:        number(0x247),
	types: typesOf[constant]{
		dtype.F64:  number(0x214),
		dtype.F32:  number(0x210),
		dtype.I64:  number(0x258),
		dtype.I32:  number(0x250),
		dtype.I16:  number(0x248),
		dtype.I8:   number(0x240),
		dtype.U64:  number(0x259),
		dtype.U32:  number(0x251),
		dtype.U16:  number(0x249),
		dtype.U8:   number(0x241),
		dtype.Bool: number(0x238),
	},
	ops: opsOf[constant]{
		reductions.Sum:  number(0x21),
		reductions.Prod: number(0x24),
		reductions.Min:  number(0x22),
		reductions.Max:  number(0x23),
	},
	or: number(0x31), and: number(0x30),
}
