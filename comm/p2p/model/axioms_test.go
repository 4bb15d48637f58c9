package model

import "math/bits"

// order is the memory order of an operation.
type order uint8

const (
	weak order = iota
	relaxed
	acquire
	release
	acquireRelease
	sequential // fences only
)

func (o order) acquires() bool { return o == acquire || o >= acquireRelease }
func (o order) releases() bool { return o >= release }

// scope is the set of threads that an operation is strong for.
type scope uint8

const (
	cta scope = iota
	gpu
	sys
)

// place is where a thread runs. The host is a GPU of its own.
type place struct{ gpu, cta int }

type kind uint8

const (
	read kind = iota
	write
	fence
	signal // what API and barrier synchronization starts from
	wait   // where it ends
)

const (
	unread  = -1 // the write that a read reads: not known yet
	initial = -2 // the value that the location has at first
	none    = -1 // no such event
)

// event is one operation of one execution.
type event struct {
	kind   kind
	thread int
	order  order
	scope  scope
	loc    int    // of reads and writes; the number of signals and waits
	val    uint64 // written, or read
	from   int    // of reads: the write read from
	other  int    // the other half of an atomic operation
	free   bool   // a signal that orders nothing
}

// set is a set of events, by index.
type set [maxEvents / 64]uint64

const maxEvents = 512

func (s *set) add(i int)      { s[i>>6] |= 1 << (i & 63) }
func (s *set) has(i int) bool { return s[i>>6]>>(i&63)&1 != 0 }
func (s *set) join(o *set) {
	for i := range s {
		s[i] |= o[i]
	}
}
func (s *set) meets(o *set) bool {
	for i := range s {
		if s[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// graph is an execution, or the beginning of one: its events in the order in which they
// were added, which agrees with program order, and base causality.
type graph struct {
	places []place // of threads
	events []event
	before []set // base causality: the events that precede each
	fences []int // fence.sc, in an order that agrees with Fence-SC order
	atLoc  [][]int
}

func (g *graph) copy() *graph {
	c := *g
	c.events = append(make([]event, 0, len(g.events)+16), g.events...)
	c.before = append(make([]set, 0, len(g.before)+16), g.before...)
	c.fences = append([]int(nil), g.fences...)
	c.atLoc = make([][]int, len(g.atLoc))
	for i, l := range g.atLoc {
		c.atLoc[i] = l[:len(l):len(l)]
	}
	return &c
}

func (e *event) accesses() bool { return e.kind <= write }

// strong reports whether two events are morally strong: related in program order, or both
// strong with scopes that include the other's thread; and, of accesses, of one location.
func (g *graph) strong(a, b int) bool {
	x, y := &g.events[a], &g.events[b]
	if x.kind >= signal || y.kind >= signal || x.accesses() && y.accesses() && x.loc != y.loc {
		return false
	}
	if x.thread == y.thread {
		return a != b
	}
	if x.order == weak || y.order == weak {
		return false
	}
	p, q := g.places[x.thread], g.places[y.thread]
	switch min(x.scope, y.scope) {
	case cta:
		return p == q
	case gpu:
		return p.gpu == q.gpu
	}
	return true
}

// observed calls f with the writes that precede a read in observation order, nearest first.
func (g *graph) observed(r int, f func(w int)) {
	for r != none {
		w := g.events[r].from
		if w < 0 || !g.strong(w, r) {
			return
		}
		f(w)
		r = g.events[w].other
	}
}

// direct adds to s what precedes event t in base causality without another event between,
// given the reads-from relation: by program order, barriers, API synchronization, release and
// acquire patterns.
func (g *graph) direct(t int, s *set) {
	e := &g.events[t]
	acquires := func(r int) {
		g.observed(r, func(w int) {
			x := &g.events[w]
			if x.order == weak {
				return
			}
			for h := range w + 1 {
				y := &g.events[h]
				if y.thread != x.thread || !y.order.releases() || y.kind == read {
					continue
				}
				if (y.kind == fence || y.kind == write && y.loc == x.loc) && g.strong(h, t) {
					s.add(h)
				}
			}
		})
	}
	for i := range g.events {
		y := &g.events[i]
		switch {
		case y.thread == e.thread && i < t:
			s.add(i)
			acquiring := e.order.acquires() && (e.kind == fence || e.kind == read && y.loc == e.loc)
			if acquiring && y.kind == read && y.order != weak {
				acquires(i)
			}
		case e.kind == wait && y.kind == signal && y.loc == e.loc && !y.free && !e.free:
			s.add(i)
		}
	}
	if e.kind == read && e.order.acquires() {
		acquires(t)
	}
	if e.kind == fence && e.order == sequential {
		for _, f := range g.fences {
			if f == t {
				break
			}
			if g.strong(f, t) {
				s.add(f)
			}
		}
	}
}

// append adds an event, which nothing follows yet.
func (g *graph) append(e event) int {
	t := len(g.events)
	if t == maxEvents {
		panic("too many events")
	}
	g.events = append(g.events, e)
	if e.kind == fence && e.order == sequential {
		g.fences = append(g.fences, t)
	}
	if e.accesses() {
		g.atLoc[e.loc] = append(g.atLoc[e.loc], t)
	}
	var preds, all set
	g.direct(t, &preds)
	all = preds
	for i := range g.events[:t] {
		if preds.has(i) {
			all.join(&g.before[i])
		}
	}
	g.before = append(g.before, all)
	return t
}

// close makes base causality anew. False: it has a cycle. Every cycle has a release pattern
// whose write is read, and so contradicts the causality axiom.
func (g *graph) close() bool {
	for t := range g.events {
		g.before[t] = set{}
		g.direct(t, &g.before[t])
	}
	for changed := true; changed; {
		changed = false
		for t := range g.events {
			s := g.before[t]
			for i := range s {
				for w := g.before[t][i]; w != 0; w &= w - 1 {
					s.join(&g.before[i<<6|bits.TrailingZeros64(w)])
				}
			}
			if s.has(t) {
				return false
			}
			if s != g.before[t] {
				g.before[t], changed = s, true
			}
		}
	}
	return true
}

// consistent reports whether some coherence order of a location fulfils the axioms. Their verdict on one location does
// not depend on the coherence order of another. Unless last is none, nothing may follow that write (initial: there are
// no writes).
func (g *graph) consistent(loc, last int) bool {
	var writes, reads []int
	for _, i := range g.atLoc[loc] {
		switch e := &g.events[i]; {
		case e.kind == write:
			writes = append(writes, i)
		case e.from != unread:
			reads = append(reads, i)
		}
	}
	n := len(writes)
	if last == initial {
		return n == 0
	}
	at := func(w int) int { // -1: the initial one
		for i, x := range writes {
			if x == w {
				return i
			}
		}
		return -1
	}
	// Causality order ends with base causality; it may begin with an observation.
	seen := make([]set, n)
	for i, w := range writes {
		seen[i].add(w)
	}
	for _, r := range reads {
		g.observed(r, func(w int) { seen[at(w)].add(r) })
	}
	// An operation on another location may read what a write of an atomic operation passes on,
	// but observation order stays at one location, so this is all of it.
	precedes := make([]uint64, n) // bit i of precedes[j]: i comes before j
	related := make([]uint64, n)  // bit i of related[j]: they are ordered
	for i := range n {
		for j := range n {
			if i == j {
				continue
			}
			caused := seen[i].meets(&g.before[writes[j]])
			if caused {
				precedes[j] |= 1 << i
			}
			if caused || g.strong(writes[i], writes[j]) {
				related[j] |= 1 << i
				related[i] |= 1 << j
			}
		}
	}
	forbidden := make([]uint64, n) // bit i of forbidden[j]: i does not come before j
	for _, r := range reads {
		w0 := at(g.events[r].from)
		if w0 >= 0 && g.before[writes[w0]].has(r) {
			return false
		}
		for j := range n {
			if j == w0 || !seen[j].meets(&g.before[r]) {
				continue
			}
			if w0 < 0 {
				return false
			}
			forbidden[j] |= 1 << w0
			if related[j]>>w0&1 != 0 {
				precedes[w0] |= 1 << j
			}
		}
	}
	if last != none {
		m := at(last)
		for i := range n {
			if i != m && related[m]>>i&1 != 0 {
				precedes[m] |= 1 << i
			}
		}
	}
	order := make([]int, 0, n)
	var try func(done uint64) bool
	try = func(done uint64) bool {
		if len(order) == n {
			return g.fulfils(loc, writes, reads, order, related, forbidden)
		}
		for i := range n {
			if done>>i&1 == 0 && precedes[i]&^done == 0 {
				order = append(order, i)
				if try(done | 1<<i) {
					return true
				}
				order = order[:len(order)-1]
			}
		}
		return false
	}
	return try(0)
}

// fulfils checks the axioms for the coherence order that a sequence of the writes gives: what
// is related, in that order, and transitively.
func (g *graph) fulfils(loc int, writes, reads, order []int, related, forbidden []uint64) bool {
	n := len(writes)
	co := make([]uint64, n) // bit i of co[j]: i comes before j
	for k, j := range order {
		for _, i := range order[:k] {
			if related[j]>>i&1 != 0 {
				co[j] |= 1<<i | co[i]
			}
		}
	}
	for j := range n {
		if co[j]&forbidden[j] != 0 {
			return false
		}
	}
	follows := func(from, j int) bool { // whether write j comes after what a read reads
		if from == initial {
			return true
		}
		for i, w := range writes {
			if w == from {
				return i != j && co[j]>>i&1 != 0
			}
		}
		return false
	}
	// Atomicity.
	for _, r := range reads {
		e := &g.events[r]
		if e.other == none {
			continue
		}
		for j, w := range writes {
			if w == e.other || !g.strong(r, w) || !g.strong(w, e.other) || !follows(e.from, j) {
				continue
			}
			for k, x := range writes {
				if x == e.other && co[k]>>j&1 != 0 {
					return false
				}
			}
		}
	}
	// SC-per-location: no cycle of program order and morally strong communication.
	nodes := g.atLoc[loc]
	if len(nodes) > 62 {
		panic("too many accesses of a location")
	}
	edge := make([]uint64, len(nodes))
	number := make(map[int]int, len(nodes))
	for i, e := range nodes {
		number[e] = i
	}
	for i, a := range nodes {
		x := &g.events[a]
		for j, b := range nodes {
			y := &g.events[b]
			if a == b || x.kind == read && x.from == unread || y.kind == read && y.from == unread {
				continue
			}
			if x.thread == y.thread && a < b {
				edge[i] |= 1 << j
			}
			if y.kind == read && x.kind == write && y.from == a && g.strong(a, b) {
				edge[i] |= 1 << j
			}
		}
	}
	for j, w := range writes {
		for i, v := range writes {
			if co[j]>>i&1 != 0 && g.strong(v, w) {
				edge[number[v]] |= 1 << number[w]
			}
		}
		for _, r := range reads {
			if follows(g.events[r].from, j) && g.events[r].other != w && g.strong(r, w) {
				edge[number[r]] |= 1 << number[w]
			}
		}
	}
	for left, ok := len(nodes), true; ok; { // take away what has no way out
		ok = false
		for i := range nodes {
			if edge[i] == 0 {
				edge[i] = 1 << 63 // is gone
				for j := range nodes {
					if edge[j]>>63 == 0 {
						edge[j] &^= 1 << i
					}
				}
				left--
				ok = true
			}
		}
		if left == 0 {
			return true
		}
	}
	return len(nodes) == 0
}
