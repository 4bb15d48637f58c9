package mpi

import "encoding/binary"

// openMPI is the ABI of Open MPI 4 and 5 (libmpi.so.40): handles are addresses
// of variables that the library exports.
var openMPI = abi{
	name:       "Open MPI",
	handleSize: 8,

	// int MPI_SOURCE, MPI_TAG, MPI_ERROR, _cancelled; size_t _ucount
	statusSize: 24, statusError: 8,
	received: func(status []byte) int64 { return int64(binary.NativeEndian.Uint64(status[16:])) },

	tagUB:            0,
	undefined:        -32766,
	inPlace:          1,
	threadSerialized: 2, threadMultiple: 3,
	errTruncate: 15, errInStatus: 18, errPending: 19,

	world:        symbol("ompi_mpi_comm_world"),
	errorsReturn: symbol("ompi_mpi_errors_return"),
	bytes:        symbol("ompi_mpi_byte"),
	types: [numTypes]constant{
		typeDouble: symbol("ompi_mpi_double"), typeFloat: symbol("ompi_mpi_float"),
		typeInt64: symbol("ompi_mpi_int64_t"), typeInt32: symbol("ompi_mpi_int32_t"),
		typeInt16: symbol("ompi_mpi_int16_t"), typeInt8: symbol("ompi_mpi_int8_t"),
		typeUint64: symbol("ompi_mpi_uint64_t"), typeUint32: symbol("ompi_mpi_uint32_t"),
		typeUint16: symbol("ompi_mpi_uint16_t"), typeUint8: symbol("ompi_mpi_uint8_t"),
		typeBool: symbol("ompi_mpi_c_bool"),
	},
	ops: [numNative]constant{
		opSum: symbol("ompi_mpi_op_sum"), opProd: symbol("ompi_mpi_op_prod"),
		opMin: symbol("ompi_mpi_op_min"), opMax: symbol("ompi_mpi_op_max"),
		opOr: symbol("ompi_mpi_op_lor"), opAnd: symbol("ompi_mpi_op_land"),
	},
}
