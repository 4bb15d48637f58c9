package hostops_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/reductions"
)

// benchBuffers returns the addresses of n buffers of ordinary numbers, each on separate pages, and what keeps them
// alive.
func benchBuffers(b *testing.B, n, bytes int, dt dtype.DType) (addrs []uintptr, keep [][]byte) {
	const page = 4096
	r := rand.New(rand.NewPCG(1, 2))
	pattern := make([]byte, page)
	for at := 0; at < page; at += dt.Size() {
		bits, err := dtype.FromFloat64(dt, 1+10*r.Float64())
		require.NoError(b, err)
		copy(pattern[at:], binary.LittleEndian.AppendUint64(nil, bits)[:dt.Size()])
	}
	for range n {
		memory := make([]byte, bytes+page)
		start := -int(hostmem.Addr(memory)) & (page - 1)
		for at := start; at < len(memory); at += page {
			copy(memory[at:], pattern)
		}
		keep = append(keep, memory)
		addrs = append(addrs, hostmem.Addr(memory)+uintptr(start))
	}
	return addrs, keep
}

// benchSizes are bytes of a buffer; streaming is worth a try from the size on
// where the buffers of a call do not fit into the second-level cache.
var benchSizes = []int{4 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20}

// benchEachSize runs a benchmark over buffers of every size with stores to the
// cache and, for the large ones, streaming stores. It counts bytes read and written.
func benchEachSize(b *testing.B, buffers int, dt dtype.DType, run func(addrs []uintptr, bytes int, streaming bool)) {
	for _, bytes := range benchSizes {
		for _, streaming := range []bool{false, true} {
			if streaming && bytes < 2<<20 {
				continue
			}
			b.Run(fmt.Sprintf("%dKiB/streaming=%v", bytes>>10, streaming), func(b *testing.B) {
				addrs, keep := benchBuffers(b, buffers, bytes, dt)
				b.SetBytes(int64(buffers * bytes))
				b.ReportAllocs()
				for b.Loop() {
					run(addrs, bytes, streaming)
				}
				runtime.KeepAlive(keep)
			})
		}
	}
}

// BenchmarkCopy measures the bandwidth that BenchmarkReduce is compared with.
func BenchmarkCopy(b *testing.B) {
	benchEachSize(b, 2, dtype.U8, func(addrs []uintptr, bytes int, streaming bool) {
		hostops.Copy(addrs[0], addrs[1], bytes, streaming)
	})
}

// BenchmarkCopyAllCores copies on all cores at once: what the machine's memory
// gives, and so the floor of collectives between goroutines.
func BenchmarkCopyAllCores(b *testing.B) {
	const bytes = 64 << 20
	cores := runtime.GOMAXPROCS(0)
	addrs, keep := benchBuffers(b, 2*cores, bytes, dtype.U8)
	b.SetBytes(int64(2 * bytes * cores)) // read and written
	for b.Loop() {
		var wg sync.WaitGroup
		for i := range cores {
			wg.Go(func() { hostops.Copy(addrs[2*i], addrs[2*i+1], bytes, true) })
		}
		wg.Wait()
	}
	runtime.KeepAlive(keep)
}

// BenchmarkReduce combines buffers into one more.
func BenchmarkReduce(b *testing.B) {
	for _, c := range []struct {
		dt      dtype.DType
		op      reductions.Op
		sources int
	}{
		{dtype.F32, reductions.Sum, 2}, {dtype.F32, reductions.Sum, 4}, {dtype.F32, reductions.Max, 2},
		{dtype.F16, reductions.Sum, 2}, {dtype.F16, reductions.Sum, 4},
		{dtype.BF16, reductions.Sum, 2}, {dtype.BF16, reductions.Sum, 4}, {dtype.BF16, reductions.Avg, 4},
		{dtype.F64, reductions.Sum, 2}, {dtype.I8, reductions.Sum, 2}, {dtype.FP8E4M3, reductions.Sum, 2},
	} {
		b.Run(fmt.Sprintf("%v/%v/%dsources", c.dt, c.op, c.sources), func(b *testing.B) {
			benchEachSize(b, 1+c.sources, c.dt, func(addrs []uintptr, bytes int, streaming bool) {
				hostops.Reduce(addrs[:1], addrs[1:], bytes/c.dt.Size(), c.dt, c.op, streaming)
			})
		})
	}
}
