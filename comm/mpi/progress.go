package mpi

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/ranks"
)

// progress is the goroutine that drives communication while the program computes: MPI
// libraries move most data only inside MPI calls. It looks now and then at communicators that
// have operations in flight and nobody waiting, and goes on for as long as messages complete.
// It sleeps when nothing was submitted for a while.
type progress struct {
	parked atomic.Bool   // it waits for wake
	wake   chan struct{} // has room for one
	stop   chan struct{} // closed by whoever ends it
	done   chan struct{} // closed when it has ended

	mu        sync.Mutex  // guards the list of endpoints
	endpoints []*endpoint // copied when it changes; guarded by mu

	turn int // of the goroutine: where in the endpoints the next look at idle ones begins
}

// idleLooked is how many idle communicators a look includes: it costs the same however many are open.
const idleLooked = 32

func newProgress() *progress {
	p := &progress{
		wake: make(chan struct{}, 1),
		stop: make(chan struct{}),
		done: make(chan struct{}),
	}
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
	p.endpoints = slices.DeleteFunc(slices.Clone(p.endpoints), func(have *endpoint) bool {
		return have == e
	})
}

// all returns the communicators at this moment. A look at them takes long, and so holds no
// lock.
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
	idle := 0
	for looks := 0; ; {
		switch busy, _ := p.look(); {
		case busy && looks < busyTicks:
			looks++
			idle = 0
			poll.Sleep(busyTick)
			select {
			case <-p.stop:
				return
			default:
			}
			continue
		case busy:
			idle = 0
		case idle < idleTicks:
			looks = 0
			idle++
		default:
			p.parked.Store(true)
			// A submission before that has woken nobody.
			busy, leaving := p.look()
			if busy && p.parked.CompareAndSwap(true, false) {
				idle = 0
				break
			}
			var goodbyes <-chan time.Time
			if leaving {
				goodbyes = time.After(goodbyeTick)
			}
			select {
			case <-goodbyes:
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
		timer.Reset(idleTick)
		select {
		case <-timer.C:
		case <-p.stop:
			return
		}
	}
}

// look drives every communicator that has operations in flight and that nobody waits on, and hears
// control messages of some of the others in turn. It reports whether one of them has
// operations in flight, and whether one waits for goodbyes.
func (p *progress) look() (busy, leaving bool) {
	all := p.all()
	first := p.turn % max(len(all), 1)
	p.turn = first + idleLooked
	for i, e := range all {
		if !e.Busy() && (i-first+len(all))%len(all) >= idleLooked {
			continue
		}
		moving, missed := e.Look(busyTick)
		busy = busy || moving || missed && p.parked.Load() // not the time to park
	}
	return busy, p.releaseDeparted(context.Background())
}

// releaseDeparted removes and frees the endpoints that all ranks have left. It reports whether
// others still wait for goodbyes.
func (p *progress) releaseDeparted(ctx context.Context) (leaving bool) {
	for _, e := range p.all() {
		gone, free := e.Departs()
		if gone {
			p.remove(e)
		}
		if free {
			e.release(ctx)
		}
		leaving = leaving || e.Leaving()
	}
	return leaving
}

// missing describes an endpoint that other ranks have not closed, and returns "" if no
// endpoint waits for goodbyes.
func (p *progress) missing(ctx context.Context) string {
	if !p.releaseDeparted(ctx) {
		return ""
	}
	for _, e := range p.all() {
		if missing := e.Missing(); len(missing) > 0 {
			return fmt.Sprintf("a communicator of size %d is still open on %s", e.size, ranks.Text(missing))
		}
	}
	return "its goodbyes to them are in flight"
}
