package trees

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// deepest is the maximum number of splits of a communicator below the world.
const deepest = 4

// node is a communicator of a tree.
type node struct {
	name  string // its splits, from the world on
	depth int    // splits below the world
	ranks []int  // of the world, by rank
	made  int    // splits of this one so far
}

// tree chooses the actions of one worker. Every rank has the same tree for a worker, so that all choose the same.
type tree struct {
	random *rand.Rand // the same on all ranks
	root   *node      // the world
	open   []*node    // without the root
	limit  int        // of open
	shrink bool       // more are closed than made, until half of limit remains
	steps  int        // so far
}

// action is the action of a communicator's ranks in a step.
type action uint8

const (
	use action = iota
	split
	closing
)

// step is a worker's next step, on all ranks of the nodes.
type step struct {
	action   action  // what is done
	number   int     // of the tree's steps
	nodes    []*node // one, unless they are used
	colors   []int   // of a split, by rank
	keys     []int   // of a split, by rank
	children []*node // of a split, by color
}

func newTree(seed uint64, worker, limit int, root *node) *tree {
	return &tree{
		random: rand.New(rand.NewPCG(seed, uint64(worker))),
		root:   root,
		limit:  limit,
	}
}

// next chooses a step. Communicators are made until their limit is reached, then closed until half of them remain, and
// so on.
func (t *tree) next() step {
	if len(t.open) >= t.limit {
		t.shrink = true
	} else if len(t.open) <= t.limit/2 {
		t.shrink = false
	}
	t.steps++
	splits := 50 // percent of the steps
	closes := 10
	if t.shrink {
		splits = 10
		closes = 50
	}
	switch choice := t.random.IntN(100); {
	case choice < splits && len(t.open) < t.limit:
		return t.split()
	case choice < splits+closes && len(t.open) > 0:
		return t.close()
	}
	return t.use()
}

// use chooses communicators to use concurrently: usually a few, and sometimes all, so that any two meet.
func (t *tree) use() step {
	s := step{action: use, number: t.steps}
	if t.random.IntN(16) == 0 {
		s.nodes = append(slices.Clone(t.open), t.root)
		return s
	}
	for range 1 + t.random.IntN(3) {
		if n := t.pick(); !slices.Contains(s.nodes, n) {
			s.nodes = append(s.nodes, n)
		}
	}
	return s
}

// pick chooses a communicator, the root as often as another one.
func (t *tree) pick() *node {
	if i := t.random.IntN(len(t.open) + 1); i > 0 {
		return t.open[i-1]
	}
	return t.root
}

// close chooses a communicator to close. Its sub-communicators stay.
func (t *tree) close() step {
	i := t.random.IntN(len(t.open))
	s := step{
		action: closing,
		number: t.steps,
		nodes:  t.open[i : i+1 : i+1],
	}
	t.open = slices.Concat(t.open[:i], t.open[i+1:])
	return s
}

// parent chooses a communicator to split: the root, one of the latest, or any.
func (t *tree) parent() *node {
	n := t.pick()
	switch t.random.IntN(3) {
	case 0:
		n = t.root
	case 1:
		if latest := t.open[max(0, len(t.open)-3):]; len(latest) > 0 {
			n = latest[t.random.IntN(len(latest))]
		}
	}
	if n.depth == deepest {
		return t.root
	}
	return n
}

// colors are the colors of a split whose ranks choose. Few of them, so that siblings and cousins share theirs.
var colors = []int{0, 0, 0, 1, 1, 2, -1, math.MaxInt32}

// split splits a communicator: by one color for all, by parity, or by a color for each rank.
func (t *tree) split() step {
	parent := t.parent()
	parent.made++
	s := step{
		action: split,
		number: t.steps,
		nodes:  []*node{parent},
	}
	rule := t.random.IntN(4)
	common := t.random.IntN(3)
	if len(t.open)+len(parent.ranks) > t.limit {
		rule = 0 // there may be no more than one child
	}
	for rank := range parent.ranks {
		color := common
		switch rule {
		case 1:
			color = rank % 2
		case 2:
			color = colors[t.random.IntN(len(colors))]
		}
		s.colors = append(s.colors, color)
		s.keys = append(s.keys, t.random.IntN(4)-2)
	}
	s.children = parent.children(s.colors, s.keys)
	t.open = append(t.open, s.children...)
	return s
}

// children returns the results of a split, by color. It is independent of the backends' arithmetic.
func (n *node) children(colors, keys []int) (children []*node) {
	type member struct{ color, key, rank int }
	var members []member
	for rank, color := range colors {
		if color >= 0 {
			members = append(members, member{color, keys[rank], rank})
		}
	}
	slices.SortFunc(members, func(a, b member) int {
		return slices.Compare(
			[]int{a.color, a.key, a.rank},
			[]int{b.color, b.key, b.rank},
		)
	})
	for i, m := range members {
		if i == 0 || m.color != members[i-1].color {
			name := fmt.Sprintf("%s/%d.%d", n.name, n.made, m.color)
			children = append(children, &node{name: name, depth: n.depth + 1})
		}
		last := children[len(children)-1]
		last.ranks = append(last.ranks, n.ranks[m.rank])
	}
	return children
}
