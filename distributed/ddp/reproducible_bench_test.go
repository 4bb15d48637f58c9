package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// BenchmarkReproducible alternates plain and reproducible steps of two ranks, and reports the medians of both and their
// ratio, and the ratio of the fastest, which other work on the machine changes least: with one gradient, and with
// gradients of 256 KiB; divided by a power of two, and by another number.
func BenchmarkReproducible(b *testing.B) {
	for _, bytes := range []int{64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20} {
		for _, pieces := range []int{1, max(1, bytes>>18)} {
			for _, contributions := range []int{2, 12} {
				b.Run(fmt.Sprintf("bytes=%d/gradients=%d/of=%d", bytes, pieces, contributions), func(b *testing.B) {
					require.NoError(b, compareSteps(b, bytes/4/pieces, pieces, contributions))
				})
			}
		}
	}
}

// compareSteps compares steps of gradients of n elements each.
func compareSteps(b *testing.B, n, gradients, contributions int) error {
	configs := []ddp.Config{{}, {Reproducible: contributions}}
	return local.Run(b.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		var params []*runtime.Tensor
		var initial [][]float32
		var syncs []*ddp.Gradients
		for i := range gradients {
			t, err := runtime.New(rt, dtype.F32, n)
			if err != nil {
				return err
			}
			params = append(params, t)
			initial = append(initial, standin.Normal(n, 1, i))
		}
		for _, cfg := range configs {
			g, err := ddp.New(ctx, rt, c, params, cfg)
			if err != nil {
				return err
			}
			syncs = append(syncs, g)
		}
		times := make([][]time.Duration, len(syncs))
		for i := range max(b.N, 3) {
			for j, g := range syncs {
				for k, t := range params {
					if err := runtime.CopyIn(t, initial[k]); err != nil {
						return err
					}
				}
				if err := c.Barrier(ctx); err != nil {
					return err
				}
				started := time.Now()
				if err := g.ReduceAll(ctx, params); err != nil {
					return err
				}
				if i > 0 {
					times[j] = append(times[j], time.Since(started))
				}
			}
		}
		if c.Rank() == 0 {
			for _, t := range times {
				slices.Sort(t)
			}
			middle := len(times[0]) / 2
			plain := float64(times[0][middle].Nanoseconds())
			fixed := float64(times[1][middle].Nanoseconds())
			b.ReportMetric(plain/1000, "plain-µs")
			b.ReportMetric(fixed/1000, "fixed-µs")
			b.ReportMetric(fixed/plain, "ratio")
			b.ReportMetric(float64(times[1][0])/float64(times[0][0]), "fastest-ratio")
			b.ReportMetric(0, "ns/op")
		}
		var err error
		for _, g := range syncs {
			err = errors.Join(err, g.Close())
		}
		for _, t := range params {
			err = errors.Join(err, t.Free())
		}
		return errors.Join(err, rt.Close())
	})
}
