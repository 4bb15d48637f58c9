package mpi

import (
	"encoding/binary"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// openMPI is the ABI of Open MPI 4 and 5 (libmpi.so.40): handles are addresses
// of variables that the library exports.
var openMPI = abi{
	name:       "Open MPI",
	handleSize: 8,

	// int MPI_SOURCE, MPI_TAG, MPI_ERROR, _cancelled; size_t _ucount
	statusSize: 24, statusError: 8,
	received: func(status []byte) int64 {
		return int64(binary.NativeEndian.Uint64(status[16:]))
	},

	tagUB:            0,
	undefined:        -32766,
	inPlace:          1,
	threadSerialized: 2, threadMultiple: 3,
	errInStatus: 18, errPending: 19,
	sentinels: errorClasses{
		truncate:    15,
		arguments:   []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13},
		exhausted:   []int32{39, 41, 44},
		permission:  []int32{20, 45},
		unsupported: []int32{52},
	}.sentinels(),

	world:        symbol("ompi_mpi_comm_world"),
	errorsReturn: symbol("ompi_mpi_errors_return"),
	bytes:        symbol("ompi_mpi_byte"),
	types: typesOf[constant]{
		dtype.F64:  symbol("ompi_mpi_double"),
		dtype.F32:  symbol("ompi_mpi_float"),
		dtype.I64:  symbol("ompi_mpi_int64_t"),
		dtype.I32:  symbol("ompi_mpi_int32_t"),
		dtype.I16:  symbol("ompi_mpi_int16_t"),
		dtype.I8:   symbol("ompi_mpi_int8_t"),
		dtype.U64:  symbol("ompi_mpi_uint64_t"),
		dtype.U32:  symbol("ompi_mpi_uint32_t"),
		dtype.U16:  symbol("ompi_mpi_uint16_t"),
		dtype.U8:   symbol("ompi_mpi_uint8_t"),
		dtype.Bool: symbol("ompi_mpi_c_bool"),
	},
	ops: opsOf[constant]{
		reductions.Sum:  symbol("ompi_mpi_op_sum"),
		reductions.Prod: symbol("ompi_mpi_op_prod"),
		reductions.Min:  symbol("ompi_mpi_op_min"),
		reductions.Max:  symbol("ompi_mpi_op_max"),
	},
	or: symbol("ompi_mpi_op_lor"), and: symbol("ompi_mpi_op_land"),
}
