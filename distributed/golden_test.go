package distributed_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"hash"
	"math"
	"os"
	goruntime "runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var update = flag.Bool("update", false, "record the hashes of all steps anew")

// golden compares lines of a name and a hash with those that are recorded in a file. Their
// inputs are made by floating-point code of which other processors may fuse operations.
func golden(t *testing.T, file string, got []string) {
	t.Helper()
	text := strings.Join(got, "\n") + "\n"
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	recorded, err := os.ReadFile(file)
	require.NoError(t, err)
	if text == string(recorded) {
		return
	}
	want := strings.Split(strings.TrimSuffix(string(recorded), "\n"), "\n")
	assert.Len(t, got, len(want))
	for i := range min(len(got), len(want)) {
		assert.Equal(t, want[i], got[i])
	}
}

// hashes are those of what each rank has after its steps.
type hashes []hash.Hash

func newHashes(ranks int) hashes {
	all := make(hashes, ranks)
	for r := range all {
		all[r] = sha256.New()
	}
	return all
}

// line is one of all ranks.
func (h hashes) line(name string) string {
	all := sha256.New()
	for _, one := range h {
		all.Write(one.Sum(nil))
	}
	return fmt.Sprintf("%s %x", name, all.Sum(nil)[:8])
}

// addTensor adds the bits of a tensor.
func addTensor(h hash.Hash, rt runtime.Runtime, t *runtime.Tensor) error {
	raw := make([]byte, t.Bytes())
	err := rt.CopyOut(raw, pointer(t))
	h.Write(raw)
	return err
}

// sparseCase is one configuration whose steps are recorded.
type sparseCase struct {
	name    string
	cfg     distributed.Config
	dt      dtype.DType
	ranks   int
	steps   int
	streams bool
}

func sparseCases() (all []sparseCase) {
	policies := []struct {
		name string
		cfg  distributed.Config
	}{
		{"drop", distributed.Config{}},
		{"error", distributed.Config{Overflow: distributed.OverflowError}},
		{"pass", distributed.Config{Overflow: distributed.OverflowPass}},
		{"no undo", distributed.Config{NoUndo: true}},
		{"forget", distributed.Config{NoErrorFeedback: true}},
		{"momentum", distributed.Config{Momentum: 0.9}},
		{"clip local", distributed.Config{ClipNorm: 1}},
		{"clip global", distributed.Config{ClipNorm: 1, Clip: distributed.ClipGlobal}},
		{"schedule", distributed.Config{Schedule: distributed.Schedule{WarmupSteps: 1, Densities: []float64{0.3, 0, 0.25}, StepsPerEpoch: 1}}},
		{"in place", distributed.Config{InPlace: true, NoUndo: true}},
	}
	for _, pattern := range distributed.Patterns() {
		add := func(policy string, cfg distributed.Config, dt dtype.DType, density float64, ranks, steps int, streams bool) {
			if cfg.InPlace && (dt != dtype.F32 || pattern == distributed.Dense) {
				return
			}
			cfg.Pattern, cfg.Density = pattern, density
			if cfg.Overflow == 0 && !cfg.NoUndo {
				cfg.Overflow = distributed.OverflowDrop
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
		for _, ranks := range []int{1, 2, 3, 5} {
			for _, streams := range []bool{false, true} {
				add("drop", distributed.Config{}, dtype.F32, 0.01, ranks, 5, streams)
			}
		}
		add("drop", distributed.Config{}, dtype.BF16, 0.2, 5, 5, true)
		add("pass", distributed.Config{Overflow: distributed.OverflowPass}, dtype.F32, 0.2, 2, 40, true)
		add("pass", distributed.Config{Overflow: distributed.OverflowPass}, dtype.F32, 0.2, 2, 40, false)
	}
	return all
}

// TestSparseGolden compares the bits of results, residuals and picks of every pattern, type and
// policy with those that are recorded: what changes how a step is made must not change these.
func TestSparseGolden(t *testing.T) {
	if goruntime.GOARCH != "amd64" {
		t.Skip("recorded on amd64")
	}
	var lines []string
	for _, c := range sparseCases() {
		all := newHashes(c.ranks)
		world(t, c.ranks, func(ctx context.Context, c0 comm.Communicator, rt *cpu.Runtime) error {
			return c.run(ctx, c0, rt, all[c0.Rank()])
		})
		lines = append(lines, all.line(c.name))
	}
	golden(t, "testdata/sparse.golden", lines)
}

func (c sparseCase) run(ctx context.Context, cc comm.Communicator, memory *cpu.Runtime, h hash.Hash) (err error) {
	const n = 4099
	var rt runtime.Runtime = memory
	if c.streams {
		rt = newNoticing(memory, new(waits), &stumbling{Kernels: memory.Kernels()}, nil)
		cc = newOrdered(ctx, cc)
	}
	s, err := distributed.NewSparse(rt, cc, n, c.cfg)
	if err != nil {
		return err
	}
	t, err := runtime.New(rt, c.dt, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close(), t.Free()) }()
	for step := range c.steps {
		g := normal(n, cc.Rank(), step)
		for i := range n / 8 { // where ranks differ in what is large
			g[(i+cc.Rank()*n/cc.WorldSize())%n] *= 4
		}
		overflows := step == 2 && c.cfg.Overflow > distributed.OverflowPass
		if overflows && cc.Rank() == cc.WorldSize()-1 {
			g[17] = float32(math.Inf(1))
		}
		if c.cfg.InPlace && step > 0 { // the backward pass adds to what is left
			left, err := runtime.ToSlice[float32](t)
			if err != nil {
				return err
			}
			for i := range g {
				g[i] += left[i]
			}
		}
		raw := make([]byte, t.Bytes())
		if err := errors.Join(dtype.FromFloat32(raw, c.dt, g), memory.CopyIn(pointer(t), raw)); err != nil {
			return err
		}
		err := s.AllReduce(ctx, t)
		if overflows && errors.Is(err, distributed.ErrOverflow) && c.cfg.Overflow == distributed.OverflowError {
			h.Write([]byte("overflow"))
			continue
		}
		if err != nil {
			return fmt.Errorf("%s, step %d: %w", c.name, step, err)
		}
		if err := addTensor(h, rt, t); err != nil {
			return err
		}
		if c.cfg.Pattern != distributed.Dense && !c.cfg.InPlace {
			residual, err := s.Residual()
			if err != nil {
				return err
			}
			if err := addTensor(h, rt, residual); err != nil {
				return err
			}
		}
		stats, err := s.Stats(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintln(h, stats.Step, stats.Pattern, stats.Skipped, stats.K, stats.PickedLocal, stats.PickedGlobal,
			math.Float32bits(stats.Threshold), math.Float32bits(stats.GlobalThreshold), stats.SentElements, stats.SentBytes)
		picks, err := s.Picks()
		if err != nil {
			return err
		}
		indices, values, err := s.Read(ctx, picks)
		h.Write(hostmem.Bytes(indices))
		h.Write(hostmem.Bytes(values))
		if err != nil {
			return err
		}
	}
	return nil
}

// bucketCase is one configuration of gradient buckets whose steps are recorded.
type bucketCase struct {
	name   string
	cfg    distributed.GradientConfig
	types  [2]dtype.DType // of even and odd parameters
	ranks  int
	device string // host, streams or branch
}

func bucketCases() (all []bucketCase) {
	type policy struct {
		name string
		cfg  distributed.GradientConfig
		only string // pattern; "": all
	}
	policies := []policy{
		{"plain", distributed.GradientConfig{}, ""},
		{"drop", distributed.GradientConfig{Config: distributed.Config{Overflow: distributed.OverflowDrop}}, ""},
		{"no undo", distributed.GradientConfig{Config: distributed.Config{NoUndo: true}}, ""},
		{"clip global", distributed.GradientConfig{Config: distributed.Config{ClipNorm: 3, Clip: distributed.ClipGlobal}}, ""},
		{"clip local", distributed.GradientConfig{Config: distributed.Config{ClipNorm: 3}}, ""},
		{"momentum", distributed.GradientConfig{Config: distributed.Config{Momentum: 0.5}}, ""},
		{"views", distributed.GradientConfig{BucketViews: true}, ""},
		{"uneven", distributed.GradientConfig{Uneven: true}, ""},
		{"wire", distributed.GradientConfig{Wire: dtype.BF16}, distributed.Dense},
		{"sum", distributed.GradientConfig{Sum: true}, distributed.Dense},
		{"rebuild", distributed.GradientConfig{Rebuild: true}, distributed.Dense},
		{"per bucket", distributed.GradientConfig{PerBucket: func(bucket, _ int) distributed.Config {
			return distributed.Config{Pattern: []string{distributed.Dense, distributed.TopkA, distributed.Oktopk}[bucket%3], Density: 0.1}
		}}, distributed.TopkA},
	}
	for _, pattern := range []string{distributed.Dense, distributed.TopkA, distributed.Gtopk, distributed.Oktopk, distributed.GaussiankSA} {
		for _, p := range policies {
			if p.only != "" && p.only != pattern {
				continue
			}
			cfg := p.cfg
			cfg.Pattern, cfg.Density, cfg.BucketBytes, cfg.FirstBucketBytes, cfg.DenseUpTo = pattern, 0.1, 24<<10, 8<<10, 64
			for _, device := range []string{"host", "streams", "branch"} {
				types := [2]dtype.DType{dtype.F32, dtype.F32}
				all = append(all, bucketCase{fmt.Sprintf("%s, %s, %s, 2 ranks", pattern, p.name, device), cfg, types, 2, device})
				types[1] = dtype.BF16
				all = append(all, bucketCase{fmt.Sprintf("%s, %s, %s, mixed, 3 ranks", pattern, p.name, device), cfg, types, 3, device})
			}
		}
	}
	return all
}

// TestBucketsGolden is that of gradients in buckets.
func TestBucketsGolden(t *testing.T) {
	if goruntime.GOARCH != "amd64" {
		t.Skip("recorded on amd64")
	}
	var lines []string
	for _, c := range bucketCases() {
		all := newHashes(c.ranks)
		require.NoError(t, local.Run(t.Context(), c.ranks, func(ctx context.Context, cc comm.Communicator) error {
			memory := cpu.New()
			var rt runtime.Runtime = memory
			switch c.device {
			case "streams":
				rt, cc = newOnStream(memory), newOrdered(ctx, cc)
			case "branch":
				rt, cc = newBranching(memory), newByEvents(ctx, cc)
			}
			if err := c.run(ctx, cc, rt, all[cc.Rank()]); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			return memory.Close()
		}), c.name)
		lines = append(lines, all.line(c.name))
	}
	golden(t, "testdata/buckets.golden", lines)
}

func (c bucketCase) run(ctx context.Context, cc comm.Communicator, rt runtime.Runtime, h hash.Hash) (err error) {
	var params []*runtime.Tensor
	defer func() {
		for _, p := range params {
			err = errors.Join(err, p.Free())
		}
	}()
	for i, shape := range [][]int{{40, 50}, {50}, {3000}, {20, 10}, {10}, {60, 60}, {7, 7, 7}, {100, 30}} {
		p, err := runtime.New(rt, c.types[i%2], shape...)
		if err != nil {
			return err
		}
		params = append(params, p)
	}
	g, err := distributed.NewGradientSync(ctx, rt, cc, params, c.cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(g.Close(), err) }()
	grads := params
	if c.cfg.BucketViews {
		grads = g.Gradients()
	}
	load := func(i, step int) error {
		t := grads[i]
		raw := make([]byte, t.Bytes())
		values := normal(t.Len(), cc.Rank(), step, i)
		if step == 2 && i == 3 && cc.Rank() == 1 && c.cfg.Overflow == distributed.OverflowDrop {
			values[5] = float32(math.NaN())
		}
		return errors.Join(dtype.FromFloat32(raw, t.DType(), values), rt.CopyIn(pointer(t), raw))
	}
	results := func(step int) error {
		for i := range grads {
			if err := addTensor(h, rt, g.Result(i)); err != nil {
				return err
			}
		}
		stats, err := g.Stats(ctx)
		fmt.Fprintln(h, stats.Step, stats.Skipped, stats.Buckets, stats.SentElements, stats.SentBytes, g.Buckets(), g.Patterns())
		return err
	}
	steps := 6
	if c.cfg.Uneven {
		steps -= cc.Rank()
	}
	for step := range steps {
		if step == 3 {
			for i := range grads {
				if err := errors.Join(load(i, 100), g.Accumulate(i, grads[i])); err != nil {
					return err
				}
			}
		}
		for i := range grads {
			j := (3*i + step) % len(grads) // not in the order of the buckets
			if step == 4 && j == 5 && !c.cfg.Rebuild {
				continue
			}
			if err := errors.Join(load(j, step), g.Ready(ctx, j, grads[j])); err != nil {
				return err
			}
		}
		if err := errors.Join(g.Wait(ctx), results(step)); err != nil {
			return err
		}
	}
	if c.cfg.Uneven {
		return g.Join(ctx, func() error { return results(0) })
	}
	return nil
}
