package distributed

import (
	"context"

	"github.com/tutti-go/tutti/dtype"
)

// treeTag marks the messages of treeExchange: indices, and one above it values.
const treeTag uint32 = 0x67746b00

// treeExchange merges the picks along a binomial tree: in round d = 1, 2, 4, …
// rank r+d sends its list to rank r (for r a multiple of 2d), which keeps the
// top k of the sum. Rank 0 broadcasts what is left.
//
// gTop-k (Shi et al., ICDCS 2019) as published needs a power of two ranks and
// forgets what the inner nodes drop. Here a rank without a partner waits for
// the next round, and an inner node takes what it drops into its own
// residual: the entries are sums over its subtree, and every rank of the
// subtree has taken its share out of its own residual, so each contribution
// stays in exactly one place.
type treeExchange struct {
	*engine
	incoming, merged, global listBuffer
	kept                     [2]listBuffer

	// What the functions given to Group work on.
	peer           int
	out, in        list
	send, recv, bc func() error
}

func tree(e *engine) exchange {
	x := &treeExchange{engine: e}
	x.send, x.recv, x.bc = x.sendList, x.recvList, x.broadcastList
	return x
}

func (x *treeExchange) run(ctx context.Context, picks list) int {
	k := picks.n
	x.zeroAt(x.residual, picks)
	current := picks
	for d, round := 1, 0; d < x.size; d, round = 2*d, round+1 {
		if x.rank%(2*d) == d {
			x.peer, x.out = x.rank-d, current
			x.group(ctx, x.send)
			break
		}
		if x.rank+d < x.size {
			x.peer, x.in = x.rank+d, x.list(&x.incoming, k)
			x.group(ctx, x.recv)
			current = x.merge(current, x.in, k, x.list(&x.kept[round%2], k))
		}
	}
	x.in = x.list(&x.global, k)
	if x.rank == 0 {
		x.copyList(x.in, current)
	}
	x.group(ctx, x.bc)
	x.scale(x.in.val, k, x.average)
	x.scatterSet(x.work, x.in)
	return k
}

// merge adds up two lists of k entries, returns the top k of the sum in dst
// and gives the rest to the residual. (The sum has at least k entries, so all
// lists of the tree have the same length and need not announce it.)
func (x *treeExchange) merge(a, b list, k int, dst list) list {
	sum := x.list(&x.merged, 2*k)
	if x.err != nil {
		return list{}
	}
	n, err := x.kernels.MergeAdd(a.idx, a.val, a.n, b.idx, b.val, b.n, sum.idx, sum.val)
	x.check(err)
	sum = sum.part(0, n)
	top := x.topKOf(sum, k, dst)
	x.giveBack(sum, top)
	return top
}

// group submits the messages of a round and waits for them.
func (x *treeExchange) group(ctx context.Context, submit func() error) {
	x.fence(ctx)
	if x.err == nil {
		x.check(x.c.Group(submit))
	}
	x.join(ctx)
}

func (x *treeExchange) sendList() error {
	if err := x.c.Send(x.out.idx, x.out.n, dtype.I32, x.peer, treeTag); err != nil {
		return err
	}
	return x.c.Send(x.out.val, x.out.n, dtype.F32, x.peer, treeTag+1)
}

func (x *treeExchange) recvList() error {
	if err := x.c.Recv(x.in.idx, x.in.n, dtype.I32, x.peer, treeTag); err != nil {
		return err
	}
	return x.c.Recv(x.in.val, x.in.n, dtype.F32, x.peer, treeTag+1)
}

func (x *treeExchange) broadcastList() error {
	if err := x.c.Broadcast(x.in.idx, x.in.n, dtype.I32, 0); err != nil {
		return err
	}
	return x.c.Broadcast(x.in.val, x.in.n, dtype.F32, 0)
}
