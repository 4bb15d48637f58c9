package tcp_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// BenchmarkAllReduce is an allreduce and the wait for it, on ranks of one process.
func BenchmarkAllReduce(b *testing.B) {
	for _, ranks := range []int{2, 4} {
		for _, bytes := range []int{8, 64 << 10, 1 << 20, 16 << 20} {
			b.Run(fmt.Sprintf("ranks=%d/bytes=%d", ranks, bytes), func(b *testing.B) {
				rt := cpu.New()
				defer rt.Close() //nolint:errcheck // a benchmark
				b.SetBytes(int64(bytes))
				b.ReportAllocs()
				require.NoError(b, run(b.Context(), ranks, nil, func(ctx context.Context, c comm.Communicator) error {
					p, err := rt.Allocate(bytes)
					for i := 0; i < b.N && err == nil; i++ {
						if err = c.AllReduce(p, p, bytes/4, dtype.F32, comm.Sum); err == nil {
							err = c.Sync(ctx)
						}
					}
					return err
				}))
			})
		}
	}
}
