package tcp

import (
	"fmt"
	"time"
)

// beat sends a sign of life if there was none since the last tick, and notices if none
// came for so many ticks.
func (p *pair) beat(tick, patience int64) {
	p.mu.Lock()
	quiet := !p.spoke && !p.leaving && p.urgent.Empty() // what waits is a sign of life, once the other side takes it
	if p.spoke = false; quiet {
		p.urgent.Push(sending{header: header{kind: frameBeat}})
	}
	p.mu.Unlock()
	if quiet {
		p.lanes[0].write(true)
	}
	if silent := tick - p.heard.Load(); silent >= patience {
		p.fail(fmt.Errorf("nothing has come from it for %v", time.Duration(silent)*p.node.tick))
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
