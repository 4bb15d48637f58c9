package engine

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// treeTag marks the messages of treeExchange.
const treeTag uint32 = 1

// treeExchange merges the selected entries along a binomial tree: in round d = 1, 2, 4, … rank r+d sends its list to
// rank r (for r a multiple of 2d), which keeps the top k of the sum. Rank 0 broadcasts the result.
//
// gTop-k as published (Shi et al., ICDCS 2019) needs a power of two ranks, and discards entries that inner nodes drop.
// Here a rank without a partner waits for the next round, and an inner node restores dropped entries to its own
// residual: they are sums over its subtree, and every rank of the subtree has subtracted its share from its residual,
// so each contribution stays in exactly one place.
type treeExchange struct {
	*engine
	incoming listBuffer        // the list of a partner, or the result
	merged   listBuffer        // the sum of two lists
	kept     [2]listBuffer     // its k largest entries, alternating
	coded    base.Buffer       // the encoded message, if it differs from the list
	mail     mail              // one, of the message
	pair     [2]kernel.Entries // arguments of a merge
	top      [1]kernel.Entries // the list of the result
}

func tree(e *engine) exchange {
	return &treeExchange{engine: e, mail: newMail(1)}
}

func (x *treeExchange) run(ctx context.Context, selected kernel.Entries) result {
	k := selected.N
	x.mail.rooms[0] = x.messageWords(k, x.n)
	current := selected
	for d, round := 1, 0; d < x.size; d, round = 2*d, round+1 {
		if x.rank%(2*d) == d {
			place := x.messageOf(&x.coded, current)
			x.pack(place, current, x.n)
			x.move(ctx, place, func(p uintptr, words int) comm.Call {
				return comm.SendCall(p, words, dtype.I32, x.rank-d, treeTag)
			})
			break
		}
		if x.rank+d < x.size {
			in := exactly(x.message(&x.incoming, k), k)
			place := x.messageOf(&x.coded, in)
			x.move(ctx, place, func(p uintptr, words int) comm.Call {
				return comm.RecvCall(p, words, dtype.I32, x.rank+d, treeTag)
			})
			x.unpack(in, place, x.n)
			current = x.mergeTop(current, in, exactly(x.message(&x.kept[round%2], k), k))
		}
	}
	if x.rank != 0 { // its list was sent
		current = exactly(x.message(&x.incoming, k), k)
	}
	place := x.messageOf(&x.coded, current)
	if x.rank == 0 {
		x.pack(place, current, x.n)
	}
	x.move(ctx, place, func(p uintptr, words int) comm.Call {
		return comm.BroadcastCall(p, words, dtype.I32, 0)
	})
	x.unpack(current, place, x.n)
	x.top[0] = current
	return result{lists: x.top[:], scale: x.average}
}

// move sends or receives the message at an address.
func (x *treeExchange) move(ctx context.Context, place uintptr, call func(p uintptr, words int) comm.Call) {
	m := &x.mail
	m.ptr = place
	x.travel(func() {
		x.communicate(ctx, call(base.At(place, m.from[0]), m.sizes[0]))
	}, m)
}

// mergeTop adds two lists of k entries, returns the top k of the sum in dst, and restores the others to the residual.
// (The sum has at least k entries, so all lists of the tree have the same length and need not announce it.)
func (x *treeExchange) mergeTop(a, b, dst kernel.Entries) kernel.Entries {
	x.pair = [2]kernel.Entries{a, b}
	sum := x.message(&x.merged, min(2*a.N, x.n))
	x.union(sum, x.pair[:], 1, 0)
	x.topOf(sum, dst.N, dst)
	x.restoreEntries(sum, dst)
	return dst
}
