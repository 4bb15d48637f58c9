package tcp

import (
	"fmt"
	"time"
)

// unheard is the last tick at which something has come from a peer that has said nothing since it was connected.
const unheard = -1

// beat sends a sign of life if no frame was sent since the last tick, and closes the pair if
// nothing has come for as many ticks as patience says. Called by node.beat.
func (p *pair) beat(tick, patience int64) {
	if p.quiet() {
		p.lanes[0].write(true)
	}
	last := p.lastReceived.Load()
	if last == unheard {
		// A rank says nothing before it is connected to all others. It is not lost while it tries to reach one of
		// them, which New bounds by its context; its end closes the connection.
		return
	}
	if silent := tick - last; silent >= patience {
		p.failAsync(fmt.Errorf("nothing has come from it for %v", time.Duration(silent)*p.node.tick))
	}
}

// quiet queues a sign of life, and returns true, if no frame was sent since the last tick. A frame that
// waits is a sign of life when the peer takes it, and a rank that leaves has said its last.
func (p *pair) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	quiet := !p.active && !p.state.departing() && p.outbox.urgent.Empty()
	p.active = false
	if quiet {
		p.outbox.urgent.Push(outFrame{header: header{kind: frameBeat}})
	}
	return quiet
}

// countSilence counts the silence of all peers from now on, when all ranks are connected. One that has said nothing to
// this rank yet may be cut off before it does. Called by node.form.
func (n *node) countSilence() {
	for _, p := range n.pairs {
		p.lastReceived.CompareAndSwap(unheard, n.ticks.Load())
	}
}

// beat counts the ticks. A process that was stopped counts few, and does not take the others for
// silent.
func (n *node) beat() {
	ticker := time.NewTicker(n.tick)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			tick := n.ticks.Add(1)
			if s := n.neighbors.Load(); s != nil { // a rank may have ended while it rang
				s.bell().Rouse()
			}
			for _, p := range n.pairs {
				if len(p.lanes) > 0 {
					p.beat(tick, n.patience)
				}
			}
		case <-n.stop:
			return
		}
	}
}
