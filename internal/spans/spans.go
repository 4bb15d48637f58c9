// Package spans finds overlapping ranges of memory.
package spans

import "math/bits"

// Set is a set of ranges of memory, each with a value. The zero value is empty. The cost of a call grows with the
// logarithm of the number of ranges. The set reuses its memory.
//
// It is a treap: a tree in the order of the ranges' beginnings, balanced by pseudorandom priorities. Each node knows
// the highest end below it.
type Set[T any] struct {
	nodes []node[T] // the first one stands for no node; nil before the first Insert
	root  int32     // place of the root; 0 for an empty set
	free  int32     // place of a node without a range, 0 for none; left leads to the next
}

type node[T any] struct {
	from, to    uintptr // first address of the range, and the address after the last
	farthest    uintptr // the latest end in this tree
	value       T       // the range's value
	left, right int32   // places; 0 for none
	priority    uint32  // derived from the place; no child has a higher one
}

// Insert adds a range that is not empty, and returns its place for Remove, which is not 0.
func (s *Set[T]) Insert(from, to uintptr, value T) (place int32) {
	if s.nodes == nil {
		s.nodes = make([]node[T], 1, 4)
	}
	place = s.free
	if place == 0 {
		place = int32(len(s.nodes))
		s.nodes = append(s.nodes, node[T]{})
	} else {
		s.free = s.nodes[place].left
	}
	const odd = 0x9e3779b1 // 2^32 divided by the golden ratio
	s.nodes[place] = node[T]{
		from:     from,
		to:       to,
		farthest: to,
		value:    value,
		priority: bits.Reverse32(uint32(place) * odd),
	}
	s.root = s.insert(s.root, place)
	return place
}

// Remove removes the range at a place.
func (s *Set[T]) Remove(place int32) {
	s.root = s.remove(s.root, place)
	s.nodes[place] = node[T]{left: s.free}
	s.free = place
}

// Overlaps reports whether a range has a byte in common with a range in the set whose value is accepted.
func (s *Set[T]) Overlaps(from, to uintptr, accept func(T) bool) bool {
	return from < to && s.overlaps(s.root, from, to, accept)
}

func (s *Set[T]) overlaps(tree int32, from, to uintptr, accept func(T) bool) bool {
	for tree != 0 {
		n := &s.nodes[tree]
		if n.farthest <= from {
			return false
		}
		if n.left != 0 && s.overlaps(n.left, from, to, accept) {
			return true
		}
		if n.from >= to {
			return false
		}
		if n.to > from && accept(n.value) {
			return true
		}
		tree = n.right
	}
	return false
}

// before reports whether one node sorts before another.
func (s *Set[T]) before(a, b int32) bool {
	if s.nodes[a].from != s.nodes[b].from {
		return s.nodes[a].from < s.nodes[b].from
	}
	return a < b
}

// insert returns a tree with a node.
func (s *Set[T]) insert(tree, place int32) int32 {
	if tree == 0 {
		return place
	}
	t := &s.nodes[tree]
	n := &s.nodes[place]
	if n.priority > t.priority {
		n.left, n.right = s.split(tree, place)
		s.update(place)
		return place
	}
	if s.before(place, tree) {
		t.left = s.insert(t.left, place)
	} else {
		t.right = s.insert(t.right, place)
	}
	s.update(tree)
	return tree
}

// split returns the parts of a tree that are before a node and after it.
func (s *Set[T]) split(tree, place int32) (first, second int32) {
	if tree == 0 {
		return 0, 0
	}
	t := &s.nodes[tree]
	if s.before(tree, place) {
		t.right, second = s.split(t.right, place)
		first = tree
	} else {
		first, t.left = s.split(t.left, place)
		second = tree
	}
	s.update(tree)
	return first, second
}

// remove returns a tree without a node that is in it.
func (s *Set[T]) remove(tree, place int32) int32 {
	t := &s.nodes[tree]
	if tree == place {
		return s.merge(t.left, t.right)
	}
	if s.before(place, tree) {
		t.left = s.remove(t.left, place)
	} else {
		t.right = s.remove(t.right, place)
	}
	s.update(tree)
	return tree
}

// merge returns the union of two trees, if all of the first sorts before the second.
func (s *Set[T]) merge(first, second int32) int32 {
	if first == 0 {
		return second
	}
	if second == 0 {
		return first
	}
	f := &s.nodes[first]
	b := &s.nodes[second]
	if f.priority > b.priority {
		f.right = s.merge(f.right, second)
		s.update(first)
		return first
	}
	b.left = s.merge(first, b.left)
	s.update(second)
	return second
}

// update finds the highest end in a tree whose children know theirs.
func (s *Set[T]) update(tree int32) {
	t := &s.nodes[tree]
	t.farthest = max(t.to, s.nodes[t.left].farthest, s.nodes[t.right].farthest)
}
