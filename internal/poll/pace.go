package poll

import (
	"runtime"
	"time"

	"github.com/tutti-go/tutti/internal/machine"
)

// Pace paces a goroutine that waits for other processes: it says how often to poll, and pauses in between. The zero
// value begins a wait.
type Pace struct {
	// Goroutines says that the awaited event may need other goroutines of this process. Yields then let these run
	// instead of other processes, which takes longer.
	Goroutines bool
	// Home is the processor of the rank that waits; nil if the kernel alone chooses.
	Home *Home

	pauses int           // so far
	began  time.Time     // the first pause; zero before it
	length time.Duration // of the last pause; 0 for a yield
	turn   time.Duration // length at the last turn of other goroutines
}

const (
	firstLooks = 16 // polls before the first pause
	laterLooks = 4  // polls between two pauses
	// blockPauses is the number of pauses of a blocking wait that do not count as a stall.
	blockPauses = 50
)

// Polls returns the number of polls before the next pause.
func (p *Pace) Polls() int {
	if p.pauses == 0 {
		return firstLooks
	}
	return laterLooks
}

// Next pauses.
func (p *Pace) Next() {
	now := time.Now()
	if p.pauses == 0 {
		p.began = now
	}
	waited := now.Sub(p.began)
	kind, d := next(p.pauses, waited, machine.Quota() > 0)
	p.pauses++
	if kind == park && waited == 0 {
		p.pauses = maxPauses // the clock moves during the sleep, and then stands still again
	}
	p.length = d
	switch kind {
	case yield:
		if p.Goroutines {
			runtime.Gosched()
			return
		}
		Yield()
		if p.Home != nil {
			after := time.Now()
			p.Home.yielded(after.Sub(now), after)
		}
	case sleep:
		if d >= 2*p.turn {
			// The system's sleep keeps this processor until Go takes it away. Goroutines that wait for it therefore
			// get a turn each time the pauses have doubled. A turn at every pause would wake threads that find nothing
			// to do.
			p.turn = d
			runtime.Gosched()
		}
		Sleep(d)
	case park:
		time.Sleep(d)
	}
}

// Block is Next for callers that block until something arrives: it returns the longest time to block.
func (p *Pace) Block() time.Duration {
	if p.pauses++; p.pauses > blockPauses {
		p.length = min(p.length+maxSleep/4, maxSleep)
	}
	return maxSleep
}

// Stalled reports whether the wait has lasted a millisecond or longer.
func (p *Pace) Stalled() bool { return p.length >= stallTime/share }

// Long reports whether the wait has lasted tens of milliseconds.
func (p *Pace) Long() bool { return p.length >= maxSleep }
