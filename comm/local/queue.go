package local

// queue is a first-in, first-out list of operations.
type queue struct {
	items []*op
	head  int
}

func (q *queue) empty() bool { return q.head == len(q.items) }
func (q *queue) first() *op  { return q.items[q.head] }
func (q *queue) all() []*op  { return q.items[q.head:] }

func (q *queue) push(o *op) {
	// Make room at the end before growing, once it is worth the move.
	if len(q.items) == cap(q.items) && q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, o)
}

func (q *queue) pop() *op {
	o := q.items[q.head]
	q.items[q.head] = nil
	q.head++
	if q.empty() {
		q.items, q.head = q.items[:0], 0
	}
	return o
}
