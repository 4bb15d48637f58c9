package nccl

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// native is an ncclComm_t with a lock, which NCCL lacks: one goroutine may free it while others are about to call it.
type native struct {
	lib     *library      // of the process
	rt      *cuda.Runtime // the rank's GPU
	handle  uintptr       // ncclComm_t, not 0; freed by the goroutine that sets gone
	calls   sync.RWMutex  // held for reading during a call, and for writing permanently once it is being freed
	gone    atomic.Bool   // it is being freed: no call may begin
	idle    bool          // no call is in flight; only the goroutine that frees it uses this
	shares  bool          // other ranks are in this process
	service bool          // its service thread is known
	midway  bool          // a call did not finish
	child   *uint64       // result of the unfinished call, which is freed with this communicator; nil if there is none
	freed   chan struct{} // closed after it has been freed
}

func newNative(lib *library, rt *cuda.Runtime, handle uintptr, shares bool) *native {
	n := &native{
		lib:    lib,
		rt:     rt,
		handle: handle,
		shares: shares,
		freed:  make(chan struct{}),
	}
	n.service = services.find(n)
	return n
}

// place returns the rank in the communicator, and how many there are.
func (n *native) place() (rank, size int) {
	lib := n.lib
	number := lib.out(func(p uintptr) { lib.sym.UserRank.Call(n.handle, p) })
	count := lib.out(func(p uintptr) { lib.sym.Count.Call(n.handle, p) })
	return int(int32(number)), int(int32(count))
}

// newMidway is newNative for a communicator whose creation did not finish.
func newMidway(lib *library, rt *cuda.Runtime, handle uintptr, shares bool) *native {
	n := newNative(lib, rt, handle, shares)
	n.midway = true
	return n
}

// enter begins a call, which leave ends. It returns false if the communicator is being freed.
func (n *native) enter() bool {
	if n.gone.Load() || !n.calls.TryRLock() { // free never releases the lock
		return false
	}
	if n.gone.Load() {
		n.calls.RUnlock()
		return false
	}
	return true
}

func (n *native) leave() {
	n.calls.RUnlock()
}

// queuedAborts is the first version whose ncclCommAbort, inside a group, frees the
// communicator at the group's end. The abort itself takes effect at once.
const queuedAborts = 22700

// abort stops kernels that wait for peers, except kernels on windows, makes calls fail, and frees the communicator.
// The kernels take up to ending to stop, in addition to the time of an abort.
func (n *native) abort(ending time.Duration) {
	n.free((*native).endAtOnce, ending)
}

// destroy frees a communicator without work in flight. NCCL waits in it until graphs with the communicator's
// collectives are destroyed.
func (n *native) destroy() {
	n.free((*native).endOrderly, 0)
}

// endAtOnce aborts the communicator, and frees it after the calls in flight, which use it, have returned.
func (n *native) endAtOnce() error {
	if n.lib.version < queuedAborts {
		n.left(callTimeout)
		return errors.Join(n.callAbort(), n.freeChild())
	}
	n.lib.sym.GroupStart.Int()
	err := n.callAbort()
	n.left(0)
	if n.shares && !n.midway {
		n.onAnotherThread(func() { _ = n.call(n.lib.sym.Finalize) }) // this thread's group would queue it
	}
	n.awaitService()
	if s := ncclResult(n.lib.sym.GroupEnd.Int()); s != statusSuccess && err == nil {
		err = n.lib.newError(n.lib.sym.GroupEnd, s, 0)
	}
	return errors.Join(err, n.freeChild())
}

// freeChild frees the communicator that the unfinished call made after all. The abort has ended that call.
func (n *native) freeChild() error {
	if n.child == nil {
		return nil
	}
	handle := uintptr(atomic.LoadUint64(n.child))
	if handle == 0 {
		return nil
	}
	child := newMidway(n.lib, n.rt, handle, n.shares)
	services.leave(child)
	return child.endAtOnce()
}

// endOrderly waits for calls in flight and graphs, and frees the communicator.
func (n *native) endOrderly() error {
	if !n.left(callTimeout) {
		return n.endAtOnce()
	}
	if err := n.call(n.lib.sym.Finalize); err != nil {
		_ = n.endAtOnce()
		return err
	}
	n.awaitService()
	err := n.call(n.lib.sym.Destroy)
	if err != nil && n.closeGroup() {
		err = errors.Join(err, n.endAtOnce())
	}
	return err
}

// awaitService waits until NCCL's threads have released their memory, if other ranks are in this process.
func (n *native) awaitService() {
	switch {
	case !n.shares:
	case !n.service:
		time.Sleep(unmapTime)
	case n.midway:
		services.await(unmapTime)
	default:
		services.await(backend.DeviceTimeout) // they end within milliseconds, or after another rank's drain
	}
}

// callAbort calls ncclCommAbort, and retries once if it fails before it begins. It returns the first error.
func (n *native) callAbort() error {
	err := n.call(n.lib.sym.Abort)
	if err != nil && n.closeGroup() {
		if n.call(n.lib.sym.Abort) != nil {
			n.closeGroup()
		}
	}
	return err
}

// closeGroup ends the group that ncclCommDestroy and ncclCommAbort leave open on their thread if they fail before they
// begin, and reports whether there was one. In an open group the thread's next collective would be queued and never
// launched.
func (n *native) closeGroup() bool {
	return ncclResult(n.lib.sym.GroupEnd.Int()) == statusSuccess
}

// left waits until no call is in flight, and reports whether that happened within the timeout; 0 means no timeout. No
// call can begin any more.
func (n *native) left(timeout time.Duration) bool {
	if n.idle {
		return true
	}
	ctx := context.Background()
	if timeout > 0 {
		bounded, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		ctx = bounded
	}
	n.idle = poll.Until(ctx, func() (bool, error) { return n.calls.TryLock(), nil }) == nil
	return n.idle
}

// onAnotherThread runs f with the GPU's context on another thread, and waits for it.
func (n *native) onAnotherThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.rt.CurrentToFree(f)
	}()
	<-done
}

// call makes a call that may free the communicator, after which its handle must not be used.
func (n *native) call(fn dl.Func) error {
	if s := ncclResult(fn.Int(n.handle)); s != statusSuccess && s != statusInProgress {
		return n.lib.newError(fn, s, 0)
	}
	return nil
}

// free frees a communicator, once, in the background. The last rank of a process to free its communicator frees the
// memory of all ranks on every GPU, and the driver makes that wait for the kernels there. These kernels may wait for
// this very rank to join the next collective of another communicator.
//
// All ranks' service threads must end before the last rank frees. Each rank therefore finalizes first, which ends its
// own thread, and waits for the threads. NCCL itself does not wait for all of them: it unmaps a rank's memory from the
// others' GPUs while that rank's thread unmaps it from its own. Driver 580 frees its own memory twice in this case.
func (n *native) free(end func(*native) error, ending time.Duration) {
	if n == nil || !n.gone.CompareAndSwap(false, true) {
		return
	}
	services.leave(n)
	freeing.begin(n, backend.AbortTimeout+ending)
	n.rt.Background(func() {
		defer freeing.end(n)
		n.rt.CurrentToFree(func() { // pins the goroutine to its thread, to which NCCL's groups belong
			if err := end(n); err != nil {
				goruntime.LockOSThread() // permanently: the thread ends with the goroutine, and its groups with it
				slog.Error("nccl: freeing a communicator failed", "err", err)
			}
		})
	})
}

// freeing are the native communicators of this process that are being freed.
var freeing frees

type frees struct {
	busy atomic.Bool // whether open is not empty

	mu      sync.Mutex            // not held during calls of NCCL
	open    map[*native]time.Time // time limits of waits for each; nil before the first; guarded by mu
	trimmed time.Time             // time of the last trim; guarded by mu
}

// begin records that n is being freed; a launch waits up to timeout for it.
func (f *frees) begin(n *native, timeout time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open == nil {
		f.open = map[*native]time.Time{}
	}
	f.open[n] = time.Now().Add(timeout)
	f.busy.Store(true)
}

func (f *frees) end(n *native) {
	if f.ended(n) {
		trim() // takes some hundred ms if there is much memory to return
	}
}

// forget removes n, so that nobody waits for it.
func (f *frees) forget(n *native) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop(n)
}

// drop is forget with the lock held.
func (f *frees) drop(n *native) {
	delete(f.open, n)
	f.busy.Store(len(f.open) > 0)
}

// ended removes n, and reports whether a trim is due.
func (f *frees) ended(n *native) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(n.freed)
	f.drop(n)
	due := len(f.open) == 0 || time.Since(f.trimmed) > trimEvery
	if due {
		f.trimmed = time.Now()
	}
	return due
}

// await waits until everything that is being freed is free or ctx ends, and for each communicator no longer than an
// abort takes.
//
// The driver makes freeing wait for all kernels of the process, and launches wait for freeing. If a rank launches a
// collective in the meantime and its kernel waits for another rank, the launch blocks until that rank joins, and no
// context ends it.
func (f *frees) await(ctx context.Context) {
	f.mu.Lock()
	open := maps.Clone(f.open)
	f.mu.Unlock()
	for n, end := range open {
		select {
		case <-n.freed:
		case <-ctx.Done():
			return
		case <-time.After(time.Until(end)):
			f.forget(n) // it does not end while a graph is open
		}
	}
}

// awaitAll waits until nothing is being freed.
func (f *frees) awaitAll() {
	timeout := time.After(allTimeout)
	for {
		f.mu.Lock()
		open := maps.Clone(f.open)
		f.mu.Unlock()
		if len(open) == 0 {
			return
		}
		for n := range open {
			select {
			case <-n.freed:
			case <-timeout:
				return
			}
		}
	}
}

// trim makes the C library return freed memory to the system: NCCL makes each communicator on a separate thread, for
// which glibc keeps tens of MiB.
func trim() {
	if fn := libc().Trim; fn.Found() {
		fn.Call(0)
	}
}

// libc has functions of the C library (glibc) without a Go counterpart.
var libc = sync.OnceValue(func() (sym struct {
	Trim   dl.Func `sym:"malloc_trim,optional"` // zero if the library lacks it
	Setenv dl.Func `sym:"setenv,optional"`      // zero if the library lacks it
}) {
	if lib, err := dl.Open("libc.so.6"); err == nil {
		_ = lib.Bind(&sym)
	}
	return sym
})

// creation describes a call that makes a native communicator.
type creation struct {
	rt     *cuda.Runtime              // the rank's GPU
	parent *native                    // the communicator to split, nil if there is none
	shares bool                       // other ranks are in this process
	stop   func() error               // its error ends the wait; nil if ctx alone does
	fn     dl.Func                    // the function, for errors
	call   func(cell uintptr) uintptr // makes the call, which stores a handle in cell
}

// create makes a native communicator, and waits until NCCL has finished it. If ctx ends first, it is aborted and freed
// in the background. The handle of a sub-communicator is known only after its parent has finished the call: if ctx
// ends before, it is freed with the parent. The result is nil for a split that leaves this rank out.
func (l *library) create(ctx context.Context, x creation) (*native, error) {
	cell := new(uint64)
	made, err := l.createInto(ctx, x, cell)
	if err != nil {
		l.abandon(cell)
	}
	return made, err
}

func (l *library) createInto(ctx context.Context, x creation, cell *uint64) (*native, error) {
	var status ncclResult
	err := x.rt.Current(func() error {
		status = ncclResult(int32(x.call(hostmem.AddrOf(cell))))
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Also if the call itself reports success, which only means "launched".
	if x.parent != nil && status.launched() {
		status, err = l.await(ctx, x.stop, x.parent.handle)
		if err != nil {
			x.parent.child = cell
			return nil, err
		}
	}
	handle := uintptr(atomic.LoadUint64(cell))
	if handle != 0 && status.launched() {
		status, err = l.await(ctx, x.stop, handle)
	}
	if err == nil && status != statusSuccess {
		source := handle
		if source == 0 && x.parent != nil {
			source = x.parent.handle
		}
		err = l.newError(x.fn, status, source)
	}
	switch {
	case err != nil && handle != 0:
		newMidway(l, x.rt, handle, x.shares).abort(0) // the only way to free an unfinished communicator
		return nil, err
	case err != nil || handle == 0:
		return nil, err
	}
	return newNative(l, x.rt, handle, x.shares), nil
}

// launched reports whether NCCL is making the communicator.
func (s ncclResult) launched() bool {
	return s == statusSuccess || s == statusInProgress
}

// abandon keeps a cell forever: a thread of NCCL may store a handle there long after the call was aborted.
func (l *library) abandon(cell *uint64) {
	l.abandoned.mu.Lock()
	defer l.abandoned.mu.Unlock()
	l.abandoned.cells = append(l.abandoned.cells, cell)
}

// await waits until a communicator is no longer "in progress", until ctx ends, or until stop returns an error.
func (l *library) await(ctx context.Context, stop func() error, handle uintptr) (s ncclResult, err error) {
	err = poll.Until(ctx, func() (bool, error) {
		s = l.asyncError(handle)
		if stop == nil {
			return s != statusInProgress, nil
		}
		return s != statusInProgress, stop()
	})
	if err != nil && ctx.Err() != nil {
		err = waitError(ctx)
	}
	return s, err
}

// asyncError returns the asynchronous state of a communicator.
func (l *library) asyncError(handle uintptr) ncclResult {
	answer := statusSuccess
	state := ncclResult(int32(l.out(func(p uintptr) {
		answer = ncclResult(l.sym.GetAsyncError.Int(handle, p))
	})))
	if answer != statusSuccess {
		return answer
	}
	return state
}
