package distributed_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/distributedtest"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// onStream is a runtime that has a compute stream, as a GPU does. Its work is done
// when a method returns.
type onStream struct{ *cpu.Runtime }

func (onStream) ComputeStream() uintptr { return computeStream }

// branching is one that can work beside itself.
type branching struct{ onStream }

func (b branching) Branch() (runtime.Runtime, error) { return newBeside(cpu.New()), nil }

type beside struct{ onStream }

func (beside) ComputeStream() uintptr { return computeStream + 2 }

func newOnStream(rt *cpu.Runtime) onStream   { return onStream{rt} }
func newBranching(rt *cpu.Runtime) branching { return branching{onStream{rt}} }
func newBeside(rt *cpu.Runtime) beside       { return beside{onStream{rt}} }

func newOrdered(ctx context.Context, c comm.Communicator) ordered   { return ordered{c, ctx} }
func newByEvents(ctx context.Context, c comm.Communicator) byEvents { return byEvents{ordered{c, ctx}} }

// ordered is a communicator with a stream: what comes after it waits for it.
type ordered struct {
	comm.Communicator
	ctx context.Context
}

func (o ordered) Unwrap() comm.Communicator { return o.Communicator }
func (ordered) CommStream() uintptr         { return computeStream + 1 }
func (ordered) CommAfter(uintptr) error     { return nil }
func (o ordered) AfterComm(uintptr) error   { return o.Communicator.Sync(o.ctx) }

// byEvents is one that knows of events, which are all past when they are recorded.
type byEvents struct{ ordered }

func (byEvents) CreateEvent() (uintptr, error)      { return 7, nil }
func (byEvents) DestroyEvent(uintptr) error         { return nil }
func (byEvents) RecordOnCommStream(uintptr) error   { return nil }
func (byEvents) RecordOnStream(_, _ uintptr) error  { return nil }
func (byEvents) CommStreamWaitEvent(uintptr) error  { return nil }
func (byEvents) StreamWaitEvent(_, _ uintptr) error { return nil }
func (b byEvents) SyncCommStream() error            { return b.Sync(b.ctx) }

// TestLocalWithStreams runs the suite in the ways of devices with streams.
func TestLocalWithStreams(t *testing.T) {
	sizes := []int{1, 2, 3, 5}
	if testing.Short() {
		sizes = []int{3}
	}
	rt := newOnStream(cpu.New())
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	distributedtest.Run(t, commtest.Backend{
		Name:  "local, with streams",
		Sizes: sizes,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: newOrdered(ctx, c), Runtime: rt})
			})
		},
	})
}

// The same with sparse buckets that are worked on beside the backward pass.
func TestLocalWithBranches(t *testing.T) {
	sizes := []int{1, 2, 3}
	if testing.Short() {
		sizes = []int{2}
	}
	rt := newBranching(cpu.New())
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	distributedtest.Run(t, commtest.Backend{
		Name:  "local, with branches",
		Sizes: sizes,
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
				return body(ctx, commtest.Rank{Comm: newByEvents(ctx, c), Runtime: rt})
			})
		},
	})
}

// waits counts what makes the host wait for the device, and what was sized by numbers
// that it had waited for.
type waits struct{ comm, copies, sized atomic.Int32 }

// waitedFor is a rank's runtime with streams that counts waits.
type waitedFor struct {
	onStream
	w *waits
}

func (r waitedFor) CopyOut(dst []byte, src uintptr) error {
	r.w.copies.Add(1)
	return r.onStream.CopyOut(dst, src)
}

func (r waitedFor) CopyIn(dst uintptr, src []byte) error {
	r.w.copies.Add(1)
	return r.onStream.CopyIn(dst, src)
}

func newWaitedFor(rt *cpu.Runtime, w *waits) waitedFor { return waitedFor{onStream{rt}, w} }

// watched is a rank's communicator that does.
type watched struct {
	ordered
	w *waits
}

func (c watched) Sync(ctx context.Context) error {
	c.w.comm.Add(1)
	return c.ordered.Sync(ctx)
}

func (c watched) Group(calls ...comm.Call) error {
	if calls[0].Op == comm.OpAllGatherV {
		c.w.sized.Add(1)
	}
	return c.ordered.Group(calls...)
}

// With streams oktopk pads messages, so that the host waits once in a step: the
// results have the bits that they have without, whatever the lengths of the lists.
func TestOktopkWithStreams(t *testing.T) {
	const n, steps = 60_000, 48
	rt := cpu.New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	gradients := map[string]func(rank, size, step int) []float32{
		"spread": func(rank, size, step int) []float32 { return normal(n, rank, step) },
		"own cluster": func(rank, size, step int) []float32 {
			g := normal(n, rank, step)
			for i := range g {
				if i*size/n != rank {
					g[i] /= 1000
				}
			}
			return g
		},
		"wandering": func(rank, size, step int) []float32 {
			g := normal(n, rank, step)
			for i := range g {
				if i*6/n != step/5%6 {
					g[i] /= 1000
				}
			}
			return g
		},
		"overflow": func(rank, size, step int) []float32 {
			g := normal(n, rank, step)
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
	for name, gradient := range gradients {
		for _, ranks := range worlds {
			for _, noUndo := range []bool{false, true} {
				if noUndo && name == "overflow" {
					continue
				}
				t.Run(fmt.Sprintf("%s, %d ranks, no undo %v", name, ranks, noUndo), func(t *testing.T) {
					cfg := distributed.Config{Pattern: distributed.Oktopk, Density: 0.05, ThresholdInterval: 8, RebalanceInterval: 16, NoUndo: noUndo}
					var sent, once, ahead atomic.Int64 // elements of all steps; steps in which a host waited once; and when all was sent
					run := func(streams bool) [][]uint32 {
						results := make([][]uint32, ranks)
						require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
							w := new(waits)
							var memory runtime.Runtime = rt
							if streams {
								memory = newWaitedFor(rt, w)
								c = watched{newOrdered(ctx, c), w}
							}
							s, err := distributed.NewSparse(memory, c, n, cfg)
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
									if s, err = distributed.NewSparse(memory, c, n, cfg); err != nil {
										return err
									}
									if err := s.Restore(ctx, state); err != nil {
										return err
									}
								}
								if err := runtime.CopyIn(tensor, gradient(c.Rank(), ranks, step)); err != nil {
									return err
								}
								w.comm.Store(0)
								w.copies.Store(0)
								w.sized.Store(0)
								if err := s.AllReduce(ctx, tensor); err != nil {
									return err
								}
								if w.comm.Load() <= 1 && w.copies.Load() <= 1 {
									once.Add(1)
									if w.sized.Load() == 0 {
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
								results[c.Rank()] = append(append(results[c.Rank()], bits(tensor)...), bits(residual)...)
							}
							return errors.Join(s.Close(), tensor.Free())
						}))
						return results
					}
					got := run(true)
					padded, waitedOnce, sentAhead := sent.Swap(0), int(once.Swap(0))/ranks, int(ahead.Load())/ranks
					want := run(false)
					for r := range want {
						require.True(t, slices.Equal(want[r], got[r]), "rank %d has other bits", r)
					}
					t.Logf("%d of %d steps wait once, %d when all is sent; %.3f times the elements", waitedOnce, steps, sentAhead, float64(padded)/float64(sent.Load()))
					if name == "spread" {
						assert.GreaterOrEqual(t, sentAhead, steps*3/10, "but while the residual still grows")
					}
					switch {
					case ranks == 2:
						assert.GreaterOrEqual(t, waitedOnce, steps-8, "but the first ones, whose thresholds are far off")
					case name == "spread":
						assert.GreaterOrEqual(t, waitedOnce, steps-12, "but also when regions are balanced")
						assert.Less(t, float64(padded)/steps/float64(ranks), float64(6*n/20*(ranks-1)/ranks), "within the paper's budget")
					}
				})
			}
		}
	}
}
