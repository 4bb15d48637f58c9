package local

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/ranks"
)

// yieldLooks is how often a rank looks for an end of its waiting after it has spun,
// letting other goroutines run in between, before it sleeps.
const yieldLooks = 16

// looksBetween is how often it looks before it lets others run once more. Those that
// share its processor have had their turn by then, so that it waits for another processor,
// and letting them run takes a lock of the scheduler that this one needs as well.
const looksBetween = 16

// clockLooks is how often it looks between two looks at the clock, which take longer.
const clockLooks = 16

// Progress implements [comm.Progresser].
func (e *endpoint) Progress() comm.Progress {
	// What is asked later is more; too many submitted and too few done do no harm.
	ended := e.messages.Ended()
	begun := e.messages.Begun()
	done := min(e.completed(), e.arrivals.Load()) // others may have finished what this rank is just telling
	if e.telling() {
		done = min(done, e.arrivals.Load()-1)
	}
	return comm.Progress{
		Collectives: comm.Count{Submitted: e.submitted.Load() - begun, Done: done},
		Messages:    comm.Count{Submitted: begun, Done: ended},
	}
}

// sync waits until everything the rank submitted is done.
func (e *endpoint) sync(ctx context.Context) error {
	if e.closed.Load() {
		return comm.ErrClosed
	}
	return e.settle(ctx)
}

// settle is sync for an operation that was submitted before the communicator
// was closed, if it was: whoever closes it waits as well.
func (e *endpoint) settle(ctx context.Context) error {
	submitted := e.submitted.Load()
	if f := e.world.failure.Load(); f != nil && submitted == e.settled.Load() {
		return e.broken(f)
	}
	if err := e.wait(ctx); err != nil {
		return err
	}
	for known := e.settled.Load(); known < submitted && !e.settled.CompareAndSwap(known, submitted); {
		known = e.settled.Load() // another goroutine knows more now
	}
	return nil
}

// wait helps until everything is done. If that fails, the world is broken and
// nobody touches the rank's buffers any more.
func (e *endpoint) wait(ctx context.Context) error {
	w := e.world
	spin := time.Duration(e.spin.Load())
	spinning, looks, yields := spin > 0, 0, 0
	var began time.Time
	for {
		if e.done() {
			e.learn(spin, spinning, looks)
			return nil
		}
		if w.tells && e.finishTold() {
			continue
		}
		if f := w.failure.Load(); f != nil {
			e.quiesce()
			return e.failed(f)
		}
		if e.help() {
			spinning, looks, yields, began = spin > 0, 0, 0, time.Time{}
			continue
		}
		looks++
		switch {
		case spinning:
			if looks%clockLooks > 0 {
				continue
			}
			now := time.Now()
			if began.IsZero() {
				began = now
			}
			spinning = now.Sub(began) < spin
		case yields > 0 && looks%looksBetween > 0:
		case yields < yieldLooks:
			yields++
			runtime.Gosched()
		default:
			e.mu.Lock()
			e.judge()
			e.mu.Unlock()
			e.learn(spin, false, looks)
			spin = time.Duration(e.spin.Load())
			if err := e.sleep(ctx); err != nil && !e.done() {
				e.giveUp(err)
			}
			spinning, looks, yields, began = spin > 0, 0, 0, time.Time{}
		}
	}
}

// learn adapts how long the rank spins to how its spinning ended: with what it waited
// for, or in vain.
func (e *endpoint) learn(spin time.Duration, spinning bool, looks int) {
	next := spin
	switch {
	case spin == 0 || looks == 0:
	case spinning:
		next = min(2*spin, maxSpin)
	default:
		next = max(spin/2, minSpin)
	}
	if next != spin {
		e.spin.Store(int64(next))
	}
}

// giveUp breaks the world since the rank does not wait any longer.
func (e *endpoint) giveUp(err error) {
	err = fmt.Errorf("%w, waiting for %s", err, e.waitsFor())
	e.world.fail(&failure{
		rank:  e.rank,
		own:   err,
		peers: fmt.Errorf("%w: rank %d gave up: %w", comm.ErrPeerFailed, e.rank, err),
	})
}

// waitsFor describes what keeps the rank waiting.
func (e *endpoint) waitsFor() string {
	w := e.world
	e.mu.Lock()
	defer e.mu.Unlock()
	var what []string
	seq, x := e.completed(), (*entry)(nil)
	if e.telling() {
		seq = e.arrivals.Load() - 1
		x = &w.cell(seq, e.rank).entry
	} else {
		x = &w.slot(seq).calls[e.rank]
	}
	if seq < e.arrivals.Load() {
		var late []int
		for _, other := range w.ranks {
			if other.arrivals.Load() <= seq {
				late = append(late, other.rank)
			}
		}
		text := fmt.Sprintf("%v (collective #%d)", x, seq+1)
		if len(late) > 0 {
			text += ", not called by " + ranks.Text(late)
		}
		what = append(what, text)
	}
	for _, o := range e.open {
		what = append(what, o.call().String())
	}
	if n := len(e.backlog.all()); n > 0 {
		what = append(what, fmt.Sprintf("%d operations behind that", n))
	}
	if len(what) == 0 {
		return "nothing"
	}
	return strings.Join(what, "; ")
}
