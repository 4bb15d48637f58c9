package outer_test

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// BenchmarkHiddenShare measures which share of the time of exchanges four fragments hide behind steps that submit
// kernels: on processors, on one GPU between four ranks through the memory of the host, and on all GPUs over NCCL.
func BenchmarkHiddenShare(b *testing.B) {
	b.Run("host", func(b *testing.B) {
		share(b, 1<<20, 12, func(ctx context.Context, body func(context.Context, comm.Communicator, runtime.Runtime) error) error {
			return local.Run(ctx, 4, func(ctx context.Context, c comm.Communicator) error { return body(ctx, c, cpu.New()) })
		})
	})
	gpus, err := cuda.Count()
	b.Run("one GPU", func(b *testing.B) {
		if err != nil {
			b.Skip(err)
		}
		share(b, 16<<20, 200, func(ctx context.Context, body func(context.Context, comm.Communicator, runtime.Runtime) error) error {
			return local.Run(ctx, 4, func(ctx context.Context, c comm.Communicator) error {
				rt, err := cuda.Open(0)
				if err != nil {
					return err
				}
				if c, err = staged.New(c, rt, cpu.New()); err != nil {
					return err
				}
				return errors.Join(body(ctx, c, rt), c.Close(), rt.Close())
			})
		})
	})
	b.Run("GPUs", func(b *testing.B) {
		if err != nil || gpus < 2 {
			b.Skip("needs two GPUs")
		}
		share(b, 64<<20, 100, func(ctx context.Context, body func(context.Context, comm.Communicator, runtime.Runtime) error) error {
			all := make([]*cuda.Runtime, gpus)
			for i := range all {
				var err error
				if all[i], err = cuda.Open(i); err != nil {
					return err
				}
			}
			world, err := nccl.InProcess(ctx, all)
			errs := make([]error, gpus)
			var wg sync.WaitGroup
			for i, c := range world {
				wg.Go(func() { errs[i] = errors.Join(body(ctx, c, all[i]), c.Close(), all[i].Close()) })
			}
			wg.Wait()
			return errors.Join(append(errs, err)...)
		})
	})
}

// share times steps alone, with exchanges that they wait for, and with a Delay. A step submits this number of passes
// over n elements.
func share(b *testing.B, n, passes int, world func(context.Context, func(context.Context, comm.Communicator, runtime.Runtime) error) error) {
	const every, rounds = 16, 3
	for _, cfg := range []sparse.Config{{}, {Values: sparse.I4}, {Pattern: sparse.Chunked, Density: 0.05, Values: sparse.I2}} {
		b.Run(cmp.Or(cfg.Pattern, sparse.Dense)+" "+cfg.Values, func(b *testing.B) {
			var took [3]time.Duration
			for range b.N {
				for kind, o := range []outer.Config{{Every: 1 << 30}, {Every: every, Fragments: 4}, {Every: every, Fragments: 4, Delay: every / 4}} {
					o.Reduce = ddp.Config{Config: cfg, DenseUpTo: -1}
					require.NoError(b, world(b.Context(), func(ctx context.Context, c comm.Communicator, rt runtime.Runtime) error {
						model, err := runtime.New(rt, dtype.F32, n/1024, 1024)
						require.NoError(b, err)
						gradient, err := runtime.New(rt, dtype.F32, n)
						require.NoError(b, err)
						x, err := model.Ptr()
						require.NoError(b, err)
						g, err := gradient.Ptr()
						require.NoError(b, err)
						kernels, err := kernel.Lookup(rt)
						require.NoError(b, err)
						require.NoError(b, errors.Join(model.Fill(1), gradient.Fill(1e-6)))
						l, err := outer.New(ctx, rt, c, []*runtime.Tensor{model}, o)
						require.NoError(b, err)
						step := func() {
							for range passes {
								require.NoError(b, kernels.Accumulate(kernel.Source{X: x, N: n, Grad: g, DType: dtype.F32}))
							}
							require.NoError(b, rt.Synchronize(ctx)) // as for a loss
							require.NoError(b, l.Step(ctx))
						}
						for range every + every/2 { // the first exchanges compare and allocate
							step()
						}
						require.NoError(b, c.Barrier(ctx))
						start := time.Now()
						for range every * rounds {
							step()
						}
						require.NoError(b, errors.Join(rt.Synchronize(ctx), c.Barrier(ctx)))
						if c.Rank() == 0 {
							took[kind] += time.Since(start) / (every * rounds)
						}
						return errors.Join(l.Close(), model.Free(), gradient.Free())
					}))
				}
			}
			each := func(kind int) float64 { return took[kind].Seconds() * 1e3 / float64(b.N) }
			b.ReportMetric(each(0), "ms/step-alone")
			b.ReportMetric(each(1), "ms/step-waiting")
			b.ReportMetric(each(2), "ms/step-hiding")
			b.ReportMetric(100*(each(1)-each(2))/(each(1)-each(0)), "%hidden")
			b.ReportMetric(0, "ns/op")
		})
	}
}
