package distributed_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// onStream is a runtime that has a compute stream, as a GPU does. Its work is done
// when a method returns.
type onStream struct{ *cpu.Runtime }

func (onStream) ComputeStream() uintptr { return computeStream }

// ordered is a communicator with a stream: what comes after it waits for it.
type ordered struct {
	comm.Communicator
	ctx context.Context
}

func (o ordered) Unwrap() comm.Communicator { return o.Communicator }
func (ordered) CommStream() uintptr         { return computeStream + 1 }
func (ordered) CommAfter(uintptr) error     { return nil }
func (o ordered) AfterComm(uintptr) error   { return o.Communicator.Sync(o.ctx) }

// TestLocalWithStreams runs the suite in the ways of devices with streams.
func TestLocalWithStreams(t *testing.T) {
	sizes := []int{1, 2, 3, 5}
	if testing.Short() {
		sizes = []int{3}
	}
	rt := onStream{cpu.New()}
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	distributedtest.Run(t, commtest.Backend{
		Name:  "local, with streams",
		Sizes: sizes,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: ordered{c, ctx}, Runtime: rt})
			})
		},
	})
}
