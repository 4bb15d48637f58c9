package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// world is what the ranks share. All that they do together is a meeting: whoever
// comes last does the work for all, under one lock.
type world struct {
	mu       sync.Mutex
	changed  sync.Cond    // a meeting is over, or the world broke
	memory   *cpu.Runtime // that all buffers are in
	all      []int        // the ranks
	meetings []*meeting   // that somebody has not come to, in their order
	left     []bool       // by rank
	failure  error        // what broke the world
}

// meeting is a collective of all ranks, or a message, of its source and its
// destination.
type meeting struct {
	tag   int // of a message, -1 of a collective
	ranks []int
	seats []*seat // of the ranks; nil for one that has not come yet
}

// seat is what a rank does in a meeting. Barrier and Split come as calls, too.
type seat struct {
	call  comm.Call
	wait  comm.Wait
	child comm.Communicator // what a Split makes
	done  bool
}

// newWorld makes a world and returns its communicators, in rank order.
func newWorld(size int, memory *cpu.Runtime) []comm.Communicator {
	w := &world{memory: memory, left: make([]bool, size)}
	w.changed.L = &w.mu
	all := make([]comm.Communicator, size)
	for r := range all {
		w.all = append(w.all, r)
		all[r] = backend.NewSerial(&backend.Check{Backend: "custom", Rank: r, WorldSize: size}, rank{w, r})
	}
	return all
}

// rank is one rank: the backend.Worker, of which backend.NewSerial makes a communicator.
type rank struct {
	*world
	number int
}

// Work does the calls of a group.
func (r rank) Work(calls []comm.Call) error {
	var seats []*seat
	for _, c := range calls {
		seats = append(seats, &seat{call: c})
	}
	return r.attend(seats...)
}

// Meet does a Barrier or a Split.
func (r rank) Meet(w comm.Wait) (comm.Communicator, error) {
	s := &seat{call: comm.Call{Op: w.Op}, wait: w}
	err := r.attend(s)
	return s.child, err
}

// Leave tells the others that this rank does not come any more.
func (r rank) Leave(_ context.Context, cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left[r.number] = true
	if cause != nil {
		r.failure = cmp.Or(r.failure, fmt.Errorf("%w: rank %d gave up: %w", comm.ErrPeerFailed, r.number, cause))
	}
	r.changed.Broadcast()
}

// attend takes seats, and waits until their meetings are over or the world breaks.
func (r rank) attend(seats ...*seat) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range seats {
		if r.failure == nil {
			r.take(s)
		}
	}
	for slices.ContainsFunc(seats, func(s *seat) bool { return !s.done }) {
		if r.failure = cmp.Or(r.failure, r.stranded()); r.failure != nil {
			return r.failure
		}
		r.changed.Wait()
	}
	return nil
}

// take takes a seat, and holds the meeting if it was the last one that was free.
// The caller holds mu, as for all that follows.
func (r rank) take(s *seat) {
	tag, ranks, mine := -1, r.all, r.number
	switch c := s.call; c.Op {
	case comm.OpSend:
		tag, ranks, mine = int(c.Tag), []int{r.number, c.Peer}, 0
	case comm.OpRecv:
		tag, ranks, mine = int(c.Tag), []int{c.Peer, r.number}, 1
	}
	i := slices.IndexFunc(r.meetings, func(m *meeting) bool {
		return m.tag == tag && slices.Equal(m.ranks, ranks) && m.seats[mine] == nil
	})
	if i < 0 {
		i = len(r.meetings)
		r.meetings = append(r.meetings, &meeting{tag, ranks, make([]*seat, len(ranks))})
	}
	m := r.meetings[i]
	m.seats[mine] = s
	if !slices.Contains(m.seats, nil) {
		r.meetings = slices.Delete(r.meetings, i, i+1)
		r.failure = r.hold(m.seats)
		r.changed.Broadcast()
	}
}

// hold does what a meeting is about.
func (w *world) hold(seats []*seat) error {
	var calls []comm.Call
	var waits []comm.Wait
	for _, s := range seats {
		calls, waits = append(calls, s.call), append(waits, s.wait)
	}
	if err := backend.ExecuteShared(w.memory, calls...); err != nil {
		return err
	}
	if calls[0].Op == comm.OpSplit {
		for _, group := range backend.SplitGroups(waits) {
			for i, child := range newWorld(len(group), w.memory) {
				seats[group[i]].child = child
			}
		}
	}
	for _, s := range seats {
		s.done = true
	}
	return nil
}

// stranded returns an error if a meeting waits for a rank that has left.
func (w *world) stranded() error {
	for _, m := range w.meetings {
		for i, r := range m.ranks {
			if m.seats[i] == nil && w.left[r] {
				return fmt.Errorf("%w: rank %d has left", comm.ErrPeerFailed, r)
			}
		}
	}
	return nil
}
