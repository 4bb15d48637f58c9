package cuda

import (
	"math"
	"sync/atomic"
)

// gate counts the calls in flight, so that Close can refuse new ones and wait for these. Unlike a sync.RWMutex it may
// be entered again from inside while somebody waits for it to empty: the second entry is refused, where a lock would
// deadlock.
type gate struct {
	inside atomic.Int64 // the number of calls, plus gateShut once it is shut
}

const gateShut = math.MinInt64 / 2

// enter begins a call, which leave ends. It returns false if the gate is shut.
func (g *gate) enter() bool {
	if g.inside.Add(1) > 0 {
		return true
	}
	g.leave()
	return false
}

func (g *gate) leave() {
	g.inside.Add(-1)
}

// shut refuses all further calls. It is called once.
func (g *gate) shut() {
	g.inside.Add(gateShut)
}

func (g *gate) isShut() bool {
	return g.inside.Load() < 0
}

// empty reports whether the gate is shut and all calls have left.
func (g *gate) empty() bool {
	return g.inside.Load() == gateShut
}
