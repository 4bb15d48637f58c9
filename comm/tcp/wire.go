package tcp

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm/internal/schedule"
)

// wire is a communicator's part of the connections: the [schedule.Wire] of its engine.
type wire struct {
	node   *node
	engine *schedule.Engine
	id     uint64 // number, the same on all ranks
	rank   int
	pairs  []*pair       // by rank
	place  []int32       // rank of the communicator, by rank of the world; -1 for those outside
	boxes  []box         // by rank, each guarded by its pair
	wakes  chan struct{} // who waits
	drives chan struct{} // who drives the engine while nobody waits
	closed chan struct{}

	waiting atomic.Int32 // goroutines in Await
	untold  atomic.Int32 // control messages that are not sent
	timers  sync.Pool

	// Of the holder of the engine's lock.
	dirty []*pair // to which messages were posted that nobody has begun to send
	small int     // bytes of these

	mu    sync.Mutex
	done  []schedule.Done
	heard []mail // by rank
}

// mail is what has come of control messages.
type mail struct{ report, last []byte }

func (n *node) newWire(id uint64, rank int, ranks []int) *wire {
	w := &wire{node: n, id: id, rank: rank, pairs: make([]*pair, len(ranks)), place: make([]int32, n.size), boxes: make([]box, len(ranks)),
		wakes: make(chan struct{}, 1), drives: make(chan struct{}, 1), closed: make(chan struct{}), heard: make([]mail, len(ranks))}
	w.timers.New = func() any { return time.NewTimer(time.Hour) }
	for i := range w.place {
		w.place[i] = -1
	}
	for r, world := range ranks {
		w.pairs[r], w.place[world] = n.pairs[world], int32(r)
	}
	return w
}

// drive lets operations go on that nobody waits for.
func (w *wire) drive() {
	for {
		select {
		case <-w.drives:
			w.engine.Drive()
		case <-w.closed:
			return
		}
	}
}

// Post implements [schedule.Wire].
func (w *wire) Post(id int, m *schedule.Message) {
	p, tag := w.pairs[m.Peer], m.Tag<<1
	if m.User {
		tag |= 1
	}
	if m.Receive {
		if p.post(w, m.Peer, posted{id, tag, m.Address, m.Bytes}) {
			w.soil(p, 0)
		}
		return
	}
	p.send(w, id, tag, m.Address, m.Bytes)
	w.soil(p, m.Bytes)
}

// soil notes that something waits to be sent.
func (w *wire) soil(p *pair, bytes int) {
	if len(p.lanes) > 0 {
		w.dirty = append(w.dirty, p)
		w.small += bytes
	}
}

// Flush implements [schedule.Wire]. What is short is sent here.
func (w *wire) Flush() error {
	for i, p := range w.dirty {
		if i > 0 && w.dirty[i-1] == p {
			continue
		}
		if w.small <= inlineBytes {
			p.lanes[0].write(true)
		} else {
			p.lanes[0].rouse()
		}
	}
	clear(w.dirty)
	w.dirty, w.small = w.dirty[:0], 0
	return nil
}

// Poll implements [schedule.Wire].
func (w *wire) Poll(done []schedule.Done, _ schedule.Hint) ([]schedule.Done, error) {
	_ = w.Flush()
	w.mu.Lock()
	defer w.mu.Unlock()
	done = append(done, w.done...)
	w.done = w.done[:0]
	return done, nil
}

// Abandon implements [schedule.Wire].
func (w *wire) Abandon() int {
	for from, p := range w.pairs {
		p.forget(w, from)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = w.done[:0]
	return 0
}

// Tell implements [schedule.Wire].
func (w *wire) Tell(rank int, report bool, message []byte) bool {
	p := w.pairs[rank]
	p.mu.Lock()
	taken := p.gone == nil
	if taken {
		w.untold.Add(1)
		p.urgent.Push(sending{header: header{kind: frameControl, id: w.id, report: report}, payload: append([]byte(nil), message...), wire: w})
	}
	p.mu.Unlock()
	if taken {
		p.lanes[0].write(true)
	}
	return taken
}

// Told implements [schedule.Wire].
func (w *wire) Told() (bool, error) { return w.untold.Load() == 0, nil }

// hear keeps a control message.
func (w *wire) hear(from int, report bool, message []byte) {
	w.mu.Lock()
	if m := &w.heard[from]; report {
		m.report = message
	} else {
		m.last = message
	}
	w.mu.Unlock()
	w.signal()
}

// Hear implements [schedule.Wire].
func (w *wire) Hear(rank int) (message []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := &w.heard[rank]
	if message = m.report; message != nil {
		m.report = nil
	} else {
		message, m.last = m.last, nil
	}
	return message, nil
}

// Gone implements [schedule.Wire].
func (w *wire) Gone(rank int) error {
	p := w.pairs[rank]
	p.mu.Lock()
	gone := p.gone
	p.mu.Unlock()
	for i := 0; gone != nil && i < len(p.lanes); i++ {
		pass(&p.lanes[i].sealing) // what was sent is noted
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.heard[rank]; len(w.done) > 0 || m.report != nil || m.last != nil {
		return nil // not yet
	}
	return gone
}

// complete notes a message that is done.
func (w *wire) complete(id, bytes int) {
	w.mu.Lock()
	w.done = append(w.done, schedule.Done{ID: id, Bytes: bytes})
	w.mu.Unlock()
	w.signal()
}

// signal says that something has come: to who waits, otherwise to who drives.
func (w *wire) signal() {
	poke(w.wakes)
	if w.waiting.Load() == 0 {
		poke(w.drives)
	}
}

// Await implements [schedule.Waiter]. It blocks: a thread that spins would keep the one from the
// processor that hears the network.
func (w *wire) Await(d time.Duration) {
	w.waiting.Add(1)
	defer w.waiting.Add(-1)
	timer := w.timers.Get().(*time.Timer)
	timer.Reset(d)
	select {
	case <-w.wakes:
	case <-timer.C:
	}
	timer.Stop()
	w.timers.Put(timer)
}
