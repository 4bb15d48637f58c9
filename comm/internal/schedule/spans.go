package schedule

// spans are the ranges of memory that started operations use, as a treap (Seidel
// and Aragon, 1996) in the order of their beginnings, each node with where its
// subtree reaches: whether a range overlaps one of them is known in logarithmic
// time, however many messages are outstanding. The nodes are part of the
// operations.
type spans struct {
	root   *spanNode
	random uint32
}

type spanNode struct {
	Span
	reaches     uintptr // the farthest end in the subtree
	priority    uint32
	left, right *spanNode
}

// before is the order of the tree: by beginning, and where that is the same in any
// fixed one.
func (n *spanNode) before(m *spanNode) bool {
	return n.from < m.from || n.from == m.from && n.priority < m.priority
}

// update sets reaches from the children.
func (n *spanNode) update() {
	n.reaches = n.to
	if n.left != nil {
		n.reaches = max(n.reaches, n.left.reaches)
	}
	if n.right != nil {
		n.reaches = max(n.reaches, n.right.reaches)
	}
}

// add puts n into the tree as s, unless that is empty.
func (t *spans) add(n *spanNode, s Span) {
	t.random = t.random*1664525 + 1013904223 // Knuth and Lewis
	*n = spanNode{Span: s, reaches: s.to, priority: t.random}
	if s.from < s.to {
		t.root = insert(t.root, n)
	}
}

func insert(t, n *spanNode) *spanNode {
	if t == nil {
		return n
	}
	if t.priority < n.priority {
		n.left, n.right = cut(t, n)
		n.update()
		return n
	}
	if n.before(t) {
		t.left = insert(t.left, n)
	} else {
		t.right = insert(t.right, n)
	}
	t.reaches = max(t.reaches, n.to)
	return t
}

// cut divides a tree into the nodes before n and the others.
func cut(t, n *spanNode) (before, after *spanNode) {
	if t == nil {
		return nil, nil
	}
	if t.before(n) {
		before = t
		t.right, after = cut(t.right, n)
	} else {
		after = t
		before, t.left = cut(t.left, n)
	}
	t.update()
	return before, after
}

// remove takes out a node that was added.
func (t *spans) remove(n *spanNode) {
	if n.from < n.to {
		t.root = remove(t.root, n)
	}
}

func remove(t, n *spanNode) *spanNode {
	if t == n {
		return join(n.left, n.right)
	}
	if n.before(t) {
		t.left = remove(t.left, n)
	} else {
		t.right = remove(t.right, n)
	}
	t.update()
	return t
}

// join makes one tree of two, of which the first is before the second.
func join(a, b *spanNode) *spanNode {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.priority > b.priority:
		a.right = join(a.right, b)
		a.update()
		return a
	}
	b.left = join(a, b.left)
	b.update()
	return b
}

// overlap reports whether s overlaps one of the spans.
func (t *spans) overlap(s Span) bool {
	if s.from >= s.to {
		return false
	}
	for n := t.root; n != nil; {
		switch {
		case n.Overlaps(s):
			return true
		case n.left != nil && n.left.reaches > s.from:
			n = n.left
		default:
			n = n.right
		}
	}
	return false
}
