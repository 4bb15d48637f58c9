package mpi

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
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
	endpoints []*endpoint
}

const (
	// busyTick is the pause between two looks while there is something to
	// move on, idleTick while there is not; the latter costs a loop of short
	// collectives about one percent.
	busyTick = 100 * time.Microsecond
	idleTick = time.Millisecond
	// idleTicks is how many looks find nothing before the goroutine parks.
	idleTicks = 50
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
	p.endpoints = append(p.endpoints, e)
}

func (p *progress) remove(e *endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, have := range p.endpoints {
		if have == e {
			p.endpoints = append(p.endpoints[:i], p.endpoints[i+1:]...)
			return
		}
	}
}

// close ends the goroutine and waits for it.
func (p *progress) close() {
	close(p.stop)
	<-p.done
}

func (p *progress) run() {
	defer close(p.done)
	timer := time.NewTimer(idleTick)
	defer timer.Stop()
	for idle := 0; ; {
		tick := idleTick
		switch pending := p.look(); {
		case pending:
			tick, idle = busyTick, 0
		case idle < idleTicks:
			idle++
		default:
			idle = 0
			p.parked.Store(true)
			// What was submitted before that has woken nobody.
			if p.look() && p.parked.CompareAndSwap(true, false) {
				break
			}
			select {
			case <-p.wake:
			case <-p.stop:
				return
			}
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
// one of them has operations pending.
func (p *progress) look() (pending bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.endpoints {
		if e.waiters.Load() > 0 {
			continue
		}
		if !e.mu.TryLock() {
			// Somebody is at it, and maybe submits: not the time to park.
			pending = pending || p.parked.Load()
			continue
		}
		for moved := e.inFlight.Load() > 0; moved && e.waiters.Load() == 0; {
			// An error breaks the communicator, which its next call reports.
			moved, _ = e.poll(false, 1)
		}
		if e.broken == nil && !e.closed {
			if err := e.attend(); err != nil {
				_ = e.fail(comm.OpSync.String(), err)
			}
		}
		pending = pending || e.broken == nil && len(e.active) > 0
		e.mu.Unlock()
	}
	p.departed()
	return pending
}

// departed lets go of the endpoints whose other ranks have left as well, and
// reports whether none is waiting for that. The caller holds mu.
func (p *progress) departed() bool {
	waiting := false
	p.endpoints = slices.DeleteFunc(p.endpoints, func(e *endpoint) bool {
		done := e.depart()
		waiting = waiting || e.leaving.Load()
		return done
	})
	return !waiting
}

// awaitDeparture waits until no endpoint is waiting for farewells of other ranks,
// and reports whether that came in time.
func (p *progress) awaitDeparture(limit time.Duration) bool {
	end := time.Now().Add(limit)
	for pace := (pause{}); ; pace.next() {
		p.mu.Lock()
		done := p.departed()
		p.mu.Unlock()
		if done || time.Now().After(end) {
			return done
		}
	}
}
