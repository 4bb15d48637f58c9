package distributedtest

import (
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// counted returns n numbers that name a rank: rank*1000, rank*1000+1, …
func counted(rank, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rank*1000 + i)
	}
	return x
}

// collective is one call on tensors.
type collective struct {
	name     string
	dst, src []float32 // before the call
	do       func(dst, src *runtime.Tensor) error
	want     []float32 // of dst
}

// vectors returns the vectors of n elements of all ranks, and their sum.
func vectors(ranks, n int) (all [][]float32, sum []float32) {
	sum = make([]float32, n)
	for rank := range ranks {
		x := counted(rank, n)
		for i := range x {
			sum[i] += x[i]
		}
		all = append(all, x)
	}
	return all, sum
}

// testCollectives checks that every collective moves the right elements of
// tensors. (That backends reduce right is commtest's to say.)
func testCollectives(r *rank) {
	const n = 3
	p := r.size
	root := r.size - 1
	ranks, sum := vectors(p, n*p)
	part := ranks[r.rank]
	// parts returns elements [i*n, (i+1)*n) of all ranks' vectors.
	parts := func(i int) []float32 {
		var all []float32
		for _, x := range ranks {
			all = append(all, x[i*n:(i+1)*n]...)
		}
		return all
	}
	onRoot := func(x, otherwise []float32) []float32 {
		if r.rank == root {
			return x
		}
		return otherwise
	}
	c := r.c
	ctx := r.ctx
	zeros := make([]float32, n*p)
	next := (r.rank + 1) % p
	previous := (r.rank + p - 1) % p
	for _, k := range []collective{
		{"AllReduce", part, nil, func(t, _ *runtime.Tensor) error {
			return distributed.AllReduce(ctx, c, t, comm.Sum)
		}, sum},
		{"Broadcast", part, nil, func(t, _ *runtime.Tensor) error {
			return distributed.Broadcast(ctx, c, t, root)
		}, ranks[root]},
		{"Reduce", part, nil, func(t, _ *runtime.Tensor) error {
			return distributed.Reduce(ctx, c, t, comm.Sum, root)
		}, onRoot(sum, part)},
		{"AllGather", zeros, part[:n], func(dst, src *runtime.Tensor) error {
			return distributed.AllGather(ctx, c, dst, src)
		}, parts(0)},
		{"ReduceScatter", zeros[:n], part, func(dst, src *runtime.Tensor) error {
			return distributed.ReduceScatter(ctx, c, dst, src, comm.Sum)
		}, sum[r.rank*n : (r.rank+1)*n]},
		{"AllToAll", zeros, part, func(dst, src *runtime.Tensor) error {
			return distributed.AllToAll(ctx, c, dst, src)
		}, parts(r.rank)},
		{"Gather", zeros, part[:n], func(dst, src *runtime.Tensor) error {
			if r.rank != root {
				return distributed.Gather(ctx, c, nil, src, root)
			}
			return distributed.Gather(ctx, c, dst, src, root)
		}, onRoot(parts(0), zeros)},
		{"Scatter", zeros[:n], part, func(dst, src *runtime.Tensor) error {
			if r.rank != root {
				return distributed.Scatter(ctx, c, dst, nil, root)
			}
			return distributed.Scatter(ctx, c, dst, src, root)
		}, ranks[root][r.rank*n : (r.rank+1)*n]},
		{"SendRecv", zeros[:n], part[:n], func(dst, src *runtime.Tensor) error {
			return distributed.SendRecv(ctx, c, dst, previous, src, next, 5)
		}, ranks[previous][:n]},
	} {
		dst := r.tensor(dtype.F32, k.dst)
		src := r.tensor(dtype.F32, k.src)
		if err := k.do(dst, src); err != nil {
			fail("%s: %w", k.name, err)
		}
		r.holds(dst, k.want, k.name)
	}
	testLengths(r)
	testRing(r)
}

// holds checks the elements of a tensor.
func (r *rank) holds(t *runtime.Tensor, want []float32, name string) {
	if values := r.read(t); !slices.Equal(values, want) {
		fail("%s: got %v, want %v", name, values, want)
	}
}

// testLengths checks the collectives with a length per rank: rank i has i
// elements for everybody, or i for its left and right neighbours' sake.
func testLengths(r *rank) {
	// In AllToAllV, rank i sends i+j elements to rank j.
	counts := make([]int, r.size)
	sendCounts := make([]int, r.size)
	var all, send, want []float32
	for peer := range counts {
		counts[peer] = peer
		sendCounts[peer] = r.rank + peer
		all = append(all, counted(peer, peer)...)
		send = append(send, counted(10*r.rank+peer, r.rank+peer)...)
		want = append(want, counted(10*peer+r.rank, r.rank+peer)...)
	}
	dst := r.tensor(dtype.F32, make([]float32, len(all)))
	must(distributed.AllGatherV(r.ctx, r.c, dst, r.tensor(dtype.F32, counted(r.rank, r.rank)), counts))
	r.holds(dst, all, "AllGatherV")
	dst = r.tensor(dtype.F32, make([]float32, len(want)))
	must(distributed.AllToAllV(r.ctx, r.c, dst, sendCounts, r.tensor(dtype.F32, send), sendCounts))
	r.holds(dst, want, "AllToAllV")
}

// testRing passes a tensor around by Send and Recv.
func testRing(r *rank) {
	if r.size == 1 {
		return
	}
	t := r.tensor(dtype.F32, counted(r.rank, 4))
	if r.rank > 0 {
		must(distributed.Recv(r.ctx, r.c, t, r.rank-1, 9))
	}
	if r.rank < r.size-1 {
		must(distributed.Send(r.ctx, r.c, t, r.rank+1, 9))
	}
	r.holds(t, counted(0, 4), "ring")
}
