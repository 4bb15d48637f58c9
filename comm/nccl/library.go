package nccl

import (
	"fmt"
	"os"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// symbols are the functions of libnccl that this package calls. Functions newer than 2.18 are optional, and stay zero
// if the library lacks them. Bind sets all once, and nothing changes them after.
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
type symbols struct {
	// Library.
	GetVersion     dl.Func `sym:"ncclGetVersion"`
	GetUniqueID    dl.Func `sym:"ncclGetUniqueId"`
	GetErrorString dl.Func `sym:"ncclGetErrorString"`
	GetLastError   dl.Func `sym:"ncclGetLastError"`

	// Communicators.
	InitRankConfig dl.Func `sym:"ncclCommInitRankConfig"`
	Split          dl.Func `sym:"ncclCommSplit"`
	Shrink         dl.Func `sym:"ncclCommShrink,optional"` // 2.27
	Finalize       dl.Func `sym:"ncclCommFinalize"`
	Destroy        dl.Func `sym:"ncclCommDestroy"`
	Abort          dl.Func `sym:"ncclCommAbort"`
	GetAsyncError  dl.Func `sym:"ncclCommGetAsyncError"`
	Count          dl.Func `sym:"ncclCommCount"`
	UserRank       dl.Func `sym:"ncclCommUserRank"`

	// Groups of calls of a thread.
	GroupStart dl.Func `sym:"ncclGroupStart"`
	GroupEnd   dl.Func `sym:"ncclGroupEnd"`

	// Data movement.
	AllReduce     dl.Func `sym:"ncclAllReduce"`
	Broadcast     dl.Func `sym:"ncclBroadcast"`
	Reduce        dl.Func `sym:"ncclReduce"`
	AllGather     dl.Func `sym:"ncclAllGather"`
	ReduceScatter dl.Func `sym:"ncclReduceScatter"`
	Send          dl.Func `sym:"ncclSend"`
	Recv          dl.Func `sym:"ncclRecv"`
	AllToAll      dl.Func `sym:"ncclAlltoAll,optional"` // 2.28
	Gather        dl.Func `sym:"ncclGather,optional"`   // 2.28
	Scatter       dl.Func `sym:"ncclScatter,optional"`  // 2.28

	// Symmetric memory.
	WindowRegister   dl.Func `sym:"ncclCommWindowRegister,optional"`   // 2.27
	WindowDeregister dl.Func `sym:"ncclCommWindowDeregister,optional"` // 2.27
}

// library is the opened NCCL.
type library struct {
	sym     symbols   // the functions; Found says which the library lacks
	name    string    // of the file that was opened
	version int       // NCCL_VERSION_CODE, 22803 for 2.28.3; 0 if it is not known
	cells   sync.Pool // of *uint64, for out

	abandoned abandonedCells // kept until the process ends
}

// abandonedCells hold the results of calls that were abandoned before they returned.
type abandonedCells struct {
	mu    sync.Mutex // taken alone
	cells []*uint64  // see abandon; guarded by mu
}

// libraryVariable names an environment variable with the library to use.
const libraryVariable = "TUTTI_NCCL_LIB"

// oldest is the first version with everything that this package needs (ncclCommSplit and its configuration).
const oldest = 21800

// open loads libnccl, once per process.
var open = sync.OnceValues(func() (*library, error) {
	names := []string{"libnccl.so.2", "libnccl.so"}
	if name := os.Getenv(libraryVariable); name != "" {
		names = []string{name}
	}
	lib, err := dl.Open(names...)
	if err != nil {
		const format = "nccl: %w: no library: %w; install NCCL or set %s"
		return nil, fmt.Errorf(format, comm.ErrUnavailable, err, libraryVariable)
	}
	l := &library{name: lib.Name()}
	l.cells.New = func() any { return new(uint64) }
	bindErr := lib.Bind(&l.sym)
	if l.sym.GetVersion.Found() {
		l.version = int(int32(l.out(func(p uintptr) { l.sym.GetVersion.Call(p) })))
	}
	switch {
	case l.version != 0 && l.version < oldest:
		const format = "nccl: %w: %s is version %s, older than 2.18"
		return nil, fmt.Errorf(format, comm.ErrUnavailable, l.name, versionText(l.version))
	case bindErr != nil:
		return nil, fmt.Errorf("nccl: %w: %w; it says it is version %s, 2.18 or newer is needed",
			comm.ErrUnavailable, bindErr, versionText(l.version))
	}
	nameThreads()
	return l, nil
})

// out runs a call that stores a result of at most eight bytes, and returns it.
func (l *library) out(call func(p uintptr)) uint64 {
	cell := l.cells.Get().(*uint64)
	*cell = 0
	call(hostmem.AddrOf(cell))
	v := *cell
	l.cells.Put(cell)
	return v
}

// Version returns the version of NCCL, such as "2.28.3", and the name of its library.
func Version() (version, library string, err error) {
	l, err := open()
	if err != nil {
		return "", "", err
	}
	return versionText(l.version), l.name, nil
}

func versionText(code int) string {
	if code == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%d.%d.%d", code/10000, code/100%100, code%100)
}

// ncclResult is the status that calls of the library return, an ncclResult_t.
type ncclResult int32

const (
	statusSuccess    ncclResult = 0
	statusRemote     ncclResult = 6
	statusInProgress ncclResult = 7
	statusInvalidArg ncclResult = 4
	statusUsage      ncclResult = 5
	statusTimeout    ncclResult = 8
)

// Error is a failed call of the library.
type Error struct {
	Status int32  // an ncclResult_t, as the library numbers them
	Text   string // the library's description of the status
	Detail string // the library's last error, often empty
	Call   string // the function, such as "ncclAllReduce"
}

// Error returns "ncclAllReduce: unhandled cuda error (1): detail".
func (e *Error) Error() string {
	s := fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, e.Status)
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

// Is reports whether the status corresponds to a sentinel error of package comm.
func (e *Error) Is(target error) bool {
	switch ncclResult(e.Status) {
	case statusRemote:
		return target == comm.ErrPeerFailed
	case statusTimeout:
		return target == comm.ErrTimeout
	case statusInvalidArg, statusUsage:
		return target == comm.ErrArgument
	}
	return false
}

// newError describes a status; handle may be 0.
func (l *library) newError(fn dl.Func, status ncclResult, handle uintptr) error {
	return &Error{
		Status: int32(status),
		Text:   hostmem.CString(l.sym.GetErrorString.Call(uintptr(status))),
		Detail: hostmem.CString(l.sym.GetLastError.Call(handle)),
		Call:   fn.Name(),
	}
}

// unsupported marks types without an ncclDataType_t.
const unsupported = ^uintptr(0)

// typeTable has the ncclDataType_t of each type.
var typeTable = [...]uintptr{
	dtype.I8: 0, dtype.U8: 1, dtype.I32: 2, dtype.U32: 3, dtype.I64: 4, dtype.U64: 5,
	dtype.F16: 6, dtype.F32: 7, dtype.F64: 8, dtype.BF16: 9,
	dtype.FP8E4M3: 10, dtype.FP8E5M2: 11,
	dtype.Invalid: unsupported, dtype.I16: unsupported, dtype.U16: unsupported, dtype.Bool: unsupported,
}

// opTable has the ncclRedOp_t of each reduction.
var opTable = [...]uintptr{comm.Sum: 0, comm.Prod: 1, comm.Max: 2, comm.Min: 3, comm.Avg: 4}

// The first NCCL version with FP8 types, and the compute capability that they need.
const (
	fp8Version    = 22400
	fp8Capability = 9 // 9.0
)

// nativeByte is the ncclDataType_t of calls that only move data, so that every type can be moved.
const nativeByte = 1
