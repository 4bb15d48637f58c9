package standin

import (
	"context"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// Backend is comm/local with a CPU runtime that all ranks share.
func Backend(t testing.TB, sizes ...int) commtest.Backend {
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
