package model

import (
	"fmt"
	"math/bits"
	"testing"

	"github.com/stretchr/testify/require"
)

// epochs models how a rank's kernels read and count up the epoch: state.epoch, begin and advance. Each kernel has the
// given number of blocks, of two threads each, of at most three.
func epochs(s setting, blocks ...int) *model {
	m := newModel(s)
	m.ptxOnly = !m.is("the boundary as well")
	const most, width = 3, 2
	word := func(b int) int { return m.loc("epoch of block %d", b) }
	for b := range most {
		m.program.first[word(b)] = s.first
	}
	epoch := s.first
	for _, n := range blocks {
		var all []int
		for b := range n {
			var threads []int
			for range width {
				threads = append(threads, m.thread(place{0, b}))
			}
			all = append(all, threads...)
			for _, t := range threads {
				begin := func() {
					own := word(b)
					if m.is("one word for all blocks") {
						own = word(0)
					}
					m.see(t, relaxed, sys, own, epoch)
				}
				if m.is("the epoch read before griddepcontrol.wait") {
					begin()
					m.start(t, 0)
				} else {
					m.start(t, 0)
					begin()
				}
			}
			if !m.is("no barrier before the epoch is counted up") {
				m.barrier(threads, m.is("a barrier that does not order memory"))
			}
			o, sc := relaxed, sys
			if m.is("epochs stored weak") {
				o = weak
			}
			if m.is("epochs stored for the block only") {
				sc = cta
			}
			next := m.next(epoch)
			for tid, t := range threads {
				for x := b + tid*n; x < most; x += width * n {
					if m.is("a block counts up its own word only") && x != b || m.is("the first block counts up for all") && b > 0 {
						continue
					}
					m.put(t, o, sc, word(x), next)
				}
				if m.is("the first block counts up for all") && b == 0 && tid == 0 {
					for x := range most {
						m.put(t, o, sc, word(x), next)
					}
				}
			}
		}
		m.end(0, all)
		epoch = m.next(epoch)
	}
	return m
}

func TestEpochs(t *testing.T) {
	for _, blocks := range [][]int{{2, 1, 2}, {1, 2, 1}, {3, 2, 3}, {2, 3, 1}} {
		m := epochs(setting{first: 1<<32 - 2}, blocks...)
		x := m.check(maxLeaves)
		if x.bad != nil || x.over || x.ends == 0 {
			t.Fatal(blocks, x.bad, x.over)
		}
		t.Logf("kernels of %v blocks: %d executions, %d ways", blocks, x.ends, x.leaves)
	}
}

// aborts models how ranks abort: begin, patient, and what the host reads. Rank 0 has three
// kernels of one operation each, and so has rank 1; any wait may end without the word, because
// of the rank's host or its limit, and does if the other rank has told that it aborted.
func aborts(s setting) *model {
	m := newModel(s)
	const aborted, won, told, record, second, left = 1, 2, 3, 4, 5, 6
	gone := func(r int) int { return m.loc("gone of rank %d", r) }
	ends := func(r []uint64, k int) bool { return r[left] != 0 && r[left] <= uint64(k+1) }
	register := func(t, r int, loc int, o order) {
		m.emit(t, instr{op: load, order: o, scope: sys, loc: loc, dst: r})
	}
	// A choice that nobody can predict.
	chance := func(t int, name string) int {
		l := m.loc("whether thread %d %s", t, name)
		m.put(m.thread(place{-2, t}), relaxed, sys, l, 1)
		return l
	}
	host := place{-1, 0}
	var kernels [][]int
	operations := s.operations
	if operations == 0 {
		operations = 3
	}
	for k := range operations {
		epoch := s.first + uint64(k)
		for r := range 2 {
			threads, words := m.threadsOf(r)
			kernels = append(kernels, threads)
			broken := m.loc("broken of rank %d", r)
			for i, t := range threads {
				w := words[i][0]
				m.start(t, r)
				register(t, aborted, broken, relaxed)
				if m.is("kernels that do not look at broken") {
					m.emit(t, instr{op: assign, dst: aborted, val: constant(0)})
				}
				skip := len(m.code[t])
				m.emit(t, instr{}) // a branch to the end
				m.putWord(sentinel, t, k, epoch, 1-r, r, 0, w)
				register(t, left, gone(r), relaxed)
				knows := len(m.code[t])
				m.emit(t, instr{}) // a branch to the abort
				register(t, aborted, chance(t, "aborts"), relaxed)
				waits := len(m.code[t])
				m.emit(t, instr{}) // a branch to the wait
				aborts := len(m.code[t])
				m.emit(t, instr{op: assign, dst: aborted, val: constant(1)})
				if m.is("no compare-and-swap") {
					register(t, won, broken, relaxed)
					m.put(t, relaxed, gpu, broken, 1)
				} else {
					m.emit(t, instr{op: atomic, order: relaxed, scope: gpu, loc: broken, dst: won, val: constant(1),
						cond: func(_ []uint64, v uint64) bool { return v == 0 }})
				}
				tells := len(m.code[t])
				m.emit(t, instr{}) // a branch to the end
				was := len(m.code[t])
				m.emit(t, instr{}) // a branch to the record
				switch {
				case m.is("a rank that aborts does not tell its peer"):
				case m.is("a rank that aborts breaks its peer"):
					m.put(t, relaxed, sys, m.loc("broken of rank %d", 1-r), 1)
				default:
					first := k // of the operations that end
					if m.is("a rank tells of the next operation") {
						first++
					}
					m.put(t, relaxed, sys, gone(1-r), uint64(first+1))
				}
				records := len(m.code[t])
				fields := func() {
					m.put(t, relaxed, sys, m.loc("peer of rank %d", r), uint64(10*k+i+1))
					m.put(t, relaxed, sys, m.loc("code of rank %d", r), uint64(10*k+i+1))
				}
				if !m.is("told before the fields") {
					fields()
				}
				if !m.is("told without a fence") {
					m.fence(t, acquireRelease, sys)
				}
				m.put(t, relaxed, sys, m.loc("told of rank %d", r), 1)
				if m.is("told before the fields") {
					fields()
				}
				finish := len(m.code[t])
				m.emit(t, instr{})
				await := len(m.code[t])
				m.takeWord(sentinel, t, k, epoch, r, 1-r, 0, w)
				m.code[t][await].or = func(loc int, v uint64) bool { return loc == broken || loc == gone(r) && v <= uint64(k+1) }
				m.clearWord(sentinel, t, k, epoch, r, 1-r, 0, w)
				end := len(m.code[t])
				jump := func(at, to, reg int, v bool) {
					m.code[t][at] = instr{op: branch, jump: to, cond: func(r []uint64, _ uint64) bool { return reg < 0 || r[reg] != 0 == v }}
				}
				jump(skip, end, aborted, true)
				to := aborts
				if m.is("a rank that was told does not tell its host") {
					to = end
				}
				m.code[t][knows] = instr{op: branch, jump: to, cond: func(r []uint64, _ uint64) bool { return ends(r, k) }}
				jump(waits, await, aborted, false)
				jump(tells, end, won, true)
				m.code[t][was] = instr{op: branch, jump: records, cond: func(r []uint64, _ uint64) bool { return ends(r, k) }}
				jump(finish, end, -1, true)
			}
			m.end(r, threads)
		}
	}
	// The host waits for rank 0's stream, and another thread of it looks meanwhile.
	for i := range 2 {
		t := m.thread(host)
		o := acquire
		if m.is("told read relaxed") {
			o = relaxed
		}
		if i == 0 {
			m.emit(t, instr{op: waits, loc: m.ends[0], n: m.counts[m.ends[0]]})
		}
		register(t, told, m.loc("told of rank 0"), o)
		at := len(m.code[t])
		m.emit(t, instr{})
		register(t, record, m.loc("peer of rank 0"), relaxed)
		register(t, second, m.loc("code of rank 0"), relaxed)
		m.emit(t, instr{op: assert, text: "the host reads a record that is not one thread's",
			cond: func(r []uint64, _ uint64) bool { return r[record] != 0 && r[record] == r[second] }})
		end := len(m.code[t])
		m.code[t][at] = instr{op: branch, jump: end, cond: func(r []uint64, _ uint64) bool { return r[told] == 0 }}
		if i == 0 {
			m.judge = func(s *state) string {
				for i := 0; i < len(kernels); i += 2 { // of rank 0
					for _, k := range kernels[i] {
						if r := s.tasks[k].regs; (r[aborted] != 0 || ends(r, i/2)) && s.tasks[t].regs[told] == 0 {
							return "the stream is done, an operation is not, and the host does not know"
						}
					}
				}
				return ""
			}
		}
	}
	return m
}

func TestAborts(t *testing.T) {
	for _, s := range []setting{{ranks: 2, words: 1, first: 1}, {ranks: 2, words: 2, first: 1, operations: 1}} {
		x := aborts(s).check(maxLeaves)
		if x.bad != nil || x.over || x.ends == 0 {
			t.Fatal(x.bad, x.over)
		}
		t.Logf("%d words, %d operations: %d executions, %d ways", s.words, s.operations, x.ends, x.leaves)
	}
}

// stuck returns a set of lines, by rank, from which none can go on, nil if there is none. Line i of a rank ends when
// line i of every rank has started; a rank has room for a number of lines, and starts them in its own order as others
// end.
func stuck(lines int, room []int, order [][]int) []uint64 {
	ranks := len(room)
	ended := make([]uint64, ranks)
	for {
		started := make([]uint64, ranks)
		all := uint64(1)<<lines - 1
		for r := range ranks {
			started[r] = ended[r]
			for _, l := range order[r] {
				if bits.OnesCount64(started[r]&^ended[r]) < room[r] {
					started[r] |= 1 << l
				}
			}
			all &= started[r]
		}
		// A line that can end does not keep others from ending, so any order of ends leads here.
		moved, done := false, true
		for r := range ranks {
			moved = moved || all&^ended[r] != 0
			ended[r] |= all
			done = done && ended[r] == 1<<lines-1
		}
		if done {
			return nil
		}
		if !moved {
			return started
		}
	}
}

// TestDispatch checks that rings and the other kernels end although a GPU does not have room for all blocks, if every
// GPU starts blocks in ascending order: then the first block that has not ended has started on every rank, or is the
// next that does. If some GPU starts them in another order, kernels wait forever.
func TestDispatch(t *testing.T) {
	const lines = 4
	orders := permutations(lines)
	for _, ranks := range []int{2, 3} {
		rooms, dead, alive := 0, 0, 0
		room := make([]int, ranks)
		for code := range pow(lines, ranks) {
			for r := range room {
				room[r] = 1 + code/pow(lines, r)%lines
			}
			order := make([][]int, ranks)
			for r := range order {
				order[r] = orders[0]
			}
			rooms++
			require.Nil(t, stuck(lines, room, order), "ascending, room for %v", room)
			for _, o := range orders[1:] {
				order[ranks-1] = o
				switch at := stuck(lines, room, order); {
				case at != nil:
					dead++
				default:
					alive++
				}
				order[0] = o // the same order everywhere is as good, whatever it is
				if ranks == 2 {
					require.Nil(t, stuck(lines, room, order), "the order %v, room for %v", o, room)
				}
				order[0] = orders[0]
			}
		}
		require.Positive(t, dead, "mutant: one rank starts blocks in another order")
		t.Logf("%d ranks: none of %d rooms is stuck; of %d with another order on one rank %d are", ranks, rooms, dead+alive, dead)
	}
	// With room for all lines everywhere the order does not matter.
	for _, o := range orders {
		require.Nil(t, stuck(lines, []int{lines, lines}, [][]int{orders[0], o}), fmt.Sprint(o))
	}
}

func pow(b, n int) int {
	p := 1
	for range n {
		p *= b
	}
	return p
}

// permutations lists those of 0 to n-1, ascending first.
func permutations(n int) (list [][]int) {
	var extend func(p []int)
	extend = func(p []int) {
		if len(p) == n {
			list = append(list, append([]int(nil), p...))
		}
	next:
		for i := range n {
			for _, x := range p {
				if x == i {
					continue next
				}
			}
			extend(append(p, i))
		}
	}
	extend(nil)
	return list
}
