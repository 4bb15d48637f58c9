package local

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/hostops"
)

// messageChunk is the length of the pieces that long messages are copied in,
// by ranks that wait. Shorter ones are copied by the rank that completes the
// pair.
const messageChunk = 256 << 10

// post looks for the other side of a message and otherwise leaves it to be
// found. The caller holds the lock of the operation's endpoint, so that a
// rank's messages are posted in order.
func (e *endpoint) post(o *op) (match *op) {
	box := &e.world.boxes[o.destination()]
	key := o.key()
	box.mu.Lock()
	defer box.mu.Unlock()
	if first, ok := box.waiting.First(key); ok && first.op != o.op {
		match, _ = box.waiting.Pop(key)
		return match
	}
	box.waiting.Push(key, o)
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
	from := o
	to := match
	if o.op == comm.OpRecv {
		from, to = to, from
	}
	if from.count != to.count || from.dt != to.dt {
		send := from.call()
		recv := to.call()
		err := backend.AgreeOnMessage(from.owner.rank, &send, to.owner.rank, &recv)
		w.fail(&failure{rank: everyone, culprit: err, peers: err})
		return
	}
	bytes := to.count * to.dt.Size()
	to.match = from
	to.next = 0
	to.chunks = (bytes + messageChunk - 1) / messageChunk
	if to.chunks <= 1 {
		to.chunks = 1
		to.left.Store(1)
		d.copyChunk(to, 0)
		return
	}
	chunks := to.chunks
	sender := from.owner
	receiver := to.owner
	to.left.Store(int32(chunks))
	w.jobs.push(to)
	w.front.jobs.Add(1) // from here on, the message may be done at any time
	takesPart := func(e *endpoint) bool {
		return e == sender || e == receiver
	}
	w.wakeHelpers(chunks, takesPart)
}

// copyChunk copies a part of a matched message and ends it after the last.
func (d *driver) copyChunk(to *op, chunk int) {
	w := d.world
	w.copying.Add(1)
	ok := w.failure.Load() == nil
	if ok {
		offset := chunk * messageChunk
		bytes := to.count * to.dt.Size()
		n := min(bytes-offset, messageChunk)
		hostops.Copy(
			to.recv+uintptr(offset),
			to.match.send+uintptr(offset),
			n,
			bytes >= streamBytes,
		)
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
	e.close(o)
	e.messages.End(o.number)
	e.recycle(o)
	goesOn := !e.backlog.Empty()
	idle := e.pending.Add(-1) == 0
	e.mu.Unlock()
	if goesOn {
		d.kick(e)
	}
	if idle {
		d.world.wakeDone()
	}
}

func (l *jobList) push(o *op) {
	l.mu.Lock()
	l.list = append(l.list, o)
	l.mu.Unlock()
}
