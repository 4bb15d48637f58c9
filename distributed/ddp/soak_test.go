package ddp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestSoak trains with gradients of type F16 and a dynamic loss scale, which are not finite now and then. A run in
// which calls fail at random, contexts end, and everything is saved, closed and restored ends with the weights of a run
// to which nothing happens, bit for bit. TUTTI_SOAK_STEPS is for how many steps, 300 unless set, or 200 with -short;
// 100,000 take some minutes.
func TestSoak(t *testing.T) {
	const ranks, seed = 3, 1
	steps := 300
	if testing.Short() {
		steps = 200
	}
	if text := os.Getenv("TUTTI_SOAK_STEPS"); text != "" {
		var err error
		steps, err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 7, RebalanceInterval: 11})
	for _, pattern := range []string{sparse.Oktopk, sparse.TopkA2} { // whose ranks all make the same calls
		rt := cpu.New()
		run := func(faults bool) (weights [ranks][]float32, counts [ranks]soakCounts) {
			require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
				s := &soak{rt: rt, c: standin.NewFaulty(c), rank: c.Rank(), scale: 1024, cfg: ddp.Config{BucketBytes: 1500,
					Config: sparse.Config{Pattern: pattern, Density: 0.2}}}
				if faults { // the same on every rank
					s.faults = rand.New(rand.NewPCG(seed, 0))
				}
				err := s.begin(ctx)
				for step := 0; step < steps && err == nil; step++ {
					if err = s.step(ctx, step); err != nil {
						err = fmt.Errorf("step %d, seed %d: %w", step, seed, err)
					}
				}
				weights[c.Rank()], counts[c.Rank()] = s.weights, s.soakCounts
				return errors.Join(err, s.end())
			}))
			return weights, counts
		}
		want, calm := run(false)
		got, counts := run(true)
		assert.Equal(t, want, got, "%s, seed %d", pattern, seed)
		for r := range ranks {
			assert.Equal(t, want[0], want[r], "the ranks' weights")
			assert.Equal(t, calm[0].skipped, counts[r].skipped)
			assert.True(t, slices.ContainsFunc(got[r], func(w float32) bool { return math.Abs(float64(w)-1) < 0.1 }), "it trains")
		}
		assert.Zero(t, calm[0].failed+calm[0].canceled+calm[0].restored)
		assert.NotZero(t, counts[0].skipped)
		assert.NotZero(t, counts[0].failed)
		assert.NotZero(t, counts[0].canceled)
		assert.NotZero(t, counts[0].restored)
		t.Logf("%s: %d steps, %+v", pattern, steps, counts[0])
		require.NoError(t, rt.Close())
	}
}

type soakCounts struct{ skipped, failed, canceled, restored int }

// soak is a rank of TestSoak. Its loss is the squared distance of the weights to 1,
// with noise.
type soak struct {
	rt     runtime.Runtime
	c      *standin.Faulty
	rank   int
	cfg    ddp.Config
	faults *rand.Rand // nil: none

	sync    *ddp.Gradients
	grads   []*runtime.Tensor
	weights []float32
	scale   float64
	good    int // steps since the scale changed
	soakCounts
}

var soakShapes = [][]int{{20, 30}, {30}, {10, 15}, {5}}

func (s *soak) begin(ctx context.Context) (err error) {
	for _, shape := range soakShapes {
		g, err := runtime.New(s.rt, dtype.F16, shape...)
		if err != nil {
			return err
		}
		s.grads = append(s.grads, g)
		s.weights = append(s.weights, make([]float32, g.Len())...)
	}
	s.sync, err = ddp.New(ctx, s.rt, s.c, s.grads, s.cfg)
	return err
}

func (s *soak) end() error {
	err := s.sync.Close()
	for _, g := range s.grads {
		err = errors.Join(err, g.Free())
	}
	return err
}

// chance is whether something happens, on all ranks or on none.
func (s *soak) chance(oneIn int) bool { return s.faults != nil && s.faults.IntN(oneIn) == 0 }

func (s *soak) step(ctx context.Context, step int) error {
	if err := s.loadGradients(step); err != nil {
		return err
	}
	if s.chance(40) {
		if err := s.resume(ctx); err != nil {
			return err
		}
	}
	if s.chance(20) {
		over, cancel := context.WithCancel(ctx)
		cancel()
		if err := s.sync.ReduceAll(over, s.grads); !errors.Is(err, comm.ErrCanceled) {
			return fmt.Errorf("with a context that is over: %w", err)
		}
		s.canceled++
	}
	if s.chance(10) {
		s.c.Calls, s.c.At = 0, s.faults.IntN(25)
		err := s.sync.ReduceAll(ctx, s.grads)
		s.c.At = -1
		if err == nil { // the step has fewer calls
			return s.update(ctx)
		}
		if !errors.Is(err, standin.ErrFault) {
			return err
		}
		s.failed++
	}
	if err := s.sync.ReduceAll(ctx, s.grads); err != nil {
		return err
	}
	return s.update(ctx)
}

// loadGradients computes this rank's gradients, scaled and rounded.
func (s *soak) loadGradients(step int) error {
	rng := rand.New(rand.NewPCG(uint64(step), uint64(s.rank)))
	from := 0
	for _, g := range s.grads {
		wide := make([]float32, g.Len())
		for i := range wide {
			noise := rng.NormFloat64()
			wide[i] = float32((float64(s.weights[from+i]) - 1 + 0.3*noise*noise*noise) * s.scale)
		}
		from += len(wide)
		raw := make([]byte, g.Bytes())
		ptr, err := g.Ptr()
		if err := errors.Join(err, dtype.FromFloat32(raw, dtype.F16, wide), s.rt.CopyIn(ptr, raw)); err != nil {
			return err
		}
	}
	return nil
}

// update moves the weights, unless the step was skipped, and the scale.
func (s *soak) update(ctx context.Context) error {
	stats, err := s.sync.Stats(ctx)
	if err != nil {
		return err
	}
	before := s.scale
	if stats.Skipped {
		s.skipped++
		s.scale, s.good = s.scale/2, 0
	} else if s.good++; s.good == 50 {
		s.scale, s.good = s.scale*2, 0
	}
	from := 0
	for _, g := range s.grads {
		raw, wide := make([]byte, g.Bytes()), make([]float32, g.Len())
		ptr, err := g.Ptr()
		if err := errors.Join(err, s.rt.CopyOut(raw, ptr), dtype.ToFloat32(wide, raw, dtype.F16)); err != nil {
			return err
		}
		for i, v := range wide {
			s.weights[from+i] -= float32(0.02 * float64(v) / before)
		}
		from += len(wide)
	}
	if s.scale != before {
		return s.sync.ScaleResidual(s.scale / before)
	}
	return nil
}

// resume goes on with another Gradients.
func (s *soak) resume(ctx context.Context) error {
	state, err := s.sync.State(ctx)
	if err != nil {
		return err
	}
	if err := s.sync.Close(); err != nil {
		return err
	}
	if s.sync, err = ddp.New(ctx, s.rt, s.c, s.grads, s.cfg); err != nil {
		return err
	}
	damaged := slices.Clone(state)
	binary.LittleEndian.PutUint32(damaged[len(damaged)/2:], 1+binary.LittleEndian.Uint32(damaged[len(damaged)/2:]))
	if err := s.sync.Restore(ctx, damaged); !errors.Is(err, comm.ErrArgument) {
		return fmt.Errorf("a damaged state: %w", err)
	}
	s.restored++
	return s.sync.Restore(ctx, state)
}
