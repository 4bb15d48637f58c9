package mpi

import (
	"errors"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dl"
)

// SpoilSplit makes every Split of this rank fail, after MPI_Comm_split.
func SpoilSplit(c comm.Communicator) { c.(*communicator).e.lib.handles.errorsReturn = 0 }

// Shares reports whether collectives of c go over memory that its ranks share.
func Shares(c comm.Communicator) bool { return c.(*communicator).e.segment.memory != nil }

// SkipSplit makes every Split of this rank fail instead of calling MPI_Comm_split,
// where the others wait.
func SkipSplit(c comm.Communicator) {
	lib := c.(*communicator).e.lib
	lib.CommSplit, lib.handles.errorsReturn = lib.CommSetErrhandler, 0
}

// change changes the library while no other goroutine makes calls.
func change(c comm.Communicator, how func(lib *library)) {
	e := c.(*communicator).e
	for _, other := range e.state.progress.all() {
		other.mu.Lock()
		defer other.mu.Unlock()
	}
	how(e.lib)
}

// BlockProgress keeps the progress goroutine busy with c, from when entered is closed until
// leave is.
func BlockProgress(c comm.Communicator) (entered, leave chan struct{}) {
	e := c.(*communicator).e
	entered, leave = make(chan struct{}), make(chan struct{})
	e.mu.Lock()
	defer e.mu.Unlock()
	p := planner{endpoint: e, c: &comm.Call{Op: comm.OpBarrier}}
	o := p.op(func(e *endpoint, o *op) (bool, error) {
		if o.phase == 1 {
			close(entered)
			<-leave
			return true, nil
		}
		err := e.recvBytes(o, o.msgTag, 0, 0, e.rank)
		return false, errors.Join(err, e.sendBytes(o, o.msgTag, 0, 0, e.rank))
	})
	p.add(o)
	if err := e.launch(); err != nil {
		panic(err)
	}
	return entered, leave
}

// Serialize goes on as if the library provided MPI_THREAD_SERIALIZED only.
func Serialize(c comm.Communicator) { change(c, func(lib *library) { lib.turn = newTurn() }) }

// ReplaceFree has another function called in the place of MPI_Comm_free.
func ReplaceFree(c comm.Communicator, f dl.Func) { change(c, func(lib *library) { lib.CommFree = f }) }

// ReplaceFinalize has another function called in the place of MPI_Finalize.
func ReplaceFinalize(c comm.Communicator, f dl.Func) {
	change(c, func(lib *library) { lib.Finalize = f })
}

// SetPatience sets after how long Finalize says whom it waits for, and how long it waits
// for MPI_Finalize.
func SetPatience(c comm.Communicator, d time.Duration) { c.(*communicator).e.state.patience = d }

// FailUntold aborts c for a cause that MPI does not send to the others.
func FailUntold(c comm.Communicator, cause error) {
	change(c, func(lib *library) {
		bytes := lib.handles.bytes
		defer func() { lib.handles.bytes = bytes }()
		lib.handles.bytes = 0
		_ = c.(*communicator).e.fail(comm.OpBarrier, cause)
	})
}

// Abandon does what a rank does with what a Split made that failed afterwards.
func Abandon(c comm.Communicator, cause error) { c.(*communicator).e.abandon(cause) }

// InFlight returns the number of operations of c that are not done.
func InFlight(c comm.Communicator) int { return int(c.(*communicator).e.inFlight.Load()) }
