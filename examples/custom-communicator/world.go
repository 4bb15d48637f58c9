package main

import (
	"cmp"
	"fmt"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// world is what the ranks share: messages and collectives that wait for a rank.
// Whoever brings what is missing does the work, under one lock, so that every
// promise of the contract can be seen in it.
type world struct {
	mu       sync.Mutex
	memory   *cpu.Runtime // to copy and reduce; all buffers are host memory
	size     int
	meeting  *meeting
	messages map[address][]message // sends or receives without their other end
	left     []bool                // by rank

	broken  chan struct{} // closed when a rank fails
	failure error         // then
}

// meeting is a collective that not all ranks have come to. The slices are by rank.
type meeting struct {
	calls    []comm.Call
	waits    []comm.Wait // of a Split
	children []comm.Communicator
	missing  int
	done     chan struct{}
}

// message is one end of a message, and address what both ends have in common.
type message struct {
	comm.Call
	done chan struct{}
}

type address struct {
	source, dest int
	tag          uint32
}

// newWorld makes a world and returns its communicators, in rank order.
func newWorld(size int, memory *cpu.Runtime) []comm.Communicator {
	w := &world{memory: memory, size: size, messages: map[address][]message{}, left: make([]bool, size), broken: make(chan struct{})}
	w.meeting = w.newMeeting()
	all := make([]comm.Communicator, size)
	for r := range all {
		all[r] = comm.NewSerial(comm.Check{Backend: "custom", Rank: r, WorldSize: size}, rank{w, r})
	}
	return all
}

func (w *world) newMeeting() *meeting {
	return &meeting{calls: make([]comm.Call, w.size), waits: make([]comm.Wait, w.size),
		children: make([]comm.Communicator, w.size), missing: w.size, done: make(chan struct{})}
}

// rank is one rank: the comm.Worker, of which comm.NewSerial makes a communicator.
type rank struct {
	*world
	number int
}

// Work does the calls of a group.
func (r rank) Work(calls []comm.Call) error {
	var pending []<-chan struct{}
	for _, c := range calls {
		if c.Op.Message() {
			pending = append(pending, r.post(c))
		}
	}
	for _, c := range calls {
		if !c.Op.Message() {
			if _, err := r.meet(c, comm.Wait{}); err != nil {
				return err
			}
		}
	}
	for _, done := range pending {
		if err := r.await(done); err != nil {
			return err
		}
	}
	return nil
}

// Meet does a Barrier or a Split.
func (r rank) Meet(w comm.Wait) (comm.Communicator, error) {
	return r.meet(comm.Call{Op: w.Op}, w)
}

// Leave tells the others that this rank does not come any more.
func (r rank) Leave(cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left[r.number] = true
	if cause != nil {
		r.fail(fmt.Errorf("%w: rank %d gave up: %w", comm.ErrPeerFailed, r.number, cause))
	}
	r.failIfStranded()
}

// await waits until something is done or the world breaks.
func (w *world) await(done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-w.broken:
		return w.failure
	}
}

// meet takes part in a collective. The last rank does it for all of them.
func (r rank) meet(c comm.Call, w comm.Wait) (comm.Communicator, error) {
	r.mu.Lock()
	m := r.meeting
	m.calls[r.number], m.waits[r.number] = c, w
	if m.missing--; m.missing == 0 {
		r.meeting = r.newMeeting()
		r.finish(r.perform(m), m.done)
	}
	r.failIfStranded()
	r.mu.Unlock()
	err := r.await(m.done)
	return m.children[r.number], err
}

// post leaves one end of a message to be found by the other, or does the message
// if that is there.
func (r rank) post(c comm.Call) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := address{r.number, c.Peer, c.Tag}
	if c.Op == comm.OpRecv {
		at = address{c.Peer, r.number, c.Tag}
	}
	mine, waiting := message{c, make(chan struct{})}, r.messages[at]
	if len(waiting) == 0 || waiting[0].Op == c.Op {
		r.messages[at] = append(waiting, mine)
		r.failIfStranded()
		return mine.done
	}
	other := waiting[0]
	r.messages[at] = waiting[1:]
	send, recv := &other.Call, &c
	if c.Op == comm.OpSend {
		send, recv = recv, send
	}
	err := comm.AgreeOnMessage(at.source, send, at.dest, recv)
	if err == nil {
		err = r.copy(recv.Recv, send.Send, send.Bytes())
	}
	r.finish(err, mine.done, other.done)
	return mine.done
}

// finish says that something is done, or breaks the world. The caller holds mu, as
// for all that follows.
func (w *world) finish(err error, done ...chan struct{}) {
	if err != nil {
		w.fail(err)
		return
	}
	for _, d := range done {
		close(d)
	}
}

// fail breaks the world; the first cause stays.
func (w *world) fail(err error) {
	if w.failure == nil {
		w.failure = err
		close(w.broken)
	}
}

// failIfStranded breaks the world if something waits for a rank that has left.
func (w *world) failIfStranded() {
	for r, left := range w.left {
		needed := w.meeting.missing < w.size
		for at, waiting := range w.messages {
			needed = needed || len(waiting) > 0 && (at.source == r || at.dest == r)
		}
		if left && needed {
			w.fail(fmt.Errorf("%w: rank %d has left", comm.ErrPeerFailed, r))
		}
	}
}

// perform does a collective, for all ranks.
func (w *world) perform(m *meeting) error {
	if err := cmp.Or(w.failure, comm.Agree(m.calls)); err != nil {
		return err
	}
	switch c := m.calls[0]; c.Op {
	case comm.OpBarrier:
	case comm.OpSplit:
		for _, group := range comm.SplitGroups(m.waits) {
			for i, child := range newWorld(len(group), w.memory) {
				m.children[group[i]] = child
			}
		}
	case comm.OpAllReduce: // at once, as it may be in place
		var sends, recvs []uintptr
		for _, c := range m.calls {
			sends, recvs = append(sends, c.Send), append(recvs, c.Recv)
		}
		return w.memory.Reduce(recvs, sends, c.Count, c.DType, c.Reduce)
	default:
		for to := range m.calls {
			if err := w.performFor(to, m.calls); err != nil {
				return err
			}
		}
	}
	return nil
}

// performFor does one rank's part: it copies or reduces what the others send it.
func (w *world) performFor(to int, calls []comm.Call) error {
	var sources []uintptr
	for from := range calls {
		src, bytes, sends := calls[from].SendPart(from, to)
		dst, _, receives := calls[to].RecvPart(to, from)
		switch {
		case !sends || !receives:
		case calls[to].Op.Reduces():
			sources = append(sources, src)
		default:
			if err := w.copy(dst, src, bytes); err != nil {
				return err
			}
		}
	}
	if len(sources) == 0 {
		return nil
	}
	c := calls[to]
	return w.memory.Reduce([]uintptr{c.Recv}, sources, c.Count, c.DType, c.Reduce)
}

func (w *world) copy(dst, src uintptr, bytes int) error {
	if w.failure != nil || dst == src || bytes == 0 {
		return w.failure
	}
	return w.memory.Copy(dst, src, bytes)
}
