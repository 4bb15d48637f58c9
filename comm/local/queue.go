package local

// queue is a first-in, first-out list.
type queue[T any] struct {
	items []T
	head  int
}

func (q *queue[T]) empty() bool { return q.head == len(q.items) }

func (q *queue[T]) first() T { return q.items[q.head] }

func (q *queue[T]) all() []T { return q.items[q.head:] }

func (q *queue[T]) push(x T) {
	// Make room at the end before growing, once it is worth the move.
	if len(q.items) == cap(q.items) && q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, x)
}

func (q *queue[T]) pop() T {
	x := q.items[q.head]
	clear(q.items[q.head:][:1])
	q.head++
	if q.empty() {
		q.items, q.head = q.items[:0], 0
	}
	return x
}
