package bench

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/measure"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// quick measures as little as possible.
var quick = Repeats{Warmup: 1, Iterations: 1, Rounds: 1}

// onRanks runs body on local ranks. wrap, if not nil, replaces communicators.
func onRanks(t *testing.T, ranks int, wrap func(comm.Communicator) comm.Communicator, body func(ctx context.Context, r backend.Rank) error) {
	t.Helper()
	local, err := backend.Find("local")
	require.NoError(t, err)
	require.NoError(t, local.Run(t.Context(), backend.Options{Ranks: ranks}, func(ctx context.Context, r backend.Rank) error {
		if wrap != nil {
			r.Comm = wrap(r.Comm)
		}
		return body(ctx, r)
	}))
}

func measureAll(t *testing.T, ranks int, cfg Config, wrap func(comm.Communicator) comm.Communicator) []Result {
	t.Helper()
	m, err := New(cfg)
	require.NoError(t, err)
	var all []Result
	onRanks(t, ranks, wrap, func(ctx context.Context, r backend.Rank) error {
		return m.Run(ctx, r, func(results []Result) { all = append(all, results...) })
	})
	return all
}

// runAlone measures on one rank, which shares nothing with others.
func runAlone(ctx context.Context, r backend.Rank, cfg Config, report func([]Result)) error {
	m, err := New(cfg)
	if err != nil {
		return err
	}
	return m.Run(ctx, r, report)
}

// named returns the collective with the given name.
func named(name string) Collective {
	all := Collectives()
	return all[slices.IndexFunc(all, func(k Collective) bool { return k.String() == name })]
}

func TestNothingIsWrongOnLocal(t *testing.T) {
	for _, k := range Collectives() {
		for _, dt := range dtype.All() {
			for _, op := range reductions.All() {
				if !op.Defined(dt) || !k.Reduces() && op != comm.Sum {
					continue
				}
				for _, ranks := range []int{1, 3, 4} {
					cfg := Config{Collective: k, Sizes: []int{1, 4000, 200_000}, DType: dt, Op: op, Places: k.Places(), Repeats: quick, Verify: true}
					results := measureAll(t, ranks, cfg, nil)
					require.Len(t, results, 3*len(k.Places()))
					for _, r := range results {
						require.NotNil(t, r.Wrong)
						assert.Zero(t, *r.Wrong, "%s %v %v, %d ranks, %d bytes, %s", k, dt, op, ranks, r.Bytes, r.Place)
						assert.Positive(t, r.Time)
					}
				}
			}
		}
	}
}

// liar corrupts the data that one rank receives: an element of a reduction, and the data that it passes on in other
// collectives.
type liar struct {
	comm.Communicator
	damage func(recv uintptr)
}

func (l liar) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	if err := l.Communicator.AllReduce(send, recv, count, dt, op); err != nil {
		return err
	}
	if err := l.Communicator.Sync(context.Background()); err != nil {
		return err
	}
	if l.Rank() == 1 && count > 2 {
		l.damage(recv)
	}
	return nil
}

// AllGather does nothing: it leaves the result as it was.
func (l liar) AllGather(_, _ uintptr, _ int, _ dtype.DType) error { return nil }

func TestWrongIsCounted(t *testing.T) {
	const elements = 5000
	for _, place := range []Place{OutOfPlace, InPlace} {
		cfg := Config{Collective: named("allreduce"), Sizes: []int{4 * elements}, DType: dtype.F32, Op: comm.Sum, Places: []Place{place}, Repeats: quick, Verify: true}
		var results []Result
		onRanks(t, 2, nil, func(ctx context.Context, r backend.Rank) error {
			r.Comm = liar{r.Comm, func(recv uintptr) {
				// The second element becomes wrong, and the third slightly wrong.
				_ = r.Runtime.Fill(recv+4, 1, dtype.F32, 77)
				_ = r.Runtime.Fill(recv+8, 1, dtype.F32, 0.001)
			}}
			return runAlone(ctx, r, cfg, func(all []Result) { results = append(results, all...) })
		})
		require.Len(t, results, 1)
		assert.EqualValues(t, 2, *results[0].Wrong, place)
	}

	cfg := Config{Collective: named("allgather"), Sizes: []int{4 * elements}, DType: dtype.F32, Places: []Place{OutOfPlace}, Repeats: quick, Verify: true}
	results := measureAll(t, 2, cfg, func(c comm.Communicator) comm.Communicator { return liar{Communicator: c} })
	assert.EqualValues(t, 2*elements, *results[0].Wrong, "what was never written is wrong on both ranks")
}

func TestSizesAndBandwidthsAreThoseOfNCCLTests(t *testing.T) {
	for _, c := range []struct {
		name         string
		bytes, count int
		factor       float64
	}{
		{"allreduce", 4096, 1024, 1.5},
		{"allgather", 4096, 256, 0.75},
		{"reducescatter", 4096, 256, 0.75},
		{"alltoall", 4096, 256, 0.75},
		{"broadcast", 4096, 1024, 1},
		{"sendrecv", 4096, 1024, 1},
	} {
		cfg := Config{Collective: named(c.name), Backend: "local", Sizes: []int{4096}, DType: dtype.F32, Op: comm.Max, Places: named(c.name).Places()[:1], Repeats: quick}
		r := measureAll(t, 4, cfg, nil)[0]
		assert.Equal(t, c.bytes, r.Bytes, c.name)
		assert.Equal(t, c.count, r.Count, c.name)
		assert.InEpsilon(t, float64(r.Bytes)/r.Time/1e3, r.AlgBW, 1e-3, c.name)
		require.NotNil(t, r.BusBW, c.name)
		assert.InEpsilon(t, c.factor*r.AlgBW, *r.BusBW, 1e-3, c.name)
		assert.Nil(t, r.Wrong, "not verified")
	}
}

func TestSmallSizesRoundUpOnce(t *testing.T) {
	cfg := Config{Collective: named("alltoall"), Sizes: []int{1, 2, 16, 64}, DType: dtype.F64, Places: []Place{OutOfPlace}, Repeats: quick}
	var bytes []int
	for _, r := range measureAll(t, 3, cfg, nil) {
		bytes = append(bytes, r.Bytes)
	}
	assert.Equal(t, []int{24, 48}, bytes)
}

func TestRoundsOnTheSlowestRank(t *testing.T) {
	onRanks(t, 2, nil, func(ctx context.Context, r backend.Rank) error {
		times := [][]float64{{10, 2, 6}, {4, 8, 2}}[r.Comm.Rank()]
		i := 0
		run := func(context.Context, int) (float64, error) { i++; return times[i-1], nil }
		got, err := measure.InTurns(0, 3, slowest(ctx, r), perIteration(ctx, run, 2))
		assert.NoError(t, err)
		assert.Equal(t, [][]float64{{5, 4, 3}}, got)
		return nil
	})
}

func TestSparseKeepsItsPromises(t *testing.T) {
	cfg := SparseConfig{Backend: "local", DType: dtype.F32, Patterns: sparsity.Patterns(), Values: []string{sparse.F32, sparse.I8}, Densities: []float64{0.02, 0.1}, Sizes: []int{4, 40_000}, Repeats: Repeats{Warmup: 2, Iterations: 3, Rounds: 2}, Verify: true}
	var results, inTurns []SparseResult
	onRanks(t, 3, nil, func(ctx context.Context, r backend.Rank) error {
		turns := cfg
		turns.Interleave = true
		return errors.Join(RunSparse(ctx, r, cfg, func(s SparseResult) { results = append(results, s) }),
			RunSparse(ctx, r, turns, func(s SparseResult) { inTurns = append(inTurns, s) }))
	})
	require.Len(t, results, 2*2*(2*len(cfg.Patterns)-1), "dense once for both densities")
	require.Len(t, inTurns, len(results))
	for i, r := range inTurns {
		assert.Zero(t, *r.Wrong, "%s, %d elements", r.Pattern, r.Count)
		assert.Equal(t, results[i].Pattern, r.Pattern)
		assert.Equal(t, results[i].SentBytes, r.SentBytes, "%s, %d elements", r.Pattern, r.Count)
		assert.Len(t, r.RoundTimes, 2)
		assert.InEpsilon(t, (r.RoundTimes[0]+r.RoundTimes[1])/2, r.Time, 1e-3)
	}
	for _, r := range results {
		assert.Zero(t, *r.Wrong, "%s, %d elements", r.Pattern, r.Count)
		if r.Values != sparse.F32 {
			continue
		}
		if r.Count == 10_000 && r.Pattern == "topkA" && r.Density == 0.02 {
			assert.InDelta(t, 8*200*2, r.SentBytes, 1e-9, "200 values and indices of two other ranks")
		}
		if r.Count == 10_000 && r.Pattern == "topkAopt" {
			assert.InEpsilon(t, 8*r.Density*10_000*2, r.SentBytes, 0.1, "as after many steps, a threshold serves for several")
		}
	}
	line, err := json.Marshal(results[0])
	require.NoError(t, err)
	var keys map[string]any
	require.NoError(t, json.Unmarshal(line, &keys))
	assert.ElementsMatch(t, []string{"collective", "backend", "device", "ranks", "bytes", "count", "dtype", "op", "graph", "symmetric", "p2p", "p2p_up_to_bytes", "time_us", "algbw_gb_per_s", "busbw_gb_per_s", "wrong", "place", "root",
		"pattern", "density", "values", "sent_bytes_per_rank", "select_us", "exchange_us"}, slices.Collect(maps.Keys(keys)))
}

func TestSparseOf16Bits(t *testing.T) {
	for _, dt := range []dtype.DType{dtype.F16, dtype.BF16} {
		cfg := SparseConfig{Backend: "local", DType: dt, Patterns: sparsity.Patterns(), Densities: []float64{0.02}, Sizes: []int{2, 20_000}, Repeats: quick, Verify: true}
		var results []SparseResult
		onRanks(t, 3, nil, func(ctx context.Context, r backend.Rank) error {
			return RunSparse(ctx, r, cfg, func(s SparseResult) { results = append(results, s) })
		})
		require.Len(t, results, 2*len(cfg.Patterns))
		for _, r := range results {
			assert.Zero(t, *r.Wrong, "%s, %d elements", r.Pattern, r.Count)
			assert.Equal(t, dt.String(), r.DType)
			assert.Equal(t, 2*r.Count, r.Bytes)
		}
	}
	assert.ErrorContains(t, SparseConfig{DType: dtype.F64, Repeats: quick, Densities: []float64{1}}.Validate(), "not f64")
}

// With hosts, the pattern runs between them, and nothing gets lost either.
func TestSparseBetweenHosts(t *testing.T) {
	cfg := SparseConfig{Backend: "local", DType: dtype.F32, Patterns: sparsity.Patterns(), Densities: []float64{0.02}, Hosts: 3, Sizes: []int{4, 48, 40_004}, Repeats: quick, Verify: true}
	var results []SparseResult
	onRanks(t, 6, nil, func(ctx context.Context, r backend.Rank) error {
		return RunSparse(ctx, r, cfg, func(s SparseResult) { results = append(results, s) })
	})
	require.Len(t, results, 3*len(cfg.Patterns))
	for _, r := range results {
		assert.Zero(t, *r.Wrong, "%s, %d elements", r.Pattern, r.Count)
		assert.Equal(t, 3, r.Hosts)
		if r.Count == 10_001 && r.Pattern == "topkA" {
			assert.InDelta(t, 8*100*2, r.SentBytes, 1e-9, "100 values and indices of two other hosts")
			assert.InDelta(t, 4*10_001, r.InnerBytes, 4, "a reduce-scatter and an allgather of two ranks")
		}
	}
	cfg.Hosts = 4
	onRanks(t, 6, nil, func(ctx context.Context, r backend.Rank) error {
		var refused *backend.OptionError
		err := RunSparse(ctx, r, cfg, nil)
		assert.ErrorContains(t, err, "--hosts 4 does not divide 6 ranks")
		assert.ErrorAs(t, err, &refused)
		return nil
	})
}

func TestBrokenPromisesAreCounted(t *testing.T) {
	gone := []float32{4, 0, 2, -6, float32(math.NaN())}
	size := []float32{4, 1, 2, 6, 1}
	result := []float32{2, 0, 1.5, -3, 1}
	rank0 := []float32{2, 0, 1.5, -3.0000002, 1}
	assert.EqualValues(t, 3, brokenPromises(dtype.F32, gone, size, result, rank0, 2), "a lost half, another bit pattern and a NaN")
}

func TestConfigNamesBadSettings(t *testing.T) {
	good := Config{Collective: named("allreduce"), DType: dtype.F32, Op: comm.Sum, Places: []Place{OutOfPlace}, Repeats: DefaultRepeats()}
	require.NoError(t, good.Validate())
	for want, change := range map[string]func(*Config){
		"avg":    func(c *Config) { c.DType, c.Op = dtype.I32, comm.Avg },
		"rounds": func(c *Config) { c.Rounds = 0 },
		"iters":  func(c *Config) { c.Iterations = -1 },
		"warmup": func(c *Config) { c.Warmup = -1 },
	} {
		cfg := good
		change(&cfg)
		assert.ErrorContains(t, cfg.Validate(), want)
	}
	assert.ErrorContains(t, SparseConfig{DType: dtype.F32, Repeats: DefaultRepeats(), Densities: []float64{2}}.Validate(), "density 2")
}

func TestBuffersThatDoNotFitAreRefused(t *testing.T) {
	const huge = 1 << 52
	cfg := Config{Collective: named("alltoall"), Backend: "local", Sizes: []int{8, huge}, DType: dtype.F32, Places: []Place{OutOfPlace}, Repeats: quick}
	steps := SparseConfig{Backend: "local", DType: dtype.F32, Patterns: []string{sparse.Dense}, Densities: []float64{1}, Sizes: []int{8, huge}, Repeats: quick}
	onRanks(t, 2, nil, func(ctx context.Context, r backend.Rank) error {
		err := runAlone(ctx, r, cfg, nil)
		assert.ErrorContains(t, err, "local: the buffers of 2 ranks are 16777216.0 GiB, this machine has")
		assert.ErrorAs(t, err, new(*backend.OptionError))
		err = RunSparse(ctx, r, steps, nil)
		assert.ErrorContains(t, err, "local: the buffers of 2 ranks are 25165824.0 GiB")
		buckets := BucketsConfig{Backend: "local", Patterns: []string{sparse.Dense}, Density: 1, Buckets: 8, Bytes: 1 << 60, Rounds: 1}
		err = RunBuckets(ctx, r, buckets, nil)
		assert.ErrorContains(t, err, "local: the buffers of 2 ranks are 53687091200.0 GiB", "more bytes than an int counts")
		r.HostRanks = 0
		assert.NoError(t, r.Fits("nccl", "the buffers", huge, "--max or --ranks"), "of a device nothing is known here")
		return nil
	})
}

// The ranks of a process share the tables and make only those that they need.
func TestReferenceIsMadeOnce(t *testing.T) {
	for _, verify := range []bool{false, true} {
		cfg := Config{Collective: named("allreduce"), Sizes: []int{8}, DType: dtype.F32, Op: comm.Sum, Places: named("allreduce").Places(), Repeats: quick, Verify: verify}
		m, err := New(cfg)
		require.NoError(t, err)
		const ranks = 5
		var made [ranks]atomic.Int32
		var reduced atomic.Int32
		tables := m.tables(ranks)
		for rank, input := range tables.inputs {
			tables.inputs[rank] = sync.OnceValue(func() []byte { made[rank].Add(1); return input() })
		}
		reduce := tables.reduced
		tables.reduced = sync.OnceValue(func() *reference.Result { reduced.Add(1); return reduce() })
		onRanks(t, ranks, nil, func(ctx context.Context, r backend.Rank) error { return m.Run(ctx, r, func([]Result) {}) })
		for rank := range made {
			assert.EqualValues(t, 1, made[rank].Load(), "rank %d", rank)
		}
		assert.Equal(t, verify, reduced.Load() == 1, "the result, only to be verified")
	}
}

func TestSizes(t *testing.T) {
	sizes, err := Sizes(8, 600, 4)
	require.NoError(t, err)
	assert.Equal(t, []int{8, 32, 128, 512, 600}, sizes, "the largest is always among them")
	sizes, err = Sizes(8, 512, 4)
	require.NoError(t, err)
	assert.Equal(t, []int{8, 32, 128, 512}, sizes)
	sizes, err = Sizes(8, 8, 4)
	require.NoError(t, err)
	assert.Equal(t, []int{8}, sizes)
	sizes, err = Sizes(1<<60, math.MaxInt, 5)
	require.NoError(t, err)
	assert.Equal(t, []int{1 << 60, 5 << 60, math.MaxInt}, sizes, "no overflow at the end")
	for want, args := range map[string][3]int{"smallest": {0, 8, 2}, "largest": {16, 8, 2}, "step": {8, 16, 1}} {
		_, err := Sizes(args[0], args[1], args[2])
		assert.ErrorContains(t, err, want)
	}
}

func TestNumbers(t *testing.T) {
	assert.InDelta(t, 0.0012346, significant(0.00123456), 1e-12)
	assert.InDelta(t, 98765, significant(98765.4321), 1e-9)
	assert.Zero(t, significant(0))
}

func TestBuckets(t *testing.T) {
	cfg := BucketsConfig{Backend: "local", Patterns: []string{sparse.Dense, sparse.Oktopk, sparse.Auto}, Density: 0.02,
		Buckets: 3, Bytes: 40_000, Wire: dtype.F32, Backward: time.Millisecond, Rounds: 2}
	var results []BucketsResult
	onRanks(t, 3, nil, func(ctx context.Context, r backend.Rank) error {
		return RunBuckets(ctx, r, cfg, func(b BucketsResult) { results = append(results, b) })
	})
	require.Len(t, results, 3)
	for i, r := range results {
		assert.Equal(t, cfg.Patterns[i], r.Pattern)
		assert.Equal(t, 3000.0, r.Backward)
		assert.GreaterOrEqual(t, r.After, r.Backward)
		assert.GreaterOrEqual(t, r.Overlapped, r.Backward)
		assert.Len(t, r.Chosen, []int{0, 0, 3}[i])
	}
	for want, change := range map[string]func(*BucketsConfig){
		"density": func(c *BucketsConfig) { c.Density = 0 }, "buckets": func(c *BucketsConfig) { c.Buckets = 0 },
		"size": func(c *BucketsConfig) { c.Bytes = 3 }, "backward": func(c *BucketsConfig) { c.Backward = -1 },
		"backward 2h": func(c *BucketsConfig) { c.Backward = 2 * time.Hour },
		"rounds":      func(c *BucketsConfig) { c.Rounds = 0 },
		"not i8":      func(c *BucketsConfig) { c.Wire = dtype.I8 },
		"sent as f32": func(c *BucketsConfig) { c.Wire, c.Views = dtype.BF16, true },
	} {
		bad := cfg
		change(&bad)
		assert.ErrorContains(t, bad.Validate(), want)
	}
}

// TestBucketsSent checks that dense gradients sent as bf16 take half the bytes. Sparse gradients and views take as
// many as before.
func TestBucketsSent(t *testing.T) {
	const ranks = 2
	sent := func(pattern string, wire dtype.DType, views bool) (bytes int64) {
		cfg := BucketsConfig{Backend: "local", Patterns: []string{pattern}, Density: 0.02, Buckets: 3, Bytes: 40_000, Wire: wire, Views: views, Rounds: 1}
		require.NoError(t, cfg.Validate())
		onRanks(t, ranks, nil, func(ctx context.Context, r backend.Rank) error {
			meter := metered.New(r.Comm)
			r.Comm = meter
			return RunBuckets(ctx, r, cfg, func(b BucketsResult) {
				assert.Equal(t, views, b.Views)
				assert.Equal(t, map[bool]string{true: "bf16"}[pattern == sparse.Dense && wire == dtype.BF16], b.Wire)
				bytes = meter.Totals().SentBytes
			})
		})
		return bytes
	}
	dense := sent(sparse.Dense, dtype.F32, false)
	whole := int64(3 * 40_000) // the dense gradients of a step
	assert.Zero(t, (dense-sent(sparse.Dense, dtype.BF16, false))%(whole/2))
	assert.Less(t, sent(sparse.Dense, dtype.BF16, false), dense)
	assert.Equal(t, dense, sent(sparse.Dense, dtype.F32, true))
	assert.Equal(t, sent(sparse.TopkA, dtype.F32, false), sent(sparse.TopkA, dtype.BF16, false))
}

func TestABackwardPassEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("interrupted")
	cancel(cause)
	assert.ErrorIs(t, compute(ctx, time.Hour), cause)
	assert.NoError(t, compute(t.Context(), time.Nanosecond))
}
