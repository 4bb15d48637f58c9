package tcp

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/segment"
)

// sharedVariable is the environment variable that keeps a rank from sharing memory: "off".
const sharedVariable = "TUTTI_TCP_SHARED"

const sharedOff = "off"

// sharing returns the error of a value that the variable does not have, and whether this rank may share memory.
func sharing() (bool, error) {
	switch value := os.Getenv(sharedVariable); value {
	case "":
		return true, nil
	case sharedOff:
		return false, nil
	default:
		return false, fmt.Errorf("%w: %s is %q, want %s or nothing", comm.ErrArgument, sharedVariable, value, sharedOff)
	}
}

// machine returns the number of this rank's machine, 0 if it is not to share memory. Tests have several machines.
var machine = func(int) int64 {
	if shares, err := sharing(); err != nil || !shares {
		return 0
	}
	number, err := segment.Machine()
	if err != nil {
		return 0
	}
	return int64(number)
}

// neighborhood is what the ranks of one machine share, beside the slots of their communicators: a bell for each, and
// two rings for each pair.
type neighborhood struct {
	node   *node          // this rank
	home   *poll.Home     // of its waits
	ranks  []int          // of the world, in order
	bells  []segment.Bell // by rank of the world; those of ranks elsewhere are none
	polled atomic.Bool    // a wait has looked by itself since listen has asked
	kick   chan struct{}  // gets a value when a wait begins to sleep
	ended  chan struct{}  // closed when listen has returned

	mu      sync.Mutex // guards watched
	watched []*wire    // communicators that may wait for a round in their slots; guarded by mu
}

// neighborly reports whether there are ranks of the world that may share memory. All ranks agree on that.
func (n *node) neighborly() bool {
	seen := map[int64]bool{0: false}
	for _, id := range n.hosts {
		if seen[id.machine()] {
			return true
		}
		seen[id.machine()] = id.machine() != 0
	}
	return false
}

// meetNeighbors has the ranks of each machine share memory, if they can. It is collective.
func (n *node) meetNeighbors(ctx context.Context, e *endpoint) error {
	if !n.neighborly() {
		return nil
	}
	var ranks []int
	for rank, h := range n.hosts {
		if number := h.machine(); number != 0 && number == n.hosts[n.rank].machine() {
			ranks = append(ranks, rank)
		}
	}
	capacity := ringCapacity(len(ranks))
	if capacity == 0 {
		ranks = nil // this rank shares nothing; ranks of other machines may, and all take part
	}
	bells := len(ranks) * segment.BellBytes
	ring := segment.RingBytes(capacity)
	memory, err := e.shareMemory(ctx, ranks, bells+len(ranks)*len(ranks)*ring)
	if err != nil || memory == nil {
		return err
	}
	s := &neighborhood{
		node:  n,
		home:  poll.NewHome(slices.Index(ranks, n.rank), len(ranks)),
		ranks: ranks,
		bells: make([]segment.Bell, n.size),
		kick:  make(chan struct{}, 1),
		ended: make(chan struct{}),
	}
	for i, rank := range ranks {
		s.bells[rank] = segment.NewBell(hostmem.Addr(memory) + uintptr(i*segment.BellBytes))
	}
	rings := hostmem.Addr(memory) + uintptr(bells)
	self := slices.Index(ranks, n.rank)
	for i, rank := range ranks {
		if rank == n.rank {
			continue
		}
		out := rings + uintptr((self*len(ranks)+i)*ring)
		in := rings + uintptr((i*len(ranks)+self)*ring)
		p := n.pairs[rank]
		p.useTrack(&track{
			pair: p,
			out:  segment.NewRing(out, capacity),
			in:   segment.NewRing(in, capacity),
			bell: s.bells[rank],
		})
	}
	n.neighbors.Store(s)
	e.wire.shares.Store(true)
	runtime.AddCleanup(n, segment.Unmap, memory) // a wait that is ending may look at the bell of a node that has ended
	go s.listen()
	return nil
}

// shareMemory returns memory that the given ranks of the world share, nil if they do not. The first of them makes it.
// It is collective: all ranks of the communicator call it, also if they share nothing.
func (e *endpoint) shareMemory(ctx context.Context, ranks []int, bytes int) (memory []byte, err error) {
	n := e.wire.node
	shares := len(ranks) > 1
	var reason error
	var offer segment.Offer
	if shares && ranks[0] == n.rank {
		var server *segment.Server
		server, memory, reason = segment.Serve(bytes)
		if reason == nil {
			defer server.Close()
			offer = server.Offer()
		}
	}
	kept := false
	defer func() {
		if !kept && memory != nil {
			segment.Unmap(memory)
		}
	}()
	offers, err := e.exchange(ctx, words{int64(offer.Machine), int64(offer.Key[0]), int64(offer.Key[1])})
	if err != nil {
		return nil, err
	}
	if shares && ranks[0] != n.rank {
		o := offers[e.wire.place[ranks[0]]]
		offer = segment.Offer{Machine: uint64(o[0]), Key: [2]uint64{uint64(o[1]), uint64(o[2])}}
		memory, reason = segment.Join(ctx, offer, bytes)
	}
	votes, err := e.exchange(ctx, words{int64(len(memory))})
	if err != nil || !shares {
		return nil, err
	}
	if reason != nil {
		slog.Warn("tcp: ranks of this machine share no memory", "rank", n.rank, "cause", reason)
	}
	agreed := func(rank int) bool {
		return votes[e.wire.place[rank]][0] == int64(bytes)
	}
	kept = !slices.ContainsFunc(ranks, func(rank int) bool { return !agreed(rank) })
	if !kept {
		return nil, nil
	}
	return memory, nil
}

// ShareMemory returns memory that all ranks have mapped, or nil on all of them if they have no slots. It is collective:
// all ranks pass the same number of bytes, with nothing in flight. Package staged looks for it.
func (c *communicator) ShareMemory(ctx context.Context, bytes int) ([]byte, error) {
	defer runtime.KeepAlive(c)
	e := c.e
	if !e.SharesMemory() {
		return nil, nil
	}
	var ranks []int
	for _, p := range e.wire.pairs {
		ranks = append(ranks, p.rank)
	}
	memory, err := e.shareMemory(ctx, ranks, bytes)
	if err != nil {
		return nil, e.Check.Fail("share memory", err)
	}
	return memory, nil
}

// UnshareMemory unmaps memory of ShareMemory on this rank. It may follow Close.
func (c *communicator) UnshareMemory(memory []byte) { segment.Unmap(memory) }

// share has short collectives of a communicator go over memory, if all its ranks are on one machine. It is collective.
func (e *endpoint) share(ctx context.Context) error {
	s := e.wire.node.neighbors.Load()
	if s == nil {
		return nil
	}
	var ranks []int
	for _, p := range e.wire.pairs {
		if slices.Contains(s.ranks, p.rank) {
			ranks = append(ranks, p.rank)
		}
	}
	if len(ranks) == 1 {
		return nil
	}
	e.wire.shares.Store(true)
	e.SetHome(s.home)
	if len(ranks) < len(e.wire.pairs) {
		return nil
	}
	memory, err := e.shareMemory(ctx, ranks, schedule.SegmentBytes(len(ranks)))
	if memory == nil {
		return err
	}
	e.useSlots(memory, func() { s.ring(ranks) })
	return nil
}

// useSlots has short collectives go over memory. ring wakes up the other ranks, when this one has begun a round.
func (e *endpoint) useSlots(memory []byte, ring func()) {
	e.slots = memory
	s := e.wire.node.neighbors.Load()
	e.Share(memory, func() {
		// Before the engine looks for the other ranks' parts of the round: one that comes later is seen by look.
		s.watch(e.wire)
		ring()
	})
}

// watch has look wake a communicator when something may have come to its slots. Called with the engine's lock held.
func (s *neighborhood) watch(w *wire) {
	if w.watched.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.watched.CompareAndSwap(false, true) {
		s.watched = append(s.watched, w)
	}
}

// unwatch forgets a communicator, which is closed.
func (s *neighborhood) unwatch(w *wire) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watched = slices.DeleteFunc(s.watched, func(have *wire) bool { return have == w })
}

// wakeWatched wakes the communicators that may wait for a round in their slots, and forgets those that are idle. So it
// costs the same however many are open.
func (s *neighborhood) wakeWatched() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watched = slices.DeleteFunc(s.watched, func(w *wire) bool {
		if !w.engine.Busy() {
			w.watched.Store(false)
			// A call that came before that has found itself watched.
			if !w.engine.Busy() || !w.watched.CompareAndSwap(false, true) {
				return true
			}
		}
		w.signal()
		return false
	})
}

// ring wakes up those of some ranks that sleep.
func (s *neighborhood) ring(ranks []int) {
	for _, rank := range ranks {
		if rank != s.node.rank {
			s.bells[rank].Ring()
		}
	}
}

// bell returns this rank's bell.
func (s *neighborhood) bell() segment.Bell { return s.bells[s.node.rank] }

// poll notes that a wait looks by itself, so that nobody needs to ring.
func (s *neighborhood) poll() {
	if !s.polled.Load() {
		s.polled.Store(true)
	}
	s.bell().Mute()
}

// doze notes that a wait is about to sleep: listen is to hear the bell for it. Nobody but listen arms the bell, so that
// each time is followed by a look.
func (s *neighborhood) doze() {
	if !s.bell().Armed() {
		notify(s.kick)
	}
}

// listen hears the bell, for operations that nobody waits for and for waits that sleep. While waits look by themselves,
// it looks now and then.
func (s *neighborhood) listen() {
	defer close(s.ended)
	timer := time.NewTimer(listenTime)
	defer timer.Stop()
	kicked := false // the last look was for a wait that began to sleep
	length := listenTime
	var before int64 // collectives that had ended at the last look
	for {
		select {
		case <-s.node.stop:
			return
		default:
		}
		if s.polled.Swap(false) {
			kicked = s.pause(timer, length, kicked)
			ended, unattended := s.collectives()
			length = nextListenTime(length, ended-before, unattended || kicked)
			before = ended
			s.look()
			continue
		}
		kicked = false
		length = listenTime
		s.bell().Arm()
		select {
		case <-s.node.stop: // close may have rung before
			return
		default:
		}
		s.look() // for what has come before
		// A system call keeps this processor of Go's for milliseconds, and the look may have woken up others who need one.
		runtime.Gosched()
		s.bell().Sleep()
		s.look()
	}
}

// collectives returns how many collectives have ended, and whether there is an operation that nobody waits for.
func (s *neighborhood) collectives() (ended int64, unattended bool) {
	s.node.mu.RLock()
	defer s.node.mu.RUnlock()
	for _, w := range s.node.wires {
		ended += int64(w.engine.Progress().Collectives.Done)
		unattended = unattended || w.engine.Unattended()
	}
	return ended, unattended
}

// pause leaves everything to waits that look by themselves, until one begins to sleep: kicked reports that. If one has
// just begun to, another one looks on, and the first would be woken up all the time.
func (s *neighborhood) pause(timer *time.Timer, length time.Duration, before bool) (kicked bool) {
	kick := s.kick
	if before {
		kick = nil
	}
	timer.Reset(length)
	select {
	case <-timer.C:
	case <-kick:
		kicked = true
		s.polled.Store(false)
	case <-s.node.stop:
	}
	return kicked
}

// look moves all tracks, and has the communicators that wait look at their slots.
func (s *neighborhood) look() {
	for _, rank := range s.ranks {
		if t := s.node.pairs[rank].track.Load(); t != nil {
			t.read(false)
			if t.full.Load() {
				t.write()
			}
		}
	}
	s.wakeWatched()
}

// close ends listen, behind the end of the node.
func (s *neighborhood) close() {
	s.bell().Rouse()
	<-s.ended
}
