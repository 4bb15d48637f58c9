package engine_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	goruntime "runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/internal/tuning"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The configuration names what it does not know, and what there is.
func TestValuesNames(t *testing.T) {
	for _, c := range []struct {
		cfg  engine.Config
		want string
	}{
		{engine.Config{Values: "i3"}, `unknown values "i3" (want one of f32, lossless, bf16, f16, fp8, i8, i4, i2, 1bit`},
		{engine.Config{Pattern: sparsity.Auto, Density: 0.1, Values: sparsity.Auto}, `unknown values "auto"`},
	} {
		_, err := c.cfg.Settings()
		assert.ErrorIs(t, err, comm.ErrArgument)
		assert.ErrorContains(t, err, c.want)
	}
}

// reduced makes a step on a gradient, and returns the result.
func reduced(ctx context.Context, s *engine.Reducer, t *runtime.Tensor, gradient []float32) ([]float32, error) {
	if err := errors.Join(runtime.CopyIn(t, gradient), s.AllReduce(ctx, t)); err != nil {
		return nil, err
	}
	return runtime.ToSlice[float32](t)
}

// sentPerEntry returns the bytes that a rank sends to the other one of two, headers and lengths included, by the
// entries that it selects: in a second step, as the first one has what the ranks compare.
func sentPerEntry(t *testing.T, cfg engine.Config, gradient func(rank, step int) []float32) (most float64) {
	var sent [2]float64
	standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		n := len(gradient(0, 0))
		s, err := engine.New(rt, c, n, cfg)
		if err != nil {
			return err
		}
		g, err := runtime.New(rt, dtype.F32, n)
		if err != nil {
			return err
		}
		for step := range 2 {
			if err := errors.Join(runtime.CopyIn(g, gradient(c.Rank(), step)), s.AllReduce(ctx, g)); err != nil {
				return err
			}
		}
		stats, err := s.Stats(ctx)
		sent[c.Rank()] = float64(stats.SentBytes) / math.Round(cfg.Density*float64(n))
		return errors.Join(err, s.Close(), g.Free())
	})
	return max(sent[0], sent[1])
}

// Bytes that a rank sends for an entry at 1 %, and of a dense step. Indices take 3 % more than their entropy, also where
// entries cluster.
func TestValuesBytes(t *testing.T) {
	if testing.Short() {
		t.Skip("counts bytes of long tensors")
	}
	const n = 2_000_000
	tuning.Set(t, tuning.Tuning{TrimFrom: 16 << 10}) // of tensors twice as long, the default
	var all [2][2][]float32
	for i := range 4 {
		all[i/2][i%2] = standin.Normal(n, i/2, i%2)
	}
	spread := func(rank, step int) []float32 { return all[rank][step] }
	for _, c := range []struct {
		pattern, values string
		density, most   float64 // bytes an entry, or of dense F32
	}{
		{sparsity.TopkA, sparsity.F32, 0.01, 8}, {sparsity.TopkA, sparsity.I8, 0.01, 2.055}, {sparsity.TopkA, sparsity.I4, 0.01, 1.555}, {sparsity.TopkA, sparsity.I2, 0.01, 1.28},
		{sparsity.Chunked, sparsity.I2, 64. / 4096, 1.205}, {sparsity.TopkA2, sparsity.I4, 0.01, 1.555}, {sparsity.TopkAopt, sparsity.I4, 0.01, 1.65},
		{sparsity.Gtopk, sparsity.I4, 0.01, 2 * 1.555}, // of a root, which sends k entries, and receives as many
		{sparsity.Dense, sparsity.I8, 1, 4. / 3.8}, {sparsity.Dense, sparsity.I4, 1, 4. / 7.4}, {sparsity.Dense, sparsity.Bit, 1, 4. / 25},
	} {
		sent := sentPerEntry(t, engine.Config{Pattern: c.pattern, Values: c.values, Density: c.density}, spread)
		assert.LessOrEqual(t, sent, c.most, "%s %s", c.pattern, c.values)
	}
	for _, density := range []float64{0.002, 0.01, 0.1} {
		for _, within := range []float64{1, 4 * density} { // the part of the tensor that has entries
			part := all
			if within < 1 {
				for i := range 4 {
					g := make([]float32, n)
					copy(g, all[i/2][i%2][:int(within*n)])
					part[i/2][i%2] = g
				}
			}
			sent := sentPerEntry(t, engine.Config{Pattern: sparsity.TopkA, Values: sparsity.Lossless, Density: density},
				func(rank, step int) []float32 { return part[rank][step] })
			p := density / within
			entropy := (-p*math.Log2(p) - (1-p)*math.Log2(1-p)) / p
			assert.LessOrEqual(t, 8*(sent-4), 1.03*entropy, "bits of an index, %v of %v", density, within)
		}
	}
}

// A state holds for any codec, except for the dense pattern, which has a residual with one and none without.
func TestValuesOfStates(t *testing.T) {
	const n = 3000
	for _, pattern := range []string{sparsity.TopkA, sparsity.Oktopk, sparsity.Gtopk, sparsity.Chunked, sparsity.Dense} {
		for _, values := range []string{sparsity.Lossless, sparsity.I8, sparsity.I2} {
			standin.World(t, 3, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				cfg := engine.Config{Pattern: pattern, Values: values, Density: 0.1, Momentum: 0.5}
				made := func(cfg engine.Config, states ...[]byte) (*engine.Reducer, error) {
					s, err := engine.New(rt, c, n, cfg)
					if err == nil && len(states) > 0 {
						err = s.Restore(ctx, states...)
					}
					return s, err
				}
				g, err := runtime.New(rt, dtype.F32, n)
				if err != nil {
					return err
				}
				s, err := made(cfg)
				if err != nil {
					return err
				}
				var state []byte
				var want [2][]float32
				for step := range 5 {
					if step == 3 {
						if state, err = s.State(ctx); err != nil {
							return err
						}
					}
					result, err := reduced(ctx, s, g, standin.Normal(n, c.Rank(), step))
					if err != nil {
						return err
					}
					if step >= 3 {
						want[step-3] = result
					}
				}
				resumed, err := made(cfg, state)
				if err != nil {
					return err
				}
				for step := range want {
					result, err := reduced(ctx, resumed, g, standin.Normal(n, c.Rank(), 3+step))
					if err != nil {
						return err
					}
					if !slices.Equal(result, want[step]) {
						return fmt.Errorf("%s %s: step %d is another one when it is resumed", pattern, values, step)
					}
				}
				other := cfg
				other.Values = sparsity.I4
				changed, err := made(other, state)
				if err != nil {
					return fmt.Errorf("%s %s as i4: %w", pattern, values, err)
				}
				if _, err := reduced(ctx, changed, g, standin.Normal(n, c.Rank(), 3)); err != nil {
					return err
				}
				other.Values, other.Momentum, cfg.Momentum = sparsity.F32, 0, 0
				plain, err := made(cfg)
				if err != nil {
					return err
				}
				if state, err = plain.State(ctx); err != nil {
					return err
				}
				last, err := made(other, state)
				if dense := pattern == sparsity.Dense; dense != errors.Is(err, comm.ErrMismatch) {
					return fmt.Errorf("%s %s as f32: error is %w", pattern, values, err)
				}
				return errors.Join(s.Close(), resumed.Close(), changed.Close(), plain.Close(), last.Close(), g.Free())
			})
		}
	}
}

// TestSparseLoCoTwoMagnitudes: chunked, with 64 of 4096 and i2, selects what SparseLoCo does (Sarfi et al., 2025), the
// top k of each chunk, and loses at most 2 % more of their squares than the best two magnitudes a sign do.
func TestSparseLoCoTwoMagnitudes(t *testing.T) {
	const n, chunk, k = 40_000, 4096, 64
	gradient := standin.Normal(n, 0, 0)
	picked := make([]int, 0, n)
	for from := 0; from < n; from += chunk {
		all := make([]int, min(chunk, n-from))
		for i := range all {
			all[i] = from + i
		}
		slices.SortStableFunc(all, func(a, b int) int {
			x, y := math.Abs(float64(gradient[a])), math.Abs(float64(gradient[b]))
			return map[bool]int{true: -1, false: 1}[x > y]
		})
		all = all[:min(k, len(all))]
		slices.Sort(all)
		picked = append(picked, all...)
	}
	best := leastLoss(gradient, picked)
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		s, err := engine.New(rt, c, n, engine.Config{Pattern: sparsity.Chunked, Values: sparsity.I2, Density: float64(k) / chunk})
		if err != nil {
			return err
		}
		g, err := runtime.New(rt, dtype.F32, n)
		if err != nil {
			return err
		}
		result, err := reduced(ctx, s, g, gradient)
		require.NoError(t, err)
		lost := 0.0
		for _, i := range picked {
			assert.NotZero(t, result[i], "element %d", i)
			lost += math.Pow(float64(gradient[i])-float64(result[i]), 2)
			result[i] = 0
		}
		assert.Equal(t, make([]float32, n), result, "what is not selected")
		assert.GreaterOrEqual(t, lost, best*0.999)
		assert.Less(t, lost, best*1.02)
		return errors.Join(s.Close(), g.Free())
	})
}

// leastLoss returns the squares that some elements of x, at most 4096, lose if those of each sign become the means of their
// smaller and of their larger ones, wherever these are told apart.
func leastLoss(x []float32, picked []int) (total float64) {
	for _, sign := range []float64{1, -1} {
		var values []float64
		for _, i := range picked {
			if v := sign * float64(x[i]); v > 0 {
				values = append(values, v)
			}
		}
		slices.Sort(values)
		loss := func(part []float64) (squares float64) {
			mean := 0.0
			for _, v := range part {
				mean += v / float64(len(part))
			}
			for _, v := range part {
				squares += (v - mean) * (v - mean)
			}
			return squares
		}
		best := math.Inf(1)
		for cut := range values {
			best = min(best, loss(values[:cut])+loss(values[cut:]))
		}
		total += best
	}
	return total
}

// sumRounded returns the sums of what ranks have, rounded, and leaves residuals there.
func sumRounded(codec kernel.Codec, residual [][]float32) (all []float32, err error) {
	k := cpu.New().Kernels()
	// rounded returns what a codec makes of x, of which lost becomes what that loses.
	rounded := func(x, lost []float32) []float32 {
		code, out := make([]uint32, codec.Size(len(x))/4), make([]float32, len(x))
		err = errors.Join(err, k.Quantize(hostmem.Addr(code), codec, hostmem.Addr(x), len(x), hostmem.Addr(lost)),
			k.Dequantize(hostmem.Addr(out), codec, hostmem.Addr(code), len(x), false))
		goruntime.KeepAlive(x)
		goruntime.KeepAlive(lost)
		goruntime.KeepAlive(code)
		return out
	}
	n := len(residual[0])
	share := (n + len(residual) - 1) / len(residual)
	for owner := range residual {
		from, to := owner*share, min((owner+1)*share, n)
		sums := make([]float32, to-from)
		for r := range residual {
			mine := residual[r][from:to]
			sent := mine
			if r != owner {
				sent = rounded(mine, mine)
			}
			for i, v := range sent {
				sums[i] += v
			}
		}
		all = append(all, rounded(sums, residual[owner][from:to])...)
	}
	return all, err
}

// rounder has an operation for rounded values, in one codec.
type rounder struct {
	comm.Wrapped
	codec  kernel.Codec
	calls  int
	midway bool // the next call fails when it has written a half
}

func (r *rounder) AllReduceRounded(src kernel.Source, sums uintptr, codec kernel.Codec, op comm.ReduceOp) error {
	if codec != r.codec || op != comm.Avg || src.Keep != 0 {
		return comm.ErrUnsupported
	}
	r.calls++
	n, size := src.N, r.WorldSize()
	flat, all := make([]float32, n*size), make([][]float32, size)
	for i := range all {
		all[i] = flat[i*n : (i+1)*n]
	}
	mine := all[r.Rank()]
	copy(mine, hostmem.Slice[float32](src.X, n))
	if src.Grad != 0 {
		added := src
		added.X, added.From = hostmem.Addr(mine), cmp.Or(src.From, src.X)
		if err := cpu.New().Kernels().Accumulate(added); err != nil {
			return err
		}
	}
	err := errors.Join(r.AllGather(hostmem.Addr(mine), hostmem.Addr(flat), n, dtype.F32), r.Sync(context.Background()))
	result, wrong := sumRounded(codec, all)
	if r.midway {
		r.midway, n, wrong = false, n/2, standin.ErrFault
	}
	for i, sum := range result[:n] {
		hostmem.Slice[float32](sums, n)[i] = sum * (1 / float32(size))
	}
	if src.Take {
		copy(hostmem.Slice[float32](src.X, n), mine)
	}
	return errors.Join(err, wrong)
}

// A dense step, also in one operation of a communicator that has it, rounds shares as a whole, adds them up in the
// order of the ranks, and rounds the sums.
func TestDenseShares(t *testing.T) {
	const n, ranks = 150_009, 3
	for values, codec := range map[string]kernel.Codec{sparsity.I8: kernel.CodecI8, sparsity.I2: kernel.CodecI2, sparsity.Bit: kernel.CodecSign} {
		var want [2][]float32
		residual := make([][]float32, ranks)
		for r := range residual {
			residual[r] = make([]float32, n)
		}
		for step := range want {
			for r := range residual {
				for i, g := range standin.Normal(n, r, step) {
					residual[r][i] += g
				}
			}
			var err error
			want[step], err = sumRounded(codec, residual)
			require.NoError(t, err)
			for i := range want[step] {
				want[step][i] *= float32(1) / ranks
			}
		}
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			once := &rounder{Wrapped: comm.Wrap(c), codec: kernel.CodecI8}
			plain, err := steps(ctx, rt, c, values, want[:])
			if err != nil {
				return err
			}
			sent, err := steps(ctx, rt, once, values, want[:])
			if err != nil {
				return err
			}
			assert.Equal(t, plain, sent, "bytes sent")
			assert.Equal(t, map[bool]int{true: len(want)}[values == sparsity.I8], once.calls)
			return nil
		})
	}
}

// A communicator that adds the gradient on the way makes the steps of a pass that adds it before: results and residuals have
// the same bits, also when a step has ended midway, and while addresses stay.
func TestGradientsAddedOnTheWay(t *testing.T) {
	const n, ranks, steps, bad = 1501, 3, 6, 3
	run := func(cfg engine.Config, dt dtype.DType, frozen, fused bool) (digests [ranks][]string) {
		standin.World(t, ranks, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
			host := &onHost{Copying: standin.NewCopying(rt, new(standin.Waits), &standin.Stumbling{Kernels: rt.Kernels()}, nil)}
			r := &rounder{Wrapped: comm.Wrap(c), codec: kernel.CodecI8}
			if !fused {
				r.codec = kernel.CodecNone
			}
			s, err := engine.New(host, r, n, cfg)
			if err != nil {
				return err
			}
			g, err := runtime.New(host, dt, n)
			if err != nil {
				return err
			}
			state := func() string { // all of it
				h, bytes := sha256.New(), make([]byte, g.Bytes())
				residual, err := s.Residual()
				require.NoError(t, errors.Join(err, rt.CopyOut(bytes, standin.Pointer(g))))
				h.Write(bytes)
				if !cfg.NoErrorFeedback {
					require.NoError(t, standin.AddTensor(h, host, residual))
				}
				return string(h.Sum(nil))
			}
			for step := range steps {
				values := standin.Normal(n, c.Rank(), step)
				require.NoError(t, rt.Kernels().Store(standin.Pointer(g), dt, hostmem.Addr(values), n, 1, 0))
				goruntime.KeepAlive(values)
				host.frozen = frozen && step > 1
				if step == bad && fused && !cfg.NoUndo {
					before := state()
					r.midway = true
					assert.ErrorIs(t, s.AllReduce(ctx, g), standin.ErrFault)
					assert.Equal(t, before, state())
				}
				if err := s.AllReduce(ctx, g); err != nil {
					return err
				}
				digests[c.Rank()] = append(digests[c.Rank()], state())
			}
			assert.Equal(t, fused, r.calls > 0)
			return errors.Join(s.Close(), g.Free())
		})
		return digests
	}
	for name, cfg := range map[string]engine.Config{
		"undo": {}, "no undo": {NoUndo: true}, "forget": {NoErrorFeedback: true}, "momentum": {Momentum: 0.9}, "momentum, no undo": {Momentum: 0.9, NoUndo: true},
		"clip": {ClipNorm: 1, ClipGlobal: true}, "almost all": {Pattern: sparsity.Oktopk, Density: 0.5}, "fail": {NonFinite: engine.FailNonFinite},
	} {
		cfg.Pattern, cfg.Values = cmp.Or(cfg.Pattern, sparsity.Dense), sparsity.I8
		for i, dt := range []dtype.DType{dtype.F32, dtype.F16, dtype.BF16, dtype.F32} {
			frozen := i == 3
			assert.Equal(t, run(cfg, dt, frozen, false), run(cfg, dt, frozen, true), "%s, %v, frozen %t", name, dt, frozen)
		}
	}
}

// steps makes dense steps, compares their results, and returns how many bytes the rank sent.
func steps(ctx context.Context, rt *cpu.Runtime, c comm.Communicator, values string, want [][]float32) (sent int64, err error) {
	n := len(want[0])
	s, err := engine.New(rt, c, n, engine.Config{Pattern: sparsity.Dense, Values: values})
	if err != nil {
		return 0, err
	}
	g, err := runtime.New(rt, dtype.F32, n)
	if err != nil {
		return 0, err
	}
	for step := range want {
		result, err := reduced(ctx, s, g, standin.Normal(n, c.Rank(), step))
		if err != nil {
			return 0, err
		}
		if !slices.Equal(result, want[step]) {
			return 0, fmt.Errorf("%s: rank %d has another result in step %d", values, c.Rank(), step)
		}
	}
	stats, err := s.Stats(ctx)
	return stats.SentBytes, errors.Join(err, s.Close(), g.Free())
}
