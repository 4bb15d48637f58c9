// Package trees plays random trees of sub-communicators: ranks split communicators of communicators, use all of them
// from several goroutines at once, and close them in any order. The memory after each operation is compared, byte by
// byte, with the values that follow from the seed alone.
//
// A tree has siblings and cousins with the same color, groups of the same ranks and of a single one, and children that
// outlive their parents: a backend must keep all of these apart.
package trees

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime"
)

// Config is the same on all ranks.
type Config struct {
	Seed       uint64      // of all choices
	Workers    int         // goroutines of a rank, each with its own trees; at least 1
	Open       int         // sub-communicators that are open at a time, at most; at least 2 for each worker
	Operations int         // collectives and messages of all communicators together, at least
	Sum        dtype.DType // of the sums, which are at most 15 for each rank
	// Synchronous says that a collective waits for the other ranks when it is called. Otherwise ranks
	// call communicators that they use side by side in different orders.
	Synchronous bool
}

// worker is a goroutine of a rank.
type worker struct {
	Config
	number int                         // among the workers of a rank
	rank   int                         // of the world
	rt     runtime.Runtime             // of the memory
	tree   *tree                       // the same on all ranks
	order  *rand.Rand                  // chooses what differs between ranks
	comms  map[*node]comm.Communicator // of this rank that are open
	done   int                         // operations of all ranks' communicators
	calls  int                         // operations in which this rank took part
}

// Play does a rank's part, and returns the number of operations in which it took part. The first worker splits the
// world itself, the others splits of it. After an error, communicators and memory may still be in use.
func (c Config) Play(ctx context.Context, world comm.Communicator, rt runtime.Runtime) (calls int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	workers := make([]*worker, c.Workers)
	roots := make([]comm.Communicator, c.Workers)
	ranks := make([]int, world.WorldSize())
	for rank := range ranks {
		ranks[rank] = rank
	}
	for i := range workers {
		root := &node{name: "world", ranks: ranks}
		roots[i] = world
		if i > 0 {
			root = &node{
				name:  fmt.Sprintf("world/worker %d", i),
				depth: 1,
				ranks: ranks,
			}
			roots[i], err = world.Split(ctx, 0, world.Rank())
			if err != nil {
				return 0, c.explain(err)
			}
		}
		workers[i] = &worker{
			Config: c,
			number: i,
			rank:   world.Rank(),
			rt:     rt,
			tree:   newTree(c.Seed, i, c.Open/c.Workers-1, root),
			order:  rand.New(rand.NewPCG(c.Seed, uint64(i)<<32|uint64(world.Rank()))),
			comms:  map[*node]comm.Communicator{root: roots[i]},
		}
	}
	ended := make(chan error, c.Workers)
	for _, w := range workers {
		go func() { ended <- w.play(ctx) }()
	}
	for range workers {
		if failed := <-ended; failed != nil && err == nil {
			err = failed // it caused the errors of the others
			cancel()
		}
	}
	for i, w := range workers {
		calls += w.calls
		if i > 0 && err == nil {
			err = roots[i].Close()
		}
	}
	return calls, c.explain(err)
}

func (c Config) explain(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("trees of seed %d: %w", c.Seed, err)
}

// play takes steps until there were enough operations, and closes the remaining communicators, in another order on
// each rank.
func (w *worker) play(ctx context.Context) error {
	for w.done < w.Operations/w.Workers {
		s := w.tree.next()
		if err := w.take(ctx, s); err != nil {
			return fmt.Errorf("worker %d, step %d: %w", w.number, s.number, err)
		}
	}
	for _, i := range w.order.Perm(len(w.tree.open)) {
		n := w.tree.open[i]
		if err := w.close(n); err != nil {
			return fmt.Errorf("worker %d, at the end: %w", w.number, err)
		}
	}
	return nil
}

// shuffle puts communicators into an order that depends on the rank.
func (w *worker) shuffle(used []*usage) {
	w.order.Shuffle(len(used), func(i, k int) {
		used[i], used[k] = used[k], used[i]
	})
}

func (w *worker) take(ctx context.Context, s step) error {
	switch s.action {
	case split:
		return w.split(ctx, s)
	case closing:
		return w.close(s.nodes[0])
	}
	w.done += operations * len(s.nodes)
	return w.use(ctx, s)
}

// close closes a communicator, if this rank is in it.
func (w *worker) close(n *node) error {
	c := w.comms[n]
	if c == nil {
		return nil
	}
	delete(w.comms, n)
	if err := c.Close(); err != nil {
		return fmt.Errorf("%s: %w", n.name, err)
	}
	return nil
}

// split splits a communicator, and checks this rank's place.
func (w *worker) split(ctx context.Context, s step) error {
	parent := w.comms[s.nodes[0]]
	if parent == nil {
		return nil
	}
	rank := parent.Rank()
	c, err := parent.Split(ctx, s.colors[rank], s.keys[rank])
	if err != nil {
		return fmt.Errorf("%s: %w", s.nodes[0].name, err)
	}
	i := slices.IndexFunc(s.children, func(n *node) bool {
		return slices.Contains(n.ranks, w.rank)
	})
	switch {
	case i < 0 && c == nil:
		return nil
	case i < 0:
		return fmt.Errorf("%s: a communicator for a negative color", s.nodes[0].name)
	case c == nil:
		return fmt.Errorf("%s: no communicator for color %d", s.nodes[0].name, s.colors[rank])
	}
	child := s.children[i]
	if want := slices.Index(child.ranks, w.rank); c.Rank() != want || c.WorldSize() != len(child.ranks) {
		return fmt.Errorf("rank %d of %d in %s, want %d of %d", c.Rank(), c.WorldSize(), child.name, want, len(child.ranks))
	}
	w.comms[child] = c
	return nil
}

// use has operations in flight on several communicators, and compares their results.
func (w *worker) use(ctx context.Context, s step) error {
	var used []*usage
	image := &image{}
	for i, n := range s.nodes {
		if c := w.comms[n]; c != nil {
			used = append(used, w.plan(image, n, c, s.number<<16|i))
			w.calls += operations
		}
	}
	if len(used) == 0 {
		return nil
	}
	base, err := w.rt.Allocate(len(image.before))
	if err != nil {
		return err
	}
	if err := w.rt.CopyIn(base, image.before); err != nil {
		return err
	}
	if err := w.rt.Synchronize(ctx); err != nil {
		return err
	}
	if !w.Synchronous {
		w.shuffle(used)
	}
	for _, u := range used {
		if err := u.submit(base); err != nil {
			return fmt.Errorf("%s: %w", u.node.name, err)
		}
	}
	w.shuffle(used)
	for _, u := range used {
		if err := u.comm.Sync(ctx); err != nil {
			return fmt.Errorf("%s: %w", u.node.name, err)
		}
	}
	after := make([]byte, len(image.before))
	if err := w.rt.CopyOut(after, base); err != nil {
		return err
	}
	if err := image.compare(after); err != nil {
		return err
	}
	return w.rt.Deallocate(base)
}

// image is memory before and after operations.
type image struct {
	before, after []byte // memory before the operations, and after them
	parts         []part // memory used by operations
}

// part is what an operation reads or writes.
type part struct {
	usage    *usage // of the communicator
	call     string // what errors call it
	from, to int    // first byte, and the one after the last
}

// guard is the number of unused bytes between two parts.
const guard = 64

var poison = reference.Payload(4093, 0x7ee5)

// add adds a part, between guards, and returns its offset. Without before it holds unwritten memory.
func (m *image) add(u *usage, call string, before, after []byte) (offset int) {
	const alignment = 16
	gap := guard + (alignment-len(m.before)%alignment)%alignment
	m.fill(gap)
	from := len(m.before)
	if before == nil {
		before = reference.Tile(poison, from, len(after))
	}
	m.before = append(m.before, before...)
	m.after = append(m.after, after...)
	m.parts = append(m.parts, part{u, call, from, len(m.before)})
	m.fill(guard)
	return from
}

func (m *image) fill(n int) {
	gap := reference.Tile(poison, len(m.before), n)
	m.before = append(m.before, gap...)
	m.after = append(m.after, gap...)
}

// compare returns an error if memory differs from its expected content.
func (m *image) compare(got []byte) error {
	if bytes.Equal(got, m.after) {
		return nil
	}
	for _, p := range m.parts {
		if !bytes.Equal(got[p.from:p.to], m.after[p.from:p.to]) {
			wrong, err := reference.Differences(
				got[p.from:p.to],
				m.after[p.from:p.to],
				1,
			)
			return fmt.Errorf("%v, %s: %w (%d of %d bytes differ)", p.usage, p.call, err, wrong, p.to-p.from)
		}
	}
	return errors.New("memory outside the buffers has changed")
}
