package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/kernel"
)

func TestConfig(t *testing.T) {
	rt := cpu.New()
	defer rt.Close()
	comms, err := local.New(1)
	require.NoError(t, err)
	defer comms[0].Close()
	for name, cfg := range map[string]engine.Config{
		"unknown pattern":    {Pattern: "topk", Density: 0.1},
		"no density":         {Pattern: "topkA"},
		"negative density":   {Pattern: "topkA", Density: -0.1},
		"density above 1":    {Pattern: "topkA", Density: 1.1},
		"density NaN":        {Pattern: "topkA", Density: math.NaN()},
		"clip norm":          {ClipNorm: -1},
		"clip norm NaN":      {ClipNorm: math.NaN()},
		"overflow":           {NonFinite: 4},
		"overflow, no undo":  {NonFinite: engine.SkipNonFinite, NoUndo: true},
		"warm-up":            {Schedule: engine.Schedule{WarmupSteps: -1}},
		"scheduled density":  {Schedule: engine.Schedule{Densities: []float64{0.1, 2}, StepsPerEpoch: 1}},
		"no steps per epoch": {Schedule: engine.Schedule{Densities: []float64{0.1}}},
	} {
		_, err := engine.New(rt, comms[0], 10, cfg)
		assert.ErrorIs(t, err, comm.ErrArgument, name)
	}
	for _, n := range []int{-1, math.MaxInt32 + 1} {
		_, err := engine.New(rt, comms[0], n, engine.Config{Pattern: "topkA", Density: 0.1})
		assert.ErrorIs(t, err, comm.ErrArgument, "n = %d", n)
	}
	for name, cfg := range map[string]engine.Config{
		"sparse": {Pattern: "topkA", Density: 0.1}, "clipped": {ClipNorm: 1},
		"judged": {NonFinite: engine.SkipNonFinite},
	} {
		_, err = engine.New(withoutKernels{rt}, comms[0], 1, cfg)
		assert.ErrorIs(t, err, runtime.ErrUnsupported, name)
	}
	dense, err := engine.New(withoutKernels{rt}, comms[0], 3, engine.Config{})
	require.NoError(t, err)
	gradient, err := runtime.FromSlice(rt, []float32{1, 2, 3})
	require.NoError(t, err)
	require.NoError(t, dense.AllReduce(t.Context(), gradient), "dense needs no kernels")
	require.NoError(t, errors.Join(gradient.Free(), dense.Close()))
	_, err = engine.New(nil, comms[0], 1, engine.Config{})
	assert.ErrorIs(t, err, comm.ErrArgument)
	assert.Len(t, sparsity.Patterns(), 11)
	assert.Equal(t, sparsity.Dense, sparsity.Patterns()[0])
}

// withoutKernels is a runtime that cannot do sparse patterns.
type withoutKernels struct{ runtime.Runtime }

// TestManyIndices reduces tensors of 2^25 elements, whose indices float32
// cannot hold exactly. All but a few entries are zero, so every pattern sends
// everything, and results are compared entry by entry.
func TestManyIndices(t *testing.T) {
	if !standin.Extended {
		t.Skip("takes 512 MiB; set TUTTI_EXTENDED")
	}
	const n, ranks, entries, density = 1<<25 + 3, 2, 300, 400.0 / (1 << 25)
	rng := rand.New(rand.NewPCG(1, 25))
	idx := []int32{0, 1<<24 + 1, 1 << 25, n - 2, n - 1}
	seen := map[int32]bool{}
	for _, i := range idx {
		seen[i] = true
	}
	for len(idx) < entries {
		if i := int32(rng.IntN(n)) | 1; i < n && !seen[i] {
			seen[i] = true
			idx = append(idx, i)
		}
	}
	slices.Sort(idx)
	values := make([][]float32, ranks+1)
	for r := range values {
		values[r] = make([]float32, entries)
	}
	for i := range entries {
		for r := range ranks {
			values[r][i] = float32(1 + rng.IntN(1000))
			values[ranks][i] += values[r][i] / ranks
		}
	}

	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
		grad, err := runtime.New(rt, dtype.F32, n)
		if err != nil {
			return err
		}
		defer grad.Free()
		list, err := runtime.FromSlice(rt, idx, entries)
		if err != nil {
			return err
		}
		defer list.Free()
		val, err := runtime.FromSlice(rt, values[c.Rank()], entries)
		if err != nil {
			return err
		}
		defer val.Free()
		for _, pattern := range sparsity.Patterns() {
			if err := reduceFew(ctx, rt, c, pattern, density, grad, list, val, idx, values[ranks]); err != nil {
				return fmt.Errorf("%s: %w", pattern, err)
			}
		}
		return nil
	})
	require.NoError(t, err)
}

// reduceFew reduces a gradient with few entries and compares the result.
func reduceFew(ctx context.Context, rt *cpu.Runtime, c comm.Communicator, pattern string, density float64,
	grad, list, val *runtime.Tensor, wantIdx []int32, want []float32) error {
	if pattern == sparsity.Chunked {
		density = max(density, 4./4096) // some chunks have two of the entries
	}
	s, err := engine.New(rt, c, grad.Len(), engine.Config{Pattern: pattern, Density: density})
	if err != nil {
		return err
	}
	if err := grad.Fill(0); err != nil {
		return err
	}
	g := standin.Pointer(grad)
	entries := kernel.Entries{Idx: standin.Pointer(list), Val: standin.Pointer(val), N: list.Len()}
	if err := rt.Kernels().ScatterAdd(kernel.Array{Ptr: g, N: grad.Len()}, entries, 1); err != nil {
		return err
	}
	if err := s.AllReduce(ctx, grad); err != nil {
		return err
	}
	room := 2 * len(want)
	out, err := rt.Allocate(8*room + 8) // indices, values, length, threshold
	if err != nil {
		return err
	}
	threshold := out + uintptr(8*room) + 4
	hostmem.Slice[float32](threshold, 1)[0] = math.SmallestNonzeroFloat32
	found := kernel.Entries{Idx: out, Val: out + uintptr(4*room), N: room, Len: out + uintptr(8*room)}
	if err := rt.Kernels().Select(kernel.Source{X: g, N: grad.Len()}, threshold, found); err != nil {
		return err
	}
	count := int(hostmem.Slice[int32](found.Len, 1)[0])
	if count != len(want) {
		return fmt.Errorf("result has %d entries, want %d", count, len(want))
	}
	for i, index := range hostmem.Slice[int32](out, count) {
		if value := hostmem.Slice[float32](out+uintptr(4*room), count)[i]; index != wantIdx[i] || value != want[i] {
			return fmt.Errorf("entry %d is %v at %d, want %v at %d", i, value, index, want[i], wantIdx[i])
		}
	}
	return errors.Join(rt.Deallocate(out), s.Close())
}

// TestOkTopkSection3_1_3ThresholdReuse is of Li and Hoefler, PPoPP 2022, section 3.1.3: gradient distributions change
// slowly, so that a threshold serves many steps. It counts how often a pattern selects exactly.
func TestOkTopkSection3_1_3ThresholdReuse(t *testing.T) {
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 10})
	for _, k := range []struct {
		pattern string
		scale   float32 // of the gradient from step 5 on
		want    int32   // exact selections in 12 steps
	}{
		{"topkA", 1, 12},
		{"topkAopt", 1, 2},    // steps 0 and 10
		{"topkAopt", 1000, 3}, // steps 0, 5 and 6: the threshold fits no more, once in each direction
	} {
		rt := &countingKernels{Runtime: cpu.New()}
		err := local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
			cfg := engine.Config{Pattern: k.pattern, Density: 0.05, NoErrorFeedback: true}
			return distributedtest.CheckPattern(ctx, commtest.Rank{Comm: c, Runtime: rt}, cfg, 5000, 12, func(_, step int) []float32 {
				g := standin.Normal(5000, step)
				if step == 5 {
					for i := range g {
						g[i] *= k.scale
					}
				}
				return g
			})
		})
		require.NoError(t, err)
		assert.Equal(t, k.want, rt.exact.Load(), "%s, scale %v", k.pattern, k.scale)
		require.NoError(t, rt.Close())
	}
}

// countingKernels counts exact selections: those that leave a threshold of age 0.
type countingKernels struct {
	*cpu.Runtime
	exact atomic.Int32
}

func (c *countingKernels) Kernels() kernel.Kernels { return counter{c.Runtime.Kernels(), c} }

type counter struct {
	kernel.Kernels
	c *countingKernels
}

func (k counter) TopK(src kernel.Source, count int, dst kernel.Entries, threshold uintptr) error {
	k.c.exact.Add(1)
	return k.Kernels.TopK(src, count, dst, threshold)
}

func (k counter) SelectNear(src kernel.Source, count int, state uintptr, o kernel.Acceptance, dst kernel.Entries, used uintptr) error {
	err := k.Kernels.SelectNear(src, count, state, o, dst, used)
	var age [4]byte
	err = errors.Join(err, k.c.CopyOut(age[:], state+4))
	if age == [4]byte{} {
		k.c.exact.Add(1)
	}
	return err
}

// TestOkTopkSection3_1_2Spread is of Li and Hoefler, PPoPP 2022, section 3.1.2, balance and allgatherv: where one
// partition has most of the largest sums, ranks even them out before they gather them.
func TestOkTopkSection3_1_2Spread(t *testing.T) {
	const ranks, n = 8, 40_000
	gradient := func(rank, step int) []float32 {
		g := standin.Normal(n, rank, step)
		for i := range g[:n/ranks] {
			g[i] *= 1 + 0.5*float32(i%3)
		}
		return g
	}
	// Partitions of equal length, as the first gradient has them, stay.
	tuning.Set(t, tuning.Tuning{RebalanceInterval: 1 << 30, BalanceFactor: 1.5})
	var spreads atomic.Int32
	b := standin.Backend(t, ranks)
	err := b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		r.Comm = &countingSpreads{Communicator: r.Comm, calls: &spreads}
		cfg := engine.Config{Pattern: "oktopk", Density: 0.05}
		return distributedtest.CheckPattern(ctx, r, cfg, n, 8, func(rank, step int) []float32 {
			if step == 0 {
				return standin.Normal(n, rank, step)
			}
			return gradient(rank, step)
		})
	})
	require.NoError(t, err)
	assert.Positive(t, spreads.Load(), "no spreading took place")
}

// countingSpreads counts the groups of AllToAllV, which only spreading uses.
type countingSpreads struct {
	comm.Communicator
	calls *atomic.Int32
}

func (c *countingSpreads) Unwrap() comm.Communicator { return c.Communicator }

func (c *countingSpreads) Group(calls ...comm.Call) error {
	if calls[0].Op == comm.OpAllToAllV {
		c.calls.Add(1)
	}
	return c.Communicator.Group(calls...)
}

// TestPeerFailure checks that a failed exchange is an error, then and later.
func TestPeerFailure(t *testing.T) {
	rt := cpu.New()
	left := errors.New("left")
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		if c.Rank() == 1 {
			return left
		}
		s, err := engine.New(rt, c, 100, engine.Config{Pattern: "gtopk", Density: 0.1})
		if err != nil {
			return err
		}
		g, err := runtime.FromSlice(rt, standin.Normal(100, 1), 100)
		if err != nil {
			return err
		}
		first, second := s.AllReduce(ctx, g), s.AllReduce(ctx, g)
		assert.ErrorIs(t, first, comm.ErrPeerFailed)
		assert.ErrorIs(t, second, comm.ErrPeerFailed)
		return errors.Join(c.Close(), s.Close(), g.Free())
	})
	assert.ErrorIs(t, err, left)
	assert.NoError(t, rt.Close())
}

// TestSelectionFailure checks what a rank's failing kernel does: its own step
// reports it, then and later, and when it leaves, its peers' steps end too.
func TestSelectionFailure(t *testing.T) {
	broken := errors.New("kernel failed")
	for _, pattern := range sparsity.Patterns()[1:] {
		rt := cpu.New()
		err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
			var mine runtime.Runtime = rt
			if c.Rank() == 1 {
				mine = failingKernels{rt, broken}
			}
			s, err := engine.New(mine, c, 3000, engine.Config{Pattern: pattern, Density: 0.1})
			if err != nil {
				return err
			}
			g, err := runtime.FromSlice(mine, standin.Normal(3000, c.Rank()), 3000)
			if err != nil {
				return err
			}
			want := comm.ErrPeerFailed
			if c.Rank() == 1 {
				want = broken
			}
			first := s.AllReduce(ctx, g)
			assert.ErrorIs(t, first, want, "%s, rank %d", pattern, c.Rank())
			assert.ErrorIs(t, s.AllReduce(ctx, g), want, "%s, rank %d, again", pattern, c.Rank())
			return errors.Join(first, c.Close(), s.Close(), g.Free())
		})
		assert.ErrorIs(t, err, broken)
		assert.NoError(t, rt.Close())
	}
}

// failingKernels cannot select.
type failingKernels struct {
	*cpu.Runtime
	err error
}

func (f failingKernels) Kernels() kernel.Kernels { return failing{f.Runtime.Kernels(), f.err} }

type failing struct {
	kernel.Kernels
	err error
}

func (f failing) TopK(kernel.Source, int, kernel.Entries, uintptr) error { return f.err }

func (f failing) TopKChunks(kernel.Source, int, int, kernel.Entries) error { return f.err }

func (f failing) SelectNear(kernel.Source, int, uintptr, kernel.Acceptance, kernel.Entries, uintptr) error {
	return f.err
}

// TestNaNAmongManySums has oktopk cut the sums of all partitions, one of which
// holds nothing but a NaN: every rank sees it in that step.
func TestNaNAmongManySums(t *testing.T) {
	const ranks, n, density = 8, 40_000, 0.025
	b := standin.Backend(t, ranks)
	err := b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		rank := r.Comm.Rank()
		s, err := engine.New(r.Runtime, r.Comm, n, engine.Config{Pattern: "oktopk", Density: density, NoErrorFeedback: true, NonFinite: engine.PassNonFinite})
		if err != nil {
			return err
		}
		first := standin.Normal(n, rank)
		second := make([]float32, n)
		for i := n * 7 / 8; i < n; i++ {
			if i%ranks == rank {
				second[i] = 100
			}
		}
		if rank == ranks-1 {
			second[0] = float32(math.NaN())
		}
		g, err := runtime.FromSlice(r.Runtime, first, n)
		if err != nil {
			return err
		}
		for _, gradient := range [][]float32{first, second} {
			if err := errors.Join(runtime.CopyIn(g, gradient), s.AllReduce(ctx, g)); err != nil {
				return err
			}
		}
		result, err := runtime.ToSlice[float32](g)
		stats, statsErr := s.Stats(ctx)
		assert.Less(t, stats.SelectedGlobal, n/ranks, "the sums were cut")
		assert.True(t, math.IsNaN(float64(result[0])), "rank %d: %v at index 0 (%+v)", rank, result[0], stats)
		return errors.Join(err, statsErr, s.Close(), g.Free())
	})
	require.NoError(t, err)
}

// TestAllNaN checks what a gradient of nothing but NaN leaves behind, and that
// filling the residual with zeros makes a fresh start.
func TestAllNaN(t *testing.T) {
	const ranks, n = 3, 3000
	isNaN := func(x float32) bool { return x != x }
	for _, pattern := range sparsity.Patterns()[1:] {
		b := standin.Backend(t, ranks)
		err := b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
			s, err := engine.New(r.Runtime, r.Comm, n,
				engine.Config{Pattern: pattern, Density: 0.1, NonFinite: engine.PassNonFinite})
			if err != nil {
				return err
			}
			gradient := standin.Normal(n, r.Comm.Rank())
			if r.Comm.Rank() == 1 {
				for i := range gradient {
					gradient[i] = float32(math.NaN())
				}
			}
			g, err := runtime.FromSlice(r.Runtime, gradient, n)
			if err != nil {
				return err
			}
			for step := range 3 { // NaN in the gradient, then in the residual, then nowhere
				if step == 1 {
					gradient = standin.Normal(n, r.Comm.Rank(), step)
				}
				if step == 2 {
					residual, err := s.Residual()
					if err := errors.Join(err, residual.Fill(0)); err != nil {
						return err
					}
				}
				if err := errors.Join(runtime.CopyIn(g, gradient), s.AllReduce(ctx, g)); err != nil {
					return err
				}
				result, err := runtime.ToSlice[float32](g)
				if err != nil {
					return err
				}
				assert.Equal(t, step < 2, slices.ContainsFunc(result, isNaN), "%s, rank %d, step %d", pattern, r.Comm.Rank(), step)
			}
			return errors.Join(s.Close(), g.Free())
		})
		require.NoError(t, err)
	}
}

// TestAllocations checks that steps make no garbage, all ranks together, once
// everything is warm: buffers grow to the largest list, and the backend
// allocates what it keeps for an operation when it first needs it. An
// allocation of every step would show in every round.
func TestAllocations(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a quarter of a minute under the race detector, which allocates itself")
	}
	const ranks, n, rounds, steps = 2, 8000, 6, 40
	tuning.Set(t, tuning.Tuning{TrimFrom: 100})
	rt := cpu.New()
	defer rt.Close()
	grad := standin.Normal(n, 5)
	for i := range 2 * len(sparsity.Patterns()) {
		pattern, values := sparsity.Patterns()[i/2], []string{sparsity.F32, sparsity.I8}[i%2]
		var perStep float64
		err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			s, err := engine.New(rt, c, n, engine.Config{Pattern: pattern, Density: 0.02, Values: values})
			if err != nil {
				return err
			}
			g, err := runtime.New(rt, dtype.F32, n)
			if err != nil {
				return err
			}
			step := func() {
				if err == nil {
					err = runtime.CopyIn(g, grad)
				}
				if err == nil {
					err = s.AllReduce(ctx, g)
				}
			}
			if c.Rank() == 0 {
				perStep = math.Inf(1)
				for range rounds {
					perStep = min(perStep, testing.AllocsPerRun(steps, step))
				}
			} else {
				for range rounds * (steps + 1) { // AllocsPerRun adds one
					step()
				}
			}
			return errors.Join(err, s.Close(), g.Free())
		})
		require.NoError(t, err)
		assert.Zero(t, perStep, "%s %s: allocations per step", pattern, values)
	}
}

// FuzzPatterns interprets bytes as gradients.
func FuzzPatterns(f *testing.F) {
	f.Add(uint8(1), uint8(0), uint8(3), uint8(20), []byte("any bytes are numbers of all magnitudes, some of them not numbers"))
	f.Add(uint8(4), uint8(0), uint8(5), uint8(120), binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(math.NaN()))))
	f.Add(uint8(9), uint8(0), uint8(2), uint8(1), make([]byte, 4000))
	for p := range sparsity.Patterns() {
		data := make([]byte, 0, 1200)
		for i := range 300 {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(i*i%17-8)))
		}
		f.Add(uint8(p), uint8(0), uint8(p), uint8(10*p+3), data)
		f.Add(uint8(p), uint8(1+p), uint8(p), uint8(10*p+3), data)
	}
	f.Fuzz(func(t *testing.T, pattern, values, size, density uint8, data []byte) {
		ranks := 1 + int(size)%6
		words := len(data) / 4
		n := words / ranks
		gradient := func(rank, step int) []float32 {
			g := make([]float32, n)
			for i := range g {
				word := (rank*n + i + step*7) % words
				g[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*word:]))
			}
			return g
		}
		cfg := engine.Config{
			Pattern: sparsity.Patterns()[int(pattern)%len(sparsity.Patterns())],
			Values:  sparsity.Values()[int(values)%len(sparsity.Values())],
			Density: (1 + float64(density)) / 256,
		}
		tuning.Set(t, tuning.Tuning{ThresholdInterval: 2, RebalanceInterval: 2, TrimFrom: 64})
		b := standin.Backend(t, ranks)
		require.NoError(t, b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
			return distributedtest.CheckPattern(ctx, r, cfg, n, 4, gradient)
		}))
	})
}

// TestScaleJump: when the gradients become a thousand times as small or as large,
// oktopk's result has about k entries in that step already, within its volume.
func TestScaleJump(t *testing.T) {
	const ranks, n, density, jump = 4, 40_000, 0.02, 5
	const k = int(n * density)
	for _, factor := range []float32{1e-3, 1e3} {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			// Without error feedback, so that only the gradients count.
			s, err := engine.New(rt, c, n, engine.Config{Pattern: "oktopk", Density: density, NoErrorFeedback: true})
			if err != nil {
				return err
			}
			g, err := runtime.New(rt, dtype.F32, n)
			if err != nil {
				return err
			}
			for step := range 2 * jump {
				x := standin.Normal(n, c.Rank(), step)
				for i := range x {
					if step >= jump {
						x[i] *= factor
					}
				}
				if err := errors.Join(runtime.CopyIn(g, x), s.AllReduce(ctx, g)); err != nil {
					return err
				}
				stats, err := s.Stats(ctx)
				if err != nil {
					return err
				}
				assert.GreaterOrEqual(t, stats.SelectedGlobal, k/4, "step %d, times %v", step, factor)
				if step > 0 {
					assert.LessOrEqual(t, stats.SentElements, int64(6*k*(ranks-1)/ranks), "step %d, times %v", step, factor)
				}
			}
			return errors.Join(s.Close(), g.Free())
		})
	}
}
