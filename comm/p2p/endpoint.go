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

// endpoint is a rank's scratch memory, that of its peers, and the kernels.
type endpoint struct {
	planner
	rt      *cuda.Runtime
	rank    int
	lib     *library
	scratch *cuda.SharedMemory
	peers   []*cuda.SharedMemory // nil for this rank
	pinned  []byte
	looks   sync.RWMutex // held for reading to look at watch, and for writing to free it
	watch   *watch       // in pinned; nil once anything is freed

	mu         sync.Mutex
	parameters []launchParameters // one, filled in for each launch; guarded by mu
	phase      atomic.Uint32      // a phase
}

// phase is how far an endpoint has come: open, then shut, then drained, unless work stays in flight.
type phase = uint32

const (
	open    phase = iota
	shut          // nothing is launched any more
	drained       // and nothing is in flight
)

// isShut reports whether nothing is launched any more.
func (e *endpoint) isShut() bool { return e.phase.Load() != open }

// errInFlight is why memory of peers is not unmapped.
var errInFlight = errors.New("memory of peers stays mapped, because work is in flight")

// newEndpoint makes an endpoint without the memory of its peers.
func newEndpoint(ctx context.Context, rt *cuda.Runtime, rank, ranks int, s sizes, limit time.Duration) (e *endpoint, err error) {
	e = &endpoint{planner: planner{sizes: s, ranks: ranks}, rt: rt, rank: rank, peers: make([]*cuda.SharedMemory, ranks)}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.discard(rt.Stream(), backend.DeviceTimeout))
			e = nil
		}
	}()
	if e.lib, err = openLibrary(rt); err != nil {
		return e, err
	}
	e.kernels = e.lib.kernels
	at, bytes := s.layout(ranks)
	if e.scratch, err = rt.AllocateShared(bytes); err != nil {
		return e, err
	}
	base := e.scratch.Address()
	words := base + uintptr(at.words)
	if err = errors.Join(
		rt.Fill(base, e.scratch.Bytes(), dtype.U8, 0),
		rt.Fill(base, maxBlocks, dtype.U64, 1), // the first epoch
		rt.Fill(words, 2*s.words/4, dtype.I32, -1),
		rt.Synchronize(ctx),
	); err != nil {
		return e, err
	}
	if e.pinned, err = rt.AllocatePinned(4096); err != nil {
		return e, err
	}
	clear(e.pinned)
	e.watch = &hostmem.Slice[watch](hostmem.Addr(e.pinned), 1)[0]
	e.watch.limit = int64(limit)
	e.parameters = []launchParameters{{world: worldParameters{
		rank: uint32(rank), ranks: uint32(ranks), host: uint64(hostmem.Addr(e.pinned)), at: at,
	}}}
	e.parameters[0].world.scratch[rank] = uint64(base)
	return e, nil
}

// loadAll launches every kernel once, idle. Otherwise the driver would load a kernel at its
// first launch, and make that wait for kernels in flight, which may wait for this one.
func (e *endpoint) loadAll(s *cuda.Stream) error {
	var errs []error
	for _, k := range e.kernels.all() {
		errs = append(errs, e.submit(s, plan{kernel: k, blocks: 1, width: lineWidth, call: callParameters{idle: 1}}))
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
	g := cuda.Geometry{Grid: cuda.Dim{X: p.blocks}, Block: cuda.Dim{X: p.width}, Dependent: p.kernel.dependent}
	return p.kernel.LaunchWith(s, g, hostmem.Bytes(e.parameters))
}

// look calls f with the words that kernels and host share, unless close frees them.
func (e *endpoint) look(f func(w *watch)) {
	e.looks.RLock()
	defer e.looks.RUnlock()
	if e.watch != nil {
		f(e.watch)
	}
}

// stopWaiting ends the waits of this rank's kernels for peers, for good.
func (e *endpoint) stopWaiting() { e.look(func(w *watch) { atomic.AddUint32(&w.abort, 1) }) }

// stopWith does that when ctx ends, until the function that it returns is called. If no kernel
// has noticed by then, it is taken back.
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

// leave tells the peers' kernels, once the stream is drained, that this rank has aborted, unless
// its own kernels have told them.
func (e *endpoint) leave(ctx context.Context, s *cuda.Stream) bool {
	if poll.Until(ctx, s.Done) != nil {
		return false
	}
	return e.aborted() || e.submit(s, plan{kernel: e.kernels.leave, blocks: 1, width: lineWidth}) == nil
}

// aborted reports whether kernels of this rank have aborted.
func (e *endpoint) aborted() (told bool) {
	e.look(func(w *watch) { told = atomic.LoadUint32(&w.told) != 0 })
	return told
}

// fault returns why kernels of this rank aborted, nil if none did: it names the ranks that were
// waited for, and the rank that aborted first, as far as this one knows. The end of ctx comes before
// what a peer told: of deadlines that are near each other, the first tells the others.
func (e *endpoint) fault(ctx context.Context) (err error) {
	e.look(func(w *watch) {
		if atomic.LoadUint32(&w.told) == 0 {
			return
		}
		what, told := w.text()
		switch {
		case ctx.Err() != nil:
			err = fmt.Errorf("%w: %s", comm.ContextError(ctx), what)
		case told:
			err = fmt.Errorf("%w: %s", comm.ErrPeerFailed, what)
		case w.why == whyTimedOut:
			err = fmt.Errorf("%w: %s for more than %v", comm.ErrTimeout, what, time.Duration(w.limit))
		default:
			err = fmt.Errorf("%w: %s", comm.ErrCanceled, what)
		}
	})
	return err
}

// text says what kernels waited for, and whether a peer told them to abort.
func (w *watch) text() (text string, told bool) {
	text = fmt.Sprintf("rank %d waited for rank %d in operation %d (%s)", w.rank, w.peer, w.epoch, comm.Op(w.operation))
	rank := int(w.why>>8) - 1
	if rank < 0 {
		return text, false
	}
	text += fmt.Sprintf(" until rank %d aborted", rank)
	if peer := int(w.why&0xff) - 1; peer >= 0 {
		text += fmt.Sprintf(", which waited for rank %d", peer)
	}
	return text, true
}

// discard refuses further launches, drains the stream for some time at most, and closes the endpoint.
// If work stays in flight, the memory stays too.
func (e *endpoint) discard(s *cuda.Stream, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	e.phase.Store(shut)
	// A launch into a full stream waits.
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

// close frees everything. No kernel of this rank runs any more. Those of peers may still
// write to its scratch memory, through their own mappings.
func (e *endpoint) close() error {
	e.looks.Lock()
	e.watch = nil
	e.looks.Unlock()
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
