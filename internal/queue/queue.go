// Package queue is a first-in, first-out list that reuses its memory.
package queue

import "math/bits"

// Of is a queue of elements. The zero value is empty.
type Of[T any] struct {
	items []T // the first head of them were removed
	head  int // index of the first element
}

// Empty reports whether the queue is empty.
func (q *Of[T]) Empty() bool {
	return q.head == len(q.items)
}

// First returns the oldest element of a queue that is not empty.
func (q *Of[T]) First() T {
	return q.items[q.head]
}

// All returns the elements, the oldest first.
func (q *Of[T]) All() []T {
	return q.items[q.head:]
}

// Push adds an element.
func (q *Of[T]) Push(x T) {
	// Make room at the end before growing, once it is worth the move.
	if len(q.items) == cap(q.items) && q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items = q.items[:n]
		q.head = 0
	}
	q.items = append(q.items, x)
}

// Pop removes the oldest element of a queue that is not empty, and returns it.
func (q *Of[T]) Pop() T {
	x := q.items[q.head]
	clear(q.items[q.head:][:1])
	q.head++
	if q.Empty() {
		q.items = q.items[:0]
		q.head = 0
	}
	return x
}

// Keyed is a queue for each key. The zero value is empty. The cost of a call does not depend on the number of
// elements, of this key or of others. It reuses its memory.
type Keyed[T any] struct {
	nodes   []node[T] // the first one stands for no node; nil before the first Push
	buckets []int32   // places of the oldest element of a key, by the key's hash; 0 for none
	keys    int       // with elements
	free    int32     // place of a node without an element, 0 for none; next leads to the next
}

// node is an element. The first node of a key has the place of the key's last, and of the first node of another key
// with the same hash.
type node[T any] struct {
	key     uint64 // of the element
	value   T      // the element
	next    int32  // place of the next element of the key, 0 for none
	last    int32  // place of the last element of the key
	another int32  // place of the first element of another key, 0 for none
}

// Push adds an element.
func (q *Keyed[T]) Push(key uint64, value T) {
	if q.keys >= len(q.buckets) {
		q.grow()
	}
	place := q.free
	if place == 0 {
		place = int32(len(q.nodes))
		q.nodes = append(q.nodes, node[T]{})
	} else {
		q.free = q.nodes[place].next
	}
	q.nodes[place] = node[T]{
		key:   key,
		value: value,
		last:  place,
	}
	link := q.find(key)
	if first := *link; first != 0 {
		f := &q.nodes[first]
		q.nodes[f.last].next = place
		f.last = place
		return
	}
	*link = place
	q.keys++
}

// First returns the oldest element of a key.
func (q *Keyed[T]) First(key uint64) (value T, ok bool) {
	if q.keys == 0 {
		return value, false
	}
	first := *q.find(key)
	return q.nodes[first].value, first != 0
}

// Pop removes the oldest element of a key, and returns it.
func (q *Keyed[T]) Pop(key uint64) (value T, ok bool) {
	if q.keys == 0 {
		return value, false
	}
	link := q.find(key)
	place := *link
	if place == 0 {
		return value, false
	}
	n := q.nodes[place]
	if n.next == 0 {
		*link = n.another
		q.keys--
	} else {
		next := &q.nodes[n.next]
		next.last = n.last
		next.another = n.another
		*link = n.next
	}
	q.nodes[place] = node[T]{next: q.free}
	q.free = place
	return n.value, true
}

// Empty reports whether there are no elements.
func (q *Keyed[T]) Empty() bool {
	return q.keys == 0
}

// All yields the elements: those of a key in order, keys in no order.
func (q *Keyed[T]) All(yield func(T) bool) {
	for _, first := range q.buckets {
		for first != 0 {
			for place := first; place != 0; place = q.nodes[place].next {
				if !yield(q.nodes[place].value) {
					return
				}
			}
			first = q.nodes[first].another
		}
	}
}

// find returns a pointer to the place of a key's first element, or to where it would be stored.
func (q *Keyed[T]) find(key uint64) *int32 {
	link := &q.buckets[q.bucket(key)]
	for *link != 0 && q.nodes[*link].key != key {
		link = &q.nodes[*link].another
	}
	return link
}

// bucket returns the index of a key's bucket; the number of buckets is a power of two.
func (q *Keyed[T]) bucket(key uint64) uint64 {
	const odd = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio
	high, low := bits.Mul64(key, odd)
	return (high ^ low) & uint64(len(q.buckets)-1)
}

// grow doubles the number of buckets.
func (q *Keyed[T]) grow() {
	const fewest = 4
	old := q.buckets
	q.buckets = make([]int32, max(fewest, 2*len(old)))
	if q.nodes == nil {
		q.nodes = make([]node[T], 1, fewest)
	}
	for _, first := range old {
		for first != 0 {
			n := &q.nodes[first]
			link := &q.buckets[q.bucket(n.key)]
			another := n.another
			n.another = *link
			*link = first
			first = another
		}
	}
}
