package distributed_test

import (
	"context"
	"os"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// backend is comm/local with a CPU runtime that all ranks share.
func backend(t testing.TB, sizes ...int) commtest.Backend {
	rt := cpu.New()
	t.Cleanup(func() {
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	})
	return commtest.Backend{
		Name:  "local",
		Sizes: sizes,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		},
	}
}

// TestLocal runs the suite; with TUTTI_EXTENDED set, more of it, in more worlds, and
// in fewer with -short.
func TestLocal(t *testing.T) {
	sizes := []int{1, 2, 3, 4, 5, 8}
	if testing.Short() {
		sizes = []int{1, 2, 3, 5}
	}
	var opts []distributedtest.Option
	if os.Getenv("TUTTI_EXTENDED") != "" {
		sizes = []int{1, 2, 3, 4, 5, 6, 7, 8}
		opts = append(opts, distributedtest.Extended())
	}
	distributedtest.Run(t, backend(t, sizes...), opts...)
}
