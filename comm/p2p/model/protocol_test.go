package model

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// setting is what a model of the protocols is made for.
type setting struct {
	ranks, words int
	families     []family // of the operations, one an epoch
	first        uint64   // epoch
	rounds       int      // of rings
	together     bool     // the words of a rank are one thread's
	shift        bool     // two epochs later the same memory belongs to another peer
	ptxOnly      bool     // no grid boundary; see the package
	split        bool     // flags have a location for each value; see the package
	operations   int
	mutant       string
}

type family uint8

const (
	sentinel family = iota // pair, add and reduce by sentinels
	tagged                 // reduce and move by tags
	twice                  // two stages by sentinels
	moveRing               // rings with one stage
	ring                   // rings with two stages
	lists                  // that one kernel makes and puts, and another one receives
)

func (f family) String() string {
	return [...]string{"sentinel", "tagged", "twice", "move_ring", "ring", "lists"}[f]
}

func (s setting) String() string {
	return fmt.Sprintf("%d ranks, %d words, %v, %d rounds, first epoch %#x, together %t, shifted %t, PTX only %t, split %t",
		s.ranks, s.words, s.families, s.rounds, s.first, s.together, s.shift, s.ptxOnly, s.split)
}

// model is a program that is made of the steps that p2p.cu has, or a mutant's.
type model struct {
	program
	setting
	used    bool // the mutant differs
	numbers int  // of signals
	ends    map[int]int
	counts  map[int]int
	judge   func(s *state) string // what else is wrong with an execution
}

const empty = ^uint64(0) // the sentinel

func newModel(s setting) *model {
	m := &model{setting: s, ends: map[int]int{}, counts: map[int]int{}}
	m.registers = 12
	m.program.first = map[int]uint64{}
	return m
}

// is reports whether the mutant is that one.
func (m *model) is(name string) bool {
	m.used = m.used || m.mutant == name
	return m.mutant == name
}

func (m *model) number() int { m.numbers++; return m.numbers }

func constant(v uint64) func([]uint64) uint64 { return func([]uint64) uint64 { return v } }

func (m *model) put(t int, o order, s scope, loc int, v uint64) {
	m.emit(t, instr{op: store, order: o, scope: s, loc: loc, val: constant(v)})
}

func (m *model) fence(t int, o order, s scope) {
	m.emit(t, instr{op: fenced, order: o, scope: s, loc: none})
}

// await waits until the value is one that fits, and leaves it in register 0.
func (m *model) await(t int, o order, s scope, loc int, fits func(v uint64) bool) {
	m.emit(t, instr{op: load, order: o, scope: s, loc: loc, cond: func(_ []uint64, v uint64) bool { return fits(v) }})
}

// want asserts that register 0 is a value.
func (m *model) want(t int, v uint64, what string, args ...any) {
	m.emit(t, instr{op: assert, loc: none, text: fmt.Sprintf(what, args...), cond: func(r []uint64, _ uint64) bool { return r[0] == v }})
}

// see is a read of data, which has to be that value.
func (m *model) see(t int, o order, s scope, loc int, v uint64) {
	m.emit(t, instr{op: look, order: o, scope: s, loc: loc, val: constant(v)})
}

// barrier is one of all these threads. A free one does not order memory.
func (m *model) barrier(threads []int, free bool) {
	id := m.number()
	for _, t := range threads {
		m.emit(t, instr{op: signals, loc: id, free: free})
	}
	for _, t := range threads {
		m.emit(t, instr{op: waits, loc: id, n: len(threads), free: free})
	}
}

// start is where a thread of a rank's kernel waits for the kernel before it in the stream to
// end: at its launch, or at griddepcontrol.wait.
func (m *model) start(t, rank int) {
	if id, ok := m.ends[rank]; ok && !m.is("kernels of two streams") {
		m.emit(t, instr{op: waits, loc: id, n: m.counts[id]})
	}
	if !m.ptxOnly && !m.is("the start of a grid does not release") {
		m.fence(t, acquireRelease, sys)
	}
}

// end ends the threads of a rank's kernel.
func (m *model) end(rank int, threads []int) {
	id := m.number()
	for _, t := range threads {
		if !m.ptxOnly && !m.is("the end of a grid does not acquire") {
			m.fence(t, acquireRelease, sys)
		}
		m.emit(t, instr{op: signals, loc: id})
	}
	m.ends[rank], m.counts[id] = id, len(threads)
}

// payload is what a rank sends to another.
func payload(k, from, to, word int) uint64 {
	return uint64(1000*(k+1) + 100*(from+1) + 10*(to+1) + word + 1)
}

// next is the epoch after one; see advance.
func (m *model) next(epoch uint64) uint64 {
	epoch++
	if uint32(epoch) == 0 && !m.is("the tag zero") {
		if m.is("a skip by one") {
			return epoch + 1
		}
		epoch += 2
	}
	return epoch
}

// place is which of the places an epoch uses.
func (m *model) place(epoch uint64) uint64 {
	switch {
	case m.is("one place"):
		return 0
	case m.is("three places"):
		return epoch % 3
	}
	return epoch & 1
}

// sequence makes the program of some operations that follow each other.
func sequence(s setting) *model {
	m := newModel(s)
	epoch := s.first
	for k, f := range s.families {
		for r := range s.ranks {
			switch f {
			case sentinel, tagged:
				m.atOnce(f, k, epoch, r)
			case twice:
				m.twice(k, epoch, r)
			case lists:
				m.lists(k, epoch, r)
			default:
				m.ring(f == ring, k, epoch, r)
			}
		}
		epoch = m.next(epoch)
	}
	return m
}

// threads makes those of a rank, one for each word unless they are together, and returns the
// words of each.
func (m *model) threadsOf(rank int) (threads []int, words [][]int) {
	for w := range m.words {
		if w == 0 || !m.together {
			threads = append(threads, m.thread(place{rank, 0}))
			words = append(words, nil)
		}
		words[len(words)-1] = append(words[len(words)-1], w)
	}
	return threads, words
}

// slot is where a word from a peer lies; at first it is empty, or 0.
func (m *model) slot(f family, k int, epoch uint64, to, from, stage, word int) int {
	seat := from
	if from > to {
		seat--
	}
	if m.shift { // the peers' pieces are of other sizes than two epochs ago
		seat = (seat + k/2) % (m.ranks - 1)
	}
	if m.is("a second stage in the place of the first") {
		stage = 0
	}
	wire := "words"
	if f == tagged {
		wire = "tagged"
	}
	l := m.loc("%s of rank %d, place %d, stage %d, seat %d, word %d", wire, to, m.place(epoch), stage, seat, word)
	if f != tagged {
		m.program.first[l] = empty
	}
	return l
}

// silent reports that a rank has nothing for another one, and does not say so.
func (m *model) silent(k, from, to int) bool {
	return k == 1 && from == 1 && to == 0 && m.is("a rank that sends nothing does not say so")
}

// putWord is W::put.
func (m *model) putWord(f family, t, k int, epoch uint64, to, from, stage, word int) {
	if m.silent(k, from, to) {
		return
	}
	v := payload(k, from, to, word)
	if f == tagged {
		v |= uint64(uint32(epoch)) << 32
		if m.is("tags without an epoch") {
			v = payload(k, from, to, word) | 7<<32
		}
	} else if m.is("a payload like the sentinel") && k == 1 {
		v = empty
	}
	o, s := relaxed, sys
	if m.is("weak puts") {
		o = weak
	}
	if m.is("puts of one GPU") {
		s = gpu
	}
	m.put(t, o, s, m.slot(f, k, epoch, to, from, stage, word), v)
}

// takeWord is await, up to the word's value.
func (m *model) takeWord(f family, t, k int, epoch uint64, to, from, stage, word int) {
	if m.silent(k, from, to) {
		return
	}
	v, tag := payload(k, from, to, word), uint64(uint32(epoch))
	if m.is("tags without an epoch") {
		tag = 7
	}
	o, s := relaxed, sys
	if m.is("weak looks") {
		o = weak
	}
	if m.is("looks of one GPU") {
		s = gpu
	}
	fits := func(got uint64) bool { return got != empty }
	if f == tagged {
		fits = func(got uint64) bool { return got>>32 == tag }
		v |= tag << 32
	}
	if word > 0 && m.is("the first word tells for all") {
		fits = func(uint64) bool { return true }
	}
	m.await(t, o, s, m.slot(f, k, epoch, to, from, stage, word), fits)
	m.want(t, v, "rank %d takes a wrong word %d from rank %d in operation %d, stage %d", to, word, from, k, stage)
}

// clearWord is W::clear.
func (m *model) clearWord(f family, t, k int, epoch uint64, to, from, stage, word int) {
	if f == tagged || m.silent(k, from, to) || m.is("no clear") || stage == 1 && m.is("no clear of the second stage") {
		return
	}
	o, s := relaxed, sys
	if m.is("weak clears") {
		o = weak
	}
	if m.is("clears of one GPU") {
		s = gpu
	}
	m.put(t, o, s, m.slot(f, k, epoch, to, from, stage, word), empty)
}

// each calls f with the peers of a rank, in the order after it.
func (m *model) each(rank int, f func(p int)) {
	for step := 1; step < m.ranks; step++ {
		f((rank + step) % m.ranks)
	}
}

// atOnce is reduce, pair_up, add and move.
func (m *model) atOnce(f family, k int, epoch uint64, r int) {
	threads, words := m.threadsOf(r)
	push := func(i int) {
		m.each(r, func(p int) {
			for _, w := range words[i] {
				m.putWord(f, threads[i], k, epoch, p, r, 0, w)
			}
		})
	}
	clear := func(i, k int, epoch uint64) {
		m.each(r, func(p int) {
			for _, w := range words[i] {
				m.clearWord(f, threads[i], k, epoch, r, p, 0, w)
			}
		})
	}
	for i, t := range threads {
		if m.is("a push before griddepcontrol.wait") {
			push(i)
		}
		m.start(t, r)
		if m.is("clears at the start of the next kernel") && k > 0 {
			clear(i, k-1, epoch-1)
		}
		if m.is("clears before the words arrive") {
			clear(i, k, epoch)
		}
		if m.is("fences instead of the boundary") || m.is("a fence before the push only") {
			m.fence(t, acquireRelease, sys)
		}
		if !m.is("a push before griddepcontrol.wait") {
			push(i)
		}
		m.each(r, func(p int) {
			for _, w := range words[i] {
				m.takeWord(f, t, k, epoch, r, p, 0, w)
			}
		})
		if !m.is("clears at the start of the next kernel") && !m.is("clears before the words arrive") {
			clear(i, k, epoch)
		}
		if m.is("fences instead of the boundary") || m.is("a fence after the looks only") {
			m.fence(t, acquireRelease, sys)
		}
	}
	m.end(r, threads)
}

// twice: a rank reduces one piece, and sends it to all.
func (m *model) twice(k int, epoch uint64, r int) {
	threads, words := m.threadsOf(r)
	for i, t := range threads {
		m.start(t, r)
		for stage := range 2 {
			for _, w := range words[i] {
				m.each(r, func(p int) { m.putWord(sentinel, t, k, epoch, p, r, stage, w) })
			}
			for _, w := range words[i] {
				m.each(r, func(p int) { m.takeWord(sentinel, t, k, epoch, r, p, stage, w) })
				m.each(r, func(p int) { m.clearWord(sentinel, t, k, epoch, r, p, stage, w) })
			}
		}
	}
	m.end(r, threads)
}

// lists is a kernel that makes a list, and receive. The first thread tells how many entries there are and what the list
// is headed by, in a word each, and knows it from each peer; all of them wait for the entries.
func (m *model) lists(k int, epoch uint64, r int) {
	const stage = 2 // separate memory
	const count, note = 0, 1
	heads := func(which, to, from int) int {
		return m.loc("%s of rank %d, place %d, from %d", [...]string{"count", "note"}[which], to, m.place(epoch), from)
	}
	told := func(which int) uint64 { return epoch<<32 | uint64(2*k+which+1) } // they differ
	fits := func(v uint64) bool { return v>>32 == epoch }
	if m.is("counts without an epoch") {
		told, fits = func(which int) uint64 { return uint64(2*k + which + 1) }, func(v uint64) bool { return v != 0 }
	}
	receive := func() {
		threads, words := m.threadsOf(r)
		for _, t := range threads {
			m.start(t, r)
		}
		m.each(r, func(p int) {
			m.await(threads[0], relaxed, sys, heads(count, r, p), fits)
			m.want(threads[0], told(count), "rank %d takes a wrong count from rank %d in operation %d", r, p, k)
			if m.is("the count tells of the note") {
				m.see(threads[0], relaxed, sys, heads(note, r, p), told(note))
				return
			}
			m.await(threads[0], relaxed, sys, heads(note, r, p), fits)
			m.want(threads[0], told(note), "rank %d takes a wrong note from rank %d in operation %d", r, p, k)
		})
		m.barrier(threads, m.is("a barrier that does not order memory"))
		for i, t := range threads {
			for _, w := range words[i] {
				m.each(r, func(p int) {
					if m.is("the count tells of the entries") {
						m.see(t, relaxed, sys, m.slot(sentinel, k, epoch, r, p, stage, w), payload(k, p, r, w))
					} else {
						m.takeWord(sentinel, t, k, epoch, r, p, stage, w)
					}
					m.clearWord(sentinel, t, k, epoch, r, p, stage, w)
				})
			}
		}
		m.end(r, threads)
	}
	threads, words := m.threadsOf(r)
	for i, t := range threads {
		if !m.is("a list put before the last one is received") || k == 0 {
			m.start(t, r)
		}
		for _, w := range words[i] {
			m.each(r, func(p int) { m.putWord(sentinel, t, k, epoch, p, r, stage, w) })
		}
	}
	m.each(r, func(p int) {
		m.put(threads[0], relaxed, sys, heads(note, p, r), told(note))
		m.put(threads[0], relaxed, sys, heads(count, p, r), told(count))
	})
	m.end(r, threads)
	receive()
}

// ring is ring and move_ring of one line, whose lanes each have a word of a chunk. The lanes
// below the number of peers have their flags.
func (m *model) ring(onward bool, k int, epoch uint64, r int) {
	var lanes []int
	for range max(m.words, m.ranks-1) {
		lanes = append(lanes, m.thread(place{r, 0}))
	}
	for _, t := range lanes {
		m.start(t, r)
	}
	slots := 4
	if m.is("three slots") || m.is("three slots and flags told before the reads") {
		slots = 3
	}
	if m.is("two slots") {
		slots = 2
	}
	// The slot of a lane, and what lies there.
	slot := func(to, from, stage, round, lane int) int {
		return m.loc("ring of rank %d, place %d, stage %d, slot %d, from %d, lane %d", to, m.place(epoch), stage, round%slots, from, lane)
	}
	chunk := func(from, to, stage, round, lane int) uint64 {
		return payload(k, from, to, lane)*100 + uint64(10*stage+round)
	}
	flag := func(to, from, stage, round int) int {
		if m.is("one flag for all peers") {
			from = 0
		}
		if m.is("one flag for both stages") {
			stage = 0
		}
		if m.split {
			return m.loc("flag of rank %d, stage %d, from %d, operation %d, round %d", to, stage, from, k, round)
		}
		return m.loc("flag of rank %d, stage %d, from %d", to, stage, from)
	}
	count := func(round int) uint64 {
		if m.is("flags without an epoch") {
			return uint64(round + 1)
		}
		return epoch<<20 | uint64(round+1)
	}
	peer := func(lane int) int {
		if lane >= r {
			lane++
		}
		return lane
	}
	fill := func(stage, round int) {
		o := weak
		if m.is("relaxed chunks") {
			o = relaxed
		}
		for lane, t := range lanes[:m.words] {
			m.each(r, func(p int) { m.put(t, o, sys, slot(p, r, stage, round, lane), chunk(r, p, stage, round, lane)) })
		}
	}
	tell := func(stage, round int) {
		o, s := release, sys
		if m.is("flags told relaxed") {
			o = relaxed
		}
		if m.is("flags told to one GPU") {
			s = gpu
		}
		for lane, t := range lanes[:m.ranks-1] {
			if m.is("a fence before flags told relaxed") {
				m.fence(t, acquireRelease, sys)
				o = relaxed
			}
			m.put(t, o, s, flag(peer(lane), r, stage, round), count(round))
		}
	}
	hear := func(stage, round int) {
		o, s := acquire, sys
		if m.is("flags heard relaxed") {
			o = relaxed
		}
		if m.is("flags heard from one GPU") {
			s = gpu
		}
		fits := func(v uint64) bool { return v >= count(round) }
		if m.is("flags heard when equal") {
			fits = func(v uint64) bool { return v == count(round) }
		}
		for lane, t := range lanes[:m.ranks-1] {
			if m.is("only the first lane hears") && lane > 0 {
				continue
			}
			m.await(t, o, s, flag(r, peer(lane), stage, round), fits)
		}
		m.barrier(lanes, m.is("no warp barrier after the flags"))
	}
	collect := func(stage, round int) {
		o := relaxed
		if m.is("weak reads of chunks") {
			o = weak
		}
		for lane, t := range lanes[:m.words] {
			m.each(r, func(p int) { m.see(t, o, sys, slot(r, p, stage, round, lane), chunk(p, r, stage, round, lane)) })
		}
	}
	last := m.rounds + 1
	if onward {
		last++
	}
	early := m.is("flags told before the reads") || m.is("three slots and flags told before the reads")
	for round := range last {
		fills, reduces := round < m.rounds, round >= 1 && round-1 < m.rounds
		if fills {
			fill(0, round)
		}
		if early && fills {
			m.barrier(lanes, false)
			tell(0, round)
		}
		if reduces {
			hear(0, round-1)
			collect(0, round-1)
			if onward {
				fill(1, round-1)
			}
		}
		if onward && round >= 2 {
			hear(1, round-2)
			collect(1, round-2)
		}
		m.barrier(lanes, m.is("no warp barrier before the flags"))
		if fills && !early {
			tell(0, round)
		}
		if reduces && onward {
			tell(1, round-1)
		}
	}
	m.end(r, lanes)
}

// check explores a model.
func (m *model) check(most int) *explorer {
	return m.explore(most, func(x *explorer, s *state) string {
		if m.judge != nil {
			if what := m.judge(s); what != "" {
				return what
			}
		}
		return x.unexpected(s)
	})
}

// of lists n epochs that go through some families in turn.
func of(n int, fs ...family) (list []family) {
	for i := range n {
		list = append(list, fs[i%len(fs)])
	}
	return list
}

const maxLeaves = 300000

// All executions of these are as they should be.
func TestProtocols(t *testing.T) {
	for _, s := range []setting{
		{ranks: 2, words: 2, families: of(4, sentinel)},
		{ranks: 3, words: 2, families: of(3, sentinel)},
		{ranks: 3, words: 2, families: of(4, sentinel), together: true, shift: true},
		{ranks: 2, words: 2, families: of(4, tagged), first: 1<<32 - 2},
		{ranks: 3, words: 2, families: of(3, tagged), first: 1<<32 - 1, shift: true},
		{ranks: 2, words: 2, families: of(3, twice)},
		{ranks: 3, words: 2, families: of(3, twice), together: true},
		{ranks: 3, words: 1, families: of(4, twice), shift: true},
		{ranks: 2, words: 2, families: of(3, moveRing), rounds: 1},
		{ranks: 2, words: 2, families: of(1, moveRing), rounds: 3},
		{ranks: 2, words: 2, families: of(1, ring), rounds: 2},
		{ranks: 2, words: 2, families: of(2, moveRing), rounds: 5, split: true},
		{ranks: 3, words: 2, families: of(1, moveRing), rounds: 6, split: true},
		{ranks: 3, words: 2, families: of(3, moveRing), rounds: 2, split: true},
		{ranks: 2, words: 2, families: of(1, ring), rounds: 6, split: true},
		{ranks: 3, words: 2, families: of(3, ring), rounds: 1, split: true},
		{ranks: 2, words: 2, families: of(3, sentinel, moveRing), rounds: 1},
		{ranks: 2, words: 2, families: of(3, moveRing, sentinel), rounds: 1},
		{ranks: 2, words: 2, families: of(4, moveRing, tagged), rounds: 1},
		{ranks: 3, words: 2, families: of(3, twice, tagged), together: true},
		{ranks: 3, words: 2, families: of(3, ring, sentinel), rounds: 1, split: true},
		{ranks: 2, words: 2, families: of(4, lists)},
		{ranks: 3, words: 1, families: of(4, lists), shift: true},
		{ranks: 2, words: 1, families: of(3, lists, tagged)},
		// PTX's axioms alone are enough for these.
		{ranks: 2, words: 2, families: of(4, tagged), ptxOnly: true},
		{ranks: 2, words: 2, families: of(3, sentinel, moveRing), rounds: 1, ptxOnly: true},
		{ranks: 2, words: 2, families: of(3, moveRing), rounds: 2, ptxOnly: true, split: true},
		{ranks: 3, words: 2, families: of(3, ring), rounds: 1, ptxOnly: true, split: true},
	} {
		if s.first == 0 {
			s.first = 1
		}
		t.Run(s.String(), func(t *testing.T) {
			t.Parallel()
			m := sequence(s)
			x := m.check(maxLeaves)
			t.Logf("%d threads, %d locations: %d executions, %d ways", len(m.places), len(m.names), x.ends, x.leaves)
			require.Nil(t, x.bad)
			require.False(t, x.over)
			require.Positive(t, x.ends)
		})
	}
}
