package mpi

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/ranks"
)

// progress is the goroutine that lets communication go on while its submitters
// compute: MPI libraries move most data only inside MPI calls. It looks now
// and then at communicators that have operations pending and nobody waiting,
// and goes on for as long as it finds messages done. It sleeps when nothing
// was submitted for a while.
type progress struct {
	parked atomic.Bool
	wake   chan struct{}
	stop   chan struct{}
	done   chan struct{}

	mu        sync.Mutex
	endpoints []*endpoint // copied when it changes
}

const (
	// busyTick is the pause between two looks while there is something to
	// move on, idleTick while there is not; the latter costs a loop of short
	// collectives about one percent.
	busyTick = 100 * time.Microsecond
	idleTick = time.Millisecond
	// idleTicks is how many looks find nothing before the goroutine parks.
	idleTicks = 50
	// lookLimit is how long one communicator keeps others from their look.
	lookLimit = 5 * time.Millisecond
	// farewellTick is the pause between two looks for farewells of ranks that have
	// not closed a communicator yet.
	farewellTick = 20 * time.Millisecond
)

func newProgress() *progress {
	p := &progress{wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	go p.run()
	return p
}

// notify wakes the goroutine up if it is parked.
func (p *progress) notify() {
	if p.parked.Load() && p.parked.CompareAndSwap(true, false) {
		p.wake <- struct{}{}
	}
}

func (p *progress) add(e *endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints = append(slices.Clip(p.endpoints), e)
}

func (p *progress) remove(e *endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints = slices.DeleteFunc(slices.Clone(p.endpoints), func(have *endpoint) bool { return have == e })
}

// all returns the communicators as they are now. A look at them holds no lock, as it may
// take long.
func (p *progress) all() []*endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.endpoints
}

// close ends the goroutine, and reports whether it has ended before ctx.
func (p *progress) close(ctx context.Context) bool {
	close(p.stop)
	select {
	case <-p.done:
		return true
	default:
	}
	select {
	case <-p.done:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *progress) run() {
	defer close(p.done)
	timer := time.NewTimer(idleTick)
	defer timer.Stop()
	for idle := 0; ; {
		tick := idleTick
		switch pending, _ := p.look(); {
		case pending:
			tick, idle = busyTick, 0
		case idle < idleTicks:
			idle++
		default:
			p.parked.Store(true)
			// What was submitted before that has woken nobody.
			pending, leaving := p.look()
			if pending && p.parked.CompareAndSwap(true, false) {
				idle = 0
				break
			}
			var farewells <-chan time.Time
			if leaving {
				farewells = time.After(farewellTick)
			}
			select {
			case <-farewells:
				if p.parked.CompareAndSwap(true, false) {
					continue
				}
				<-p.wake
			case <-p.wake:
			case <-p.stop:
				return
			}
			idle = 0
		}
		timer.Reset(tick)
		select {
		case <-timer.C:
		case <-p.stop:
			return
		}
	}
}

// look moves every communicator on that nobody waits for, and reports whether
// one of them has operations pending, and whether one waits for farewells.
func (p *progress) look() (pending, leaving bool) {
	pending = p.moveOn()
	return pending, p.seeOff(context.Background())
}

func (p *progress) moveOn() (pending bool) {
	for _, e := range p.all() {
		if e.waiters.Load() > 0 {
			continue
		}
		if !e.mu.TryLock() {
			// Somebody is at it, and maybe submits: not the time to park.
			pending = pending || p.parked.Load()
			continue
		}
		if !e.keepUp() {
			pending = true
			continue
		}
		if e.broken == nil && !e.closed {
			if err := e.attend(); err != nil {
				_ = e.fail(comm.OpSync.String(), err)
			}
		}
		pending = pending || e.broken == nil && e.started() > 0
		e.mu.Unlock()
	}
	return pending
}

// keepUp lets operations go on for as long as they do, up to lookLimit. Many small ones go on a step at a
// time, each when the other ranks have made theirs: where something has moved, more is a
// moment away if the others are at it as well, and is waited for as long as they may pause.
// The caller holds mu, which others can have in between; keepUp reports whether they have
// left it to the caller.
func (e *endpoint) keepUp() bool {
	var began, last time.Time
	for e.inFlight.Load() > 0 && e.waiters.Load() == 0 {
		// An error breaks the communicator, which its next call reports.
		moved, err := e.poll(false, 1)
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		if moved {
			last = now
		}
		if err != nil || now.Sub(last) > busyTick || now.Sub(began) > lookLimit {
			break
		}
		e.mu.Unlock()
		if !moved {
			yieldProcessor()
		}
		if !e.mu.TryLock() {
			return false
		}
	}
	return true
}

// seeOff lets go of the endpoints whose other ranks have left as well, frees what
// they hold, and reports whether others still wait for that.
func (p *progress) seeOff(ctx context.Context) (leaving bool) {
	for _, e := range p.all() {
		gone, free := e.departs()
		if gone {
			p.remove(e)
		}
		if free {
			e.release(ctx)
		}
		leaving = leaving || e.leaving.Load()
	}
	return leaving
}

// awaitDeparture waits until no endpoint is waiting for farewells of other ranks. It
// says which ranks it misses: its error where ctx ends first, and the log when its
// patience is over.
func (p *progress) awaitDeparture(ctx context.Context, patience time.Duration) error {
	began, told := time.Now(), false
	for pace := (pause{}); p.seeOff(ctx); pace.next() {
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", p.missing(), comm.ContextError(ctx))
		}
		if !told && time.Since(began) > patience {
			slog.Warn("mpi: Finalize waits for other ranks: " + p.missing())
			told = true
		}
	}
	return nil
}

// missing describes an endpoint that other ranks have not closed.
func (p *progress) missing() string {
	for _, e := range p.all() {
		if missing := e.missing(); len(missing) > 0 {
			return fmt.Sprintf("a communicator of %d ranks is still open on %s", e.size, ranks.Text(missing))
		}
	}
	return "they are being told that this one has closed its communicators"
}
