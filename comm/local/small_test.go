package local_test

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// TestAProcessorForEachRank repeats tests as on a machine with more processors, where
// small collectives of more ranks go through cells.
func TestAProcessorForEachRank(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	t.Run("conformance", func(t *testing.T) { conformance(t, 3) })
	t.Run("mismatch", TestMismatch)
	t.Run("without a rank", TestProgressWithoutARank)
	t.Run("random", TestRandomPrograms)
}

// TestSmallOfWhoDoesNotWait lets rank 0 submit several small collectives and then wait
// for rank 1 by other means than Sync: those behind the first are told all the same.
func TestSmallOfWhoDoesNotWait(t *testing.T) {
	ctx := within(t)
	data, addr := perRank(newMemory(t), 2, 4, rankPlusOne)
	comms := world(t, 2)
	for _, c := range comms {
		for i := range 3 {
			at := addr[c.Rank()] + uintptr(4*i)
			require.NoError(t, c.AllReduce(at, at, 1, dtype.I32, comm.Sum))
		}
	}
	require.NoError(t, comms[1].Sync(ctx))
	assert.Equal(t, []int32{3, 3, 3, 2}, data[1])
	require.NoError(t, comms[0].Sync(ctx))
	assert.Equal(t, []int32{3, 3, 3, 1}, data[0])
}

// BenchmarkPingPong has a cache line go from one goroutine to another and one back:
// what a small allreduce of two ranks takes at least.
func BenchmarkPingPong(b *testing.B) {
	var lines [2]struct {
		_ [128]byte
		n atomic.Int64
		_ [120]byte
	}
	await := func(line *atomic.Int64, n int64) {
		for looks := 1; line.Load() < n; looks++ {
			if looks%10000 == 0 {
				runtime.Gosched() // the other one may have no processor
			}
		}
	}
	var other sync.WaitGroup
	other.Go(func() {
		for i := range int64(b.N) {
			await(&lines[0].n, i+1)
			lines[1].n.Store(i + 1)
		}
	})
	for i := range int64(b.N) {
		lines[0].n.Store(i + 1)
		await(&lines[1].n, i+1)
	}
	other.Wait()
}
