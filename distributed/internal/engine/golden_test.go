package engine_test

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"math"
	goruntime "runtime"
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// sparseCase is one configuration whose steps are recorded.
type sparseCase struct {
	name    string
	cfg     engine.Config
	dt      dtype.DType
	ranks   int
	steps   int
	streams bool
}

func sparseCases() (all []sparseCase) {
	policies := []struct {
		name string
		cfg  engine.Config
	}{
		{"drop", engine.Config{}},
		{"error", engine.Config{NonFinite: engine.FailNonFinite}},
		{"pass", engine.Config{NonFinite: engine.PassNonFinite}},
		{"no undo", engine.Config{NoUndo: true}},
		{"forget", engine.Config{NoErrorFeedback: true}},
		{"momentum", engine.Config{Momentum: 0.9}},
		{"clip local", engine.Config{ClipNorm: 1}},
		{"clip global", engine.Config{ClipNorm: 1, ClipGlobal: true}},
		{"schedule", engine.Config{Schedule: engine.Schedule{WarmupSteps: 1, Densities: []float64{0.3, 0, 0.25}, StepsPerEpoch: 1}}},
	}
	for _, pattern := range sparsity.Patterns() {
		add := func(policy string, cfg engine.Config, dt dtype.DType, density float64, ranks, steps int, streams bool) {
			cfg.Pattern, cfg.Density = pattern, density
			if cfg.NonFinite == 0 && !cfg.NoUndo {
				cfg.NonFinite = engine.SkipNonFinite
			}
			name := fmt.Sprintf("%s, %s, %v, density %v, %d ranks", pattern, policy, dt, density, ranks)
			if streams {
				name += ", streams"
			}
			all = append(all, sparseCase{name, cfg, dt, ranks, steps, streams})
		}
		for _, p := range policies {
			for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
				add(p.name, p.cfg, dt, 0.2, 2, 5, false)
			}
			for _, streams := range []bool{false, true} {
				add(p.name, p.cfg, dtype.F32, 0.2, 3, 7, streams)
			}
		}
		for i, values := range sparsity.Values()[1:] {
			cfg := engine.Config{Values: values}
			add(values, cfg, dtype.F32, 0.2, 3, 5, false)
			add(values, cfg, []dtype.DType{dtype.F16, dtype.BF16}[i%2], 0.2, 2, 5, true)
			cfg.Momentum = 0.9
			add(values+", momentum", cfg, dtype.F32, 0.2, 3, 5, i%2 == 0)
		}
		for _, ranks := range []int{1, 2, 3, 5} {
			for _, streams := range []bool{false, true} {
				add("drop", engine.Config{}, dtype.F32, 0.01, ranks, 5, streams)
			}
		}
		add("drop", engine.Config{}, dtype.BF16, 0.2, 5, 5, true)
		add("pass", engine.Config{NonFinite: engine.PassNonFinite}, dtype.F32, 0.2, 2, 40, true)
		add("pass", engine.Config{NonFinite: engine.PassNonFinite}, dtype.F32, 0.2, 2, 40, false)
	}
	return all
}

// TestSparseGolden compares the bits of results, residuals and selected entries of every pattern, type and
// policy with those that are recorded: what changes how a step is made must not change these.
func TestSparseGolden(t *testing.T) {
	if goruntime.GOARCH != "amd64" || testing.Short() {
		t.Skip("recorded on amd64, and too much for the race detector")
	}
	tuning.Set(t, tuning.Tuning{TrimFrom: 1000})
	var lines []string
	for i, c := range sparseCases() {
		if !standin.Sampled(i) {
			lines = append(lines, "")
			continue
		}
		all := standin.NewHashes(c.ranks)
		standin.World(t, c.ranks, func(ctx context.Context, c0 comm.Communicator, rt *cpu.Runtime) error {
			return c.run(ctx, c0, rt, all[c0.Rank()])
		})
		lines = append(lines, all.Line(c.name))
	}
	standin.Golden(t, "testdata/steps.golden", lines)
}

func (c sparseCase) run(ctx context.Context, cc comm.Communicator, memory *cpu.Runtime, h hash.Hash) (err error) {
	const n = 4099
	var rt runtime.Runtime = memory
	if c.streams {
		rt = standin.NewCopying(memory, new(standin.Waits), &standin.Stumbling{Kernels: memory.Kernels()}, nil)
		cc = standin.NewOrdered(ctx, cc)
	}
	s, err := engine.New(rt, cc, n, c.cfg)
	if err != nil {
		return err
	}
	t, err := runtime.New(rt, c.dt, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close(), t.Free()) }()
	for step := range c.steps {
		g := standin.Normal(n, cc.Rank(), step)
		for i := range n / 8 { // where ranks differ in what is large
			g[(i+cc.Rank()*n/cc.WorldSize())%n] *= 4
		}
		overflows := step == 2 && c.cfg.NonFinite > engine.PassNonFinite
		if overflows && cc.Rank() == cc.WorldSize()-1 {
			g[17] = float32(math.Inf(1))
		}
		raw := make([]byte, t.Bytes())
		if err := errors.Join(dtype.FromFloat32(raw, c.dt, g), memory.CopyIn(standin.Pointer(t), raw)); err != nil {
			return err
		}
		err := s.AllReduce(ctx, t)
		if overflows && errors.Is(err, engine.ErrNonFinite) && c.cfg.NonFinite == engine.FailNonFinite {
			h.Write([]byte("overflow"))
			continue
		}
		if err != nil {
			return fmt.Errorf("%s, step %d: %w", c.name, step, err)
		}
		if err := standin.AddTensor(h, rt, t); err != nil {
			return err
		}
		if c.cfg.Pattern != sparsity.Dense || c.cfg.Values != "" {
			residual, err := s.Residual()
			if err != nil {
				return err
			}
			if err := standin.AddTensor(h, rt, residual); err != nil {
				return err
			}
		}
		stats, err := s.Stats(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintln(h, stats.Step, stats.Pattern, stats.Skipped, stats.K, stats.SelectedLocal, stats.SelectedGlobal,
			math.Float32bits(stats.Threshold), math.Float32bits(stats.GlobalThreshold), stats.SentElements, stats.SentBytes)
		selected, err := s.SelectedEntries()
		if err != nil {
			return err
		}
		indices, values, err := s.Read(ctx, selected)
		h.Write(hostmem.Bytes(indices))
		h.Write(hostmem.Bytes(values))
		if err != nil {
			return err
		}
	}
	return nil
}
