package main

import (
	"fmt"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// world is what the ranks share. All that they do together is a meeting: whoever
// comes last does the work for all, under one lock, so that every promise of the
// contract can be seen in it.
type world struct {
	mu       sync.Mutex
	memory   *cpu.Runtime // to copy and reduce; all buffers are host memory
	size     int
	meetings map[place][]*meeting // that somebody has not come to, in their order
	left     []bool               // by rank
	broken   chan struct{}        // closed when the world breaks
	failure  error                // then
}

// place is where ranks meet for a message. Collectives have one place for all.
type place struct {
	message      bool
	source, dest int
	tag          uint32
}

// meeting is a collective, with a seat for each rank, or a message, with one for
// each end. Barrier and Split come as calls, too.
type meeting struct {
	seats   []seat
	missing int
	done    chan struct{}
}

type seat struct {
	taken bool
	call  comm.Call
	wait  comm.Wait
	child comm.Communicator // what a Split makes
}

// newWorld makes a world and returns its communicators, in rank order.
func newWorld(size int, memory *cpu.Runtime) []comm.Communicator {
	w := &world{memory: memory, size: size, meetings: map[place][]*meeting{}, left: make([]bool, size), broken: make(chan struct{})}
	all := make([]comm.Communicator, size)
	for r := range all {
		all[r] = comm.NewSerial(comm.Check{Backend: "custom", Rank: r, WorldSize: size}, rank{w, r})
	}
	return all
}

// rank is one rank: the comm.Worker, of which comm.NewSerial makes a communicator.
type rank struct {
	*world
	number int
}

// Work does the calls of a group.
func (r rank) Work(calls []comm.Call) error {
	var meetings []*meeting
	for _, c := range calls {
		meetings = append(meetings, r.come(seat{call: c}))
	}
	for _, m := range meetings {
		if err := r.await(m); err != nil {
			return err
		}
	}
	return nil
}

// Meet does a Barrier or a Split.
func (r rank) Meet(w comm.Wait) (comm.Communicator, error) {
	m := r.come(seat{call: comm.Call{Op: w.Op}, wait: w})
	if err := r.await(m); err != nil {
		return nil, err
	}
	return m.seats[r.number].child, nil
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

// await waits until a meeting is over or the world breaks.
func (w *world) await(m *meeting) error {
	select {
	case <-m.done:
		return nil
	case <-w.broken:
		return w.failure
	}
}

// come takes a seat, and holds the meeting if it was the last one that was free.
func (r rank) come(mine seat) *meeting {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, number, seats := place{}, r.number, r.size
	switch c := mine.call; c.Op {
	case comm.OpSend:
		at, number, seats = place{true, r.number, c.Peer, c.Tag}, 0, 2
	case comm.OpRecv:
		at, number, seats = place{true, c.Peer, r.number, c.Tag}, 1, 2
	}
	queue := r.meetings[at]
	i := slices.IndexFunc(queue, func(m *meeting) bool { return !m.seats[number].taken })
	if i < 0 {
		i = len(queue)
		queue = append(queue, &meeting{make([]seat, seats), seats, make(chan struct{})})
	}
	m := queue[i]
	mine.taken = true
	m.seats[number] = mine
	if m.missing--; m.missing == 0 { // it is the first: all come in order
		queue = queue[1:]
		if err := r.hold(at, m.seats); err != nil {
			r.fail(err)
		} else {
			close(m.done)
		}
	}
	r.meetings[at] = queue
	r.failIfStranded()
	return m
}

// fail breaks the world; the first cause stays. The caller holds mu, as for all
// that follows.
func (w *world) fail(err error) {
	if w.failure == nil {
		w.failure = err
		close(w.broken)
	}
}

// failIfStranded breaks the world if a meeting waits for a rank that has left.
func (w *world) failIfStranded() {
	for at, queue := range w.meetings {
		for r, left := range w.left {
			if left && len(queue) > 0 && (!at.message || at.source == r || at.dest == r) {
				w.fail(fmt.Errorf("%w: rank %d has left", comm.ErrPeerFailed, r))
			}
		}
	}
}

// hold does what a meeting is about.
func (w *world) hold(at place, seats []seat) error {
	var calls []comm.Call
	var waits []comm.Wait
	for _, s := range seats {
		calls, waits = append(calls, s.call), append(waits, s.wait)
	}
	if w.failure != nil {
		return w.failure
	}
	if at.message {
		if err := comm.AgreeOnMessage(at.source, &calls[0], at.dest, &calls[1]); err != nil {
			return err
		}
		return w.copy(calls[1].Recv, calls[0].Send, calls[0].Bytes())
	}
	if err := comm.Agree(calls); err != nil {
		return err
	}
	switch op := calls[0].Op; {
	case op == comm.OpBarrier:
		return nil
	case op == comm.OpSplit:
		for _, group := range comm.SplitGroups(waits) {
			for i, child := range newWorld(len(group), w.memory) {
				seats[group[i]].child = child
			}
		}
		return nil
	case op.Reduces():
		return w.reduce(calls)
	}
	return w.move(calls)
}

// move copies what the ranks send each other.
func (w *world) move(calls []comm.Call) error {
	for to := range calls {
		for from := range calls {
			src, bytes, sends := calls[from].SendPart(from, to)
			dst, _, receives := calls[to].RecvPart(to, from)
			if sends && receives {
				if err := w.copy(dst, src, bytes); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// reduce reduces what the ranks send to each rank. An allreduce may be in place, so
// its result goes to all of them at once.
func (w *world) reduce(calls []comm.Call) error {
	for to, c := range calls {
		var sources, everywhere []uintptr
		for from := range calls {
			if src, _, ok := calls[from].SendPart(from, to); ok {
				sources, everywhere = append(sources, src), append(everywhere, calls[from].Recv)
			}
		}
		if c.Op == comm.OpAllReduce {
			return w.memory.Reduce(everywhere, sources, c.Count, c.DType, c.Reduce)
		}
		if len(sources) > 0 {
			if err := w.memory.Reduce([]uintptr{c.Recv}, sources, c.Count, c.DType, c.Reduce); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *world) copy(dst, src uintptr, bytes int) error {
	if dst == src || bytes == 0 {
		return nil
	}
	return w.memory.Copy(dst, src, bytes)
}
