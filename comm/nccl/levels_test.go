package nccl_test

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// levelsOverMPI reduces on two hosts, between which there is MPI and within which
// NCCL: with the bits that the same levels have on processors, over MPI alone. (Up
// to two ranks within a host add up in one order only.)
func levelsOverMPI(ctx context.Context, t *testing.T, base comm.Communicator, gpu *cuda.Runtime) {
	const hosts, n, steps = 2, 100_003, 5
	perHost := base.WorldSize() / hosts
	host, local := base.Rank()/perHost, base.Rank()%perHost
	split := func(color, key int) comm.Communicator {
		c, err := base.Split(ctx, color, key)
		require.NoError(t, err)
		return c
	}
	processor := cpu.New()
	overMPI := split(host, local)
	within, err := nccl.From(ctx, overMPI, gpu)
	require.NoError(t, err)
	between, err := staged.New(split(local, host), gpu, processor)
	require.NoError(t, err)
	mixed, err := distributed.JoinMesh(distributed.Line{Name: "host", Comm: between}, distributed.Line{Name: "gpu", Comm: within})
	require.NoError(t, err)
	plain, err := distributed.JoinMesh(distributed.Line{Name: "host", Comm: split(local, host)}, distributed.Line{Name: "gpu", Comm: overMPI})
	require.NoError(t, err)

	for _, pattern := range sparse.Patterns() {
		for _, dt := range []dtype.DType{dtype.F32, dtype.BF16} {
			run := func(rt runtime.Runtime, mesh *distributed.Mesh) [][]byte {
				l, err := sparse.NewHierarchical(rt, mesh, n, sparse.Config{Pattern: pattern, Density: 0.02})
				require.NoError(t, err)
				gradient, err := runtime.New(rt, dt, n)
				require.NoError(t, err)
				p, err := gradient.Ptr()
				require.NoError(t, err)
				var results [][]byte
				rng := rand.New(rand.NewPCG(5, uint64(base.Rank())))
				values, data := make([]float32, n), make([]byte, gradient.Bytes())
				for range steps {
					for i := range values {
						values[i] = float32(rng.NormFloat64())
					}
					require.NoError(t, dtype.FromFloat32(data, dt, values))
					require.NoError(t, rt.CopyIn(p, data))
					require.NoError(t, l.AllReduce(ctx, gradient))
					last, err := mesh.Comm("gpu")
					require.NoError(t, err)
					require.NoError(t, last.Sync(ctx))
					result := make([]byte, gradient.Bytes())
					require.NoError(t, rt.CopyOut(result, p))
					results = append(results, result)
				}
				require.NoError(t, l.Close())
				require.NoError(t, gradient.Free())
				return results
			}
			got, want := run(gpu, mixed), run(processor, plain)
			for step := range got {
				different := 0
				for i, b := range got[step] {
					if b != want[step][i] {
						different++
					}
				}
				assert.Zero(t, different, "%s, %v, step %d: bytes of %d", pattern, dt, step, len(got[step]))
			}
		}
	}
	assert.NoError(t, mixed.Close())
	assert.NoError(t, plain.Close())
	assert.NoError(t, processor.Close())
}
