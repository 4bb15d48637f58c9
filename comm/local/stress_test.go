package local_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// arenaSize is the number of int32 that each rank of a stress test works on.
const arenaSize = 3000

// step is one operation of all ranks on their arenas: submitted by each of
// them, and done by a reference that executes the steps one after the other.
type step struct {
	text    string
	submit  func(c comm.Communicator, arena uintptr) error
	perform func(arenas [][]int32)
}

// program makes random steps: one rank's operations keep working on the
// results of those before, so every order that matters is checked.
type program struct {
	*rand.Rand
	ranks int
}

// regions chooses places of the given lengths that do not overlap.
func (p program) regions(lengths ...int) []int {
	total := 0
	for _, l := range lengths {
		total += l
	}
	gaps := make([]int, len(lengths))
	for i := range gaps {
		gaps[i] = p.IntN(arenaSize - total + 1)
	}
	slices.Sort(gaps)
	starts := make([]int, len(lengths))
	before := 0
	for k, i := range p.Perm(len(lengths)) {
		starts[i] = gaps[k] + before
		before += lengths[i]
	}
	return starts
}

func at(arena uintptr, i int) uintptr { return arena + uintptr(4*i) }

func reduceInt32(op comm.ReduceOp, a, b int32) int32 {
	switch op {
	case comm.Sum:
		return a + b
	case comm.Prod:
		return a * b
	case comm.Min:
		return min(a, b)
	}
	return max(a, b)
}

// reduced returns elements [from, from+n) combined over all arenas.
func reduced(arenas [][]int32, op comm.ReduceOp, from, n int) []int32 {
	out := slices.Clone(arenas[0][from:][:n])
	for _, a := range arenas[1:] {
		for i := range out {
			out[i] = reduceInt32(op, out[i], a[from+i])
		}
	}
	return out
}

// next returns a random step.
func (p program) next() step {
	n, P := p.IntN(1+p.IntN(arenaSize/(2*p.ranks+1))), p.ranks
	op := comm.ReduceOp(p.IntN(4))
	root := p.IntN(P)
	switch kind := p.IntN(11); kind {
	case 0, 1:
		s := p.regions(n, n)
		if kind == 1 {
			s[1] = s[0]
		}
		return step{fmt.Sprintf("allreduce %d %v %v", n, op, s),
			func(c comm.Communicator, a uintptr) error {
				return c.AllReduce(at(a, s[0]), at(a, s[1]), n, dtype.I32, op)
			},
			func(arenas [][]int32) {
				sum := reduced(arenas, op, s[0], n)
				for _, a := range arenas {
					copy(a[s[1]:], sum)
				}
			}}
	case 2:
		s := p.regions(n)
		return step{fmt.Sprintf("broadcast %d root %d %v", n, root, s),
			func(c comm.Communicator, a uintptr) error { return c.Broadcast(at(a, s[0]), n, dtype.I32, root) },
			func(arenas [][]int32) {
				for _, a := range arenas {
					copy(a[s[0]:], arenas[root][s[0]:][:n])
				}
			}}
	case 3:
		s := p.regions(n, n)
		return step{fmt.Sprintf("reduce %d %v root %d %v", n, op, root, s),
			func(c comm.Communicator, a uintptr) error {
				return c.Reduce(at(a, s[0]), at(a, s[1]), n, dtype.I32, op, root)
			},
			func(arenas [][]int32) { copy(arenas[root][s[1]:], reduced(arenas, op, s[0], n)) }}
	case 4:
		s := p.regions(n, n*P)
		return step{fmt.Sprintf("allgather %d %v", n, s),
			func(c comm.Communicator, a uintptr) error {
				return c.AllGather(at(a, s[0]), at(a, s[1]), n, dtype.I32)
			},
			func(arenas [][]int32) {
				for r, from := range arenas {
					for _, to := range arenas {
						copy(to[s[1]+r*n:], from[s[0]:][:n])
					}
				}
			}}
	case 5:
		s := p.regions(n*P, n)
		inPlace := p.IntN(2) == 0
		place := func(r int) int {
			if inPlace {
				return s[0] + r*n
			}
			return s[1]
		}
		return step{fmt.Sprintf("reducescatter %d %v %v in place %v", n, op, s, inPlace),
			func(c comm.Communicator, a uintptr) error {
				return c.ReduceScatter(at(a, s[0]), at(a, place(c.Rank())), n, dtype.I32, op)
			},
			func(arenas [][]int32) {
				sum := reduced(arenas, op, s[0], n*P)
				for r, a := range arenas {
					copy(a[place(r):], sum[r*n:][:n])
				}
			}}
	case 6:
		return p.allToAllV()
	case 7:
		return p.allGatherV()
	case 8:
		s := p.regions(n, n*P)
		return step{fmt.Sprintf("gather %d root %d %v", n, root, s),
			func(c comm.Communicator, a uintptr) error {
				return c.Gather(at(a, s[0]), at(a, s[1]), n, dtype.I32, root)
			},
			func(arenas [][]int32) {
				for r, from := range arenas {
					copy(arenas[root][s[1]+r*n:], from[s[0]:][:n])
				}
			}}
	case 9:
		s := p.regions(n*P, n)
		return step{fmt.Sprintf("scatter %d root %d %v", n, root, s),
			func(c comm.Communicator, a uintptr) error {
				return c.Scatter(at(a, s[0]), at(a, s[1]), n, dtype.I32, root)
			},
			func(arenas [][]int32) {
				from := slices.Clone(arenas[root][s[0]:][:n*P])
				for r, to := range arenas {
					copy(to[s[1]:], from[r*n:][:n])
				}
			}}
	}
	return p.message(n)
}

// message is a step in which some ranks send one to their partner, in a group
// or, one way, without.
func (p program) message(n int) step {
	s := p.regions(n, n)
	tag := uint32(p.IntN(3))
	partner := p.Perm(p.ranks) // rank r sends to partner[r]
	sender := slices.Index(partner, 0)
	if p.IntN(2) == 0 { // only one message, to rank 0
		return step{fmt.Sprintf("send %d from %d to 0 tag %d %v", n, sender, tag, s),
			func(c comm.Communicator, a uintptr) error {
				var calls []comm.Call
				if c.Rank() == sender {
					calls = append(calls, comm.SendCall(at(a, s[0]), n, dtype.I32, 0, tag))
				}
				if c.Rank() == 0 {
					calls = append(calls, comm.RecvCall(at(a, s[1]), n, dtype.I32, sender, tag))
				}
				return c.Group(calls...)
			},
			func(arenas [][]int32) { copy(arenas[0][s[1]:], arenas[sender][s[0]:][:n]) }}
	}
	return step{fmt.Sprintf("exchange %d along %v tag %d %v", n, partner, tag, s),
		func(c comm.Communicator, a uintptr) error {
			return c.Group(
				comm.SendCall(at(a, s[0]), n, dtype.I32, partner[c.Rank()], tag),
				comm.RecvCall(at(a, s[1]), n, dtype.I32, slices.Index(partner, c.Rank()), tag))
		},
		func(arenas [][]int32) {
			for r, from := range arenas {
				copy(arenas[partner[r]][s[1]:], from[s[0]:][:n])
			}
		}}
}

// layout returns random lengths for the ranks, displacements that leave gaps,
// and the extent.
func (p program) layout(lengths []int) (displs []int, extent int) {
	for _, l := range lengths {
		extent += p.IntN(3)
		displs = append(displs, extent)
		extent += l
	}
	return displs, extent
}

func (p program) allGatherV() step {
	counts := make([]int, p.ranks)
	for r := range counts {
		counts[r] = p.IntN(2) * p.IntN(arenaSize/(3*p.ranks))
	}
	displs, extent := p.layout(counts)
	s := p.regions(slices.Max(counts), extent)
	return step{fmt.Sprintf("allgatherv %v %v %v", counts, displs, s),
		func(c comm.Communicator, a uintptr) error {
			return c.AllGatherV(at(a, s[0]), at(a, s[1]), counts, displs, dtype.I32)
		},
		func(arenas [][]int32) {
			for r, from := range arenas {
				for _, to := range arenas {
					copy(to[s[1]+displs[r]:], from[s[0]:][:counts[r]])
				}
			}
		}}
}

func (p program) allToAllV() step {
	P := p.ranks
	type side struct{ sends, sendAt, recvs, recvAt, place []int }
	sides := make([]side, P)
	for from := range sides {
		for to := range sides {
			n := p.IntN(2) * p.IntN(arenaSize/(3*P))
			sides[from].sends = append(sides[from].sends, n)
			sides[to].recvs = append(sides[to].recvs, n)
		}
	}
	for r := range sides {
		var sendExtent, recvExtent int
		sides[r].sendAt, sendExtent = p.layout(sides[r].sends)
		sides[r].recvAt, recvExtent = p.layout(sides[r].recvs)
		sides[r].place = p.regions(sendExtent, recvExtent)
	}
	return step{fmt.Sprintf("alltoallv %v", sides),
		func(c comm.Communicator, a uintptr) error {
			s := sides[c.Rank()]
			return c.AllToAllV(at(a, s.place[0]), s.sends, s.sendAt, at(a, s.place[1]), s.recvs, s.recvAt, dtype.I32)
		},
		func(arenas [][]int32) {
			for from, f := range sides {
				for to, t := range sides {
					copy(arenas[to][t.place[1]+t.recvAt[from]:],
						arenas[from][f.place[0]+f.sendAt[to]:][:f.sends[to]])
				}
			}
		}}
}

// TestRandomPrograms runs random sequences of operations, with few Syncs in
// between, against a sequential reference.
func TestRandomPrograms(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 5, 8, 17} {
		for seed := range uint64(6) {
			t.Run(fmt.Sprintf("ranks=%d/seed=%d", ranks, seed), func(t *testing.T) {
				t.Parallel()
				runProgram(t, program{rand.New(rand.NewPCG(seed, uint64(ranks))), ranks}, 200)
			})
		}
	}
}

func runProgram(t *testing.T, p program, length int) {
	ctx := within(t)
	fill := func(r, i int) int32 { return int32(r*7919 + i*i + 1) }
	got, addr := perRank(newMemory(t), p.ranks, arenaSize, fill)
	want := make([][]int32, p.ranks)
	for r := range want {
		want[r] = slices.Clone(got[r])
	}
	steps := make([]step, length)
	for i := range steps {
		steps[i] = p.next()
		steps[i].perform(want)
	}
	syncs := make([][]bool, p.ranks) // which rank waits after which step
	for r := range syncs {
		for range steps {
			syncs[r] = append(syncs[r], p.IntN(20) == 0)
		}
	}
	requireAll(t, onAll(world(t, p.ranks), func(c comm.Communicator) error {
		for i, s := range steps {
			if err := s.submit(c, addr[c.Rank()]); err != nil {
				return fmt.Errorf("step %d, %s: %w", i, s.text, err)
			}
			if syncs[c.Rank()][i] {
				if err := c.Sync(ctx); err != nil {
					return fmt.Errorf("after step %d, %s: %w", i, s.text, err)
				}
			}
		}
		return c.Sync(ctx)
	}))
	for r := range want {
		require.Equal(t, want[r], got[r], "rank %d", r)
	}
}
