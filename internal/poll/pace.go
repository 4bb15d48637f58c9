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
	blockRounds = 50 // is that for those who block
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
	if p.round++; p.round <= yieldRounds {
		Yield()
		return
	}
	p.sleep = min(p.sleep+sleepStep, maxSleep)
	time.Sleep(p.sleep)
}

// Block is Next for those who block until something comes: it returns the longest time that
// they do.
func (p *Pace) Block() time.Duration {
	if p.round++; p.round > blockRounds {
		p.sleep = min(p.sleep+8*sleepStep, maxSleep)
	}
	return maxSleep
}

// Stalled reports whether the wait has come to sleeping.
func (p *Pace) Stalled() bool { return p.sleep > 0 }

// Long reports whether it has taken some milliseconds.
func (p *Pace) Long() bool { return p.sleep >= 40*sleepStep }
