//go:build simulated

package simulation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sim"
)

// links are the simplest wires: a message is copied some time after both its ends are posted.
type links struct {
	p     *play
	mu    sim.Mutex
	wires []*wire
	subs  map[string]*links
	gone  map[int]error // lost ranks

	memory []byte // shared by the ranks; nil without shared memory
}

type wire struct {
	*links
	rank      int
	node      *sim.Node
	engine    *schedule.Engine
	posted    []post
	done      []schedule.Done
	heard     [][]control
	lost      []error
	untold    int
	abandoned bool
	copying   int // messages whose memory is in use
	changed   chan struct{}
	kick      chan struct{}
	stop      chan struct{}
	ready     []time.Time // by rank: arrival of its last message here
	arriving  [][]func()  // by rank: its messages to here, in order
}

type post struct {
	id int
	schedule.Message
	eager []byte // data of a completed send
}

type control struct {
	at    time.Time
	bytes []byte
}

func newLinks(p *play, nodes []*sim.Node) *links {
	n := &links{p: p, subs: map[string]*links{}, gone: map[int]error{}}
	for r := range nodes {
		n.wires = append(n.wires, &wire{links: n, rank: r, node: nodes[r], heard: make([][]control, len(nodes)), lost: make([]error, len(nodes)),
			changed: make(chan struct{}), kick: make(chan struct{}, 1), stop: make(chan struct{}), ready: make([]time.Time, len(nodes)), arriving: make([][]func(), len(nodes))})
	}
	return n
}

// share gives the ranks shared memory if there are several.
func (n *links) share() {
	if size := len(n.wires); size > 1 {
		n.memory = hostmem.Bytes(make([]uint64, schedule.SegmentBytes(size)/8+1))
	}
}

// begun wakes ranks that may wait for one that has begun a round.
func (w *wire) begun() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, other := range w.wires {
		if other != w {
			other.wake()
		}
	}
}

// wake tells a wire that something has changed. The caller holds mu.
func (w *wire) wake() {
	close(w.changed)
	w.changed = make(chan struct{})
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// later schedules f at a rank after a while, after everything else from that rank.
func (w *wire) later(from int, f func()) (at time.Time) {
	at = time.Now().Add(w.p.Between(time.Microsecond, []time.Duration{100 * time.Microsecond, 3 * time.Millisecond, 15 * time.Millisecond}[w.p.Seed%3]))
	if at.Before(w.ready[from]) {
		at = w.ready[from].Add(1)
	}
	w.arriving[from] = append(w.arriving[from], f)
	sim.AfterFunc(time.Until(at), func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		first := w.arriving[from][0]
		w.arriving[from] = w.arriving[from][1:]
		first()
		w.wake()
	})
	return at
}

func (w *wire) Post(id int, m *schedule.Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.abandoned {
		w.p.fail("rank %d posts a message after Abandon", w.rank)
	}
	peer := w.wires[m.Peer]
	i := slices.IndexFunc(peer.posted, func(o post) bool {
		return o.Peer == w.rank && o.Receive != m.Receive && o.Tag == m.Tag && o.User == m.User
	})
	if i < 0 {
		o := post{id: id, Message: *m}
		if !m.Receive && w.p.Seed%5 < 3 {
			o.eager = append([]byte{}, hostmem.Slice[byte](m.Address, m.Bytes)...)
			w.done = append(w.done, schedule.Done{ID: id, Bytes: m.Bytes})
			w.wake()
		}
		w.posted = append(w.posted, o)
		return
	}
	other := peer.posted[i]
	peer.posted = slices.Delete(peer.posted, i, i+1)
	from, to, source, target, sent, got := *m, other.Message, w, peer, id, other.id
	if m.Receive {
		from, to, source, target, sent, got = to, from, target, source, got, sent
	}
	early := other.eager
	if target.copying++; early == nil {
		source.copying++
	}
	finish := func(w *wire, d schedule.Done) {
		w.copying--
		if !w.abandoned {
			w.done = append(w.done, d)
		}
		w.wake()
	}
	target.later(source.rank, func() {
		n := min(from.Bytes, to.Bytes)
		if finish(target, schedule.Done{ID: got, Bytes: from.Bytes}); early != nil {
			copy(hostmem.Slice[byte](to.Address, n), early)
			return
		}
		copy(hostmem.Slice[byte](to.Address, n), hostmem.Slice[byte](from.Address, n))
		source.later(target.rank, func() { finish(source, schedule.Done{ID: sent, Bytes: from.Bytes}) })
	})
}

func (w *wire) Flush() error { return nil }

func (w *wire) Poll(done []schedule.Done, _ schedule.Hint) ([]schedule.Done, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.done); n > 1 && w.p.Chance(3) { // in any order
		i := w.p.IntN(n)
		w.done[0], w.done[i] = w.done[i], w.done[0]
	}
	done = append(done, w.done...)
	w.done = w.done[:0]
	return done, nil
}

func (w *wire) Abandon() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.posted, w.abandoned, w.done = slices.DeleteFunc(w.posted, func(o post) bool { return o.eager == nil }), true, nil
	return w.copying
}

func (w *wire) Tell(rank int, report bool, message []byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.untold++
	message = slices.Clone(message)
	peer := w.wires[rank]
	at := peer.later(w.rank, func() {
		peer.heard[w.rank] = append(peer.heard[w.rank], control{bytes: message})
		w.untold--
		w.wake()
	})
	peer.ready[w.rank] = at // control messages arrive in order
	return true
}

func (w *wire) Told() (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.untold == 0, nil
}

func (w *wire) Hear(rank int) (message []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if from := w.heard[rank]; len(from) > 0 {
		message, w.heard[rank] = from[0].bytes, from[1:]
	}
	return message, nil
}

func (w *wire) Gone(rank int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.copying > 0 || len(w.done) > 0 || len(w.heard[rank]) > 0 {
		return nil
	}
	return w.lost[rank]
}

func (w *wire) Await(d time.Duration) {
	w.mu.Lock()
	changed := w.changed
	w.mu.Unlock()
	select {
	case <-changed:
	case <-time.After(d):
	}
	sim.Point()
}

// lose makes a rank disappear for all others, after everything that it has sent.
func (n *links) lose(rank int, why error) {
	n.p.Event("rank %d is lost", rank)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gone[rank] = why
	for _, w := range n.wires {
		if w.rank != rank {
			w.later(rank, func() { w.lost[rank] = why })
		}
	}
	for _, s := range n.subs {
		for _, w := range s.wires {
			if w.node == n.wires[rank].node {
				sim.Go(func() { s.lose(w.rank, why) })
			}
		}
	}
}

// endpoint is a rank on links.
type endpoint struct {
	*schedule.Engine
	wire   *wire
	splits int
}

// join returns the communicator of a rank.
func (n *links) join(rank int) comm.Communicator {
	w := n.wires[rank]
	check := backend.Check{Backend: "simulated", Rank: rank, WorldSize: len(n.wires)}
	w.engine = schedule.New(schedule.Config{Check: check, Wire: w, MaxTag: 1 << 62, Pieces: n.p.Seed%2 == 0})
	if n.memory != nil {
		w.engine.Share(n.memory, w.begun)
	}
	e := &endpoint{Engine: w.engine, wire: w}
	sim.GoOn(w.node, func() {
		for {
			sim.Point()
			select {
			case <-w.kick:
				e.Drive()
			case <-w.stop:
				return
			}
		}
	})
	return backend.New(&e.Check, &e.Life, e)
}

func (e *endpoint) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	if w.Op != comm.OpSplit {
		return nil, e.Engine.Wait(ctx, w.Op)
	}
	if err := e.Barrier(ctx, comm.OpSplit, true); err != nil {
		return nil, err
	}
	size := e.Check.WorldSize
	pairs := make([]int64, 2*size+2)
	mine := pairs[2*size:]
	mine[0], mine[1] = int64(w.Color), int64(w.Key)
	if err := e.SetUp(ctx, comm.AllGatherCall(hostmem.Addr(mine), hostmem.Addr(pairs), 2, dtype.I64)); err != nil {
		return nil, err
	}
	splits := make([]comm.Wait, size)
	for r := range splits {
		splits[r] = comm.Wait{Color: int(pairs[2*r]), Key: int(pairs[2*r+1])}
	}
	e.splits++
	for i, group := range backend.SplitGroups(splits) {
		if place := slices.Index(group, e.Check.Rank); place >= 0 {
			return e.wire.sub(fmt.Sprint(e.splits, i), group).join(place), nil
		}
	}
	return nil, nil
}

func (n *links) sub(name string, group []int) *links {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.subs[name] == nil {
		var nodes []*sim.Node
		for _, r := range group {
			nodes = append(nodes, n.wires[r].node)
		}
		sub := newLinks(n.p, nodes)
		if n.memory != nil {
			sub.share()
		}
		n.subs[name] = sub
		for place, r := range group {
			if why := n.gone[r]; why != nil {
				sim.Go(func() { sub.lose(place, why) })
			}
		}
	}
	return n.subs[name]
}

func (e *endpoint) Release(ctx context.Context) error {
	e.Leave(ctx)
	close(e.wire.stop)
	n, left := e.wire.links, errors.New("it left")
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gone[e.wire.rank] = left
	for _, s := range n.subs { // it has not joined them and never will
		for _, w := range s.wires {
			if w.node == e.wire.node && w.engine == nil {
				sim.Go(func() { s.lose(w.rank, left) })
			}
		}
	}
	for _, w := range n.wires {
		if w.rank != e.wire.rank {
			w.later(e.wire.rank, func() { w.lost[e.wire.rank] = left })
		}
	}
	return nil
}

// playSchedule runs the engine over links; playSegment also shares memory between the ranks.
func playSchedule(p *play) { p.playLinks(newLinks(p, p.nodes(1+p.IntN(5)))) }

func playSegment(p *play) {
	n := newLinks(p, p.nodes(2+p.IntN(4)))
	n.share()
	p.playLinks(n)
}

func (p *play) playLinks(n *links) {
	var nodes []*sim.Node
	for _, w := range n.wires {
		nodes = append(nodes, w.node)
	}
	g := p.newProgram(len(nodes), 9000, "stall", "idle", "abort", "leave", "mismatch", "lost")
	if f := g.fault; f.kind == "lost" {
		sim.AfterFunc(p.Between(0, 20*time.Millisecond), func() { n.lose(f.rank, errors.New("cable cut")) })
		g.fault.kind = ""
	}
	lost := g.fault.wait > 0 && g.fault.kind == ""
	outcomes := make([]outcome, len(nodes))
	p.together(nodes, func(rank int) {
		outcomes[rank] = g.play(p, context.Background(), n.join(rank), rank)
		outcomes[rank].finish(p, g, rank, lost)
	})
	sim.Sleep(time.Second)
	for rank, o := range outcomes {
		o.checkMemory(p, rank)
	}
	g.judge(p, outcomes, lost, nil)
}

// nodes returns the nodes of ranks.
func (p *play) nodes(size int) (nodes []*sim.Node) {
	for rank := range size {
		nodes = append(nodes, p.NewNode(fmt.Sprint("r", rank)))
	}
	return nodes
}
