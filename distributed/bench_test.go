package distributed_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// BenchmarkSparse measures a step of each pattern: 2 ranks, 2^20 float32
// elements, density 1 %. It reports the parts of a step on rank 0.
func BenchmarkSparse(b *testing.B) {
	const ranks, n, warm = 2, 1 << 20, 70 // warm: until buffers have settled
	grads := [ranks][]float32{normal(n, 0), normal(n, 1)}
	for _, pattern := range distributed.Patterns() {
		b.Run(pattern, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(4 * n)
			world := backend(b, ranks)
			err := world.Run(b.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
				s, err := distributed.NewSparse(r.Runtime, r.Comm, n, distributed.Config{Pattern: pattern, Density: 0.01})
				if err != nil {
					return err
				}
				source, err := runtime.FromSlice(r.Runtime, grads[r.Comm.Rank()], n)
				if err != nil {
					return err
				}
				grad, err := runtime.New(r.Runtime, dtype.F32, n)
				if err != nil {
					return err
				}
				var selecting, exchanging, sent float64
				for i := range b.N + warm {
					if i == warm && r.Comm.Rank() == 0 {
						b.ResetTimer()
						selecting, exchanging, sent = 0, 0, 0
					}
					if err := grad.CopyFrom(source); err != nil {
						return err
					}
					if err := s.AllReduce(ctx, grad); err != nil {
						return err
					}
					stats, err := s.Stats(ctx)
					if err != nil {
						return err
					}
					selecting += float64(stats.SelectTime.Nanoseconds()) / float64(b.N)
					exchanging += float64(stats.ExchangeTime.Nanoseconds()) / float64(b.N)
					sent += float64(stats.SentElements) / float64(b.N)
				}
				if r.Comm.Rank() == 0 {
					b.StopTimer()
					b.ReportMetric(selecting/1e3, "select_us")
					b.ReportMetric(exchanging/1e3, "exchange_us")
					b.ReportMetric(sent, "sent_elements")
				}
				return errors.Join(s.Close(), grad.Free(), source.Free())
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkAllReduce measures what the tensor level adds to a small allreduce.
func BenchmarkAllReduce(b *testing.B) {
	for _, n := range []int{1, 1 << 10} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			world := backend(b, 2)
			err := world.Run(b.Context(), 2, func(ctx context.Context, r commtest.Rank) error {
				t, err := runtime.New(r.Runtime, dtype.F32, n)
				if err != nil {
					return err
				}
				for range b.N {
					if err := distributed.AllReduce(ctx, r.Comm, t, comm.Max); err != nil {
						return err
					}
				}
				return t.Free()
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}
