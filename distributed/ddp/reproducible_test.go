package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// microbatches is how many contributions the tests' steps have.
const microbatches = 12

// lengths are the lengths of the parameters: within a block, at its ends, and beyond.
var lengths = []int{3, 64, 65, 1000, 63, 4100}

// contributions are gradients by microbatch and parameter, rounded to their type.
type contributions struct {
	dt      dtype.DType
	values  [][][]float32
	weights []float64 // of the microbatches; nil: means are not weighted
}

// terms are what is added up of a parameter, and what the sum is divided by.
func (c *contributions) terms(param int) (terms [][]float32, divisor float64) {
	for m, values := range c.values {
		switch {
		case c.weights == nil:
			terms = append(terms, values[param])
		case c.weights[m] > 0:
			var products []float32
			for _, x := range values[param] {
				products = append(products, x*float32(c.weights[m]))
			}
			terms = append(terms, products)
			divisor += c.weights[m]
		}
	}
	if c.weights == nil {
		divisor = microbatches
	}
	return terms, divisor
}

// draw draws contributions whose magnitudes differ from block to block and from one to another, by up to 2^100.
func draw(dt dtype.DType, seed uint64, special bool) *contributions {
	c := &contributions{dt: dt}
	for m := range microbatches {
		random := rand.New(rand.NewPCG(seed, uint64(m)))
		var all [][]float32
		for _, n := range lengths {
			x := make([]float32, n)
			for i := range x {
				if i%64 == 0 && random.IntN(10) == 0 { // some of a contribution's blocks
					x[i] = float32(math.Ldexp(1, random.IntN(100)-50))
				}
				x[i] += float32(random.NormFloat64())
				if special && random.IntN(500) == 0 {
					others := []float64{math.NaN(), math.Inf(1), math.Inf(-1), 0, 1e-44, math.MaxFloat32}
					x[i] = float32(others[random.IntN(6)])
				}
			}
			all = append(all, narrowed(dt, x))
		}
		c.values = append(c.values, all)
	}
	return c
}

// narrowed rounds numbers to a type.
func narrowed(dt dtype.DType, x []float32) []float32 {
	bytes := make([]byte, len(x)*dt.Size())
	wide := make([]float32, len(x))
	if err := errors.Join(dtype.FromFloat32(bytes, dt, x), dtype.ToFloat32(wide, bytes, dt)); err != nil {
		panic(err)
	}
	return wide
}

// mean returns the expected averages of a parameter with this precision.
func (c *contributions) mean(param, precision int) []float32 {
	terms, divisor := c.terms(param)
	n := len(c.values[0][param])
	out := make([]float32, n)
	exponent := uint32(0) // of the block
	for i := range out {
		if i%64 == 0 {
			exponent = 0
			for _, m := range terms {
				for _, x := range m[i:min(i+64, n)] {
					exponent = max(exponent, math.Float32bits(x)>>23&255)
				}
			}
		}
		if exponent == 255 {
			out[i] = float32(math.NaN())
			continue
		}
		sum := int64(0)
		for _, m := range terms {
			sum += int64(math.RoundToEven(math.Ldexp(float64(m[i]), precision+126-int(exponent))))
		}
		inverse := math.Ldexp(1/divisor, int(exponent)-126-precision)
		out[i] = float32(float64(sum) * inverse)
	}
	return narrowed(c.dt, out)
}

// assignment is which microbatches a rank computes, in what order.
type assignment func(rank, size int) []int

// assignments give each microbatch to one rank of a world.
var assignments = map[string]assignment{
	"one after the other": func(rank, size int) []int {
		var list []int
		for m := range microbatches {
			if m*size/microbatches == rank {
				list = append(list, m)
			}
		}
		return list
	},
	"in turn, backwards": func(rank, size int) []int {
		var list []int
		for m := range slices.Backward(make([]int, microbatches)) {
			if m%size == rank {
				list = append(list, m)
			}
		}
		return list
	},
	"all on the last": func(rank, size int) []int {
		if rank < size-1 {
			return nil
		}
		return rand.New(rand.NewPCG(1, uint64(size))).Perm(microbatches)
	},
}

// load makes a tensor hold a contribution.
func load(t *runtime.Tensor, x []float32) error {
	bytes := make([]byte, t.Bytes())
	if err := dtype.FromFloat32(bytes, t.DType(), x); err != nil {
		return err
	}
	return t.Runtime().CopyIn(standin.Pointer(t), bytes)
}

// values are the values of a tensor.
func values(t *runtime.Tensor) ([]float32, error) {
	bytes := make([]byte, t.Bytes())
	if err := t.Runtime().CopyOut(bytes, standin.Pointer(t)); err != nil {
		return nil, err
	}
	out := make([]float32, t.Len())
	return out, dtype.ToFloat32(out, bytes, t.DType())
}

// batchRank is a rank that reduces contributions.
type batchRank struct {
	g      *ddp.Gradients
	params []*runtime.Tensor
}

func newBatchRank(
	ctx context.Context, rt runtime.Runtime, c comm.Communicator, dt dtype.DType, cfg ddp.Config,
) (*batchRank, error) {
	return newBatchRankOf(ctx, rt, c, dt, cfg, lengths)
}

// newBatchRankOf is for parameters of other lengths.
func newBatchRankOf(
	ctx context.Context, rt runtime.Runtime, c comm.Communicator, dt dtype.DType, cfg ddp.Config, lengths []int,
) (*batchRank, error) {
	r := &batchRank{}
	for _, n := range lengths {
		t, err := runtime.New(rt, dt, n)
		if err != nil {
			return nil, err
		}
		r.params = append(r.params, t)
	}
	var err error
	r.g, err = ddp.New(ctx, rt, c, r.params, cfg)
	if views := r.g.Views(); err == nil && views != nil {
		err = r.free()
		r.params = views
	}
	return r, err
}

func (r *batchRank) free() error {
	var err error
	for _, t := range r.params {
		err = errors.Join(err, t.Free())
	}
	return err
}

func (r *batchRank) close() error { return errors.Join(r.g.Close(), r.free()) }

// submit computes microbatches, and makes the gradients of the last one ready in an order of the parameters.
func (r *batchRank) submit(ctx context.Context, c *contributions, batches, order []int) error {
	for turn, m := range batches {
		if c.weights != nil {
			if err := r.g.Weigh(c.weights[m]); err != nil {
				return err
			}
		}
		for _, i := range order {
			if err := load(r.params[i], c.values[m][i]); err != nil {
				return err
			}
			last := turn == len(batches)-1
			if !last {
				if err := r.g.Accumulate(i, r.params[i]); err != nil {
					return err
				}
				continue
			}
			if err := r.g.Ready(ctx, i, r.params[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// check compares the results with what is wanted, by parameter.
func (r *batchRank) check(want [][]float32) error {
	for i := range want {
		got, err := values(r.g.Result(i))
		if err != nil {
			return err
		}
		for j := range got {
			if same := got[j] == want[i][j] || got[j] != got[j] && want[i][j] != want[i][j]; !same {
				return fmt.Errorf("parameter %d, element %d is %v, want %v", i, j, got[j], want[i][j])
			}
		}
	}
	return nil
}

// hidden is a communicator of which nothing but its methods is known: ranks do not sum together.
type hidden struct{ comm.Communicator }

// hide hides a communicator, or does not.
func hide(c comm.Communicator, hides bool) comm.Communicator {
	if hides {
		return hidden{c}
	}
	return c
}

// near is a communicator of ranks that share memory, and do not sum together.
type near struct{ comm.Communicator }

func (near) SharesMemory() bool { return true }

// late is the communicator of a rank that comes to its Sync when the others' step is over and the world has failed.
type late struct {
	comm.Communicator
	fixedpoint.Reducer
	failed chan struct{}
}

func (l late) AllReduceFixed(sums []fixedpoint.Sum) error {
	err := l.Reducer.AllReduceFixed(sums)
	<-l.failed
	return err
}

// A step that is done is so on all ranks, even if one of them hears of a failed world first.
func TestReproducibleDoneBeforeAbort(t *testing.T) {
	failed := make(chan struct{})
	over := errors.New("the step is over")
	err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		w := c
		if c.Rank() == 1 {
			w = late{c, c.(fixedpoint.Reducer), failed}
		}
		gradient, err := runtime.New(cpu.New(), dtype.F32, 1000)
		if err != nil {
			return err
		}
		if err := gradient.Fill(float64(c.Rank() + 1)); err != nil {
			return err
		}
		g, err := ddp.New(ctx, gradient.Runtime(), w, []*runtime.Tensor{gradient}, ddp.Config{Reproducible: 2})
		if err != nil {
			return err
		}
		stepped := g.ReduceAll(ctx, []*runtime.Tensor{gradient})
		if c.Rank() == 0 {
			c.Abort(over)
			close(failed)
		}
		got, err := values(gradient)
		if err != nil {
			return err
		}
		assert.NoError(t, stepped, c.Rank())
		assert.Equal(t, float32(1.5), got[0], c.Rank())
		return nil
	})
	if err != nil {
		assert.ErrorIs(t, err, over)
	}
}

// Whenever a rank aborts, either all ranks have the results or all have what they brought.
func TestReproducibleAllOrNone(t *testing.T) {
	const worlds, ranks, elements = 150, 3, 1000
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for world := range worlds {
		patience := time.Duration(random.IntN(100*elements)) * time.Nanosecond
		var stepped atomic.Int32
		_ = local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) error {
			gradient, err := runtime.New(cpu.New(), dtype.F32, elements)
			if err != nil {
				return err
			}
			params := []*runtime.Tensor{gradient}
			g, err := ddp.New(ctx, gradient.Runtime(), c, params, ddp.Config{Reproducible: ranks})
			if err != nil {
				return err
			}
			want := float32(c.Rank() + 1)
			if err := gradient.Fill(float64(want)); err != nil {
				return err
			}
			limited := ctx
			if c.Rank() == 0 {
				var cancel context.CancelFunc
				limited, cancel = context.WithTimeout(ctx, patience)
				defer cancel()
			}
			failed := g.ReduceAll(limited, params)
			if failed == nil {
				stepped.Add(1)
				want = 2
			}
			got, err := values(gradient)
			if err != nil {
				return err
			}
			for i := range got {
				if got[i] != want {
					t.Errorf("world %d, rank %d, after %v: element %d is %v, want %v", world, c.Rank(), failed, i, got[i], want)
					break
				}
			}
			return failed
		})
		assert.Contains(t, []int32{0, ranks}, stepped.Load(), world)
	}
}

// Results follow from the contributions alone: not from the number of ranks, who has which of them, buckets, or the order
// in which gradients are ready.
func TestReproducible(t *testing.T) {
	const seed = 5
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		for _, precision := range []int{0, 24, 12} {
			c := draw(dt, seed, precision == 24)
			var want [][]float32
			for i := range lengths {
				want = append(want, c.mean(i, map[int]int{0: 27, 24: 24, 12: 12}[precision]))
			}
			for _, size := range []int{1, 2, 3, 4, 5, 6, 12, 13} {
				for name, of := range assignments {
					cfg := ddp.Config{Reproducible: microbatches, ReproducibleBits: precision}
					cfg.BucketBytes = []int{0, 1, 5000}[size%3]
					cfg.BucketViews = size%4 == 2
					err := local.Run(t.Context(), size, func(ctx context.Context, w comm.Communicator) error {
						rt := standin.Borrow()
						r, err := newBatchRank(ctx, rt, hide(w, size%2 == 0), dt, cfg)
						if err != nil {
							return err
						}
						order := rand.New(rand.NewPCG(seed, uint64(w.Rank()))).Perm(len(lengths))
						for range 2 {
							if err := r.submit(ctx, c, of(w.Rank(), size), order); err != nil {
								return err
							}
							if err := errors.Join(r.g.Wait(ctx), r.check(want)); err != nil {
								return err
							}
						}
						return errors.Join(r.close(), standin.Return(rt))
					})
					require.NoError(t, err, "%v with %d bits, %d ranks, %s, seed %d", dt, precision, size, name, seed)
				}
			}
		}
	}
}

// Gradients that take several turns, and such that end within one, have the same results, whether a step may be rolled
// back or not.
func TestReproducibleTurns(t *testing.T) {
	const seed = 13
	turns := []int{100, 300_001, 64, 131_000, 5}
	drawn := &contributions{dt: dtype.F32}
	for m := range microbatches {
		var all [][]float32
		for i, n := range turns {
			all = append(all, standin.Normal(n, seed, m*len(turns)+i))
		}
		drawn.values = append(drawn.values, all)
	}
	var want [][]float32
	for i := range turns {
		want = append(want, drawn.mean(i, 27))
	}
	for _, noUndo := range []bool{false, true} {
		for number, size := range []int{1, 3, 3, 3} {
			// Unless extended, each world has one of both.
			if !standin.Extended && noUndo != (number%2 > 0) {
				continue
			}
			cfg := ddp.Config{Reproducible: microbatches, BucketBytes: 1 << 22, Config: sparse.Config{NoUndo: noUndo}}
			standin.World(t, size, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
				c := hide(w, number < 2)
				if number == 3 {
					c = near{w}
				}
				r, err := newBatchRankOf(ctx, rt, c, dtype.F32, cfg, turns)
				require.NoError(t, err)
				for range 2 {
					batches := assignments["in turn, backwards"](w.Rank(), size)
					require.NoError(t, r.submit(ctx, drawn, batches, []int{4, 0, 3, 1, 2}))
					require.NoError(t, errors.Join(r.g.Wait(ctx), r.check(want)), "%d ranks, NoUndo %v, seed %d", size, noUndo, seed)
				}
				return r.close()
			})
		}
	}
}

// sameInAllWorlds makes a step with a configuration in worlds of several sizes, and has each leave the same results.
func sameInAllWorlds(t *testing.T, cfg ddp.Config, c *contributions, look func(r *batchRank, results [][]float32)) {
	t.Helper()
	var mu sync.Mutex
	var first [][]float32
	for _, size := range []int{1, 2, 3, 12} {
		require.NoError(t, local.Run(t.Context(), size, func(ctx context.Context, w comm.Communicator) error {
			rt := standin.Borrow()
			r, err := newBatchRank(ctx, rt, hide(w, size > 2), c.dt, cfg)
			if err != nil {
				return err
			}
			order := rand.New(rand.NewPCG(9, uint64(w.Rank()))).Perm(len(lengths))
			if err := r.submit(ctx, c, assignments["one after the other"](w.Rank(), size), order); err != nil {
				return err
			}
			if err := r.g.Wait(ctx); err != nil {
				return err
			}
			var results [][]float32
			for i := range lengths {
				v, err := values(r.g.Result(i))
				if err != nil {
					return err
				}
				results = append(results, v)
			}
			mu.Lock()
			if first == nil {
				first = results
				look(r, results)
			}
			want := first
			mu.Unlock()
			if err := r.check(want); err != nil {
				return fmt.Errorf("%d ranks: %w", size, err)
			}
			return errors.Join(r.close(), standin.Return(rt))
		}))
	}
}

// The norm that clips belongs to the results, from the same integers, and has the same bits in all worlds.
func TestReproducibleClip(t *testing.T) {
	const limit = 0.25
	c := draw(dtype.F32, 6, false)
	square := 0.0
	for i := range lengths {
		for _, x := range c.mean(i, 27) {
			square += float64(x) * float64(x)
		}
	}
	require.Greater(t, square, 4*limit*limit)
	cfg := ddp.Config{Reproducible: microbatches, Config: sparse.Config{ClipNorm: limit}}
	sameInAllWorlds(t, cfg, c, func(_ *batchRank, results [][]float32) {
		norm := 0.0
		for i, x := range results {
			whole := c.mean(i, 27)
			for j, v := range x {
				norm += float64(v) * float64(v)
				assert.InDelta(t, float64(whole[j])*limit/math.Sqrt(square), float64(v), 1e-6*math.Abs(float64(v)), "%d", j)
			}
		}
		assert.InDelta(t, limit, math.Sqrt(norm), 1e-6*limit)
	})
}

// results makes a step of one rank with contributions, and returns what it leaves.
func results(t *testing.T, dt dtype.DType, cfg ddp.Config, contributions ...[]float32) (out []float32) {
	standin.World(t, 1, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		x, err := runtime.New(rt, dt, len(contributions[0]))
		require.NoError(t, err)
		g, err := ddp.New(ctx, rt, w, []*runtime.Tensor{x}, cfg)
		require.NoError(t, err)
		for _, c := range contributions {
			require.NoError(t, errors.Join(load(x, c), g.Accumulate(0, x)))
		}
		require.NoError(t, g.Wait(ctx))
		out, err = values(g.Result(0))
		require.NoError(t, err)
		return errors.Join(g.Close(), x.Free())
	})
	return out
}

// The norm of the results is bounded, also where much larger contributions have canceled out.
func TestReproducibleClipAfterCancellation(t *testing.T) {
	const n = 128
	for _, left := range []float32{0, 1 << 20} { // in the block of those
		first := slices.Repeat([]float32{1}, n)
		second := slices.Clone(first)
		first[0] = 1 << 40
		second[0] = left - 1<<40
		cfg := ddp.Config{Reproducible: 2, Config: sparse.Config{ClipNorm: 0.1}}
		norm := 0.0
		for _, x := range results(t, dtype.F32, cfg, first, second) {
			norm += float64(x) * float64(x)
		}
		assert.InEpsilon(t, 0.1, math.Sqrt(norm), 1e-6, "%v is left", left)
	}
}

// Results of finite contributions are finite: what clips them comes first, and beyond the largest number of their type
// they are that.
func TestReproducibleLargest(t *testing.T) {
	const n = 70
	clipped := sparse.Config{ClipNorm: 1}
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		largest := map[dtype.DType]float32{dtype.F32: math.MaxFloat32, dtype.F16: 65504, dtype.BF16: 0x1.fep127}[dt]
		x := slices.Repeat([]float32{largest, -largest}, n/2)
		all := slices.Repeat([][]float32{x}, 126)
		assert.Equal(t, x, results(t, dt, ddp.Config{Reproducible: 126, Sum: true}, all...), "sum of %v", dt)
		assert.Equal(t, x, results(t, dt, ddp.Config{Reproducible: 126, ReproducibleBits: 8}, all...), "mean of %v", dt)
		got := results(t, dt, ddp.Config{Reproducible: 2, Sum: true, Config: clipped}, all[:2]...)
		for i, v := range got {
			assert.InEpsilon(t, math.Copysign(1/math.Sqrt(n), float64(x[i])), float64(v), 0.01, "%v, clipped", dt)
		}
	}
}

// Sums are sums, and a step with an element that is not finite is skipped on all ranks, where that is asked for.
func TestReproducibleSumAndSkip(t *testing.T) {
	c := draw(dtype.F32, 7, false)
	sameInAllWorlds(t, ddp.Config{Reproducible: 20, Sum: true}, c, func(_ *batchRank, results [][]float32) {
		sum := 0.0
		for _, m := range c.values {
			sum += float64(m[0][1])
		}
		assert.InDelta(t, sum, float64(results[0][1]), 1e-3*math.Abs(sum))
	})
	spoiled := draw(dtype.F32, 8, true)
	cfg := ddp.Config{Reproducible: microbatches, Config: sparse.Config{NonFinite: sparse.SkipNonFinite}}
	sameInAllWorlds(t, cfg, spoiled, func(r *batchRank, results [][]float32) {
		for _, x := range results {
			assert.Equal(t, make([]float32, len(x)), x)
		}
	})
}

// A step that fails is rolled back, and has all its contributions when it is repeated by the same calls of Ready. One
// that begins anew, or goes on with other ranks, has its own alone.
func TestReproducibleRolledBack(t *testing.T) {
	c := draw(dtype.F32, 9, false)
	var want [][]float32
	for i := range lengths {
		want = append(want, c.mean(i, 27))
	}
	all := []int{0, 1, 2, 3, 4, 5}
	standin.World(t, 2, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		f := standin.NewFaulty(w)
		r, err := newBatchRank(ctx, rt, f, c.dt, ddp.Config{Reproducible: microbatches})
		require.NoError(t, err)
		mine := assignments["one after the other"](w.Rank(), 2)
		require.NoError(t, errors.Join(r.submit(ctx, c, mine, all), r.g.Wait(ctx), r.check(want)))
		fail := func() {
			f.Calls, f.At = 0, 1
			err := r.submit(ctx, c, mine, all)
			assert.ErrorIs(t, errors.Join(err, r.g.Wait(ctx)), standin.ErrFault)
			f.At = -1
		}
		fail()
		require.NoError(t, errors.Join(r.g.ReduceAll(ctx, r.params), r.check(want)), "repeated")
		fail()
		require.NoError(t, errors.Join(r.submit(ctx, c, mine, all), r.g.Wait(ctx), r.check(want)), "anew")
		fail()
		require.NoError(t, r.g.Rebind(ctx, w))
		require.NoError(t, errors.Join(r.submit(ctx, c, mine, all), r.g.Wait(ctx), r.check(want)), "with other ranks")

		require.NoError(t, r.g.Accumulate(0, r.params[0]))
		_, err = r.g.State(ctx)
		assert.ErrorIs(t, err, comm.ErrArgument)
		return r.close()
	})
}

// A step that fails at any call, or before it commits, leaves gradients as they were, of which turns may have held
// results already, where ranks share memory. Then it can be repeated.
func TestReproducibleRestored(t *testing.T) {
	lengths := []int{100, 34_001, 64}
	for _, dt := range []dtype.DType{dtype.F32, dtype.BF16} {
		drawn := &contributions{dt: dt}
		for m := range microbatches {
			var all [][]float32
			for i, n := range lengths {
				all = append(all, narrowed(dt, standin.Normal(n, 31, m*len(lengths)+i)))
			}
			drawn.values = append(drawn.values, all)
		}
		var want [][]float32
		for i := range lengths {
			want = append(want, drawn.mean(i, 27))
		}
		standin.World(t, 2, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
			f := standin.NewFaulty(w)
			r, err := newBatchRankOf(ctx, rt, near{f}, dt, ddp.Config{Reproducible: microbatches}, lengths)
			require.NoError(t, err)
			batches := assignments["one after the other"](w.Rank(), 2)
			last := batches[len(batches)-1]
			// failed makes a step, of which the test has a call or the commit fail.
			failed := func() error {
				for _, m := range batches {
					for i := range lengths {
						require.NoError(t, load(r.params[i], drawn.values[m][i]))
						if m != last {
							require.NoError(t, r.g.Accumulate(i, r.params[i]))
						}
					}
				}
				return r.g.ReduceAll(ctx, r.params)
			}
			check := func(when string) {
				for i := range lengths {
					left, err := values(r.params[i])
					require.NoError(t, err)
					require.Equal(t, drawn.values[last][i], left, "gradient %d of %v, %s", i, dt, when)
				}
				require.NoError(t, errors.Join(r.g.ReduceAll(ctx, r.params), r.check(want)), "repeated, %s", when)
			}
			require.NoError(t, errors.Join(failed(), r.check(want)))
			calls := 0
			for ; ; calls++ {
				f.Calls = 0
				f.At = calls
				err := failed()
				f.At = -1
				if err == nil {
					break
				}
				require.ErrorIs(t, err, standin.ErrFault)
				check(fmt.Sprint("call ", calls))
			}
			require.Greater(t, calls, 4, "calls of a step of two turns")
			r.g.BeforeCommit(func(context.Context) error { return standin.ErrFault })
			require.ErrorIs(t, failed(), standin.ErrFault)
			r.g.BeforeCommit(nil)
			check("before the commit")
			return r.close()
		})
	}
}

// A step that is left out after it was rolled back adds nothing to the next one, which begins with Accumulate, of any
// gradient, or after a Rebind: however early it failed.
func TestReproducibleLeftOut(t *testing.T) {
	const count = 4
	standin.World(t, 1, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		f := standin.NewFaulty(w)
		params := standin.Gradients(t, rt, 2)
		g, err := ddp.New(ctx, rt, f, params, ddp.Config{Reproducible: count})
		require.NoError(t, err)
		set := func(x float64) { require.NoError(t, errors.Join(params[0].Fill(x), params[1].Fill(x))) }
		over, cancel := context.WithCancel(ctx)
		cancel()
		var confirmation error
		g.BeforeCommit(func(context.Context) error { return confirmation })
		failures := map[string]func() error{
			"before the commit": func() error {
				confirmation = standin.ErrFault
				defer func() { confirmation = nil }()
				return g.ReduceAll(ctx, params)
			},
			"in the first collective": func() error {
				f.Calls, f.At = 0, 1
				defer func() { f.At = -1 }()
				return g.ReduceAll(ctx, params)
			},
			"before its first call": func() error { return g.ReduceAll(over, params) },
			"in Wait":               func() error { return g.Wait(over) },
		}
		begins := map[string]func() error{
			"Accumulate of one": func() error { return errors.Join(g.Accumulate(1, params[1]), g.Ready(ctx, 0, params[0])) },
			"Accumulate of all": func() error { return errors.Join(g.Accumulate(0, params[0]), g.Accumulate(1, params[1])) },
			"Rebind":            func() error { return errors.Join(g.Rebind(ctx, f), g.ReduceAll(ctx, params)) },
		}
		for when, fail := range failures {
			for how, begin := range begins {
				set(100)
				require.NoError(t, errors.Join(g.Accumulate(0, params[0]), g.Accumulate(1, params[1])))
				require.Error(t, fail(), when)
				set(4)
				err := begin()
				if how != "Rebind" {
					err = errors.Join(err, g.Wait(ctx))
				}
				require.NoError(t, err, "%s, %s", when, how)
				for i := range params {
					got, err := values(g.Result(i))
					require.NoError(t, err)
					assert.Equal(t, slices.Repeat([]float32{1}, 100), got, "gradient %d, failed %s, begun with %s", i, when, how)
				}
			}
			set(4)
			require.NoError(t, g.Accumulate(0, params[0]))
			require.Error(t, fail(), when)
			set(4) // which the step had as well
			require.NoError(t, g.ReduceAll(ctx, params))
			repeated, err := values(g.Result(0))
			require.NoError(t, err)
			assert.Equal(t, slices.Repeat([]float32{2}, 100), repeated, "repeated after it failed %s", when)
		}
		standin.Free(t, params)
		return g.Close()
	})
}

// A contribution to a step that repeats another one is refused where that has begun, and held ones are part of it.
func TestReproducibleMixed(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 2)
		g, err := ddp.New(ctx, rt, w, params, ddp.Config{Reproducible: 4})
		require.NoError(t, err)
		g.BeforeCommit(func(context.Context) error { return standin.ErrFault })
		require.NoError(t, g.Accumulate(0, params[0]))
		require.ErrorIs(t, g.Wait(ctx), standin.ErrFault)
		g.BeforeCommit(nil)
		require.NoError(t, g.Ready(ctx, 0, params[0]))
		err = g.Accumulate(1, params[1])
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, "gradient 0 is ready with what it had in the step that was rolled back")
		require.NoError(t, g.Wait(ctx))
		standin.Free(t, params)
		return g.Close()
	})
}

// A step whose contributions could not all be kept fails as a whole, and can be made anew, also with other ranks.
func TestReproducibleWithoutMemory(t *testing.T) {
	standin.FreshWorld(t, 1, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 2)
		g, err := ddp.New(ctx, rt, w, params, ddp.Config{Reproducible: 2})
		require.NoError(t, err)
		ends := map[string]func() error{
			"Wait": func() error {
				err := g.Wait(ctx)
				assert.ErrorIs(t, err, runtime.ErrFrozen)
				return nil
			},
			"ReduceAll": func() error {
				assert.ErrorIs(t, g.ReduceAll(ctx, params), runtime.ErrFrozen)
				return nil
			},
			"Rebind": func() error { return g.Rebind(ctx, w) },
		}
		for name, end := range ends {
			require.NoError(t, errors.Join(params[0].Fill(100), params[1].Fill(100)))
			free := standin.Exhaust(t, rt, params[1].Len())
			require.ErrorIs(t, g.Accumulate(1, params[1]), runtime.ErrFrozen)
			free()
			require.NoError(t, end(), name)
			require.NoError(t, errors.Join(params[0].Fill(3), params[1].Fill(3)))
			require.NoError(t, errors.Join(g.Accumulate(0, params[0]), g.ReduceAll(ctx, params)), name)
			for i, want := range []float32{3, 1.5} {
				got, err := values(params[i])
				require.NoError(t, err)
				assert.Equal(t, slices.Repeat([]float32{want}, 100), got, "%s, gradient %d", name, i)
			}
		}
		standin.Free(t, params)
		return g.Close()
	})
}

// Views hold the results of a step on all ranks: where a gradient was left out, in Join, and where it was passed as
// another tensor.
func TestReproducibleViews(t *testing.T) {
	for _, hides := range []bool{false, true} {
		standin.World(t, 3, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
			params := standin.Gradients(t, rt, 2)
			g, err := ddp.New(ctx, rt, hide(w, hides), params, ddp.Config{Reproducible: 2, BucketViews: true, Uneven: true})
			require.NoError(t, err)
			views := g.Views()
			check := func() error {
				for i, v := range views {
					got, err := values(v)
					require.NoError(t, err)
					assert.Equal(t, slices.Repeat([]float32{3}, 100), got, "view %d of rank %d", i, w.Rank())
				}
				return nil
			}
			for i := range views {
				require.NoError(t, errors.Join(views[i].Fill(77), params[i].Fill(3)))
			}
			switch w.Rank() {
			case 0:
				require.NoError(t, g.Wait(ctx))
			case 1:
				require.NoError(t, views[1].Fill(3))
				require.NoError(t, g.ReduceAll(ctx, []*runtime.Tensor{params[0], views[1]}))
			case 2:
				require.NoError(t, errors.Join(g.Accumulate(0, params[0]), g.Accumulate(1, params[1]), g.Wait(ctx)))
			}
			require.NoError(t, check())
			require.NoError(t, g.Join(ctx, nil, check))
			standin.Free(t, params)
			return g.Close()
		})
	}
}

// More contributions than there may be are an error on all ranks, and change nothing.
func TestReproducibleTooMany(t *testing.T) {
	c := draw(dtype.F32, 10, false)
	tooMany := func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		r, err := newBatchRank(ctx, rt, w, c.dt, ddp.Config{Reproducible: 4})
		require.NoError(t, err)
		mine := [][]int{{0, 1, 2}, {}, {3, 4}}[w.Rank()]
		require.NoError(t, r.submit(ctx, c, mine, []int{0, 1, 2, 3, 4, 5}))
		err = r.g.Wait(ctx)
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, "5 contributions in a step, Config.Reproducible is 4")
		if len(mine) > 0 {
			left, err := values(r.params[3])
			require.NoError(t, err)
			assert.Equal(t, c.values[mine[len(mine)-1]][3], left, "the last contribution is as it was")
		}
		return r.close()
	}
	standin.FreshWorld(t, 3, tooMany)
	standin.FreshWorld(t, 3, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		return tooMany(ctx, near{w}, rt)
	})
}

// A Rebind gives the memory of contributions back, of which a rank may have fewer then; also a runtime that is frozen has
// memory for as many.
func TestReproducibleRebindFrees(t *testing.T) {
	standin.FreshWorld(t, 1, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 1)
		g, err := ddp.New(ctx, rt, w, params, ddp.Config{Reproducible: 8})
		require.NoError(t, err)
		step := func(count int) int64 {
			for range count - 1 {
				require.NoError(t, g.Accumulate(0, params[0]))
			}
			require.NoError(t, g.ReduceAll(ctx, params))
			return rt.Stats().LiveBytes
		}
		few := step(2)
		assert.Greater(t, step(8), few)
		require.NoError(t, g.Rebind(ctx, w))
		assert.Equal(t, few, step(2))
		step(8)
		rt.Freeze()
		require.NoError(t, g.Rebind(ctx, w))
		step(8)
		rt.Unfreeze()
		standin.Free(t, params)
		return g.Close()
	})
}

// How many contributions there are is counted by gradient: whether a step has too many depends neither on the ranks that
// have them nor on the buckets.
func TestReproducibleCounts(t *testing.T) {
	for _, bytes := range []int{1, 0} {
		for size := 1; size <= 4; size++ {
			for _, count := range []int{4, 5} {
				standin.World(t, size, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
					params := standin.Gradients(t, rt, 3)
					g, err := ddp.New(ctx, rt, hide(w, size > 2), params, ddp.Config{Reproducible: 4, BucketBytes: bytes})
					require.NoError(t, err)
					for i, p := range params[:2] { // which have different ranks
						require.NoError(t, p.Fill(2))
						for n := range count {
							if (n+i)%size == w.Rank() {
								require.NoError(t, g.Accumulate(i, p))
							}
						}
					}
					err = g.Wait(ctx)
					if count > 4 {
						assert.ErrorIs(t, err, comm.ErrArgument)
						assert.ErrorContains(t, err, "5 contributions in a step, Config.Reproducible is 4")
						standin.Free(t, params)
						return g.Close()
					}
					require.NoError(t, err, "%d ranks, buckets of %d bytes", size, bytes)
					for i, want := range []float32{2, 2, 0} {
						got, err := values(g.Result(i))
						require.NoError(t, err)
						assert.Equal(t, slices.Repeat([]float32{want}, 100), got)
					}
					standin.Free(t, params)
					return g.Close()
				})
			}
		}
	}
}

// A job that is resumed with another number of ranks goes on with the same bits, and one without data takes part.
func TestReproducibleRestoreAndJoin(t *testing.T) {
	c := draw(dtype.F32, 11, false)
	var want [][]float32
	for i := range lengths {
		want = append(want, c.mean(i, 27))
	}
	var saved []byte
	order := []int{5, 4, 3, 2, 1, 0}
	cfg := ddp.Config{Reproducible: microbatches, Uneven: true}
	for _, size := range []int{4, 3} {
		standin.World(t, size, func(ctx context.Context, w comm.Communicator, rt *cpu.Runtime) error {
			r, err := newBatchRank(ctx, rt, hide(w, size == 3), c.dt, cfg)
			require.NoError(t, err)
			if size == 3 {
				require.NoError(t, r.g.Restore(ctx, saved))
			}
			if w.Rank() == size-1 { // the others have all contributions
				require.NoError(t, r.g.Join(ctx, r.params, func() error { return r.check(want) }))
				return r.close()
			}
			mine := assignments["in turn, backwards"](w.Rank(), size-1)
			require.NoError(t, errors.Join(r.submit(ctx, c, mine, order), r.g.Wait(ctx), r.check(want)))
			require.NoError(t, r.g.Join(ctx, r.params, nil))
			state, err := r.g.State(ctx)
			if require.NoError(t, err); w.Rank() == 0 {
				saved = state
			}
			return r.close()
		})
	}
}

// Configurations whose results depend on who computes what are refused, and so are more contributions than the bits
// allow.
func TestReproducibleConfig(t *testing.T) {
	topk := sparse.Config{Pattern: "topkA", Density: 0.1}
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 1)
		for text, cfg := range map[string]ddp.Config{
			"Shard with Mesh":                       {Reproducible: 4, Shard: true, Mesh: hosts(1)},
			"Shard and BucketViews":                 {Reproducible: 4, Shard: true, BucketViews: true},
			"dense gradients in F32":                {Reproducible: 4, Wire: dtype.BF16},
			"without Momentum":                      {Reproducible: 4, Config: sparse.Config{Momentum: 0.9}},
			"it excludes":                           {Reproducible: 4, Config: topk, DenseUpTo: -1},
			"Weighted with Sum":                     {Reproducible: 4, Weighted: true, Sum: true},
			"ReproducibleBits without Reproducible": {ReproducibleBits: 24},
			"ReproducibleBits is 31, want 8 to 30":  {Reproducible: 1, ReproducibleBits: 31},
			"which allows 127 contributions a step, and Reproducible is 128; want at most 23": {
				Reproducible: 128, ReproducibleBits: 24},
			"Reproducible is -1, want 1 to": {Reproducible: -1},
		} {
			_, err := ddp.New(ctx, rt, c, params, cfg)
			assert.ErrorContains(t, err, text)
			assert.ErrorIs(t, err, comm.ErrArgument, text)
		}
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{Reproducible: 127, ReproducibleBits: 24})
		require.NoError(t, errors.Join(err, g.Close()))
		standin.Free(t, params)
		return nil
	})
}

// Bytes are those of dense F32 and one for each block, and steps allocate nothing.
func TestReproducibleCosts(t *testing.T) {
	const n = 1 << 18 // two turns
	fixed := ddp.Config{Reproducible: 4}
	early := fixed
	early.NoUndo = true
	weighted := fixed
	weighted.Weighted = true
	shard := fixed
	shard.Shard = true
	mesh := fixed
	mesh.Mesh = hosts(2)
	clipped := fixed
	clipped.ClipNorm = 1e9
	for name, cfg := range map[string]ddp.Config{
		"fixed": fixed, "early": early, "weighted": weighted, "clipped": clipped, "shard": shard, "mesh": mesh,
		"fixed, hidden": fixed, "early, hidden": early, "clipped, hidden": clipped,
		"fixed, near": fixed, "early, near": early, "clipped, near": clipped,
	} {
		perStep := math.Inf(1)
		standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			x, err := runtime.New(rt, dtype.F32, n)
			require.NoError(t, err)
			params := []*runtime.Tensor{x}
			sent := map[int]int64{}
			for _, contributions := range []int{0, 4} {
				chosen := cfg
				if contributions == 0 {
					chosen = ddp.Config{Shard: cfg.Shard}
				}
				placed := hide(c, strings.HasSuffix(name, "hidden"))
				if strings.HasSuffix(name, "near") {
					placed = near{c}
				}
				g, err := ddp.New(ctx, rt, placed, params, chosen)
				require.NoError(t, err)
				step := func() {
					if chosen.Weighted {
						err = errors.Join(err, g.Weigh(3))
					}
					if contributions > 0 {
						err = errors.Join(err, g.Accumulate(0, x))
					}
					err = errors.Join(err, g.ReduceAll(ctx, params))
				}
				rounds := 6
				if contributions == 0 {
					rounds = 1
				}
				for range rounds {
					if c.Rank() == 0 && contributions > 0 {
						perStep = min(perStep, testing.AllocsPerRun(5, step))
						continue
					}
					for range 6 {
						step()
					}
				}
				require.NoError(t, err)
				stats, err := g.Stats(ctx)
				require.NoError(t, err)
				sent[contributions] = stats.SentBytes
				require.NoError(t, g.Close())
			}
			if cfg.Mesh == nil { // which counts what goes between hosts
				assert.LessOrEqual(t, float64(sent[4]), 1.02*float64(sent[0]), name)
			}
			standin.Free(t, params)
			return nil
		})
		assert.Zero(t, perStep, "allocations per step, %s", name)
	}
}

// ordinary draws what microbatches contribute to a gradient whose magnitudes change slowly.
func ordinary(dt dtype.DType, n int) (all [][]float32) {
	for m := range microbatches {
		x := standin.Normal(n, 77, m)
		for i := range x {
			x[i] *= float32(math.Exp(2 * math.Sin(float64(i)/5000)))
		}
		all = append(all, narrowed(dt, x))
	}
	return all
}

// Sums of ordinary gradients are about as good as sums in F32 that are rounded to the gradients' type, beside those of
// F64: of F32 with 24 bits, of F16 with 13, of BF16 with 11. With as many bits as 12 contributions allow, they are not worse.
func TestReproducibleAccuracy(t *testing.T) {
	const n = 1 << 16
	for _, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16} {
		all := ordinary(dt, n)
		exact := make([]float64, n)
		chain := make([]float32, n)
		for _, x := range all {
			for i := range x {
				exact[i] += float64(x[i])
				chain[i] += x[i]
			}
		}
		plain := rms(narrowed(dt, chain), exact)
		for precision, bound := range map[dtype.DType]map[int]float64{
			dtype.F32:  {24: 1.7, 0: 0.7},
			dtype.F16:  {8: 30, 11: 4, 13: 1.3, 24: 1.01, 0: 1.01},
			dtype.BF16: {8: 4, 10: 1.3, 11: 1.1, 24: 1.01, 0: 1.01},
		}[dt] {
			standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				x, err := runtime.New(rt, dt, n)
				require.NoError(t, err)
				params := []*runtime.Tensor{x}
				cfg := ddp.Config{Reproducible: microbatches, ReproducibleBits: precision, Sum: true}
				g, err := ddp.New(ctx, rt, c, params, cfg)
				require.NoError(t, err)
				for m := c.Rank(); m < microbatches; m += 2 {
					if m >= 2 {
						require.NoError(t, g.Accumulate(0, x))
					}
					require.NoError(t, load(x, all[m]))
				}
				require.NoError(t, g.ReduceAll(ctx, params))
				got, err := values(x)
				require.NoError(t, err)
				if c.Rank() == 0 {
					t.Logf("%v, %d bits: rms error %.3g, of a chain of F32 %.3g", dt, precision, rms(got, exact), plain)
				}
				assert.LessOrEqual(t, rms(got, exact), bound*plain, "%v, %d bits", dt, precision)
				require.NoError(t, g.Close())
				standin.Free(t, params)
				return nil
			})
		}
	}
}

// rms returns the error of sums beside exact ones.
func rms(sums []float32, exact []float64) float64 {
	sum := 0.0
	total := 0.0
	for i, v := range sums {
		sum += (float64(v) - exact[i]) * (float64(v) - exact[i])
		total += exact[i] * exact[i]
	}
	return math.Sqrt(sum / total)
}
