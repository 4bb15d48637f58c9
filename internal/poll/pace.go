package poll

import "time"

// Pace paces a goroutine that waits: at first it asks again at once, since most collectives
// take microseconds; then it lets other threads and processes run in between, which is what
// the peers need when there are more of them than processors; and in the end it sleeps. The
// zero value is the beginning of a wait.
type Pace struct {
	round int
	sleep time.Duration
}

const (
	firstPolls  = 16 // before the first pause
	laterPolls  = 4  // between two
	yieldRounds = 500
	// Sleeps get longer by sleepStep, so that they stay a small part of the
	// time that was waited already.
	sleepStep = 5 * time.Microsecond
)

// Polls is how often to ask before the next pause.
func (p *Pace) Polls() int {
	if p.round == 0 {
		return firstPolls
	}
	return laterPolls
}

// Next pauses.
func (p *Pace) Next() {
	if d := p.Pause(); d > 0 {
		time.Sleep(d)
	} else {
		Yield()
	}
}

// Pause returns how long the next pause is to be, for those who make it themselves: 0 gives
// up the processor only.
func (p *Pace) Pause() time.Duration {
	if p.round++; p.round > yieldRounds {
		p.sleep = min(p.sleep+sleepStep, maxSleep)
	}
	return p.sleep
}

// blockRounds is yieldRounds for who blocks, and blockTime the shortest time.
const (
	blockRounds = 50
	blockTime   = time.Millisecond
)

// Block is Pause for those who block until something comes: the longest time that they do.
func (p *Pace) Block() time.Duration {
	if p.round++; p.round > blockRounds {
		p.sleep = min(p.sleep+8*sleepStep, maxSleep)
	}
	return max(p.sleep, blockTime)
}

// Stalled reports whether the wait has come to sleeping, Long whether it has
// taken some milliseconds.
func (p *Pace) Stalled() bool { return p.sleep > 0 }
func (p *Pace) Long() bool    { return p.sleep >= 40*sleepStep }
