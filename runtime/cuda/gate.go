package cuda

import (
	"math"
	"sync/atomic"
)

// gate counts the calls that are in flight, so that Close can keep new ones
// out and wait for these. Unlike a sync.RWMutex it may be entered again from
// inside while somebody waits for it to empty: the second entry is refused
// then, where a lock would never be granted.
type gate struct {
	inside atomic.Int64 // the number of calls, plus gateShut once it is shut
}

const gateShut = math.MinInt64 / 2

// enter lets a call in, which ends by leave, unless the gate is shut.
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

// shut keeps everybody out from here on. It is called once.
func (g *gate) shut() {
	g.inside.Add(gateShut)
}

func (g *gate) isShut() bool {
	return g.inside.Load() < 0
}

// empty reports whether the gate is shut and everybody has left.
func (g *gate) empty() bool {
	return g.inside.Load() == gateShut
}
