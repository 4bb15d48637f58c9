package schedule_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/dtype"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// network is the least wire: the ranks of a communicator in one process, a message of which
// is copied when both its ends are posted.
type network struct {
	mu     sync.Mutex
	wires  []*wire
	subs   map[string]*network // made by Split
	links  schedule.Links
	pieces bool
}

type wire struct {
	*network
	rank    int
	posted  []post // that wait for the other end
	done    []schedule.Done
	heard   [][][]byte // control messages, by the rank that sent them
	lost    []error    // by rank
	changed chan struct{}
	kick    chan struct{}
}

type post struct {
	id int
	schedule.Message
}

func newNetwork(size int) *network {
	n := &network{subs: map[string]*network{}}
	for r := range size {
		n.wires = append(n.wires, &wire{network: n, rank: r, heard: make([][][]byte, size), lost: make([]error, size),
			changed: make(chan struct{}), kick: make(chan struct{}, 1)})
	}
	return n
}

// wake tells a wire that something is new. The caller holds mu.
func (w *wire) wake() {
	close(w.changed)
	w.changed = make(chan struct{})
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

func (w *wire) Post(id int, m *schedule.Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	peer := w.wires[m.Peer]
	i := slices.IndexFunc(peer.posted, func(p post) bool {
		return p.Peer == w.rank && p.Receive != m.Receive && p.Tag == m.Tag && p.User == m.User
	})
	if i < 0 {
		w.posted = append(w.posted, post{id, *m})
		return
	}
	other := peer.posted[i]
	peer.posted = slices.Delete(peer.posted, i, i+1)
	from, to := m, &other.Message
	if m.Receive {
		from, to = to, from
	}
	hostops.Copy(to.Address, from.Address, min(from.Bytes, to.Bytes), false)
	w.done = append(w.done, schedule.Done{ID: id, Bytes: from.Bytes})
	peer.done = append(peer.done, schedule.Done{ID: other.id, Bytes: from.Bytes})
	w.wake()
	peer.wake()
}

func (w *wire) Flush() error { return nil }

func (w *wire) Poll(done []schedule.Done, _ schedule.Hint) ([]schedule.Done, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	done = append(done, w.done...)
	w.done = w.done[:0]
	return done, nil
}

func (w *wire) Abandon() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.posted = nil
	return 0
}

func (w *wire) Tell(rank int, _ bool, message []byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	peer := w.wires[rank]
	peer.heard[w.rank] = append(peer.heard[w.rank], slices.Clone(message))
	peer.wake()
	return true
}

func (w *wire) Told() (bool, error) { return true, nil }

func (w *wire) Hear(rank int) (message []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if from := w.heard[rank]; len(from) > 0 {
		message, w.heard[rank] = from[0], from[1:]
	}
	return message, nil
}

func (w *wire) Gone(rank int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost[rank]
}

func (w *wire) Await(d time.Duration) {
	w.mu.Lock()
	changed, late := w.changed, time.After(d)
	w.mu.Unlock()
	select {
	case <-changed:
	case <-late:
	}
}

// lose has a rank be gone for all others.
func (n *network) lose(rank int, why error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, w := range n.wires {
		w.lost[rank] = why
		w.wake()
	}
}

// endpoint is a rank of a network.
type endpoint struct {
	*schedule.Engine
	wire   *wire
	splits int
	stop   chan struct{}
}

// join returns the communicator of a rank.
func (n *network) join(rank int) comm.Communicator { return n.joinBy(rank, n.wires[rank]) }

// joinBy is join over a wire that differs from the network's.
func (n *network) joinBy(rank int, over schedule.Wire) comm.Communicator {
	w := n.wires[rank]
	check := backend.Check{Backend: "network", Rank: rank, WorldSize: len(n.wires)}
	e := &endpoint{Engine: schedule.New(schedule.Config{Check: check, Wire: over, MaxTag: 1 << 62, Pieces: n.pieces}), wire: w, stop: make(chan struct{})}
	e.Links = n.links
	go func() {
		for {
			select {
			case <-w.kick:
				e.Drive()
			case <-e.stop:
				return
			}
		}
	}()
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
	pairs := make([]int64, 2*size+2) // not moved: the heap's
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
			return e.wire.sub(fmt.Sprint(e.splits, i), len(group)).join(place), nil
		}
	}
	return nil, nil
}

func (n *network) sub(name string, size int) *network {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.subs[name] == nil {
		n.subs[name] = newNetwork(size)
	}
	return n.subs[name]
}

func (e *endpoint) Release(ctx context.Context) error {
	e.Leave(ctx)
	close(e.stop)
	return nil
}

// each runs body for the ranks of a network.
func each(ctx context.Context, size int, body func(context.Context, comm.Communicator) error) error {
	n := newNetwork(size)
	world := make([]comm.Communicator, size)
	for r := range world {
		world[r] = n.join(r)
	}
	return comm.Run(ctx, world, body)
}

// TestConformance runs the suite of the contract over the least wire.
func TestConformance(t *testing.T) {
	rt := cpu.New()
	calls := 1000
	if os.Getenv("TUTTI_EXTENDED") != "" {
		calls = 6000 // the network looks through all messages on their way for each one
	}
	sizes := []int{1, 2, 5}
	if testing.Short() {
		sizes = []int{5}
	}
	commtest.Run(t, commtest.Backend{Name: "network", Sizes: sizes, Calls: calls, LateMismatch: true,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return each(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		}})
}

// TestLostRank has the wire lose a rank that others wait for, and then one that has closed
// its communicator and that nobody needs any more.
func TestLostRank(t *testing.T) {
	cut := errors.New("cable cut")
	n := newNetwork(3)
	c := []comm.Communicator{n.join(0), n.join(1), n.join(2)}
	go n.lose(2, cut)
	for _, c := range c[:2] {
		err := c.Barrier(t.Context())
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "rank 2 is gone: cable cut")
		assert.NoError(t, c.Close())
	}

	n = newNetwork(2)
	first, second := n.join(0), n.join(1)
	require.NoError(t, second.Close())
	n.lose(1, cut)
	assert.NoError(t, first.Sync(t.Context()))
	assert.ErrorContains(t, first.Barrier(t.Context()), "rank 1 closed its communicator")
	assert.NoError(t, first.Close())
}

// failing is a wire that cannot start or complete messages.
type failing struct {
	*wire
	flush, poll error
}

func (f failing) Flush() error { return f.flush }

func (f failing) Poll(done []schedule.Done, h schedule.Hint) ([]schedule.Done, error) {
	return done, f.poll
}

// TestFailedWire aborts communicators, and tells the others, when the wire fails.
func TestFailedWire(t *testing.T) {
	cause := fmt.Errorf("%w: no more memory for messages", comm.ErrPeerFailed)
	for _, f := range []failing{{flush: cause}, {poll: cause}} {
		n := newNetwork(2)
		f.wire = n.wires[0]
		c, other := n.joinBy(0, f), n.join(1)
		assert.ErrorIs(t, c.Barrier(t.Context()), cause)
		assert.ErrorIs(t, c.Barrier(t.Context()), comm.ErrBroken)
		assert.ErrorContains(t, other.Barrier(t.Context()), "no more memory for messages")
		assert.NoError(t, errors.Join(c.Close(), other.Close()))
	}
}

// counting is a wire that keeps the longest message, and the most that are in flight.
type counting struct {
	*wire
	longest, posted, done, most int
	sends                       int
}

func (c *counting) Post(id int, m *schedule.Message) {
	c.posted++
	if !m.Receive {
		c.sends++
	}
	c.longest, c.most = max(c.longest, m.Bytes), max(c.most, c.posted-c.done)
	c.wire.Post(id, m)
}

func (c *counting) Poll(done []schedule.Done, h schedule.Hint) ([]schedule.Done, error) {
	done, err := c.wire.Poll(done, h)
	c.done += len(done)
	return done, err
}

// TestGathered: from eight ranks on, short sums take as many messages as doubling the ranks takes rounds, in
// place and not, and are those of the operands in rank order. Long links and few ranks keep to one round.
func TestGathered(t *testing.T) {
	for _, c := range []struct {
		ranks int
		links schedule.Links
		sends int
	}{
		{7, schedule.ShortLinks, 6}, {8, schedule.ShortLinks, 3}, {8, schedule.LongLinks, 7}, {9, schedule.OneHost, 4},
		{13, schedule.ShortLinks, 4}, {33, schedule.OneHost, 6},
	} {
		n := newNetwork(c.ranks)
		n.links = c.links
		world := make([]comm.Communicator, c.ranks)
		wires := make([]*counting, c.ranks)
		for r := range world {
			wires[r] = &counting{wire: n.wires[r]}
			world[r] = n.joinBy(r, wires[r])
		}
		operand := func(rank, i int) float32 { return float32(rank*rank+i) * 1e-3 * float32(1-2*(rank%2)) }
		require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
			for _, count := range []int{0, 1, 3, 500} {
				memory := make([]float32, 2*count+1)
				for _, offset := range []int{0, count} {
					for i := range count {
						memory[i] = operand(c.Rank(), i)
					}
					send := hostmem.Addr(memory)
					recv := send + uintptr(4*offset)
					if err := errors.Join(c.AllReduce(send, recv, count, dtype.F32, comm.Sum), c.Sync(ctx)); err != nil {
						return err
					}
					for i := range count {
						want := operand(0, i)
						for r := 1; r < c.WorldSize(); r++ {
							want += operand(r, i)
						}
						if got := memory[offset+i]; got != want {
							return fmt.Errorf("rank %d: element %d of %d is %v, want %v", c.Rank(), i, count, got, want)
						}
					}
				}
			}
			return nil
		}))
		for r, w := range wires {
			assert.Equal(t, 8*c.sends, w.sends, "rank %d of %d", r, c.ranks)
		}
	}
}

// TestSetUpAborted: an engine whose communicator has aborted posts no messages of a SetUp, which nothing would end.
func TestSetUpAborted(t *testing.T) {
	over := &counting{wire: newNetwork(2).wires[0]}
	check := backend.Check{Backend: "network", WorldSize: 2}
	e := schedule.New(schedule.Config{Check: check, Wire: over, MaxTag: 1 << 62})
	e.Life.Fail(comm.ErrPeerFailed)
	err := e.SetUp(t.Context(), comm.BroadcastCall(hostmem.Addr(make([]byte, 1)), 1, dtype.U8, 0))
	assert.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.Zero(t, over.posted)
}

// TestClosedInSplit: a rank that closes its communicator between the barrier and the exchange of a Split ends the
// Split of the others.
func TestClosedInSplit(t *testing.T) {
	n := newNetwork(2)
	var engines []*schedule.Engine
	for r := range n.wires {
		check := backend.Check{Backend: "network", Rank: r, WorldSize: 2}
		engines = append(engines, schedule.New(schedule.Config{Check: check, Wire: n.wires[r], MaxTag: 1 << 62}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	barriers := make(chan error)
	for _, e := range engines {
		go func() { barriers <- e.Barrier(ctx, comm.OpSplit, true) }()
	}
	require.NoError(t, errors.Join(<-barriers, <-barriers))
	require.True(t, engines[0].Leave(ctx))
	memory := make([]byte, 1)
	err := engines[1].SetUp(ctx, comm.BroadcastCall(hostmem.Addr(memory), 1, dtype.U8, 0))
	goruntime.KeepAlive(memory)
	assert.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "rank 0 closed its communicator")
}

// TestPieces has long messages cut, and exchanges parts that end within a window, with one and behind it.
func TestPieces(t *testing.T) {
	const size, window = 3, 4 << 20 / 3
	n := newNetwork(size)
	n.pieces = true
	world, wires := make([]comm.Communicator, size), make([]*counting, size)
	for r := range world {
		wires[r] = &counting{wire: n.wires[r]}
		world[r] = n.joinBy(r, wires[r])
	}
	value := func(from, to, i int) byte { return byte(from*7 + to*3 + i*5 + i>>8) }
	require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
		rank := c.Rank()
		for _, length := range []int{70_000, window, 2*window + 1, 3 * window} {
			send, recv := make([]byte, size*length), make([]byte, size*length)
			for to := range size {
				for i := range length {
					send[to*length+i] = value(rank, to, i)
				}
			}
			if err := errors.Join(c.AllToAll(hostmem.Addr(send), hostmem.Addr(recv), length, dtype.U8), c.Sync(ctx)); err != nil {
				return err
			}
			goruntime.KeepAlive(send)
			for from := range size {
				for i, v := range recv[from*length:][:length] {
					if v != value(from, rank, i) {
						return fmt.Errorf("rank %d: byte %d of %d from rank %d is %d", rank, i, length, from, v)
					}
				}
			}
		}
		return nil
	}))
	for _, w := range wires {
		assert.LessOrEqual(t, w.longest, 64<<10)
		assert.LessOrEqual(t, w.most, 2*(size-1)*(window>>16+2), "messages in flight")
	}
}
