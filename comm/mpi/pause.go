package mpi

import "time"

// pause paces a goroutine that waits: at first it asks again at once, since
// most collectives take microseconds; then it lets other threads and processes
// run in between, which is what the peers need when there are more of them
// than processors; and in the end it sleeps.
type pause struct {
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
	maxSleep  = time.Millisecond
)

// polls is how often to ask before the next pause.
func (p *pause) polls() int {
	if p.first() {
		return firstPolls
	}
	return laterPolls
}

// first reports whether nothing was waited yet.
func (p *pause) first() bool { return p.round == 0 }

// next waits a little.
func (p *pause) next() {
	p.round++
	if p.round <= yieldRounds {
		yieldProcessor()
		return
	}
	p.sleep = min(p.sleep+sleepStep, maxSleep)
	time.Sleep(p.sleep)
}

// stalled reports whether the wait has come to sleeping, long whether it has
// taken some milliseconds.
func (p *pause) stalled() bool { return p.round > yieldRounds }
func (p *pause) long() bool    { return p.sleep >= 40*sleepStep }
