package outer_test

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestSkippedRoundsAreSaid: 16 rounds that are all skipped are said five times, by the rank whose parameter it is,
// which names that, and by rank 0. A fragment without it is not skipped.
func TestSkippedRoundsAreSaid(t *testing.T) {
	logged := logtest.Capture(t)
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		m := newModel(t, rt)
		l, err := outer.New(ctx, rt, c, m.tensors, outer.Config{Every: 2, Fragments: 2})
		if err != nil {
			return err
		}
		for range 32 {
			if c.Rank() == 1 {
				m.values[3][17] = float32(math.NaN())
			}
			if err := l.Step(ctx); err != nil {
				return err
			}
		}
		assert.Equal(t, 16, l.Stats().Skipped)
		err = l.Close()
		for _, x := range m.tensors {
			err = errors.Join(err, x.Free())
		}
		return err
	})
	assert.Len(t, logged.Lines("outer: all ranks go back"), 10)
	assert.Len(t, logged.Lines("parameters=[3]"), 5)
	assert.Len(t, logged.Lines("rank=0"), 5)
	assert.Len(t, logged.Lines("times=16"), 2)
	assert.Empty(t, logged.Lines("ddp:"), "one line for one thing")
}
