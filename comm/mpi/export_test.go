package mpi

import (
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
)

// SpoilSplit makes every Split of this rank fail, after MPI_Comm_split.
func SpoilSplit(c comm.Communicator) { c.(*communicator).e.lib.handles.errorsReturn = 0 }

// Shares reports whether collectives of c go over memory that its ranks share.
func Shares(c comm.Communicator) bool { return c.(*communicator).SharesMemory() }

// CloseWithin bounds the abort of c, and its drain in Close.
func CloseWithin(c comm.Communicator, d time.Duration) { c.(*communicator).e.Life.Timeout = d }

// SkipSplit makes every Split of this rank fail instead of calling MPI_Comm_split,
// where the others wait.
func SkipSplit(c comm.Communicator) {
	lib := c.(*communicator).e.lib
	lib.CommSplit, lib.handles.errorsReturn = lib.CommSetErrhandler, 0
}

// testWire is a wire whose library and behavior tests change.
type testWire struct {
	*wire
	entered, leave chan struct{} // closed by the next Poll, which waits for the other
	refuses        bool          // to send control messages
}

var testWires sync.Map // by *wire

func init() {
	asWire = func(w *wire) schedule.Wire {
		t := &testWire{wire: w}
		testWires.Store(w, t)
		return t
	}
}

// tests returns the wire of c.
func tests(c comm.Communicator) *testWire {
	t, _ := testWires.Load(c.(*communicator).e.wire)
	return t.(*testWire)
}

// calling is held while wires call the library.
var calling sync.RWMutex

func (w *testWire) Flush() error {
	calling.RLock()
	defer calling.RUnlock()
	return w.wire.Flush()
}

func (w *testWire) Poll(done []schedule.Done, h schedule.Hint) ([]schedule.Done, error) {
	calling.RLock()
	entered := w.entered
	calling.RUnlock()
	if entered != nil {
		w.entered = nil
		close(entered)
		<-w.leave
	}
	calling.RLock()
	defer calling.RUnlock()
	return w.wire.Poll(done, h)
}

func (w *testWire) Tell(rank int, report bool, message []byte) bool {
	calling.RLock()
	defer calling.RUnlock()
	return !w.refuses && w.wire.Tell(rank, report, message)
}

func (w *testWire) Hear(rank int) ([]byte, error) {
	calling.RLock()
	defer calling.RUnlock()
	return w.wire.Hear(rank)
}

// change changes the library while no wire makes calls.
func change(c comm.Communicator, how func(lib *library)) {
	calling.Lock()
	defer calling.Unlock()
	how(c.(*communicator).e.lib)
}

// BlockProgress keeps the progress goroutine busy with c, from when entered is closed until
// leave is.
func BlockProgress(c comm.Communicator) (entered, leave chan struct{}) {
	entered, leave = make(chan struct{}), make(chan struct{})
	w := tests(c)
	change(c, func(*library) { w.entered, w.leave = entered, leave })
	if err := c.Group(comm.SendCall(0, 0, dtype.U8, c.Rank(), 0), comm.RecvCall(0, 0, dtype.U8, c.Rank(), 0)); err != nil {
		panic(err)
	}
	return entered, leave
}

// Serialize goes on as if the library provided MPI_THREAD_SERIALIZED only.
func Serialize(c comm.Communicator) { change(c, func(lib *library) { lib.turn = newTurn() }) }

// ReplaceFree has another function called instead of MPI_Comm_free.
func ReplaceFree(c comm.Communicator, f dl.Func) { change(c, func(lib *library) { lib.CommFree = f }) }

// ReplaceIrecv has another function called instead of MPI_Irecv until restore is called.
func ReplaceIrecv(c comm.Communicator, f dl.Func) (restore func()) {
	before := c.(*communicator).e.lib.Irecv
	change(c, func(lib *library) { lib.Irecv = f })
	return func() { change(c, func(lib *library) { lib.Irecv = before }) }
}

// ReplaceFinalize has another function called instead of MPI_Finalize.
func ReplaceFinalize(c comm.Communicator, f dl.Func) {
	change(c, func(lib *library) { lib.Finalize = f })
}

// SetPatience sets after how long Finalize says whom it waits for, and how long it waits
// for MPI_Finalize.
func SetPatience(c comm.Communicator, d time.Duration) { c.(*communicator).e.state.patience = d }

// FailUntold aborts c for a cause that MPI does not send to the others.
func FailUntold(c comm.Communicator, cause error) {
	tests(c).refuses = true
	_ = c.(*communicator).e.Fail(comm.OpBarrier, cause)
}

// Abandon does what a rank does with what a Split made that failed afterwards.
func Abandon(c comm.Communicator, cause error) { c.(*communicator).e.abandon(cause) }

// InFlight returns the number of operations of c that are not done.
func InFlight(c comm.Communicator) int {
	p := c.(*communicator).Progress()
	return int(p.Collectives.Submitted + p.Messages.Submitted - p.Collectives.Done - p.Messages.Done)
}

// SetProtocol sets the version of what this process's rank sends, before Init.
func SetProtocol(version int) { protocol = uint64(version) }
