package tcp

import (
	"fmt"
	"time"
)

// beat sends a sign of life if no frame was sent since the last tick, and closes the pair if
// nothing has come for as many ticks as patience says. Called by node.beat.
func (p *pair) beat(tick, patience int64) {
	if p.quiet() {
		p.lanes[0].write(true)
	}
	if silent := tick - p.lastReceived.Load(); silent >= patience {
		p.fail(fmt.Errorf("nothing has come from it for %v", time.Duration(silent)*p.node.tick))
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

// beat counts the ticks. A process that was stopped counts few, and does not take the others for
// silent.
func (n *node) beat() {
	ticker := time.NewTicker(n.tick)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			tick := n.ticks.Add(1)
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
