package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// volume is what ranks sent per step, in elements and in bytes.
type volume struct{ mean, most, bytes float64 }

// measureVolume runs steps of a pattern and returns what a rank sent per step,
// on average and at most, as a meter around the backend counts it.
func measureVolume(t *testing.T, cfg engine.Config, ranks, n, steps int, gradient func(rank, step int) []float32) volume {
	t.Helper()
	var mu sync.Mutex
	var v volume
	b := standin.Backend(t, ranks)
	err := b.Run(t.Context(), ranks, func(ctx context.Context, r commtest.Rank) error {
		meter := metered.New(r.Comm)
		s, err := engine.New(r.Runtime, meter, n, cfg)
		if err != nil {
			return err
		}
		defer s.Close()
		g, err := runtime.New(r.Runtime, dtype.F32, n)
		if err != nil {
			return err
		}
		defer g.Free()
		for step := range steps {
			if err := runtime.CopyIn(g, gradient(r.Comm.Rank(), step)); err != nil {
				return err
			}
			before := meter.Totals()
			if err := s.AllReduce(ctx, g); err != nil {
				return err
			}
			after := meter.Totals()
			sent, bytes := float64(after.SentElements-before.SentElements), float64(after.SentBytes-before.SentBytes)
			if step == 0 { // without what the ranks compare first
				sent, bytes = sent-float64(ranks-1), bytes-float64(8*(ranks-1))
			}
			mu.Lock()
			v.mean += sent / float64(ranks*steps)
			v.bytes += bytes / float64(ranks*steps)
			v.most = max(v.most, sent)
			mu.Unlock()
		}
		return nil
	})
	require.NoError(t, err)
	return v
}

// TestVolumeTable measures patterns and prints the table of lab/results/sparse, with
// TUTTI_EXTENDED set all of it. It holds oktopk to the bound of Li and Hoefler, PPoPP 2022, equation 3: 6k(P-1)/P.
func TestVolumeTable(t *testing.T) {
	if testing.Short() {
		t.Skip("a table for worlds of up to 32 ranks")
	}
	const n, density = 100_000, 0.01
	steps, worlds, patterns := 2, []int{2, 16}, []string{sparsity.TopkA, sparsity.Oktopk} // of which there is something to assert
	if standin.Extended {
		steps, worlds, patterns = 3, []int{2, 4, 8, 16, 32}, sparsity.Patterns()
	}
	k := int(n * density)
	gradients := map[string][][]float32{} // of each rank, one step after the other
	for i := range steps * worlds[len(worlds)-1] {
		spread := standin.Normal(n, i/steps, i%steps)
		clustered := slices.Clone(spread)
		for i := range clustered {
			if i < n*6/10 || i >= n*65/100 {
				clustered[i] *= 1e-3
			}
		}
		gradients["spread"], gradients["clustered"] = append(gradients["spread"], spread), append(gradients["clustered"], clustered)
	}
	all := []string{sparsity.F32, sparsity.I8, sparsity.I2}
	for _, name := range []string{"spread", "clustered"} {
		var table strings.Builder
		fmt.Fprintf(&table, "bytes sent per rank and step in the mean, as %s, in units of k; n = %d, k = %d\n| %s |", strings.Join(all, " · "), n, k, name)
		for _, p := range worlds {
			fmt.Fprintf(&table, " P=%d |", p)
		}
		table.WriteByte('\n')
		volumes := map[string][]volume{}
		for _, pattern := range patterns {
			fmt.Fprintf(&table, "| %s |", pattern)
			for _, p := range worlds {
				var cells []string
				for _, values := range all {
					v := measureVolume(t, engine.Config{Pattern: pattern, Density: density, Values: values}, p, n, steps,
						func(rank, step int) []float32 { return gradients[name][rank*steps+step] })
					volumes[pattern+values] = append(volumes[pattern+values], v)
					cells = append(cells, fmt.Sprintf("%.3g", v.bytes/float64(k)))
				}
				fmt.Fprintf(&table, " %s |", strings.Join(cells, " · "))
			}
			table.WriteByte('\n')
		}
		t.Log(table.String())
		for i, p := range worlds {
			assert.LessOrEqual(t, volumes["oktopkf32"][i].most, 6*float64(k)*float64(p-1)/float64(p), "oktopk, P=%d, %s", p, name)
			assert.Equal(t, float64(2*k*(p-1)), volumes["topkAf32"][i].most, "topkA, P=%d", p)
			assert.InEpsilon(t, 8*k*(p-1), volumes["topkAf32"][i].bytes, 1e-9, "topkA, P=%d", p)
			assert.LessOrEqual(t, volumes["topkAi8"][i].bytes, 2.2*float64(k*(p-1)), "topkA i8, P=%d", p)
			assert.LessOrEqual(t, volumes["topkAi2"][i].bytes, 1.4*float64(k*(p-1)), "topkA i2, P=%d", p)
			assert.Less(t, volumes["oktopki2"][i].bytes, 0.4*volumes["oktopkf32"][i].bytes, "oktopk i2, P=%d", p)
		}
		last := len(worlds) - 1
		assert.Greater(t, volumes["topkAf32"][last].most, float64(worlds[last])/4*volumes["oktopkf32"][last].most, name)
	}
}

// TestFillUp checks that topkSA gathers whole partitions when the ranks' selected entries
// together are most of the tensor: a value per element instead of two words
// per entry.
func TestFillUp(t *testing.T) {
	const ranks, n, density = 8, 10_000, 0.25
	gradient := func(rank, step int) []float32 { return standin.Normal(n, rank, step) }
	lists := measureVolume(t, engine.Config{Pattern: sparsity.GaussiankSA, Density: density}, ranks, n, 2, gradient)
	dense := measureVolume(t, engine.Config{Pattern: sparsity.TopkSA, Density: density}, ranks, n, 2, gradient)
	const split = 2 * density * n
	assert.Less(t, dense.most, split+n)
	assert.Greater(t, lists.most, split+n)
}

// TestOkTopkEquation3OnStreams is of Li and Hoefler, PPoPP 2022, equation 3: a rank sends at most 6k(P-1)/P elements.
// Each step is held to this bound also where lengths travel with messages, which may add 7(P-1) elements: with
// gradients of which other parts are large in each step, so that partitions and shares of the result are as uneven as
// they can be; and with those that grow in a part that is one rank's, so that the threshold is estimated again. A
// result has 1.5k entries at most.
func TestOkTopkEquation3OnStreams(t *testing.T) {
	const n, steps = 20_000, 40
	shapes := map[string]func(step, i int) float32{
		"wandering": func(step, i int) float32 {
			if i*8/n == step%8 {
				return 100
			}
			return 1
		},
		"growing": func(step, i int) float32 {
			x, from, to := float32(1), n/3, n*6/10
			if step > 4 {
				from, to = n*5/8, n*81/100
			}
			if step > 0 && (i < from || i >= to) {
				x /= 1000
			}
			if step > 0 && step < 6 {
				x /= 100
			}
			return x
		},
	}
	tuning.Set(t, tuning.Tuning{ThresholdInterval: 100, RebalanceInterval: 50})
	for name, shape := range shapes {
		for _, ranks := range []int{2, 3, 4} {
			for _, streams := range []bool{false, true} {
				standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
					memory, besides := runtime.Runtime(rt), 0
					if streams {
						memory, c, besides = standin.NewOnStream(rt), standin.NewOrdered(ctx, c), 7*(ranks-1)
					}
					u, err := standin.NewTrainee(memory, c, engine.Config{Pattern: sparsity.Oktopk, Density: 0.05}, n)
					if err != nil {
						return err
					}
					for step := range steps {
						g := u.Gradient(step)
						for i := range g {
							g[i] *= shape(step, i)
						}
						if err := errors.Join(runtime.CopyIn(u.T, g), u.S.AllReduce(ctx, u.T)); err != nil {
							return err
						}
						stats, err := u.S.Stats(ctx)
						if err != nil {
							return err
						}
						if step == 0 { // the ranks compare what they reduce, too
							besides += ranks - 1
						}
						assert.LessOrEqual(t, int(stats.SentElements), 6*stats.K*(ranks-1)/ranks+besides, "%s, streams %v, rank %d of %d, step %d", name, streams, c.Rank(), ranks, step)
						if step == 0 {
							besides -= ranks - 1
						}
						result, err := u.S.Entries()
						if err != nil {
							return err
						}
						entries, _, err := u.S.Read(ctx, result)
						if err != nil {
							return err
						}
						assert.LessOrEqual(t, len(entries), 3*stats.K/2, "%s, streams %v, %d ranks, step %d", name, streams, ranks, step)
					}
					return u.Close()
				})
			}
		}
	}
}

// TestNoZerosInSplit: the split allreduce of topkSA does not send the zeros that fill
// up a list of k entries.
func TestNoZerosInSplit(t *testing.T) {
	few := func(rank, _ int) []float32 {
		g := make([]float32, 10_000)
		g[3000*rank], g[3000*rank+1] = 1, -2
		return g
	}
	assert.Less(t, measureVolume(t, engine.Config{Pattern: sparsity.TopkSA, Density: 0.1}, 3, 10_000, 2, few).most, 60.0)
}
