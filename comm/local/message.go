package local

import (
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostops"
)

// messageChunk is the length of the pieces that long messages are copied in,
// by ranks that wait. Shorter ones are copied by the rank that completes the
// pair.
const messageChunk = 256 << 10

// mailbox holds the messages to one rank that have only one side yet, in the
// order in which they were posted. It has sends or receives of any (source,
// tag), never both of one.
type mailbox struct {
	mu      sync.Mutex
	waiting []*op
	_       cacheLine
}

// source and destination of a message.
func (o *op) source() int {
	if o.op == comm.OpSend {
		return o.owner.rank
	}
	return int(o.peer)
}

func (o *op) destination() int {
	if o.op == comm.OpSend {
		return int(o.peer)
	}
	return o.owner.rank
}

// matches reports whether two operations are the sides of one message.
func (o *op) matches(other *op) bool {
	return o.op != other.op && o.tag == other.tag && o.source() == other.source()
}

// buffer returns the memory that a message uses on its side.
func (o *op) buffer() (start, end uintptr) {
	start = o.send
	if o.op == comm.OpRecv {
		start = o.recv
	}
	return start, start + uintptr(o.count*o.dt.Size())
}

// conflicts reports whether two messages of one rank touch the same memory,
// at least one of them writing it.
func (o *op) conflicts(other *op) bool {
	if o.op == comm.OpSend && other.op == comm.OpSend {
		return false
	}
	a, aEnd := o.buffer()
	b, bEnd := other.buffer()
	return max(a, b) < min(aEnd, bEnd) // nothing overlaps an empty buffer
}

// post looks for the other side of a message and otherwise leaves it to be
// found. The caller holds the lock of the operation's endpoint, so that a
// rank's messages are posted in order.
func (e *endpoint) post(o *op) (match *op) {
	box := &e.world.boxes[o.destination()]
	box.mu.Lock()
	defer box.mu.Unlock()
	for i, other := range box.waiting {
		if o.matches(other) {
			box.waiting = slices.Delete(box.waiting, i, i+1)
			return other
		}
	}
	box.waiting = append(box.waiting, o)
	return nil
}

// posted goes on with a message: copies it if it has both sides.
func (d *driver) posted(o, match *op) {
	w := d.world
	if match == nil {
		if w.left.Load() > 0 {
			w.checkMailboxes()
		}
		return
	}
	from, to := o, match
	if o.op == comm.OpRecv {
		from, to = match, o
	}
	if from.count != to.count || from.dt != to.dt {
		send, recv := from.call(), to.call()
		err := comm.AgreeOnMessage(from.owner.rank, &send, to.owner.rank, &recv)
		w.fail(&failure{rank: everyone, own: err, peers: err})
		return
	}
	bytes := to.count * to.dt.Size()
	to.match, to.next = from, 0
	to.chunks = (bytes + messageChunk - 1) / messageChunk
	if to.chunks <= 1 {
		to.chunks = 1
		to.left.Store(1)
		d.copyChunk(to, 0)
		return
	}
	chunks, sender, receiver := to.chunks, from.owner, to.owner
	to.left.Store(int32(chunks))
	w.jobs.push(to)
	w.front.jobs.Add(1) // from here on, the message may be done at any time
	w.wakeHelpers(chunks, func(e *endpoint) bool { return e == sender || e == receiver })
}

// copyChunk copies a part of a matched message and ends it after the last.
func (d *driver) copyChunk(to *op, chunk int) {
	w := d.world
	w.copying.Add(1)
	ok := w.failure.Load() == nil
	if ok {
		at := chunk * messageChunk
		bytes := to.count * to.dt.Size()
		n := min(bytes-at, messageChunk)
		hostops.Copy(to.recv+uintptr(at), to.match.send+uintptr(at), n, bytes >= streamBytes)
	}
	w.copying.Add(-1)
	if ok && to.left.Add(-1) == 0 {
		from := to.match
		d.messageDone(from)
		d.messageDone(to)
	}
}

// messageDone ends one side of a message.
func (d *driver) messageDone(o *op) {
	e := o.owner
	e.mu.Lock()
	i := slices.Index(e.open, o)
	last := len(e.open) - 1
	e.open[i] = e.open[last]
	e.open[last] = nil
	e.open = e.open[:last]
	e.recycle(o)
	goesOn := !e.backlog.empty()
	idle := e.pending.Add(-1) == 0
	e.mu.Unlock()
	if goesOn {
		d.kick(e)
	}
	if idle {
		d.world.wakeDone()
	}
}

// jobList holds long messages that have chunks left to copy.
type jobList struct {
	mu   sync.Mutex
	list []*op
}

func (l *jobList) push(o *op) {
	l.mu.Lock()
	l.list = append(l.list, o)
	l.mu.Unlock()
}

// helpMessage copies one chunk of a message.
func (e *endpoint) helpMessage() bool {
	w := e.world
	w.jobs.mu.Lock()
	if len(w.jobs.list) == 0 {
		w.jobs.mu.Unlock()
		return false
	}
	o := w.jobs.list[0]
	chunk := o.next
	o.next++
	if o.next == o.chunks {
		w.jobs.list = slices.Delete(w.jobs.list, 0, 1)
		w.front.jobs.Add(-1)
	}
	w.jobs.mu.Unlock()
	d := driver{endpoint: e}
	d.copyChunk(o, chunk)
	d.run()
	return true
}
