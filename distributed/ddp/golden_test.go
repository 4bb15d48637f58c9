package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"math"
	goruntime "runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// bucketCase is one configuration of gradient buckets whose steps are recorded.
type bucketCase struct {
	name   string
	cfg    ddp.Config
	types  [2]dtype.DType // of even and odd parameters
	ranks  int
	device string // host, streams or fork
}

func bucketCases() (all []bucketCase) {
	type policy struct {
		name string
		cfg  ddp.Config
		only string // pattern; "": all
	}
	policies := []policy{
		{"plain", ddp.Config{}, ""},
		{"drop", ddp.Config{Config: sparse.Config{NonFinite: sparse.SkipNonFinite}}, ""},
		{"no undo", ddp.Config{Config: sparse.Config{NoUndo: true}}, ""},
		{"clip global", ddp.Config{Config: sparse.Config{ClipNorm: 3, ClipGlobal: true}}, ""},
		{"clip local", ddp.Config{Config: sparse.Config{ClipNorm: 3}}, ""},
		{"momentum", ddp.Config{Config: sparse.Config{Momentum: 0.5}}, ""},
		{"views", ddp.Config{BucketViews: true}, ""},
		{"uneven", ddp.Config{Uneven: true}, ""},
		{"wire", ddp.Config{Wire: dtype.BF16}, sparse.Dense},
		{"sum", ddp.Config{Sum: true}, sparse.Dense},
	}
	for _, pattern := range []string{sparse.Dense, sparse.TopkA, sparse.Gtopk, sparse.Oktopk, sparse.GaussiankSA} {
		for _, p := range policies {
			if p.only != "" && p.only != pattern {
				continue
			}
			cfg := p.cfg
			cfg.Pattern = pattern
			cfg.Density = 0.1
			cfg.BucketBytes = 24 << 10
			cfg.DenseUpTo = 64
			for _, device := range []string{"host", "streams", "fork"} {
				types := [2]dtype.DType{dtype.F32, dtype.F32}
				all = append(all, bucketCase{fmt.Sprintf("%s, %s, %s, 2 ranks", pattern, p.name, device), cfg, types, 2, device})
				types[1] = dtype.BF16
				all = append(all, bucketCase{fmt.Sprintf("%s, %s, %s, mixed, 3 ranks", pattern, p.name, device), cfg, types, 3, device})
			}
		}
	}
	return all
}

// TestBucketsGolden is TestSparseGolden for gradients in buckets.
func TestBucketsGolden(t *testing.T) {
	if goruntime.GOARCH != "amd64" || testing.Short() {
		t.Skip("recorded on amd64, and too much for the race detector")
	}
	var lines []string
	for i, c := range bucketCases() {
		if !standin.Sampled(i) {
			lines = append(lines, "")
			continue
		}
		all := standin.NewHashes(c.ranks)
		require.NoError(t, local.Run(t.Context(), c.ranks, func(ctx context.Context, cc comm.Communicator) error {
			memory := standin.Borrow()
			var rt runtime.Runtime = memory
			switch c.device {
			case "streams":
				rt, cc = standin.NewOnStream(memory), standin.NewOrdered(ctx, cc)
			case "fork":
				rt, cc = standin.NewForking(memory), standin.NewByEvents(ctx, cc)
			}
			if err := c.run(ctx, cc, rt, all[cc.Rank()]); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			return standin.Return(memory)
		}), c.name)
		lines = append(lines, all.Line(c.name))
	}
	standin.Golden(t, "testdata/steps.golden", lines)
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
	g, err := ddp.New(ctx, rt, cc, params, c.cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(g.Close(), err) }()
	grads := params
	if c.cfg.BucketViews {
		grads = g.Views()
	}
	load := func(i, step int) error {
		t := grads[i]
		raw := make([]byte, t.Bytes())
		values := standin.Normal(t.Len(), cc.Rank(), step, i)
		if step == 2 && i == 3 && cc.Rank() == 1 && c.cfg.NonFinite == sparse.SkipNonFinite {
			values[5] = float32(math.NaN())
		}
		return errors.Join(dtype.FromFloat32(raw, t.DType(), values), rt.CopyIn(standin.Pointer(t), raw))
	}
	results := func(step int) error {
		for i := range grads {
			if err := standin.AddTensor(h, rt, g.Result(i)); err != nil {
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
			if step == 4 && j == 5 {
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
		return g.Join(ctx, grads, func() error { return results(0) })
	}
	return nil
}
