package overlap

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/lab/cublas"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// onGPUs returns a function that runs a body on all GPUs, one goroutine each. It skips the test if something is
// missing.
func onGPUs(t *testing.T) (ranks int, eachRank func(body func(context.Context, Rank) error)) {
	t.Helper()
	n, err := cuda.Count()
	if err == nil {
		_, _, err = nccl.Version()
	}
	if err == nil {
		_, _, err = cublas.Version()
	}
	if err != nil {
		t.Skipf("needs NVIDIA GPUs, NCCL and cuBLAS: %v", err)
	}
	runtimes := make([]*cuda.Runtime, n)
	for i := range runtimes {
		runtimes[i], err = cuda.Open(i)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, runtimes[i].Close()) })
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	open := func() []*nccl.Comm {
		world, err := nccl.InProcess(ctx, runtimes)
		require.NoError(t, err)
		return world
	}
	alone, beside := open(), open()
	return n, func(body func(context.Context, Rank) error) {
		errs := make([]error, n)
		var all sync.WaitGroup
		for i, rt := range runtimes {
			all.Go(func() {
				gpu, err := NewGPU(rt)
				if err == nil {
					err = errors.Join(body(ctx, Rank{Runtime: rt, Compute: gpu, Comm: alone[i], Beside: beside[i]}), gpu.Close())
				}
				errs[i] = errors.Join(err, alone[i].Close(), beside[i].Close())
			})
		}
		all.Wait()
		require.NoError(t, errors.Join(errs...))
	}
}

func TestGradientsOnGPUs(t *testing.T) {
	for name, bucket := range bucketSizes {
		t.Run(name, func(t *testing.T) {
			ranks, eachRank := onGPUs(t)
			cfg := testConfig()
			cfg.BucketBytes = bucket
			checkGradients(t, cfg, ranks, eachRank)
		})
	}
}

// TestRunOnGPUs measures a small model. It can only check that the times are consistent.
func TestRunOnGPUs(t *testing.T) {
	_, eachRank := onGPUs(t)
	cfg := Config{Layers: 4, Width: 512, Batch: 1024, BucketBytes: 128 << 10, Steps: 2, Rounds: 3, Seed: 1}
	eachRank(func(ctx context.Context, r Rank) error {
		result, err := Run(ctx, r, cfg)
		if err != nil || r.Comm.Rank() != 0 {
			return err
		}
		t.Logf("%+v", result)
		assert.Positive(t, result.ComputeMS)
		assert.Positive(t, result.OverlappedMS)
		assert.Equal(t, 3+4, result.Buckets, "the first layer is cut in four")
		assert.Len(t, result.Timelines, 2)
		for _, timeline := range result.Timelines {
			assert.Len(t, timeline.Spans, 4+3+3+4+result.Buckets)
			for _, s := range timeline.Spans {
				assert.LessOrEqual(t, s.Start, s.End, s.Name)
				assert.LessOrEqual(t, s.End, timeline.Total+1, s.Name) // events have a resolution of half a microsecond
			}
		}
		return nil
	})
}
