package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// fuzzedStep is a step of a stateFuzz.
type fuzzedStep struct {
	fails    float64 // at first, on all ranks, at this share of its calls; < 0: it does not
	drops    bool    // its gradient is not finite
	restores bool    // another Reducer goes on after it
	calls    [4]int  // of each rank; 0 in gtopk, whose ranks make different ones
}

// stateFuzz are random steps of a random configuration.
type stateFuzz struct {
	t       *testing.T
	rt      *cpu.Runtime
	label   string
	cfg     engine.Config
	ranks   int
	streams bool
	steps   []fuzzedStep
}

func newStateFuzz(t *testing.T, pattern string, streams bool, seed uint64) *stateFuzz {
	rng := rand.New(rand.NewPCG(seed, 5))
	f := &stateFuzz{t: t, rt: cpu.New(), ranks: 2 + rng.IntN(3), streams: streams,
		cfg: engine.Config{Pattern: pattern, Density: 0.02 + 0.2*rng.Float64()}}
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 1 + rng.IntN(5), RebalanceInterval: 1 + rng.IntN(5)})
	f.label = fmt.Sprintf("%s, %d ranks, streams %v, seed %d", pattern, f.ranks, streams, seed)
	for range 10 {
		f.steps = append(f.steps, fuzzedStep{fails: 1.5*rng.Float64() - 0.5, drops: rng.IntN(6) == 0, restores: rng.IntN(5) == 0})
	}
	return f
}

// run makes the steps and returns the State of each rank after each of them.
func (f *stateFuzz) run(faults bool) (states [4][][]byte) {
	const n = 1200
	over, cancel := context.WithCancel(f.t.Context())
	cancel()
	require.NoError(f.t, local.Run(f.t.Context(), f.ranks, func(ctx context.Context, c comm.Communicator) error {
		broken := standin.NewFaulty(c)
		rank := c.Rank()
		var memory runtime.Runtime = f.rt
		var through comm.Communicator = broken
		if f.streams {
			memory, through = standin.NewOnStream(f.rt), standin.NewOrdered(ctx, broken)
		}
		u, err := standin.NewTrainee(memory, through, f.cfg, n)
		for i := range f.steps {
			if err != nil {
				return fmt.Errorf("%s, step %d: %w", f.label, i, err)
			}
			step := &f.steps[i]
			g := u.Gradient(i)
			if step.drops {
				g[i] = float32(math.Inf(1))
			}
			if faults && step.fails >= 0 && i > 0 { // the first one lays out partitions, which stay
				before, _ := u.S.State(ctx)
				of, want, calls := ctx, standin.ErrFault, slices.Min(step.calls[:f.ranks])
				if calls == 0 {
					of, want = over, comm.ErrCanceled
				}
				broken.Calls, broken.At = 0, int(step.fails*float64(calls))
				err := errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(of, u.T))
				assert.ErrorIs(f.t, err, want, f.label)
				broken.At = -1
				after, err := u.S.State(ctx)
				assert.NoError(f.t, err)
				assert.True(f.t, slices.Equal(before, after), "%s: step %d, undone, is in the state", f.label, i)
			}
			broken.Calls = 0
			if err = errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T)); err != nil {
				continue
			}
			calls := broken.Calls
			if stats, err := u.S.Stats(ctx); !faults && stats.Pattern != sparsity.Gtopk {
				assert.NoError(f.t, err)
				step.calls[rank] = calls
			}
			state, err := u.S.State(ctx)
			if err != nil {
				return err
			}
			states[rank] = append(states[rank], state)
			if step.restores {
				if err := u.Close(); err != nil {
					return err
				}
				if u, err = standin.NewTrainee(memory, through, f.cfg, n); err != nil {
					return err
				}
				if err := u.S.Restore(ctx, state); err != nil {
					return err
				}
				again, err := u.S.State(ctx)
				assert.NoError(f.t, err)
				assert.True(f.t, slices.Equal(state, again), "%s: step %d, restored", f.label, i)
			}
		}
		return errors.Join(err, u.Close())
	}))
	return states
}

// TestStateOfUndoneSteps makes random steps, of which some fail on all ranks at a random call and are repeated, some
// are skipped because of non-finite gradients, and some continue with another Reducer from what was saved. A State
// says nothing about steps that were rolled back, nor about when messages come: it equals the state of a run in which
// none fails, bit for bit.
func TestStateOfUndoneSteps(t *testing.T) {
	seeds := 4
	if testing.Short() {
		seeds = 1
	}
	for _, pattern := range sparsity.Patterns() {
		for _, streams := range []bool{false, true} {
			for seed := range seeds {
				f := newStateFuzz(t, pattern, streams, uint64(seed))
				want := f.run(false)
				got := f.run(true)
				for r := range f.ranks {
					for step := range f.steps {
						assert.True(t, slices.Equal(want[r][step], got[r][step]), "%s: rank %d, after step %d", f.label, r, step)
					}
				}
				require.NoError(t, f.rt.Close())
			}
		}
	}
}
