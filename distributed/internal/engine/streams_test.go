package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// watched is a rank's communicator that does.
type watched struct {
	standin.Ordered
	w *standin.Waits
}

func (c watched) Sync(ctx context.Context) error {
	c.w.Comm.Add(1)
	return c.Ordered.Sync(ctx)
}

func (c watched) Group(calls ...comm.Call) error {
	if calls[0].Op == comm.OpAllGatherV {
		c.w.Sized.Add(1)
	}
	return c.Ordered.Group(calls...)
}

// With streams oktopk pads messages, so that the host waits once in a step: the
// results have the bits that they have without, whatever the lengths of the lists.
func TestOktopkWithStreams(t *testing.T) {
	const steps = 48
	n := 30_000
	if standin.Extended {
		n = 60_000
	}
	rt := cpu.New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	gradients := map[string]func(rank, size, step int) []float32{
		"spread": func(rank, size, step int) []float32 { return standin.Normal(n, rank, step) },
		"own cluster": func(rank, size, step int) []float32 {
			g := standin.Normal(n, rank, step)
			for i := range g {
				if i*size/n != rank {
					g[i] /= 1000
				}
			}
			return g
		},
		"wandering": func(rank, size, step int) []float32 {
			g := standin.Normal(n, rank, step)
			for i := range g {
				if i*6/n != step/5%6 {
					g[i] /= 1000
				}
			}
			return g
		},
		"overflow": func(rank, size, step int) []float32 {
			g := standin.Normal(n, rank, step)
			if rank == 0 && step%7 == 3 {
				g[step] = float32(math.Inf(1))
			}
			return g
		},
	}
	worlds := []int{2, 3, 5}
	if testing.Short() {
		worlds = []int{3}
	}
	// Unless extended, each kind of gradients meets two numbers of ranks, and most of them both
	// ways of keeping a residual.
	undone := map[string]int{"spread": 3, "own cluster": 5, "wandering": 2, "overflow": 3}
	kept := map[string]int{"spread": 5, "own cluster": 2, "wandering": 3}
	for name, gradient := range gradients {
		for _, ranks := range worlds {
			for _, noUndo := range []bool{false, true} {
				if noUndo && name == "overflow" || testing.Short() && noUndo ||
					!standin.Extended && !testing.Short() && ranks != map[bool]int{false: undone[name], true: kept[name]}[noUndo] {
					continue
				}
				t.Run(fmt.Sprintf("%s, %d ranks, no undo %v", name, ranks, noUndo), func(t *testing.T) {
					tuning.Set(t, tuning.Tuning{ThresholdInterval: 8, RebalanceInterval: 16})
					cfg := engine.Config{Pattern: sparsity.Oktopk, Density: 0.05, NoUndo: noUndo}
					var sent, once, ahead atomic.Int64 // elements of all steps; steps in which a host waited once; and when all was sent
					run := func(streams bool) [][]uint64 {
						results := make([][]uint64, ranks)
						require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
							w := new(standin.Waits)
							var memory runtime.Runtime = rt
							if streams {
								memory = standin.NewWaitedFor(rt, w)
								c = watched{standin.NewOrdered(ctx, c), w}
							}
							s, err := engine.New(memory, c, n, cfg)
							if err != nil {
								return err
							}
							tensor, err := runtime.New(memory, dtype.F32, n)
							if err != nil {
								return err
							}
							for step := range steps {
								if step == steps/2+1 { // goes on from what was saved
									state, err := s.State(ctx)
									if err != nil {
										return err
									}
									if err := s.Close(); err != nil {
										return err
									}
									if s, err = engine.New(memory, c, n, cfg); err != nil {
										return err
									}
									if err := s.Restore(ctx, state); err != nil {
										return err
									}
								}
								if err := runtime.CopyIn(tensor, gradient(c.Rank(), ranks, step)); err != nil {
									return err
								}
								w.Comm.Store(0)
								w.Copies.Store(0)
								w.Sized.Store(0)
								if err := s.AllReduce(ctx, tensor); err != nil {
									return err
								}
								if w.Comm.Load() <= 1 && w.Copies.Load() <= 1 {
									once.Add(1)
									if w.Sized.Load() == 0 {
										ahead.Add(1)
									}
								}
								if err := c.Sync(ctx); err != nil {
									return err
								}
								stats, err := s.Stats(ctx)
								if err != nil {
									return err
								}
								sent.Add(stats.SentElements)
								residual, err := s.Residual()
								if err != nil {
									return err
								}
								results[c.Rank()] = append(results[c.Rank()], standin.Digest(standin.Bits(tensor), standin.Bits(residual)))
							}
							return errors.Join(s.Close(), tensor.Free())
						}))
						return results
					}
					got := run(true)
					padded, waitedOnce, sentAhead := sent.Swap(0), int(once.Swap(0))/ranks, int(ahead.Load())/ranks
					want := run(false)
					for r := range want {
						require.Equal(t, want[r], got[r], "rank %d has other bits", r)
					}
					t.Logf("%d of %d steps wait once, %d when all is sent; %.3f times the elements", waitedOnce, steps, sentAhead, float64(padded)/float64(sent.Load()))
					if name == "spread" {
						assert.GreaterOrEqual(t, sentAhead, steps*3/10, "but while the residual still grows")
					}
					switch {
					case ranks == 2 && name == "overflow":
						assert.GreaterOrEqual(t, waitedOnce, steps-8-steps/7, "but the first ones, and those that overflow")
					case ranks == 2:
						assert.GreaterOrEqual(t, waitedOnce, steps-8, "but the first ones, whose thresholds are far off")
					case name == "spread":
						assert.GreaterOrEqual(t, waitedOnce, steps-12, "but also when partitions are balanced")
						assert.Less(t, float64(padded)/steps/float64(ranks), float64(6*n/20*(ranks-1)/ranks), "within the paper's budget")
					}
				})
			}
		}
	}
}
