package cuda

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	topk "github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
)

// How many nodes the graph of a steady step of two ranks has at most: kernels, copies and
// collectives. A transaction keeps what an undo brings back, counts overflows in each
// rank's list, and looks at them: with that gtopk has 13 and gaussiank 14.
const mostNodes, mostOfTransactions = 12, 14

// overHost is a communicator of the host with its own stream, which takes the
// memory of the stand-in for a GPU's.
type overHost struct {
	comm.Communicator
	ctx context.Context
}

func (c overHost) Unwrap() comm.Communicator        { return c.Communicator }
func (overHost) CheckDevice(d runtime.Device) error { return nil }
func (overHost) CommStream() uintptr                { return 1 }
func (overHost) CommAfter(uintptr) error            { return nil }
func (c overHost) AfterComm(uintptr) error          { return c.Sync(c.ctx) }

// TestStepsOfPatterns makes steps of two ranks, the kernels' source run on the host,
// and counts what a steady one submits, and what it allocates: nothing of Go's memory,
// nothing of the device's.
func TestStepsOfPatterns(t *testing.T) {
	if os.Getenv(standInVariable) == "" {
		t.Skip("needs the stand-in; see TestOnStandIns")
	}
	f := openStandIn(t)
	const ranks, n, rounds, steps = 2, 2048, 5, 2
	for i, pattern := range sparsity.Patterns() {
		for name, cfg := range map[string]topk.Config{"transactions": {}, "no undo": {NoUndo: true}} {
			// The steps around a pattern differ: every second one is enough, unless TUTTI_EXTENDED is set.
			if cfg.NoUndo && (race.Enabled || i%2 > 0 && os.Getenv("TUTTI_EXTENDED") == "") {
				continue
			}
			cfg.Pattern, cfg.Density = pattern, 0.02
			warm := 12
			if sparsity.NeedsHost(pattern) {
				warm = 40 // its memory grows to the longest list
			}
			t.Run(pattern+"/"+name, func(t *testing.T) {
				nodes, garbage := 0, 0.0
				err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) (err error) {
					rt, err := Open(c.Rank())
					if err != nil {
						return err
					}
					defer func() { err = errors.Join(err, rt.Close()) }()
					meter := metered.New(overHost{c, ctx})
					s, err := topk.New(rt, meter, n, cfg)
					if err != nil {
						return err
					}
					defer func() { err = errors.Join(err, s.Close()) }()
					rng := rand.New(rand.NewPCG(uint64(c.Rank()), 16))
					values := make([]float32, n)
					for i := range values {
						values[i] = float32(rng.NormFloat64())
					}
					gradient, err := runtime.FromSlice(rt, values)
					if err != nil {
						return err
					}
					defer func() { err = errors.Join(err, gradient.Free()) }()
					g, err := gradient.Ptr()
					if err != nil {
						return err
					}
					tensor, err := runtime.New(rt, dtype.F32, n)
					if err != nil {
						return err
					}
					defer func() { err = errors.Join(err, tensor.Free()) }()
					if err := tensor.Fill(0); err != nil {
						return err
					}
					to, err := tensor.Ptr()
					if err != nil {
						return err
					}
					step := func() {
						if err != nil {
							return
						}
						err = errors.Join(rt.Copy(to, g, 4*n), s.AllReduce(ctx, tensor))
					}
					for range warm {
						step()
					}
					rt.Freeze()
					// The count covers the whole process: in the first round the other rank may still freeze its
					// memory.
					for range rounds {
						if c.Rank() == 0 {
							garbage = testing.AllocsPerRun(steps, step)
						} else {
							for range steps + 1 { // AllocsPerRun adds one
								step()
							}
						}
						if err := errors.Join(err, c.Barrier(ctx)); err != nil {
							return err
						}
						if garbage == 0 {
							break
						}
					}
					rt.Unfreeze()
					stats, err := s.Stats(ctx)
					assert.Positive(t, stats.SelectedLocal, "the kernels ran")
					if err != nil || sparsity.NeedsHost(pattern) {
						return err
					}
					// Collectives of the host are made at once here: on what is there.
					calls, submitted := meter.Totals().Calls, f.Submitted.Call(rt.ComputeStream())
					graph, err := rt.Stream().Capture(func() error { return s.AllReduce(ctx, tensor) })
					if err != nil {
						return err
					}
					if c.Rank() == 0 {
						nodes = int(meter.Totals().Calls-calls) + int(f.Submitted.Call(rt.ComputeStream())-submitted)
					}
					return graph.Close()
				})
				require.NoError(t, err)
				most := mostNodes
				if !cfg.NoUndo {
					most = mostOfTransactions
				}
				assert.LessOrEqual(t, nodes, most)
				t.Log(nodes, "nodes in a graph")
				if !race.Enabled {
					assert.Zero(t, garbage, "allocations a step")
				}
			})
		}
	}
}
