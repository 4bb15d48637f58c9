package local_test

import (
	"context"
	"os"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var extended = os.Getenv("TUTTI_EXTENDED") != ""

// TestConformance runs the suite; with TUTTI_EXTENDED set, more of it, and in more worlds. [TestAProcessorForEachRank]
// has three ranks.
func TestConformance(t *testing.T) {
	switch {
	case extended:
		conformance(t, 1, 2, 3, 4, 8)
	case testing.Short():
		conformance(t, 3)
	default:
		conformance(t, 1, 4)
	}
}

// runner runs body for each rank of a world.
type runner func(ctx context.Context, ranks int, body func(context.Context, comm.Communicator) error) error

// TestConformanceOfParts runs it where each rank has a processor, and makes its part of the result of short sums.
func TestConformanceOfParts(t *testing.T) {
	conformanceOn(t, func(ctx context.Context, ranks int, body func(context.Context, comm.Communicator) error) error {
		return comm.Run(ctx, local.NewDedicated(ranks), body)
	}, 4)
}

// conformance runs the suite on worlds of some sizes.
func conformance(t *testing.T, sizes ...int) { conformanceOn(t, local.Run, sizes...) }

// conformanceOn runs the suite on worlds that run makes.
func conformanceOn(t *testing.T, run runner, sizes ...int) {
	rt := cpu.New()
	t.Cleanup(func() {
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	})
	var opts []commtest.Option
	if extended {
		opts = append(opts, commtest.Extended())
	}
	commtest.Run(t, commtest.Backend{
		Name:  "local",
		Sizes: sizes,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: c, Runtime: rt})
			})
		},
	}, opts...)
}
