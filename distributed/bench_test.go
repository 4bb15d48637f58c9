package distributed_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// BenchmarkAllReduce measures what the tensor level adds to a small allreduce.
func BenchmarkAllReduce(b *testing.B) {
	for _, n := range []int{1, 1 << 10} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			world := standin.Backend(b, 2)
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
