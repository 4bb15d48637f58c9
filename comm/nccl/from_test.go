package nccl_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
)

// reducesRight checks that a new communicator works, and closes it.
func reducesRight(ctx context.Context, c *nccl.Comm) error {
	const n = 1000
	rt := c.Runtime()
	buf, err := rt.Allocate(n * 4)
	if err != nil {
		return err
	}
	if err := write(rt, buf, c.Rank(), n); err != nil {
		return err
	}
	return errors.Join(
		c.AllReduce(buf, buf, n, dtype.F32, comm.Sum), c.Sync(ctx),
		wantSum(rt, buf, c.WorldSize(), 0, n),
		rt.Deallocate(buf), c.Close())
}

// The unique id travels over goroutines, and over another NCCL.
func TestFromOtherCommunicators(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, local.Run(ctx, len(runtimes), func(ctx context.Context, base comm.Communicator) error {
		rt := runtimes[base.Rank()]
		first, err := nccl.From(ctx, base, rt)
		if err != nil {
			return err
		}
		second, err := nccl.From(ctx, first, rt)
		if err != nil {
			return err
		}
		return errors.Join(reducesRight(ctx, second), reducesRight(ctx, first))
	}))
}

// The unique id travels over MPI, when Open MPI's mpirun started the test, and MPI
// joins hosts of one or two GPUs each, within which there is NCCL.
func TestFromMPI(t *testing.T) {
	j := gputest.Job(t)
	if j.WorldSize == 1 || os.Getenv("OMPI_COMM_WORLD_SIZE") == "" {
		t.Skip("not started by Open MPI's mpirun with several processes")
	}
	rt := gputest.Own(t)
	base, err := mpi.Init(context.Background())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := nccl.From(ctx, base, rt)
	require.NoError(t, err)
	assert.Equal(t, base.Rank(), c.Rank())
	assert.NoError(t, reducesRight(ctx, c))
	assert.NoError(t, mpi.Finalize(context.Background()))
	assert.NoError(t, rt.Close())
}

// On a stream of somebody else the communicator's work is ordered with the
// work there, without events.
func TestUseStream(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	const n = 1 << 22
	require.NoError(t, each(world, func(c *nccl.Comm) error {
		rt := c.Runtime()
		buf, err := rt.Allocate(n * 4)
		if err != nil {
			return err
		}
		own := c.Stream().Handle()
		if err := c.UseStream(rt.ComputeStream()); err != nil {
			return err
		}
		for range 50 { // nothing waits on the host between fill, sum and scale
			if err := errors.Join(
				rt.Fill(buf, n, dtype.F32, 2),
				c.AllReduce(buf, buf, n, dtype.F32, comm.Sum),
				rt.Kernels().Store(buf, dtype.F32, buf, n, 0.5, 0)); err != nil {
				return err
			}
		}
		got, err := read(rt, buf, n)
		if err != nil {
			return err
		}
		for i, v := range got {
			if v != float32(c.WorldSize()) {
				t.Errorf("element %d is %v, want %d", i, v, c.WorldSize())
				break
			}
		}
		err = c.UseStream(0)
		if c.Stream().Handle() != own {
			t.Error("0 does not go back to the communicator's own stream")
		}
		return errors.Join(err, rt.Deallocate(buf), c.Close())
	}))
}
