package sparse_test

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestSkippedStepsAreSaid: a hundred steps that are all skipped are said seven times, by the rank whose gradient is
// not finite, and by rank 0.
func TestSkippedStepsAreSaid(t *testing.T) {
	logged := logtest.Capture(t)
	standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		r, err := sparse.New(rt, c, 100, sparse.Config{Pattern: sparse.TopkA, Density: 0.1})
		if err != nil {
			return err
		}
		for step := range 100 {
			values := standin.Normal(100, step, c.Rank())
			if c.Rank() == 2 {
				values[7] = float32(math.Inf(-1))
			}
			g, err := runtime.FromSlice(rt, values)
			if err != nil {
				return err
			}
			if err := errors.Join(r.AllReduce(ctx, g), g.Free()); err != nil {
				return err
			}
		}
		return r.Close()
	})
	assert.Len(t, logged.Lines("sparse: skipping a step"), 14)
	assert.Len(t, logged.Lines("the gradient of this rank is not finite\" rank=2"), 7)
	assert.Len(t, logged.Lines("rank=0"), 7)
	assert.Len(t, logged.Lines("times=64"), 2)
}
