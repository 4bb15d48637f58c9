package mpi

import (
	"strings"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// api is the part of the MPI library that this package calls. The names and
// argument orders are those of the MPI standard; a name that ends in _c takes
// MPI_Count where the other takes int, and exists from MPI 4.0 on. Bind sets the
// functions once, and nothing changes them after; an optional one that the library
// lacks stays zero.
type api struct {
	// The library, and errors.
	GetLibraryVersion dl.Func `sym:"MPI_Get_library_version"`
	Initialized       dl.Func `sym:"MPI_Initialized"`
	Finalized         dl.Func `sym:"MPI_Finalized"`
	InitThread        dl.Func `sym:"MPI_Init_thread"`
	QueryThread       dl.Func `sym:"MPI_Query_thread"`
	Finalize          dl.Func `sym:"MPI_Finalize"`
	Abort             dl.Func `sym:"MPI_Abort"`
	ErrorString       dl.Func `sym:"MPI_Error_string"`
	ErrorClass        dl.Func `sym:"MPI_Error_class"`

	// Communicators.
	CommRank          dl.Func `sym:"MPI_Comm_rank"`
	CommSize          dl.Func `sym:"MPI_Comm_size"`
	CommDup           dl.Func `sym:"MPI_Comm_dup"`
	CommSplit         dl.Func `sym:"MPI_Comm_split"`
	CommFree          dl.Func `sym:"MPI_Comm_free"`
	CommSetErrhandler dl.Func `sym:"MPI_Comm_set_errhandler"`
	CommGetAttr       dl.Func `sym:"MPI_Comm_get_attr"`

	// Messages, and the requests of all that is in flight.
	Isend    dl.Func `sym:"MPI_Isend"`
	Irecv    dl.Func `sym:"MPI_Irecv"`
	Recv     dl.Func `sym:"MPI_Recv"`
	Iprobe   dl.Func `sym:"MPI_Iprobe"`
	Ibarrier dl.Func `sym:"MPI_Ibarrier"`
	Testall  dl.Func `sym:"MPI_Testall"`
	Testsome dl.Func `sym:"MPI_Testsome"`
	Cancel   dl.Func `sym:"MPI_Cancel,optional"`

	// GetCountC is called where the layout of a status is private, that is in
	// the MPI-5 ABI, which has it.
	GetCountC dl.Func `sym:"MPI_Get_count_c,optional"`

	// Collectives that do not block: of native ones alone.
	Iallreduce           dl.Func `sym:"MPI_Iallreduce"`
	IallreduceC          dl.Func `sym:"MPI_Iallreduce_c,optional"`
	Ireduce              dl.Func `sym:"MPI_Ireduce"`
	IreduceC             dl.Func `sym:"MPI_Ireduce_c,optional"`
	IreduceScatterBlock  dl.Func `sym:"MPI_Ireduce_scatter_block"`
	IreduceScatterBlockC dl.Func `sym:"MPI_Ireduce_scatter_block_c,optional"`
	Ibcast               dl.Func `sym:"MPI_Ibcast"`
	IbcastC              dl.Func `sym:"MPI_Ibcast_c,optional"`
	Iallgather           dl.Func `sym:"MPI_Iallgather"`
	IallgatherC          dl.Func `sym:"MPI_Iallgather_c,optional"`
	Iallgatherv          dl.Func `sym:"MPI_Iallgatherv"`
	IallgathervC         dl.Func `sym:"MPI_Iallgatherv_c,optional"`
	Ialltoall            dl.Func `sym:"MPI_Ialltoall"`
	IalltoallC           dl.Func `sym:"MPI_Ialltoall_c,optional"`
	Ialltoallv           dl.Func `sym:"MPI_Ialltoallv"`
	IalltoallvC          dl.Func `sym:"MPI_Ialltoallv_c,optional"`
	Igather              dl.Func `sym:"MPI_Igather"`
	IgatherC             dl.Func `sym:"MPI_Igather_c,optional"`
	Iscatter             dl.Func `sym:"MPI_Iscatter"`
	IscatterC            dl.Func `sym:"MPI_Iscatter_c,optional"`

	ReduceLocal dl.Func `sym:"MPI_Reduce_local"` // see comparesSigned

	QueryCUDA dl.Func `sym:"MPIX_Query_cuda_support,optional"` // of Open MPI and MPICH alone
}

// library is an open MPI library: its functions, and its constants as the
// table of its ABI has them.
type library struct {
	api
	abi     *abi    // the library's; nobody changes it
	handles handles // set when the library is opened
	file    string  // under which it was opened
	version string  // what MPI_Get_library_version says
	cuda    bool    // it takes device memory; MPICH can only be asked after Init
	signed  bool    // it compares unsigned integers as signed ones; see comparesSigned

	turn *turn // nil unless the library provides MPI_THREAD_SERIALIZED only
}

// handles are the library's predefined objects, as it wants them passed.
type handles struct {
	world        uintptr          // MPI_COMM_WORLD
	errorsReturn uintptr          // MPI_ERRORS_RETURN
	bytes        uintptr          // MPI_BYTE
	types        typesOf[uintptr] // 0 for those that the library lacks
	ops, boolOps opsOf[uintptr]   // of numbers, and of truth values; 0 for those that MPI lacks
}

// call calls a function that returns an MPI error code.
func (l *library) call(f dl.Func, args ...uintptr) int32 {
	if t := l.turn; t != nil {
		if !t.take() {
			return leftBehind
		}
		defer t.give()
	}
	return f.Int(args...)
}

// run makes calls of functions that return an MPI error code.
func (l *library) run(calls *dl.Sequence) (done int, code int32) {
	if t := l.turn; t != nil {
		if !t.take() {
			calls.Drop()
			return 0, leftBehind
		}
		defer t.give()
	}
	return calls.Run()
}

// must is call for functions off the hot path; a failure becomes an error that
// names the function.
func (l *library) must(f dl.Func, args ...uintptr) error {
	if code := l.call(f, args...); code != success {
		return l.error(f, code)
	}
	return nil
}

// reach is must for functions that need other ranks: its error has the sentinel of a failure
// of the communicator.
func (l *library) reach(f dl.Func, args ...uintptr) error {
	if code := l.call(f, args...); code != success {
		return translate(l, l.error(f, code))
	}
	return nil
}

// success is MPI_SUCCESS, in every ABI.
const success = 0

// text calls a function that fills in a string and its length.
func (l *library) text(fill func(buffer, length uintptr) int32) string {
	const longest = 8192 // MPI_MAX_LIBRARY_VERSION_STRING of any ABI, or less
	buffer, err := host.Allocate(longest)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = host.Deallocate(buffer) }()
	length := newCells()
	defer length.free()
	if fill(buffer, length.addr(0)) != success {
		return "no description"
	}
	n := min(max(length.int32(0), 0), longest)
	return strings.TrimRight(string(hostmem.Slice[byte](buffer, int(n))), "\x00\n ")
}

// cells is a little memory outside the Go heap for results that a C function
// stores.
type cells struct {
	base uintptr // of numCells cells
}

const cellSize, numCells = 8, 8

// newCells returns zeroed cells. Without memory for 64 bytes nothing can go on.
func newCells() cells {
	base, err := host.Allocate(cellSize * numCells)
	if err != nil {
		panic("mpi: " + err.Error())
	}
	clear(hostmem.Slice[byte](base, cellSize*numCells))
	return cells{base}
}

func (c cells) free()              { _ = host.Deallocate(c.base) }
func (c cells) addr(i int) uintptr { return c.base + uintptr(i)*cellSize }
func (c cells) int32(i int) int32 {
	return hostmem.Slice[int32](c.addr(i), 1)[0]
}
func (c cells) uintptr(i int) uintptr {
	return hostmem.Slice[uintptr](c.addr(i), 1)[0]
}

// set stores a handle; one of 32 bits takes the first half on the
// little-endian machines that this module supports.
func (c cells) set(i int, handle uintptr) {
	hostmem.Slice[uintptr](c.addr(i), 1)[0] = handle
}

// handle reads an MPI object handle that the library stored in cell i.
func (l *library) handle(c cells, i int) uintptr {
	if l.abi.handleSize == 4 {
		return uintptr(uint32(c.int32(i)))
	}
	return c.uintptr(i)
}
