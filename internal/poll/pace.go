package poll

import (
	"runtime"
	"time"

	"github.com/tutti-go/tutti/internal/machine"
)

// Pace paces a goroutine that waits for other processes. It says how often to look, and pauses in between. The zero
// value is the beginning of a wait.
type Pace struct {
	// Goroutines says that what is waited for may need other goroutines of this process. Yields then let these run
	// instead of other processes, which takes longer.
	Goroutines bool

	pauses int           // so far
	began  time.Time     // the first pause; zero before it
	length time.Duration // of the last pause; 0 for a yield
	turn   time.Duration // length when other goroutines had their last turn
}

const (
	firstLooks = 16 // before the first pause
	laterLooks = 4  // between two
	// blockPauses is how many pauses of those who block are no stall.
	blockPauses = 50
)

// Polls is how often to look before the next pause.
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
		p.pauses = maxPauses // the clock will have moved after the sleep, and then stand again
	}
	p.length = d
	switch kind {
	case yield:
		if p.Goroutines {
			runtime.Gosched()
		} else {
			Yield()
		}
	case sleep:
		if d >= 2*p.turn {
			// The system's sleep keeps this processor until Go takes it away, so goroutines that wait for it get
			// it each time that the pauses have doubled. Each time would wake threads that find nothing to do.
			p.turn = d
			runtime.Gosched()
		}
		Sleep(d)
	case park:
		time.Sleep(d)
	}
}

// Block is Next for those who block until something comes: it returns the longest time that
// they do.
func (p *Pace) Block() time.Duration {
	if p.pauses++; p.pauses > blockPauses {
		p.length = min(p.length+maxSleep/4, maxSleep)
	}
	return maxSleep
}

// Stalled reports whether the wait has taken a millisecond or longer.
func (p *Pace) Stalled() bool { return p.length >= stallTime/share }

// Long reports whether it has taken tens of milliseconds.
func (p *Pace) Long() bool { return p.length >= maxSleep }
