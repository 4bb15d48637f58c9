package distributed_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestLocalWithStreams runs the suite in the ways of devices with streams. (What auto chooses among
// is part of it; how it does so there, TestAutoWithStreams of package sparse knows.) Unless extended,
// it does so with 2 ranks, which [TestLocal] leaves out, and codecs with one pattern of each kind of exchange.
func TestLocalWithStreams(t *testing.T) {
	sizes := []int{2}
	if extended {
		sizes = []int{1, 2, 3, 5}
	} else if testing.Short() {
		sizes = []int{3}
	}
	rt := standin.NewOnStream(cpu.New())
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	distributedtest.Run(t, commtest.Backend{
		Name:  "local, with streams",
		Sizes: sizes,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: standin.NewOrdered(ctx, c), Runtime: rt})
			})
		},
	}, distributedtest.SameBits(standin.Backend(t).Run), distributedtest.Cases(func(_ int, name string) bool {
		pattern, kind, _ := strings.Cut(name, "/")
		long := kind == "Values" && !slices.Contains([]string{sparse.Dense, sparse.TopkA, sparse.Gtopk, sparse.TopkSA, sparse.Oktopk}, pattern)
		return extended || !strings.HasPrefix(name, "auto") && !long
	}))
}

// The same with sparse buckets that are worked on beside the backward pass: the cases that have
// buckets.
func TestLocalWithSideStreams(t *testing.T) {
	sizes := []int{1, 2, 3}
	if testing.Short() {
		sizes = []int{2}
	}
	rt := standin.NewForking(cpu.New())
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	distributedtest.Run(t, commtest.Backend{
		Name:  "local, with side streams",
		Sizes: sizes,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: standin.NewByEvents(ctx, c), Runtime: rt})
			})
		},
	}, distributedtest.SameBits(standin.Backend(t).Run), distributedtest.Cases(func(_ int, name string) bool {
		return extended || slices.Contains([]string{"Misuse", "Gradients", "Many", "Training", "Outer"}, name)
	}))
}
