package distributedtest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
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

// testCollectives checks that every collective moves the right elements of
// tensors. (That backends reduce right is commtest's to say.)
func testCollectives(r *rank) error {
	const n = 3
	p, root := r.size, r.size-1
	ranks := make([][]float32, p)
	for i := range ranks {
		ranks[i] = counted(i, n*p)
	}
	mine := ranks[r.rank]
	sum := make([]float32, n*p)
	for _, x := range ranks {
		for i := range x {
			sum[i] += x[i]
		}
	}
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
	c, ctx := r.c, r.ctx
	zeros := make([]float32, n*p)
	next, previous := (r.rank+1)%p, (r.rank+p-1)%p
	cases := []struct {
		name     string
		dst, src []float32
		do       func(dst, src *runtime.Tensor) error
		want     []float32 // of dst
	}{
		{"AllReduce", mine, nil, func(t, _ *runtime.Tensor) error {
			return distributed.AllReduce(ctx, c, t, comm.Sum)
		}, sum},
		{"Broadcast", mine, nil, func(t, _ *runtime.Tensor) error {
			return distributed.Broadcast(ctx, c, t, root)
		}, ranks[root]},
		{"Reduce", mine, nil, func(t, _ *runtime.Tensor) error {
			return distributed.Reduce(ctx, c, t, comm.Sum, root)
		}, onRoot(sum, mine)},
		{"AllGather", zeros, mine[:n], func(dst, src *runtime.Tensor) error {
			return distributed.AllGather(ctx, c, dst, src)
		}, parts(0)},
		{"ReduceScatter", zeros[:n], mine, func(dst, src *runtime.Tensor) error {
			return distributed.ReduceScatter(ctx, c, dst, src, comm.Sum)
		}, sum[r.rank*n : (r.rank+1)*n]},
		{"AllToAll", zeros, mine, func(dst, src *runtime.Tensor) error {
			return distributed.AllToAll(ctx, c, dst, src)
		}, parts(r.rank)},
		{"Gather", zeros, mine[:n], func(dst, src *runtime.Tensor) error {
			if r.rank != root {
				return distributed.Gather(ctx, c, nil, src, root)
			}
			return distributed.Gather(ctx, c, dst, src, root)
		}, onRoot(parts(0), zeros)},
		{"Scatter", zeros[:n], mine, func(dst, src *runtime.Tensor) error {
			if r.rank != root {
				return distributed.Scatter(ctx, c, dst, nil, root)
			}
			return distributed.Scatter(ctx, c, dst, src, root)
		}, ranks[root][r.rank*n : (r.rank+1)*n]},
		{"SendRecv", zeros[:n], mine[:n], func(dst, src *runtime.Tensor) error {
			return distributed.SendRecv(ctx, c, dst, previous, src, next, 5)
		}, ranks[previous][:n]},
	}
	for _, k := range cases {
		dst, err := r.tensor(dtype.F32, k.dst)
		if err != nil {
			return err
		}
		src, err := r.tensor(dtype.F32, k.src)
		if err != nil {
			return err
		}
		if err := k.do(dst, src); err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
		got, err := r.read(dst)
		if err != nil {
			return err
		}
		if !slices.Equal(got, k.want) {
			return fmt.Errorf("%s: got %v, want %v", k.name, got, k.want)
		}
	}
	return errors.Join(testLengths(r), testRing(r))
}

// testLengths checks the collectives with a length per rank: rank i has i
// elements for everybody, or i for its left and right neighbours' sake.
func testLengths(r *rank) error {
	counts := make([]int, r.size)
	var all []float32
	for peer := range counts {
		counts[peer] = peer
		all = append(all, counted(peer, peer)...)
	}
	src, err := r.tensor(dtype.F32, counted(r.rank, r.rank))
	if err != nil {
		return err
	}
	dst, err := r.tensor(dtype.F32, make([]float32, len(all)))
	if err != nil {
		return err
	}
	if err := distributed.AllGatherV(r.ctx, r.c, dst, src, counts); err != nil {
		return err
	}
	if got, err := r.read(dst); err != nil || !slices.Equal(got, all) {
		return errors.Join(err, fmt.Errorf("AllGatherV: got %v, want %v", got, all))
	}

	// Rank i sends i+j elements to rank j.
	sendCounts := make([]int, r.size)
	var send, want []float32
	for peer := range sendCounts {
		sendCounts[peer] = r.rank + peer
		send = append(send, counted(10*r.rank+peer, r.rank+peer)...)
		want = append(want, counted(10*peer+r.rank, r.rank+peer)...)
	}
	if src, err = r.tensor(dtype.F32, send); err != nil {
		return err
	}
	if dst, err = r.tensor(dtype.F32, make([]float32, len(want))); err != nil {
		return err
	}
	if err := distributed.AllToAllV(r.ctx, r.c, dst, sendCounts, src, sendCounts); err != nil {
		return err
	}
	if got, err := r.read(dst); err != nil || !slices.Equal(got, want) {
		return errors.Join(err, fmt.Errorf("AllToAllV: got %v, want %v", got, want))
	}
	return nil
}

// testRing passes a tensor around by Send and Recv.
func testRing(r *rank) error {
	if r.size == 1 {
		return nil
	}
	t, err := r.tensor(dtype.F32, counted(r.rank, 4))
	if err != nil {
		return err
	}
	if r.rank > 0 {
		if err := distributed.Recv(r.ctx, r.c, t, r.rank-1, 9); err != nil {
			return err
		}
	}
	if r.rank < r.size-1 {
		if err := distributed.Send(r.ctx, r.c, t, r.rank+1, 9); err != nil {
			return err
		}
	}
	if got, err := r.read(t); err != nil || !slices.Equal(got, counted(0, 4)) {
		return errors.Join(err, fmt.Errorf("ring: got %v, want %v", got, counted(0, 4)))
	}
	return nil
}

// testMisuse checks that wrong arguments are named errors on every rank and
// leave the communicator usable.
func testMisuse(r *rank) error {
	c, ctx := r.c, r.ctx
	m, err := r.newMisuse()
	if err != nil {
		return err
	}
	bf16, err := r.tensor(dtype.BF16, make([]float32, 4))
	if err != nil {
		return err
	}
	short := make([]int, r.size-1)
	return errors.Join(unexpected([]expectation{
		{"nil tensor", distributed.AllReduce(ctx, c, nil, comm.Sum), comm.ErrArgument},
		{"freed tensor", distributed.AllReduce(ctx, c, m.freed, comm.Sum), runtime.ErrFreed},
		{"strided tensor", distributed.AllReduce(ctx, c, m.strided, comm.Sum), runtime.ErrNotContiguous},
		{"other type", distributed.AllToAll(ctx, c, m.good, bf16), runtime.ErrDType},
		{"gather length", distributed.AllGather(ctx, c, m.long, m.good), runtime.ErrShape},
		{"scatter length", distributed.ReduceScatter(ctx, c, m.good, m.long, comm.Sum), runtime.ErrShape},
		{"alltoall length", distributed.AllToAll(ctx, c, m.long, m.good), runtime.ErrShape},
		{"root", distributed.Broadcast(ctx, c, m.good, r.size), comm.ErrArgument},
		{"peer", distributed.Send(ctx, c, m.good, -1, 0), comm.ErrArgument},
		{"counts", distributed.AllGatherV(ctx, c, m.good, m.good, short), comm.ErrArgument},
		{"sum of counts", distributed.AllToAllV(ctx, c, m.good, make([]int, r.size), m.good, make([]int, r.size)), runtime.ErrShape},
	}), distributed.AllReduce(ctx, c, m.good, comm.Sum))
}

// testSparseMisuse is testMisuse of a Sparse.
func testSparseMisuse(r *rank) error {
	c, ctx := r.c, r.ctx
	m, err := r.newMisuse()
	if err != nil {
		return err
	}
	f64, err := r.tensor(dtype.F64, make([]float32, 4))
	if err != nil {
		return err
	}
	s, err := sparse.New(r.rt, c, 4, sparse.Config{Pattern: sparse.TopkA, Density: 0.5})
	if err != nil {
		return err
	}
	closed, err := sparse.New(r.rt, c, 4, sparse.Config{})
	if err != nil {
		return err
	}
	if err := errors.Join(closed.Close(), closed.Close()); err != nil {
		return err
	}
	return errors.Join(unexpected([]expectation{
		{"type", s.AllReduce(ctx, f64), comm.ErrUnsupported},
		{"length", s.AllReduce(ctx, m.long), runtime.ErrShape},
		{"nil", s.AllReduce(ctx, nil), comm.ErrArgument},
		{"strided", s.AllReduce(ctx, m.strided), runtime.ErrNotContiguous},
		{"freed", s.AllReduce(ctx, m.freed), runtime.ErrFreed},
		{"closed", closed.AllReduce(ctx, m.good), comm.ErrClosed},
	}), s.AllReduce(ctx, m.good), s.Close())
}

// misuse are tensors of four float32, but for one that is longer, of which all
// but the good one are refused.
type misuse struct {
	good, long, strided, freed *runtime.Tensor
}

func (r *rank) newMisuse() (m misuse, err error) {
	if m.good, err = r.tensor(dtype.F32, make([]float32, 4)); err != nil {
		return m, err
	}
	if m.long, err = r.tensor(dtype.F32, make([]float32, 4*r.size+1)); err != nil {
		return m, err
	}
	if m.strided, err = m.long.Slice(0, 0, 4); err != nil {
		return m, err
	}
	if m.strided, err = m.strided.Reshape(2, 2); err != nil {
		return m, err
	}
	if m.strided, err = m.strided.Transpose(0, 1); err != nil {
		return m, err
	}
	if m.freed, err = r.tensor(dtype.F32, make([]float32, 4)); err != nil {
		return m, err
	}
	return m, m.freed.Free()
}

// expectation is a call's error, and what it should wrap.
type expectation struct {
	name      string
	got, want error
}

// unexpected returns an error for each that was not met.
func unexpected(all []expectation) error {
	var errs []error
	for _, e := range all {
		if !errors.Is(e.got, e.want) {
			errs = append(errs, fmt.Errorf("%s: got error %v, want %v", e.name, e.got, e.want))
		}
	}
	return errors.Join(errs...)
}
