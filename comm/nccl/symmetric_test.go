package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// pattern is element i of a rank's input: integers, whose sums float32 holds.
func pattern(rank, i int) float32 { return float32((i*7+rank*13)%101 - 50) }

// write stores the pattern of a rank.
func write(rt runtime.Runtime, p uintptr, rank, n int) error {
	values := make([]float32, n)
	for i := range values {
		values[i] = pattern(rank, i)
	}
	return rt.CopyIn(p, hostmem.Bytes(values))
}

// wantSum compares n elements with the sum of all ranks' patterns, which begin
// at element from.
func wantSum(rt runtime.Runtime, p uintptr, ranks, from, n int) error {
	got, err := read(rt, p, n)
	if err != nil {
		return err
	}
	for i, v := range got {
		var want float32
		for r := range ranks {
			want += pattern(r, from+i)
		}
		if v != want {
			return fmt.Errorf("element %d of %d is %v, want %v", i, n, v, want)
		}
	}
	return nil
}

// TestSymmetricBuffers runs the collectives that NCCL has kernels for windows
// for, on buffers below and above the limit of windows, and on parts of them.
func TestSymmetricBuffers(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	for _, n := range []int{1, 3, 1000, 1001, 4096, 1<<18 + 5, 1 << 22, 1<<22 + 1} {
		assert.NoError(t, each(world, func(c *nccl.Comm) error {
			return symmetricCollectives(ctx, c, n)
		}), "%d elements", n)
	}
	// Close frees the rest; the runtimes detect leaks.
	require.NoError(t, each(world, func(c *nccl.Comm) error {
		_, err := c.AllocateSymmetric(ctx, 1<<20)
		return errors.Join(err, c.Close())
	}))
}

// symmetricCollectives reduces and gathers n elements of every rank.
func symmetricCollectives(ctx context.Context, c *nccl.Comm, n int) error {
	p, rank, rt := c.WorldSize(), c.Rank(), c.Runtime()
	const size = 4
	in, err := c.AllocateSymmetric(ctx, p*n*size)
	if err != nil {
		return err
	}
	out, err := c.AllocateSymmetric(ctx, p*n*size)
	if err != nil {
		return err
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"allreduce", func() error {
			return errors.Join(
				c.AllReduce(in, out, p*n, dtype.F32, comm.Sum), c.Sync(ctx),
				wantSum(rt, out, p, 0, p*n))
		}},
		{"allreduce of a part", func() error {
			at := uintptr((p*n - 1) * size)
			return errors.Join(
				c.AllReduce(in+at, out+at, 1, dtype.F32, comm.Sum), c.Sync(ctx),
				wantSum(rt, out+at, p, p*n-1, 1))
		}},
		{"reducescatter", func() error {
			return errors.Join(
				c.ReduceScatter(in, out, n, dtype.F32, comm.Sum), c.Sync(ctx),
				wantSum(rt, out, p, rank*n, n))
		}},
		{"allreduce in place", func() error {
			return errors.Join(
				c.AllReduce(in, in, p*n, dtype.F32, comm.Sum), c.Sync(ctx),
				wantSum(rt, in, p, 0, p*n))
		}},
		{"maximum, for which there are no windows", func() error {
			return errors.Join(
				c.AllReduce(in, in, p*n, dtype.F32, comm.Max), c.Sync(ctx),
				wantSum(rt, in, p, 0, p*n))
		}},
		{"allgather", func() error {
			// Every rank's part is its part of the sum.
			at := uintptr(rank * n * size)
			return errors.Join(
				c.AllGather(in+at, out, n, dtype.F32), c.Sync(ctx),
				wantSum(rt, out, p, 0, p*n))
		}},
	}
	if err := write(rt, in, rank, p*n); err != nil {
		return err
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return errors.Join(c.FreeSymmetric(ctx, out), c.FreeSymmetric(ctx, in))
}

func TestSymmetricMisuse(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	require.NoError(t, each(world, func(c *nccl.Comm) error {
		if c.WorldSize() > 1 {
			_, err := c.AllocateSymmetric(ctx, 1000+c.Rank()*8)
			if !errors.Is(err, comm.ErrMismatch) {
				return fmt.Errorf("different sizes: got error %v", err)
			}
		}
		if _, err := c.AllocateSymmetric(ctx, 1<<50); !errors.Is(err, runtime.ErrOutOfMemory) {
			return fmt.Errorf("too much: got error %v", err)
		}
		if _, err := c.AllocateSymmetric(ctx, -1); !errors.Is(err, comm.ErrArgument) {
			return fmt.Errorf("negative: got error %v", err)
		}
		none, err := c.AllocateSymmetric(ctx, 0)
		if none != 0 || err != nil {
			return fmt.Errorf("nothing: got %#x, %v", none, err)
		}
		if err := c.FreeSymmetric(ctx, 0); err != nil {
			return err
		}
		if err := c.FreeSymmetric(ctx, 4096); !errors.Is(err, comm.ErrArgument) {
			return fmt.Errorf("foreign: got error %v", err)
		}
		// After all that it still works.
		buf, err := c.AllocateSymmetric(ctx, 4096)
		if err != nil {
			return err
		}
		if err := write(c.Runtime(), buf, c.Rank(), 1024); err != nil {
			return err
		}
		return errors.Join(
			c.AllReduce(buf, buf, 1024, dtype.F32, comm.Sum), c.Sync(ctx),
			wantSum(c.Runtime(), buf, c.WorldSize(), 0, 1024),
			c.FreeSymmetric(ctx, buf), c.Close())
	}))
}

// Ranks may have different numbers of calls in a group. A single call on some ranks must not use another path than on
// the others.
func TestSymmetricBuffersInUnequalGroups(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	const n = 256
	require.NoError(t, each(world, func(c *nccl.Comm) error {
		buf, err := c.AllocateSymmetric(ctx, n*4)
		if err != nil {
			return err
		}
		if err := write(c.Runtime(), buf, c.Rank(), n); err != nil {
			return err
		}
		message, err := c.Runtime().Allocate(8)
		if err != nil {
			return err
		}
		group := []comm.Call{comm.AllReduceCall(buf, buf, n, dtype.F32, comm.Sum)}
		switch { // only ranks 0 and 1 have a message
		case c.WorldSize() < 2 || c.Rank() > 1:
		case c.Rank() == 0:
			group = append(group, comm.SendCall(message, 8, dtype.U8, 1, 0))
		default:
			group = append(group, comm.RecvCall(message, 8, dtype.U8, 0, 0))
		}
		return errors.Join(
			c.Group(group...),
			c.Sync(ctx),
			wantSum(c.Runtime(), buf, c.WorldSize(), 0, n),
			c.Runtime().Deallocate(message),
			c.FreeSymmetric(ctx, buf), c.Close())
	}))
}
