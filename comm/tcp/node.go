package tcp

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/fault"
)

// node is a rank of the world: what its communicators share.
type node struct {
	rank      int           // in the world
	size      int           // of the world
	hosts     []hostID      // by rank; nil until they are known
	pairs     []*pair       // by rank
	tick      time.Duration // between two signs of life
	patience  int64         // ticks without a sign of life after which a rank is lost
	ticks     atomic.Int64  // since the node was made
	proposals atomic.Uint64 // communicator IDs that this rank has proposed

	neighbors atomic.Pointer[neighborhood] // of this rank's machine; nil if they share no memory
	stop      chan struct{}                // closed when the node ends
	report    func([]fault.Report)         // tells the launcher; nil where there is none
	takeBack  func(come []int)             // takes back that ranks were late; nil where there is none
	isolated  bool                         // it shares no memory with ranks of its machine
	run       string                       // names the world in flight records; set before there is a communicator

	mu    sync.RWMutex     // guards wires and gone
	wires map[uint64]*wire // open communicators, by ID; guarded by mu
	gone  bool             // this rank has left; guarded by mu
}

// worldID is the communicator ID of the world. A communicator has one ID on all its ranks, and no other one of the
// world ever has it, since frames of one that was closed may still be in flight. Nothing but the ID tells the
// frames of two communicators apart. Other IDs below the size of the world are not used.
const worldID = 0

// propose returns an ID that no rank of the world has proposed or will: the remainder by the size of the world is
// this rank, the quotient counts this rank's proposals, from 1 on.
func (n *node) propose() uint64 {
	return n.proposals.Add(1)*uint64(n.size) + uint64(n.rank)
}

// checkProposal returns an error unless an ID is one that the rank of the world may propose.
func (n *node) checkProposal(id uint64, rank int) error {
	size := uint64(n.size)
	if id < size || id%size != uint64(rank) {
		return fmt.Errorf("%w: rank %d of the world proposes the communicator ID %d, which another rank may propose",
			comm.ErrMismatch, rank, id)
	}
	return nil
}

// register has the frames with a communicator's ID come to it.
func (n *node) register(w *wire) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone {
		return comm.ErrClosed
	}
	if n.wires[w.id] != nil {
		return fmt.Errorf("%w: the communicator ID %d is in use", comm.ErrMismatch, w.id)
	}
	n.wires[w.id] = w
	return nil
}

// unregister has no more frames come to a communicator.
func (n *node) unregister(w *wire) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.wires[w.id] == w {
		delete(n.wires, w.id)
	}
}

// wire returns the communicator with that ID, nil if it is closed.
func (n *node) wire(id uint64) *wire {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.wires[id]
}

// forgive takes back what the launcher was told of ranks that have come now to make a communicator with this one.
func (n *node) forgive(pairs []*pair) {
	if n.takeBack == nil {
		return
	}
	var come []int
	for _, p := range pairs {
		come = append(come, p.rank)
	}
	n.takeBack(come)
}

// signal has all communicators look.
func (n *node) signal() {
	n.mu.RLock()
	defer n.mu.RUnlock()
	for _, w := range n.wires {
		w.signal()
	}
}

// notify puts a value into a channel of one, unless it has one.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// start starts the lanes, when all have been made.
func (n *node) start() {
	for _, p := range n.pairs {
		p.start()
	}
	go n.beat()
}

// leave closes the connections if all communicators are closed: it says goodbye, and waits until
// all peers have seen everything that this rank has sent, or until ctx ends.
func (n *node) leave(ctx context.Context) error {
	n.mu.Lock()
	stays := n.gone || len(n.wires) > 0
	n.gone = n.gone || !stays
	n.mu.Unlock()
	if stays {
		return nil
	}
	for _, p := range n.pairs {
		p.leave()
	}
	for _, p := range n.pairs {
		if len(p.lanes) > 0 {
			select {
			case <-p.acknowledged:
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
	if s := n.neighbors.Load(); s != nil {
		s.close()
	}
}
