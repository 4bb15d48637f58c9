package tcp

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// node is a rank of the world: what its communicators share.
type node struct {
	rank, size int
	hosts      []comm.Wait // by rank: ranks of one host have the same color
	pairs      []*pair     // by rank
	tick       time.Duration
	patience   int64 // ticks without a sign of life
	ticks      atomic.Int64
	stop       chan struct{}

	mu    sync.RWMutex
	wires map[uint64]*wire
	gone  bool // this rank has left
}

// wire returns the communicator of that number, nil if it is closed.
func (n *node) wire(id uint64) *wire {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.wires[id]
}

// signal has all communicators look.
func (n *node) signal() {
	n.mu.RLock()
	defer n.mu.RUnlock()
	for _, w := range n.wires {
		w.signal()
	}
}

// poke says that there is something new, to who looks for that.
func poke(news chan struct{}) {
	select {
	case news <- struct{}{}:
	default:
	}
}

// start starts the lanes, once all are there.
func (n *node) start() {
	for _, p := range n.pairs {
		for _, l := range p.lanes {
			go l.writer()
			go l.reader()
		}
	}
	go n.beat()
}

// leave closes the connections if all communicators are closed: it says goodbye, and waits until
// all others have seen everything that this rank has sent, or until ctx ends.
func (n *node) leave(ctx context.Context) error {
	n.mu.Lock()
	stays := n.gone || len(n.wires) > 0
	n.gone = n.gone || !stays
	n.mu.Unlock()
	if stays {
		return nil
	}
	for _, p := range n.pairs {
		p.mu.Lock()
		p.leaving = true
		p.mu.Unlock()
		for _, l := range p.lanes {
			l.rouse()
		}
	}
	for _, p := range n.pairs {
		if len(p.lanes) > 0 {
			select {
			case <-p.seen:
			case <-p.dead:
			case <-ctx.Done():
			}
		}
	}
	n.end()
	return nil
}

// end closes the connections.
func (n *node) end() {
	close(n.stop)
	for _, p := range n.pairs {
		p.fail(errLeft)
	}
}
