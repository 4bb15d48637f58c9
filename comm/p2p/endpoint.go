package p2p

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// endpoint is the kernels and the scratch memory of a rank and its peers.
//
// Its two locks are never held together: mu is held during a launch, which may wait for room in the stream, and
// watchUse during a look at a few words. A wait that ends therefore never blocks behind a launch.
type endpoint struct {
	planner
	rt      *cuda.Runtime        // of the rank's GPU
	rank    int                  // of this process, in the communicator
	lib     *library             // nil until opened
	scratch *cuda.SharedMemory   // nil until allocated
	peers   []*cuda.SharedMemory // by rank; nil for this one, and until mapped
	pinned  []byte               // nil until allocated

	watchUse sync.RWMutex // read-locked to access watch, locked to free it
	watch    *watch       // in pinned; nil once anything is freed; guarded by watchUse

	mu         sync.Mutex         // held during a launch; guards parameters
	parameters []launchParameters // one, filled in for each launch; guarded by mu
	phase      atomic.Uint32      // a phase
}

// phase is the state of an endpoint: open, then shut, then drained, unless work stays in flight.
type phase = uint32

const (
	open    phase = iota
	shut          // no further launches
	drained       // shut, and nothing is in flight
)

// isShut reports whether launches are refused.
func (e *endpoint) isShut() bool {
	return e.phase.Load() != open
}

// errInFlight says why the memory of peers stays mapped.
var errInFlight = errors.New("memory of peers stays mapped, because work is in flight")

// newEndpoint makes an endpoint without the memory of its peers.
func newEndpoint(
	ctx context.Context, rt *cuda.Runtime, rank, ranks int, s sizes, limit time.Duration,
) (*endpoint, error) {
	e := &endpoint{
		planner: planner{sizes: s, ranks: ranks},
		rt:      rt,
		rank:    rank,
		peers:   make([]*cuda.SharedMemory, ranks),
	}
	if err := e.allocate(ctx, limit); err != nil {
		return nil, errors.Join(err, e.discard(rt.Stream(), backend.DeviceTimeout))
	}
	return e, nil
}

// allocate opens the kernels, and allocates the memory that they write.
func (e *endpoint) allocate(ctx context.Context, limit time.Duration) (err error) {
	e.lib, err = openLibrary(e.rt)
	if err != nil {
		return err
	}
	e.kernels = e.lib.kernels
	places, bytes := e.layout(e.ranks)
	e.scratch, err = e.rt.AllocateShared(bytes)
	if err != nil {
		return err
	}
	scratch := e.scratch.Address()
	err = errors.Join(
		e.rt.Fill(scratch, e.scratch.Bytes(), dtype.U8, 0),
		e.rt.Fill(scratch, maxBlocks, dtype.U64, 1), // the first epoch
		e.rt.Fill(scratch+uintptr(places.words), 2*e.words/4, dtype.I32, -1),
		e.rt.Synchronize(ctx),
	)
	if err != nil {
		return err
	}
	e.pinned, err = e.rt.AllocatePinned(pinnedBytes)
	if err != nil {
		return err
	}
	clear(e.pinned)
	e.watch = &hostmem.Slice[watch](hostmem.Addr(e.pinned), 1)[0]
	e.watch.limit = int64(limit)
	world := worldParameters{
		rank:   uint32(e.rank),
		ranks:  uint32(e.ranks),
		host:   uint64(hostmem.Addr(e.pinned)),
		places: places,
	}
	world.scratch[e.rank] = uint64(scratch)
	e.parameters = []launchParameters{{world: world}}
	return nil
}

// pinnedBytes is a page for the watch.
const pinnedBytes = 4096

// loadAll launches every kernel once, idle. Otherwise the driver would load a kernel at its first launch, which would
// then wait for kernels in flight that may themselves wait for this one.
func (e *endpoint) loadAll(s *cuda.Stream) error {
	var errs []error
	for _, k := range e.kernels.all() {
		idle := plan{
			kernel: k,
			blocks: 1,
			width:  lineWidth,
			call:   callParameters{idle: 1},
		}
		errs = append(errs, e.submit(s, idle))
	}
	return errors.Join(errs...)
}

// submit launches a planned operation.
func (e *endpoint) submit(s *cuda.Stream, p plan) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.isShut() {
		return comm.ErrClosed
	}
	e.parameters[0].call = p.call
	g := cuda.Geometry{
		Grid:      cuda.Dim{X: p.blocks},
		Block:     cuda.Dim{X: p.width},
		Dependent: p.kernel.dependent,
	}
	return p.kernel.LaunchWith(s, g, hostmem.Bytes(e.parameters))
}

// look calls f with the words that kernels and host share, unless close has freed them.
func (e *endpoint) look(f func(w *watch)) {
	e.watchUse.RLock()
	defer e.watchUse.RUnlock()
	if e.watch != nil {
		f(e.watch)
	}
}

// stopWaiting permanently ends the waits of this rank's kernels for peers.
func (e *endpoint) stopWaiting() {
	e.look(func(w *watch) { atomic.AddUint32(&w.abort, 1) })
}

// stopWith stops waiting when ctx ends, unless the function that it returns was called before. If no kernel has
// noticed by then, that function revokes the stop.
func (e *endpoint) stopWith(ctx context.Context) (done func()) {
	if ctx.Done() == nil {
		return func() {}
	}
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		e.stopWaiting()
		close(stopped)
	})
	return func() {
		if stop() {
			return
		}
		<-stopped
		e.look(func(w *watch) {
			if atomic.LoadUint32(&w.told) == 0 {
				atomic.AddUint32(&w.abort, ^uint32(0))
			}
		})
	}
}

// leave tells the peers' kernels, once the stream is drained, that this rank has aborted, unless its own kernels have
// told them. It reports whether they have been told.
func (e *endpoint) leave(ctx context.Context, s *cuda.Stream) bool {
	if err := poll.Until(ctx, s.Done); err != nil {
		return false
	}
	if e.aborted() {
		return true
	}
	err := e.submit(s, plan{
		kernel: e.kernels.leave,
		blocks: 1,
		width:  lineWidth,
	})
	return err == nil
}

// aborted reports whether kernels of this rank have aborted.
func (e *endpoint) aborted() (told bool) {
	e.look(func(w *watch) { told = atomic.LoadUint32(&w.told) != 0 })
	return told
}

// fault returns the reason why kernels of this rank aborted, nil if none did. It names the ranks that were waited for,
// and the rank that aborted first, as far as this rank knows.
func (e *endpoint) fault(ctx context.Context) (err error) {
	e.look(func(w *watch) {
		if atomic.LoadUint32(&w.told) != 0 {
			err = w.fault(ctx)
		}
	})
	return err
}

// fault returns the error of kernels that have aborted.
func (w *watch) fault(ctx context.Context) error {
	text, told := w.text()
	switch {
	case ctx.Err() != nil:
		// The context comes before a peer's report: of deadlines close to each other, the first one tells the others.
		return fmt.Errorf("%w: %s", comm.ContextError(ctx), text)
	case told:
		return fmt.Errorf("%w: %s", comm.ErrPeerFailed, text)
	case w.reason == reasonTimedOut:
		return fmt.Errorf("%w: %s for more than %v", comm.ErrTimeout, text, time.Duration(w.limit))
	}
	return fmt.Errorf("%w: %s", comm.ErrCanceled, text)
}

// text names the peer and the operation that kernels waited for, and says whether a peer told them to abort.
func (w *watch) text() (text string, told bool) {
	text = fmt.Sprintf("rank %d waited for rank %d in operation %d (%s)", w.rank, w.peer, w.epoch, comm.Op(w.operation))
	rank := int(w.reason>>8) - 1
	if rank < 0 {
		return text, false
	}
	text += fmt.Sprintf(" until rank %d aborted", rank)
	if peer := int(w.reason&0xff) - 1; peer >= 0 {
		text += fmt.Sprintf(", which waited for rank %d", peer)
	}
	return text, true
}

// discard refuses further launches, drains the stream for at most the timeout, and closes the endpoint. If work stays
// in flight, so does the memory.
func (e *endpoint) discard(s *cuda.Stream, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	e.phase.Store(shut)
	// A launch into a full stream waits while it holds the lock.
	err := poll.Until(ctx, func() (bool, error) { return e.mu.TryLock(), nil })
	if err == nil {
		e.mu.Unlock()
		err = poll.Until(ctx, s.Done)
	}
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", errInFlight, err)
	}
	e.phase.Store(drained)
	return e.close()
}

// close frees everything. No kernel of this rank is running. Kernels of peers may still write to its scratch memory,
// through their own mappings.
func (e *endpoint) close() error {
	e.watchUse.Lock()
	e.watch = nil
	e.watchUse.Unlock()
	var errs []error
	for _, m := range append(e.peers, e.scratch) {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	if e.lib != nil {
		errs = append(errs, e.lib.close(e.rt))
	}
	if e.pinned != nil {
		errs = append(errs, e.rt.FreePinned(e.pinned))
	}
	return errors.Join(errs...)
}
