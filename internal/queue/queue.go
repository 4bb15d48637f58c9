// Package queue is a first-in, first-out list that keeps its memory.
package queue

// Of is a queue of elements. The zero value is empty.
type Of[T any] struct {
	items []T
	head  int
}

// Empty reports whether there is nothing.
func (q *Of[T]) Empty() bool { return q.head == len(q.items) }

// First returns the oldest element, of a queue that is not empty.
func (q *Of[T]) First() T { return q.items[q.head] }

// All returns the elements, the oldest first.
func (q *Of[T]) All() []T { return q.items[q.head:] }

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

// Pop removes the oldest element, of a queue that is not empty, and returns it.
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
