package engine_test

import (
	"context"
	"errors"
	"testing"

	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
)

// BenchmarkSparse measures a step of each pattern: 2 ranks, 2^20 float32
// elements, density 1 %. It reports the parts of a step on rank 0.
func BenchmarkSparse(b *testing.B) {
	const ranks, n, warm = 2, 1 << 20, 70 // warm: until buffers have grown
	grads := [ranks][]float32{standin.Normal(n, 0), standin.Normal(n, 1)}
	for _, pattern := range sparsity.Patterns() {
		b.Run(pattern, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(4 * n)
			world := standin.Backend(b, ranks)
			err := world.Run(b.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
				s, err := engine.New(r.Runtime, r.Comm, n, engine.Config{Pattern: pattern, Density: 0.01})
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
