package distributed_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// misuse are a communicator, and tensors of four F32, but for one that is longer, of which all but the good one are refused.
type misuse struct {
	ctx                              context.Context
	c                                comm.Communicator
	rt                               *cpu.Runtime
	good, long, strided, freed, bf16 *runtime.Tensor
}

// misused calls a test on each of some ranks, of which the communicator is usable afterwards.
func misused(t *testing.T, test func(m *misuse)) {
	for _, ranks := range []int{1, 3} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			tensor := func(dt dtype.DType, n int) *runtime.Tensor {
				x, err := runtime.New(rt, dt, n)
				require.NoError(t, err)
				return x
			}
			m := &misuse{ctx: ctx, c: c, rt: rt, good: tensor(dtype.F32, 4), long: tensor(dtype.F32, 4*ranks+1), freed: tensor(dtype.F32, 4), bf16: tensor(dtype.BF16, 4)}
			part, err := m.long.Slice(0, 0, 4)
			require.NoError(t, err)
			part, err = part.Reshape(2, 2)
			require.NoError(t, err)
			m.strided, err = part.Transpose(0, 1)
			require.NoError(t, errors.Join(err, m.freed.Free()))
			test(m)
			require.NoError(t, distributed.AllReduce(ctx, c, m.good, comm.Sum))
			return errors.Join(c.Sync(ctx), m.good.Free(), m.long.Free(), m.bf16.Free())
		})
	}
}

// TestMisuse: wrong arguments are errors that can be told apart, on every rank.
func TestMisuse(t *testing.T) {
	misused(t, func(m *misuse) {
		c, ctx, size := m.c, m.ctx, m.c.WorldSize()
		assert.ErrorIs(t, distributed.AllReduce(ctx, c, nil, comm.Sum), comm.ErrArgument)
		assert.ErrorIs(t, distributed.AllReduce(ctx, c, m.freed, comm.Sum), runtime.ErrFreed)
		assert.ErrorIs(t, distributed.AllReduce(ctx, c, m.strided, comm.Sum), runtime.ErrNotContiguous)
		assert.ErrorIs(t, distributed.AllToAll(ctx, c, m.good, m.bf16), runtime.ErrDType)
		assert.ErrorIs(t, distributed.AllGather(ctx, c, m.long, m.good), runtime.ErrShape)
		assert.ErrorIs(t, distributed.ReduceScatter(ctx, c, m.good, m.long, comm.Sum), runtime.ErrShape)
		assert.ErrorIs(t, distributed.AllToAll(ctx, c, m.long, m.good), runtime.ErrShape)
		assert.ErrorIs(t, distributed.Broadcast(ctx, c, m.good, size), comm.ErrArgument)
		assert.ErrorIs(t, distributed.Send(ctx, c, m.good, -1, 0), comm.ErrArgument)
		assert.ErrorIs(t, distributed.AllGatherV(ctx, c, m.good, m.good, make([]int, size-1)), comm.ErrArgument)
		assert.ErrorIs(t, distributed.AllToAllV(ctx, c, m.good, make([]int, size), m.good, make([]int, size)), runtime.ErrShape)
		part, err := m.good.Slice(0, 3, 4)
		require.NoError(t, err)
		for _, shared := range []*runtime.Tensor{m.good, part} { // which would be reduced twice
			all := []*runtime.Tensor{m.bf16, m.good, shared}
			for _, err := range []error{distributed.AllReduceAll(ctx, c, all, comm.Sum), distributed.BroadcastAll(ctx, c, all, 0)} {
				assert.ErrorIs(t, err, comm.ErrArgument)
				assert.ErrorContains(t, err, "tensors 1 and 2")
			}
		}
	})
}

// TestSparseMisuse is TestMisuse of a Reducer.
func TestSparseMisuse(t *testing.T) {
	misused(t, func(m *misuse) {
		s, err := sparse.New(m.rt, m.c, 4, sparse.Config{Pattern: sparse.TopkA, Density: 0.5})
		require.NoError(t, err)
		closed, err := sparse.New(m.rt, m.c, 4, sparse.Config{})
		require.NoError(t, errors.Join(err, closed.Close(), closed.Close()))
		f64, err := runtime.New(m.rt, dtype.F64, 4)
		require.NoError(t, err)
		assert.ErrorIs(t, s.AllReduce(m.ctx, f64), comm.ErrUnsupported)
		assert.ErrorIs(t, s.AllReduce(m.ctx, m.long), runtime.ErrShape)
		assert.ErrorIs(t, s.AllReduce(m.ctx, nil), comm.ErrArgument)
		assert.ErrorIs(t, s.AllReduce(m.ctx, m.strided), runtime.ErrNotContiguous)
		assert.ErrorIs(t, s.AllReduce(m.ctx, m.freed), runtime.ErrFreed)
		assert.ErrorIs(t, closed.AllReduce(m.ctx, m.good), comm.ErrClosed)
		require.NoError(t, s.AllReduce(m.ctx, m.good))
		residual, err := s.Residual()
		require.NoError(t, err)
		assert.ErrorIs(t, s.AllReduce(m.ctx, residual), comm.ErrArgument)
		require.NoError(t, errors.Join(s.Close(), f64.Free()))
	})
}

// TestGradientsMisuse is TestMisuse of a Gradients.
func TestGradientsMisuse(t *testing.T) {
	misused(t, func(m *misuse) {
		i32, err := runtime.New(m.rt, dtype.I32, 4)
		require.NoError(t, err)
		refused := func(cfg ddp.Config, tensors ...*runtime.Tensor) error {
			_, err := ddp.New(m.ctx, m.rt, m.c, tensors, cfg)
			return err
		}
		assert.ErrorIs(t, refused(ddp.Config{}, m.good, nil), comm.ErrArgument)
		assert.ErrorIs(t, refused(ddp.Config{}, i32), comm.ErrUnsupported)
		assert.ErrorIs(t, refused(ddp.Config{BucketBytes: -1}), comm.ErrArgument)
		assert.ErrorIs(t, refused(ddp.Config{Sum: true, Config: sparse.Config{ClipNorm: 1}}, m.good), comm.ErrArgument)
		assert.ErrorIs(t, refused(ddp.Config{Config: sparse.Config{Pattern: "none"}}, m.good), comm.ErrArgument)
		g, err := ddp.New(m.ctx, m.rt, m.c, []*runtime.Tensor{m.good}, ddp.Config{})
		require.NoError(t, err)
		assert.ErrorIs(t, g.Ready(m.ctx, 1, m.good), comm.ErrArgument)
		assert.ErrorIs(t, g.Ready(m.ctx, 0, nil), comm.ErrArgument)
		assert.ErrorIs(t, g.Ready(m.ctx, 0, m.long), runtime.ErrShape)
		assert.ErrorIs(t, g.Ready(m.ctx, 0, i32), runtime.ErrDType)
		assert.ErrorIs(t, g.ReduceAll(m.ctx, []*runtime.Tensor{m.good, m.good}), comm.ErrArgument)
		require.NoError(t, g.Ready(m.ctx, 0, m.good))
		assert.ErrorIs(t, g.Ready(m.ctx, 0, m.good), comm.ErrArgument, "it is ready")
		require.NoError(t, errors.Join(g.Wait(m.ctx), g.Close(), i32.Free()))
		assert.ErrorIs(t, g.Ready(m.ctx, 0, m.good), comm.ErrClosed)
	})
}

// TestMeshMisuse is TestMisuse of a Mesh.
func TestMeshMisuse(t *testing.T) {
	misused(t, func(m *misuse) {
		size := m.c.WorldSize()
		for name, dims := range map[string][]distributed.Dim{
			"none":      nil,
			"no name":   {{Size: size}},
			"twice":     {{Name: "a", Size: size}, {Name: "a", Size: 1}},
			"zero":      {{Name: "a", Size: 0}},
			"too many":  {{Name: "a", Size: size + 1}},
			"too few":   {{Name: "a", Size: size}, {Name: "b", Size: 2}},
			"two open":  {{Name: "a", Size: -1}, {Name: "b", Size: -1}},
			"remainder": {{Name: "a", Size: -1}, {Name: "b", Size: size + 1}},
		} {
			_, err := distributed.NewMesh(m.ctx, m.c, dims...)
			assert.ErrorIs(t, err, comm.ErrArgument, name)
		}
		mesh, err := distributed.NewMesh(m.ctx, m.c, distributed.Dim{Name: "data", Size: size})
		require.NoError(t, err)
		_, err = mesh.Comm("tensor")
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = mesh.Coord("tensor")
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = mesh.Rank()
		assert.ErrorIs(t, err, comm.ErrArgument)
		_, err = mesh.Rank(size)
		assert.ErrorIs(t, err, comm.ErrArgument)
		require.NoError(t, mesh.Close())
	})
}
