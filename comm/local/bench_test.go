package local_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// BenchmarkAllReduce times AllReduce and Sync with separate buffers.
func BenchmarkAllReduce(b *testing.B) {
	for _, ranks := range []int{2, 4, 16} {
		for _, bytes := range []int{8, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20} {
			b.Run(fmt.Sprintf("ranks=%d/bytes=%d", ranks, bytes), func(b *testing.B) {
				comms, m := world(b, ranks), newMemory(b)
				_, src := perRank(m, ranks, bytes/4, constant(0x3f800000))
				_, dst := perRank(m, ranks, bytes/4, constant(0))
				collective(b, comms, bytes, func(c comm.Communicator) error {
					return c.AllReduce(src[c.Rank()], dst[c.Rank()], bytes/4, dtype.F32, comm.Sum)
				})
			})
		}
	}
}

// collective times a collective followed by Sync, on all ranks.
func collective(b *testing.B, comms []comm.Communicator, bytes int, call func(comm.Communicator) error) {
	var ranks sync.WaitGroup
	b.SetBytes(int64(bytes))
	b.ReportAllocs()
	b.ResetTimer()
	for _, c := range comms {
		ranks.Go(func() {
			ctx := context.Background()
			for range b.N {
				if err := call(c); err != nil {
					b.Error(err)
					return
				}
				if err := c.Sync(ctx); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	ranks.Wait()
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1e3/float64(b.N), "us/op")
}

// BenchmarkExchange times two ranks that send each other a message.
func BenchmarkExchange(b *testing.B) {
	for _, bytes := range []int{8, 4 << 10, 256 << 10, 16 << 20} {
		b.Run(fmt.Sprintf("bytes=%d", bytes), func(b *testing.B) {
			comms, m := world(b, 2), newMemory(b)
			_, src := perRank(m, 2, bytes/4, rankPlusOne)
			_, dst := perRank(m, 2, bytes/4, constant(0))
			var exchange [2][]comm.Call
			for r := range exchange {
				exchange[r] = []comm.Call{
					comm.SendCall(src[r], bytes/4, dtype.F32, 1-r, 0), comm.RecvCall(dst[r], bytes/4, dtype.F32, 1-r, 0)}
			}
			collective(b, comms, bytes, func(c comm.Communicator) error { return c.Group(exchange[c.Rank()]...) })
		})
	}
}
