package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// onDevices runs a body on ranks whose runtimes work as a host's, in order on a stream, or on two streams.
func onDevices(t *testing.T, ranks int, body func(ctx context.Context, c comm.Communicator, rt runtime.Runtime, device string) error) {
	t.Helper()
	for _, device := range []string{"host", "streams", "side stream"} {
		err := local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			memory := standin.Borrow()
			var rt runtime.Runtime = memory
			switch device {
			case "streams":
				rt, c = standin.NewOnStream(memory), standin.NewOrdered(ctx, c)
			case "side stream":
				rt, c = standin.NewForking(memory), standin.NewByEvents(ctx, c)
			}
			return errors.Join(body(ctx, c, rt, device), standin.Return(memory))
		})
		require.NoError(t, err, device)
	}
}

// averaging is a Reducer that averages.
type averaging struct{}

func (averaging) Memory() ddp.Memory { return ddp.Memory{} }

func (averaging) Reduce(ctx context.Context, b ddp.Bucket) error {
	return distributed.AllReduce(ctx, b.Comm, b.Tensor, comm.Avg)
}

func newAveraging(ddp.Bucket) (ddp.Reducer, error) { return averaging{}, nil }

// gradientsOfRanks are what ranks put in and get in some steps, as float64.
type gradientsOfRanks struct {
	given [][][][]float64 // by step, rank and gradient: as a tensor of the type holds them
	want  [][][]float64   // by step and gradient: the weighted means
}

// gradientsOf draws gradients of these lengths, and computes their means with weightsOf.
func gradientsOf(t *testing.T, dt dtype.DType, ranks int, lengths []int) (all gradientsOfRanks) {
	t.Helper()
	for step, weights := range weightsOf {
		given := make([][][]float64, ranks)
		want := make([][]float64, len(lengths))
		for i, n := range lengths {
			want[i] = make([]float64, n)
			for rank := range ranks {
				x := rounded(t, dt, random(n, uint64(rank), uint64(step), uint64(i)))
				given[rank] = append(given[rank], x)
				part := share(weights[:ranks], rank)
				for j, v := range x {
					want[i][j] += v * part
				}
			}
		}
		all.given = append(all.given, given)
		all.want = append(all.want, want)
	}
	return all
}

// rounded returns values as a type holds them.
func rounded(t *testing.T, dt dtype.DType, values []float64) []float64 {
	t.Helper()
	narrow := make([]float32, len(values))
	for i, v := range values {
		narrow[i] = float32(v)
	}
	raw := make([]byte, len(values)*dt.Size())
	require.NoError(t, dtype.FromFloat32(raw, dt, narrow))
	require.NoError(t, dtype.ToFloat32(narrow, raw, dt))
	held := make([]float64, len(values))
	for i, v := range narrow {
		held[i] = float64(v)
	}
	return held
}

// write stores values in a tensor of any type of gradients.
func write(t *testing.T, x *runtime.Tensor, values []float64) {
	t.Helper()
	raw := make([]byte, x.Bytes())
	narrow := make([]float32, len(values))
	for i, v := range values {
		narrow[i] = float32(v)
	}
	require.NoError(t, dtype.FromFloat32(raw, x.DType(), narrow))
	p, err := x.Ptr()
	require.NoError(t, err)
	require.NoError(t, x.Runtime().CopyIn(p, raw))
}

func read(t *testing.T, x *runtime.Tensor) []float64 {
	t.Helper()
	raw := make([]byte, x.Bytes())
	p, err := x.Ptr()
	require.NoError(t, err)
	require.NoError(t, x.Runtime().CopyOut(raw, p))
	narrow := make([]float32, x.Len())
	require.NoError(t, dtype.ToFloat32(narrow, raw, x.DType()))
	values := make([]float64, len(narrow))
	for i, v := range narrow {
		values[i] = float64(v)
	}
	return values
}

// random are n numbers that are the same wherever they are made from the same seeds.
func random(n int, seeds ...uint64) []float64 {
	rng := rand.New(rand.NewPCG(seeds[0]<<20|seeds[1], seeds[2]))
	x := make([]float64, n)
	for i := range x {
		x[i] = rng.NormFloat64()
	}
	return x
}

// share is a rank's weight divided by the sum of all.
func share(weights []float64, rank int) float64 {
	sum := 0.0
	for _, w := range weights {
		sum += w / slices.Max(weights)
	}
	if slices.Max(weights) == 0 {
		return 0
	}
	return weights[rank] / slices.Max(weights) / sum
}

// weightsOf are the weights of several steps.
var weightsOf = [][]float64{
	{257, 129, 3, 1000}, {5, 5, 5, 5}, {0, 7, 2, 0}, {0, 0, 1, 0}, {0, 0, 0, 0}, {1e-200, 3e-200, 1e-201, 0}, {1e300, 2e300, 1.7e308, 0}, {0.1, 0.1, 0.1, 0.3},
}

// TestWeights compares the means over samples with those in float64, over all ways to reduce that send every entry. The
// gradients of ranks without samples are NaN.
func TestWeights(t *testing.T) {
	shapes := [][]int{{10, 12}, {7}, {20, 21}, {}, {0}}
	every := sparse.Config{Density: 1}
	with := func(change func(*sparse.Config)) ddp.Config {
		c := every
		change(&c)
		return ddp.Config{Config: c, DenseUpTo: -1}
	}
	configs := map[string]ddp.Config{
		"plain": {}, "small": {BucketBytes: 64}, "views": {BucketViews: true}, "bf16 wire": {Wire: dtype.BF16}, "f16 wire": {Wire: dtype.F16},
		"clip": {Config: sparse.Config{ClipNorm: 1e30}}, "clip all": {Config: sparse.Config{ClipNorm: 1e30, ClipGlobal: true}},
		"skip": {Config: sparse.Config{NonFinite: sparse.SkipNonFinite}}, "fail": {Config: sparse.Config{NonFinite: sparse.FailNonFinite}},
		"views skip":    {BucketViews: true, Config: sparse.Config{NonFinite: sparse.SkipNonFinite}},
		"no undo":       with(func(c *sparse.Config) { c.Pattern, c.NoUndo = sparse.TopkA, true }),
		"dense no undo": {Config: sparse.Config{ClipNorm: 1e30, NoUndo: true, NonFinite: sparse.PassNonFinite}},
		"reducer":       {Reducer: newAveraging}, "mesh": {Mesh: hosts(2)}, "mesh topkA": {Mesh: hosts(2), Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1},
		"uneven": {Uneven: true}, "vectors": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}},
	}
	for _, p := range sparsity.Patterns() {
		configs[p] = with(func(c *sparse.Config) { c.Pattern = p })
	}
	lengths := make([]int, len(shapes))
	for i, shape := range shapes {
		lengths[i] = 1
		for _, n := range shape {
			lengths[i] *= n
		}
	}
	gradients := map[dtype.DType]map[int]gradientsOfRanks{}
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		gradients[dt] = map[int]gradientsOfRanks{}
		for _, ranks := range []int{1, 3, 4} {
			gradients[dt][ranks] = gradientsOf(t, dt, ranks, lengths)
		}
	}
	for name, cfg := range configs {
		cfg.Weighted = true
		for _, ranks := range []int{1, 3, 4} {
			if (cfg.Mesh != nil || testing.Short()) && ranks%2 == 1 {
				continue
			}
			for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
				// Worlds of other sizes do the same with them.
				if dt != dtype.F32 && ranks != 4 && !standin.Extended {
					continue
				}
				onDevices(t, ranks, func(ctx context.Context, c comm.Communicator, rt runtime.Runtime, device string) error {
					if device != "host" && dt == dtype.BF16 {
						return nil
					}
					var params []*runtime.Tensor
					for _, shape := range shapes {
						x, err := runtime.New(rt, dt, shape...)
						require.NoError(t, err)
						params = append(params, x)
					}
					g, err := ddp.New(ctx, rt, c, params, cfg)
					require.NoError(t, err, name)
					all := params
					if cfg.BucketViews {
						all = g.Views()
					}
					tolerance := map[dtype.DType]float64{dtype.F32: 1e-6, dtype.F16: 4e-3, dtype.BF16: 3e-2}[dt]
					if dt == dtype.F32 && cfg.Wire != dtype.Invalid {
						tolerance = 3e-2
					}
					for step, weights := range weightsOf {
						weights = weights[:ranks]
						label := fmt.Sprintf("%s, %v, %s, rank %d of %d, step %d, weights %v", name, dt, device, c.Rank(), ranks, step, weights)
						want := gradients[dt][ranks].want[step]
						for i, x := range all {
							given := slices.Clone(gradients[dt][ranks].given[step][c.Rank()][i])
							if weights[c.Rank()] == 0 {
								for j := range given {
									given[j] = math.NaN()
								}
							}
							write(t, x, given)
						}
						require.NoError(t, errors.Join(g.Weigh(weights[c.Rank()]), g.ReduceAll(ctx, all)), label)
						for i, x := range all {
							for j, got := range read(t, x) {
								if !(math.Abs(want[i][j]-got) <= tolerance*4) { // also of NaN
									require.Failf(t, "another mean", "%v, want %v: %s, gradient %d, element %d", got, want[i][j], label, i, j)
								}
							}
						}
						stats, err := g.Stats(ctx)
						require.NoError(t, err)
						require.False(t, stats.Skipped, label)
						sum := 0.0
						for _, w := range weights {
							sum += w
						}
						require.Equal(t, sum, stats.Weight, label)
					}
					err = g.Close()
					standin.Free(t, params)
					return err
				})
			}
		}
	}
}

// TestWeightedLarge: an F16 whose mean is in range is not scaled out of it.
func TestWeightedLarge(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"plain": {Weighted: true}, "skip": {Weighted: true, Config: sparse.Config{NonFinite: sparse.SkipNonFinite}},
		"wire": {Weighted: true, Wire: dtype.F16},
	} {
		standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			dt := dtype.F16
			if cfg.Wire != dtype.Invalid {
				dt = dtype.F32
			}
			x, err := runtime.New(rt, dt, 9)
			require.NoError(t, err)
			all := []*runtime.Tensor{x}
			g, err := ddp.New(ctx, rt, c, all, cfg)
			require.NoError(t, err)
			for _, weights := range [][]float64{{0, 1, 0}, {1, 8, 1}} {
				require.NoError(t, errors.Join(x.Fill(60000), g.Weigh(weights[c.Rank()]), g.ReduceAll(ctx, all)))
				for _, v := range read(t, x) {
					require.InDelta(t, 60000, v, 64, "%s, %v", name, weights)
				}
			}
			err = g.Close()
			standin.Free(t, all)
			return err
		})
	}
}

// TestWeightedPatterns: a step with weights has the bits of one without them whose gradients were multiplied by weight
// and divided by the mean weight, as F32, before: results, residuals, and momentum, over steps of other weights.
func TestWeightedPatterns(t *testing.T) {
	const n, steps = 800, 6
	var configs []sparse.Config
	for _, p := range sparsity.Patterns() {
		if p == sparse.Dense || p == sparse.Auto {
			continue
		}
		configs = append(configs, sparse.Config{Pattern: p, Density: 0.05},
			sparse.Config{Pattern: p, Density: 0.05, Momentum: 0.9}, sparse.Config{Pattern: p, Density: 0.05, NoErrorFeedback: true})
	}
	for _, v := range sparsity.Values() {
		if v == sparse.Auto {
			continue
		}
		configs = append(configs, sparse.Config{Pattern: sparse.TopkA, Density: 0.1, Values: v})
		if v != sparse.F32 {
			configs = append(configs, sparse.Config{Pattern: sparse.Dense, Values: v})
		}
	}
	configs = append(configs, sparse.Config{Pattern: sparse.Dense, Momentum: 0.9},
		sparse.Config{Pattern: sparse.TopkA, Density: 0.1, Momentum: 0.5, Schedule: sparse.Schedule{WarmupSteps: 2, Densities: []float64{0, 0.3}, StepsPerEpoch: 1}})
	for _, cfg := range configs {
		onDevices(t, 3, func(ctx context.Context, c comm.Communicator, rt runtime.Runtime, device string) error {
			run := func(weighted bool) (all []uint32) {
				x, err := runtime.New(rt, dtype.F32, n/100, 100)
				require.NoError(t, err)
				tensors := []*runtime.Tensor{x}
				g, err := ddp.New(ctx, rt, c, tensors, ddp.Config{Config: cfg, Weighted: weighted, DenseUpTo: -1})
				if err != nil {
					require.ErrorIs(t, err, comm.ErrArgument, "%+v", cfg) // values that the pattern does not send
					standin.Free(t, tensors)
					return nil
				}
				for step := range steps {
					weights := weightsOf[step][:3]
					factor := float32(1)
					if !weighted {
						factor = float32(3 * share(weights, c.Rank()))
						if weights[0] == weights[1] && weights[1] == weights[2] {
							factor = min(1, float32(weights[0]))
						}
					}
					values := random(n, uint64(c.Rank()), uint64(step), 7)
					for i := range values {
						values[i] = float64(float32(values[i]) * factor)
					}
					write(t, x, values)
					if weighted {
						require.NoError(t, g.Weigh(weights[c.Rank()]))
					}
					require.NoError(t, g.ReduceAll(ctx, tensors), "%+v, step %d", cfg, step)
					all = append(all, standin.Bits(x)...)
				}
				residuals, err := g.Residuals()
				require.NoError(t, err)
				for _, r := range residuals {
					all = append(all, standin.Bits(r)...)
				}
				require.NoError(t, g.Close())
				standin.Free(t, tensors)
				return all
			}
			standin.SameBits(t, run(false), run(true), "%+v, %s, rank %d", cfg, device, c.Rank())
			return nil
		})
	}
}

// TestEqualWeights: where all weights are equal, whatever they are, bits are those of a step without weights.
func TestEqualWeights(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"plain": {}, "wire": {Wire: dtype.BF16}, "views": {BucketViews: true}, "shard": {Shard: true}, "mesh": {Mesh: hosts(1)},
		"clip":     {Config: sparse.Config{ClipNorm: 3}},
		"clip all": {Config: sparse.Config{ClipNorm: 3, ClipGlobal: true, Pattern: sparse.Oktopk, Density: 0.1, Momentum: 0.9}},
		"sparse":   {Config: sparse.Config{Pattern: sparse.Gtopk, Density: 0.1}, DenseUpTo: -1}, "reducer": {Reducer: newAlternating},
	} {
		standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			run := func(weighted bool) (all [][]uint32) {
				cfg := cfg
				cfg.Weighted = weighted
				m, err := newModel(ctx, rt, c, cfg)
				require.NoError(t, err)
				for step, weight := range []float64{1, 0.1, 1e-300, 12345} {
					require.NoError(t, m.load(step))
					if weighted {
						require.NoError(t, m.sync.Weigh(weight))
					}
					require.NoError(t, m.sync.ReduceAll(ctx, m.params))
					if cfg.Shard {
						shards, err := m.sync.Shards()
						require.NoError(t, err)
						for _, s := range shards.Buckets {
							all = append(all, standin.Bits(s.Tensor))
						}
						continue
					}
					all = append(all, m.bits())
				}
				require.NoError(t, m.close())
				return all
			}
			require.Equal(t, run(false), run(true), name)
			return nil
		})
	}
}

// TestWeightedClip compares clipped means with those in float64: the clipped norm belongs to weighted gradients.
func TestWeightedClip(t *testing.T) {
	const limit = 5.0
	for _, global := range []bool{false, true} {
		for _, pattern := range []string{sparse.Dense, sparse.TopkA} {
			for _, weights := range [][]float64{{257, 129}, {1, 0}, {3, 3}, {1, 1000}} {
				onDevices(t, 2, func(ctx context.Context, c comm.Communicator, rt runtime.Runtime, device string) error {
					m, err := newModel(ctx, rt, c, ddp.Config{Weighted: true, Config: sparse.Config{Pattern: pattern, Density: 1, ClipNorm: limit, ClipGlobal: global}})
					require.NoError(t, err)
					require.NoError(t, m.load(0))
					if weights[c.Rank()] == 0 {
						for _, x := range m.params {
							require.NoError(t, x.Fill(math.NaN()))
						}
					}
					require.NoError(t, errors.Join(m.sync.Weigh(weights[c.Rank()]), m.sync.ReduceAll(ctx, m.params)))
					var squares [2]float64
					for r := range squares {
						for i, p := range m.params {
							for _, v := range standin.Normal(p.Len(), r, 0, i) {
								x := float64(v) * 2 * share(weights, r)
								squares[r] += x * x
							}
						}
					}
					for i, p := range m.params {
						want := make([]float64, p.Len())
						for r, s := range squares {
							factor := min(1, limit/math.Sqrt2/math.Sqrt(s))
							if global {
								factor = min(1, limit/math.Sqrt((squares[0]+squares[1])/2))
							}
							if s == 0 {
								continue
							}
							for j, v := range standin.Normal(p.Len(), r, 0, i) {
								want[j] += float64(v) * share(weights, r) * factor
							}
						}
						for j, got := range read(t, p) {
							require.InDelta(t, want[j], got, 1e-6, "%s, %v, %v, %s, gradient %d", pattern, global, weights, device, i)
						}
					}
					return m.close()
				})
			}
		}
	}
}

// TestWeighMisuse: weights that are none, and calls at the wrong time, are errors that change nothing.
func TestWeighMisuse(t *testing.T) {
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		all := standin.Gradients(t, rt, 2)
		_, err := ddp.New(ctx, rt, c, all, ddp.Config{Weighted: true, Sum: true})
		assert.ErrorIs(t, err, comm.ErrArgument)
		double, err := runtime.New(rt, dtype.F64, 3)
		require.NoError(t, err)
		_, err = ddp.New(ctx, rt, c, []*runtime.Tensor{double}, ddp.Config{Weighted: true})
		assert.ErrorIs(t, err, comm.ErrUnsupported)
		plain, err := ddp.New(ctx, rt, c, all, ddp.Config{})
		require.NoError(t, err)
		assert.ErrorIs(t, plain.Weigh(1), comm.ErrArgument)

		g, err := ddp.New(ctx, rt, c, all, ddp.Config{Weighted: true})
		require.NoError(t, err)
		for _, err := range []error{g.Ready(ctx, 0, all[0]), g.Accumulate(0, all[0]), g.ReduceAll(ctx, all)} {
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, "Weigh")
		}
		for _, w := range []float64{-1, math.NaN(), math.Inf(1), math.Inf(-1), -math.SmallestNonzeroFloat64} {
			assert.ErrorIs(t, g.Weigh(w), comm.ErrArgument, "%v", w)
		}
		require.NoError(t, errors.Join(g.Weigh(1e-30), all[0].Fill(0), g.Accumulate(0, all[0])))
		assert.ErrorIs(t, g.Weigh(1e30), comm.ErrArgument)
		require.NoError(t, errors.Join(all[0].Fill(1), all[1].Fill(1), g.Ready(ctx, 0, all[0])))
		assert.ErrorIs(t, g.Weigh(1), comm.ErrArgument, "in the middle of a step")
		require.NoError(t, errors.Join(g.Ready(ctx, 1, all[1]), g.Wait(ctx)))
		assert.Equal(t, 1.0, read(t, all[0])[0])
		assert.ErrorIs(t, g.ReduceAll(ctx, all), comm.ErrArgument, "weights are of one step")
		require.NoError(t, errors.Join(g.Wait(ctx), g.Close(), plain.Close()))
		assert.ErrorIs(t, g.Weigh(1), comm.ErrClosed)
		standin.Free(t, append(all, double))
		return nil
	})
}

// passes are backward passes for one step: their weights, and which of them use a parameter.
type passes struct {
	weights []float64
	uses    func(pass, param int) bool
}

// passValue is the gradient of a parameter in a pass, everywhere.
func passValue(rank, step, pass, param int) float64 {
	return float64((7*rank+3*step+5*pass+11*param)%13) - 6
}

// meanOver is the mean gradient over the samples of all passes of all ranks.
func meanOver(all []passes, step, param int) float64 {
	sum, total := 0.0, 0.0
	for rank, p := range all {
		for pass, w := range p.weights {
			total += w
			if p.uses(pass, param) {
				sum += w * passValue(rank, step, pass, param)
			}
		}
	}
	if total == 0 {
		return 0
	}
	return sum / total
}

// accumulate makes all passes but the last one, and fills the gradients of that.
func (p *passes) accumulate(t *testing.T, g *ddp.Gradients, params []*runtime.Tensor, rank, step int) (last []*runtime.Tensor) {
	t.Helper()
	last = make([]*runtime.Tensor, len(params))
	for pass, w := range p.weights {
		require.NoError(t, g.Weigh(w))
		for i, x := range params {
			if !p.uses(pass, i) {
				continue
			}
			value := passValue(rank, step, pass, i)
			if w == 0 {
				value = math.NaN()
			}
			require.NoError(t, x.Fill(value))
			if pass == len(p.weights)-1 {
				last[i] = x
			} else {
				require.NoError(t, g.Accumulate(i, x))
			}
		}
	}
	return last
}

var accumulated = [][]passes{
	{{[]float64{3, 2}, always}, {[]float64{4}, always}},
	{{[]float64{3, 0, 2}, always}, {[]float64{4, 1, 7}, always}},
	{{[]float64{3, 5, 2}, func(pass, param int) bool { return (pass+param)%2 == 0 }}, {[]float64{0, 4}, always}},
	{{[]float64{0, 0}, always}, {[]float64{4, 0}, always}},
	{{[]float64{5, 6}, func(pass, param int) bool { return param == pass }}, {nil, always}}, // a rank without data
	{{[]float64{2, 2, 2}, func(_, param int) bool { return param != 1 }}, {[]float64{1, 1e20}, always}},
	{{[]float64{0}, always}, {[]float64{0, 0}, always}},
}

func always(int, int) bool { return true }

// TestWeightedAccumulate: passes of unequal size, some of which leave gradients out, or have no samples.
func TestWeightedAccumulate(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"plain": {}, "views": {BucketViews: true}, "skip": {Config: sparse.Config{NonFinite: sparse.SkipNonFinite}}, "clip": {Config: sparse.Config{ClipNorm: 1e9}},
		"sparse": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1}, "reducer": {Reducer: newAveraging}, "mesh": {Mesh: hosts(2)},
	} {
		cfg.Weighted = true
		onDevices(t, 2, func(ctx context.Context, c comm.Communicator, rt runtime.Runtime, device string) error {
			params := standin.Gradients(t, rt, 3)
			g, err := ddp.New(ctx, rt, c, params, cfg)
			require.NoError(t, err)
			all := params
			if cfg.BucketViews {
				all = g.Views()
			}
			for step, ranks := range accumulated {
				last := ranks[c.Rank()].accumulate(t, g, all, c.Rank(), step)
				require.NoError(t, g.ReduceAll(ctx, last), "%s, step %d", name, step)
				for i := range all {
					require.InDelta(t, meanOver(ranks, step, i), read(t, g.Result(i))[99], 1e-5, "%s, %s, step %d, gradient %d", name, device, step, i)
				}
			}
			err = g.Close()
			standin.Free(t, params)
			return err
		})
	}
}

// TestWeightedFaults has each call of a step with several passes fail on all ranks. The gradients of a single pass are as
// before, and the step, repeated as it was, has the means that it has without a fault; so has one that is
// made anew after Weigh, whatever was accumulated for the one that failed.
func TestWeightedFaults(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"clip": {Config: sparse.Config{ClipNorm: 1e9, ClipGlobal: true}}, "views": {BucketViews: true, Config: sparse.Config{NonFinite: sparse.SkipNonFinite}},
		"sparse": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1}, "reducer": {Reducer: newAveraging},
	} {
		cfg.Weighted = true
		for _, anew := range []bool{false, true} {
			for step, ranks := range accumulated {
				for at := 0; ; at++ {
					more := false
					label := fmt.Sprintf("%s, anew %v, step %d, call %d", name, anew, step, at)
					standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
						f := standin.NewFaulty(c)
						params := standin.Gradients(t, rt, 3)
						g, err := ddp.New(ctx, rt, f, params, cfg)
						require.NoError(t, err)
						require.NoError(t, g.Wait(ctx)) // the ranks have compared what they reduce
						all := params
						if cfg.BucketViews {
							all = g.Views()
						}
						p := ranks[c.Rank()]
						last := p.accumulate(t, g, all, c.Rank(), step)
						before := make([][]uint32, len(last))
						for i, x := range last {
							if x != nil {
								before[i] = standin.Bits(x)
							}
						}
						f.Calls, f.At = 0, at
						err = g.ReduceAll(ctx, last)
						f.At = -1
						if c.Rank() == 0 {
							more = f.Calls > at
						}
						if err != nil {
							assert.ErrorIs(t, err, standin.ErrFault, label)
							for i, x := range last {
								if x != nil && len(p.weights) == 1 && p.weights[0] > 0 {
									assert.Equal(t, before[i], standin.Bits(x), label)
								}
							}
							if anew && len(p.weights) > 0 {
								last = p.accumulate(t, g, all, c.Rank(), step)
							} else if anew {
								require.NoError(t, g.Weigh(0))
							}
							require.NoError(t, g.ReduceAll(ctx, last), label)
						}
						for i := range all {
							require.InDelta(t, meanOver(ranks, step, i), read(t, g.Result(i))[99], 1e-5, "%s, rank %d, gradient %d", label, c.Rank(), i)
						}
						err = g.Close()
						standin.Free(t, params)
						return err
					})
					if !more {
						break
					}
				}
			}
		}
	}
}

// TestWeightedJoin: a rank that has run out of data has no samples, but those that it has accumulated.
func TestWeightedJoin(t *testing.T) {
	for name, cfg := range map[string]ddp.Config{
		"plain": {}, "clip": {Config: sparse.Config{ClipNorm: 1e9}}, "sparse": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1},
	} {
		cfg.Weighted, cfg.Uneven = true, true
		standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := standin.Gradients(t, rt, 2)
			g, err := ddp.New(ctx, rt, c, all, cfg)
			require.NoError(t, err)
			for epoch := range 2 {
				have := []int{4, 2, 0}[c.Rank()]
				weight := func(rank, step int) float64 {
					switch {
					case step < []int{4, 2, 0}[rank]:
						return float64(1 + 10*rank + step)
					case rank == 1 && step == 2: // accumulated by a rank that then has joined
						return 5
					}
					return 0
				}
				step := 0
				check := func() error {
					sum, total := 0.0, 0.0
					for rank := range 3 {
						sum += weight(rank, step) * passValue(rank, step, 0, 0)
						total += weight(rank, step)
					}
					assert.InDelta(t, sum/total, read(t, g.Result(0))[99], 1e-5, "%s, epoch %d, step %d, rank %d", name, epoch, step, c.Rank())
					stats, err := g.Stats(ctx)
					assert.Equal(t, total, stats.Weight)
					step++
					return err
				}
				for step < have {
					require.NoError(t, errors.Join(all[0].Fill(passValue(c.Rank(), step, 0, 0)), all[1].Fill(1), g.Weigh(weight(c.Rank(), step)), g.ReduceAll(ctx, all), check()))
				}
				if c.Rank() == 1 {
					require.NoError(t, errors.Join(all[0].Fill(passValue(1, 2, 0, 0)), g.Weigh(5), g.Accumulate(0, all[0])))
				}
				require.NoError(t, g.Weigh(1000)) // of a batch that was not there
				require.NoError(t, g.Join(ctx, all, check))
				assert.Equal(t, 4, step)
			}
			err = g.Close()
			standin.Free(t, all)
			return err
		})
	}
}

// TestWeightedRebind: a step that has failed goes on with fewer ranks, which have other means; a state that is restored
// has no weights.
func TestWeightedRebind(t *testing.T) {
	weights := []float64{2, 3, 100}
	for name, cfg := range map[string]ddp.Config{
		"plain": {}, "clip": {Config: sparse.Config{ClipNorm: 1e9}}, "sparse": {Config: sparse.Config{Pattern: sparse.TopkA, Density: 1}, DenseUpTo: -1},
	} {
		cfg.Weighted = true
		fewer, err := local.New(2)
		require.NoError(t, err)
		standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := standin.Gradients(t, rt, 2)
			f := standin.NewFaulty(c)
			g, err := ddp.New(ctx, rt, f, all, cfg)
			require.NoError(t, err)
			state, err := g.State(ctx)
			require.NoError(t, err)
			fill := func() error { return errors.Join(all[0].Fill(float64(c.Rank())), all[1].Fill(1)) }
			require.NoError(t, errors.Join(fill(), g.Weigh(weights[c.Rank()]), g.ReduceAll(ctx, all)))
			assert.InDelta(t, 203.0/105, read(t, all[0])[0], 1e-5, name)
			require.NoError(t, errors.Join(fill(), g.Weigh(weights[c.Rank()])))
			f.Calls, f.At = 0, 0
			assert.ErrorIs(t, g.ReduceAll(ctx, all), standin.ErrFault)
			if c.Rank() < 2 {
				defer fewer[c.Rank()].Close()
				require.NoError(t, errors.Join(g.Rebind(ctx, fewer[c.Rank()]), fill(), g.ReduceAll(ctx, all)))
				assert.InDelta(t, 3.0/5, read(t, all[0])[0], 1e-5, name)
				require.NoError(t, errors.Join(g.Weigh(1), g.Accumulate(0, all[0])))
				_, err := g.State(ctx)
				assert.ErrorIs(t, err, comm.ErrArgument, "a state has no sums")
			}
			err = g.Close()
			standin.Free(t, all)
			_ = state
			return err
		})
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := standin.Gradients(t, rt, 2)
			g, err := ddp.New(ctx, rt, c, all, cfg)
			require.NoError(t, err)
			state, err := g.State(ctx)
			require.NoError(t, errors.Join(err, g.Weigh(9), all[0].Fill(7), g.Accumulate(0, all[0]), g.Restore(ctx, state)))
			assert.ErrorIs(t, g.ReduceAll(ctx, all), comm.ErrArgument, "weights are forgotten with the sums")
			require.NoError(t, errors.Join(g.Weigh(1), all[0].Fill(3), g.ReduceAll(ctx, all)))
			assert.Equal(t, 3.0, read(t, all[0])[0])
			err = g.Close()
			standin.Free(t, all)
			return err
		})
	}
}

// TestWeightedAllocate: weights cost no allocation in a step.
func TestWeightedAllocate(t *testing.T) {
	for _, cfg := range []ddp.Config{{Weighted: true}, {Weighted: true, Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1}} {
		standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			all := standin.Gradients(t, rt, 3)
			g, err := ddp.New(ctx, rt, c, all, cfg)
			require.NoError(t, err)
			weight := 0.0
			assert.Zero(t, testing.AllocsPerRun(20, func() {
				weight++
				if err := errors.Join(g.Weigh(weight), g.ReduceAll(ctx, all)); err != nil {
					t.Error(err)
				}
			}))
			err = g.Close()
			standin.Free(t, all)
			return err
		})
	}
}
