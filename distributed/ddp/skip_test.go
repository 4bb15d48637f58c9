package ddp_test

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// spoiledSteps makes steps of three gradients, of which one of the last rank has a NaN in each.
func spoiledSteps(
	ctx context.Context, c comm.Communicator, rt runtime.Runtime, steps int, spoiled func(step int) int, cfg ddp.Config,
) error {
	params := make([]*runtime.Tensor, 3)
	for i := range params {
		p, err := runtime.FromSlice(rt, standin.Normal(64, i), 8, 8)
		if err != nil {
			return err
		}
		params[i] = p
		defer p.Free() //nolint:errcheck // the runtime says what is live
	}
	g, err := ddp.New(ctx, rt, c, params, cfg)
	if err != nil {
		return err
	}
	for step := range steps {
		for i, p := range params {
			values := standin.Normal(64, i, step, c.Rank())
			if i == spoiled(step) && c.Rank() == c.WorldSize()-1 {
				values[5] = float32(math.NaN())
			}
			if err := runtime.CopyIn(p, values); err != nil {
				return err
			}
		}
		if err := g.ReduceAll(ctx, params); err != nil {
			return errors.Join(err, g.Close())
		}
	}
	return g.Close()
}

// lastOne is the last of three gradients in each step.
func lastOne(int) int { return 2 }

// TestSkipsOfOtherGradients: a gradient that was not spoiled before is no reason to say each step.
func TestSkipsOfOtherGradients(t *testing.T) {
	logged := logtest.Capture(t)
	cfg := ddp.Config{Config: sparse.Config{NonFinite: sparse.SkipNonFinite}}
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		return spoiledSteps(ctx, c, rt, 100, func(step int) int { return step % 3 }, cfg)
	})
	assert.Len(t, logged.Lines("these gradients of this rank are not finite"), 7)
	assert.Len(t, logged.Lines("rank=1 step=63 gradients=[0] times=64"), 1)
}

// TestSkippedStepsAreSaid: a hundred steps that are all skipped are said seven times, by the rank whose gradient it
// is, which names that, and by rank 0.
func TestSkippedStepsAreSaid(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"dense": {Config: sparse.Config{NonFinite: sparse.SkipNonFinite}},
		"topkA": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}},
		"clip":  {Config: sparse.Config{NonFinite: sparse.SkipNonFinite, ClipNorm: 1, ClipGlobal: true}},
	} {
		t.Run(name, func(t *testing.T) {
			logged := logtest.Capture(t)
			standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				return spoiledSteps(ctx, c, rt, 100, lastOne, cfg)
			})
			said := logged.Lines("ddp: skipping a step")
			assert.Len(t, said, 14)
			assert.Len(t, logged.Lines("rank=2"), 7)
			assert.Len(t, logged.Lines("gradients=[2]"), 7)
			assert.Len(t, logged.Lines("gradients=[]"), 7)
			assert.Len(t, logged.Lines("times=64"), 2)
		})
	}
}

// TestFailedStepsNameTheGradient: so does the error of a policy that fails instead.
func TestFailedStepsNameTheGradient(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		err := spoiledSteps(ctx, c, rt, 1, lastOne, ddp.Config{Config: sparse.Config{NonFinite: sparse.FailNonFinite}})
		assert.ErrorIs(t, err, sparse.ErrNonFinite)
		if c.Rank() == 1 {
			assert.ErrorContains(t, err, "gradients [2] of rank 1")
		}
		return nil
	})
}

// TestSkipsOfTheDeviceAreSaid: where the device alone knows, the host looks now and then, and in Close.
func TestSkipsOfTheDeviceAreSaid(t *testing.T) {
	for steps, said := range map[int]int{100: 1, 600: 2} { // 3 times, of which the third is not said
		logged := logtest.Capture(t)
		s := &standin.Streamed{Runtime: cpu.New(), Reach: runtime.CPU}
		require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
			cfg := ddp.Config{Config: sparse.Config{NonFinite: sparse.SkipNonFinite}}
			return spoiledSteps(ctx, standin.NewStreamedComm(c, s), s, steps, lastOne, cfg)
		}))
		assert.Len(t, logged.Lines("ddp: steps have been skipped"), said)
	}
}
