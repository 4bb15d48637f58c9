package overlap

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The tests' model has gradients of 128 bytes per layer.
const (
	testRanks = 3
	layers    = 3
	width     = 8
	batch     = 4
	layerSize = width * width * 2
)

// A product of a layer takes 10 ms, or 12 with fewer multiprocessors. The reduction of a layer takes 6 ms, or 9
// beside products.
const (
	ms          = float64(time.Millisecond)
	productTime = 10 * ms
	limitedTime = 12 * ms
	reduceTime  = 6 * ms
	besideTime  = 9 * ms
)

func testConfig() Config {
	return Config{Layers: layers, Width: width, Batch: batch, BucketBytes: layerSize, Steps: 2, Rounds: 3, Seed: 7}
}

// eachRank runs body on simulated devices, one for each rank.
func eachRank(t *testing.T, body func(ctx context.Context, r Rank) error) {
	t.Helper()
	require.NoError(t, local.Run(t.Context(), testRanks, func(ctx context.Context, c comm.Communicator) error {
		d := newSimDevice()
		d.perMAC, d.limited = productTime/(batch*width*width), limitedTime/(batch*width*width)
		err := body(ctx, Rank{
			Runtime: d,
			Compute: d,
			Comm:    &simComm{Communicator: c, device: d, perByte: reduceTime / layerSize},
			Beside:  &simComm{Communicator: c, device: d, perByte: besideTime / layerSize},
		})
		if len(d.events) > 0 {
			err = errors.Join(err, errors.New("events are left over"))
		}
		return errors.Join(err, d.Close()) // reports unfreed memory
	}))
}

// run measures on all ranks and returns rank 0's result and device.
func run(t *testing.T, cfg Config, change func(*Rank)) (result Result, device *simDevice) {
	t.Helper()
	eachRank(t, func(ctx context.Context, r Rank) error {
		change(&r)
		got, err := Run(ctx, r, cfg)
		if r.Comm.Rank() == 0 {
			result, device = got, r.Compute.(*simDevice)
		}
		return err
	})
	return result, device
}

// exact is the largest rounding error of simulated milliseconds.
const exact = 1e-5

func TestTimesAndHiddenShare(t *testing.T) {
	// Three products forward and five backward, without the gradient of the input. The gradients are ready after 40,
	// 60 and 80 ms.
	result, device := run(t, testConfig(), func(r *Rank) { r.Beside = nil })
	assert.InDelta(t, 80, result.ComputeMS, exact)
	assert.InDelta(t, 18, result.CommMS, exact)
	assert.InDelta(t, 18, result.CommFlatMS, exact)
	assert.InDelta(t, 18, result.CommBesideMS, exact)
	assert.InDelta(t, 98, result.SequentialMS, exact)
	assert.InDelta(t, 86, result.OverlappedMS, exact, "the last bucket has nothing to hide behind")
	assert.InDelta(t, 12.0/18, result.Hidden, exact)
	assert.InDelta(t, 6, result.TailMS, exact)
	assert.InDelta(t, 0, result.SlowdownMS, exact)
	flops := 8.0 * 2 * batch * width * width
	assert.InEpsilon(t, flops/0.080/1e12, result.TFLOPS, 1e-4)
	assert.Equal(t, testRanks, result.Ranks)
	assert.Equal(t, layers, result.Buckets)
	assert.Equal(t, layers*layerSize, result.GradientBytes)
	for _, n := range device.limits {
		assert.Zero(t, n)
	}
}

func TestCommunicationBesideProducts(t *testing.T) {
	cfg := testConfig()
	cfg.Multiprocessors = 5
	result, device := run(t, cfg, func(*Rank) {})
	// Four products at full speed, four with fewer multiprocessors, and then the last bucket.
	assert.InDelta(t, 4*10+4*12+9, result.OverlappedMS, exact)
	assert.InDelta(t, 9, result.TailMS, exact)
	assert.InDelta(t, 8, result.SlowdownMS, exact)
	assert.InDelta(t, 27, result.CommBesideMS, exact)
	assert.InDelta(t, 18, result.CommFlatMS, exact, "the share is that of the faster communication")
	assert.InDelta(t, (80.0+18-97)/18, result.Hidden, exact)
	assert.InDelta(t, 98, result.SequentialMS, exact)
	steps := (cfg.Steps + 1) * (cfg.Rounds + 1) // one step of a round is traced
	require.Len(t, device.limits, 2*steps)
	for i, n := range device.limits {
		assert.Equal(t, []int{5, 0}[i%2], n)
	}
}

// TestTheFirstLayerIsCut halves the buckets. The first layer's gradient is computed and reduced in two parts, of
// which only the last is not hidden.
func TestTheFirstLayerIsCut(t *testing.T) {
	cfg := testConfig()
	cfg.BucketBytes = layerSize / 2
	result, _ := run(t, cfg, func(r *Rank) { r.Beside = nil })
	assert.Equal(t, layers+1, result.Buckets)
	assert.InDelta(t, 80, result.ComputeMS, exact)
	// The parts are ready after 75 and 80 ms; each takes 3 ms.
	assert.InDelta(t, 83, result.OverlappedMS, exact)
	assert.InDelta(t, 3, result.TailMS, exact)
}

func TestOneRankHasNothingToHide(t *testing.T) {
	d := newSimDevice()
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		result, err := Run(ctx, Rank{Runtime: d, Compute: d, Comm: &simComm{Communicator: c, device: d}}, testConfig())
		assert.Zero(t, result.Hidden)
		_, jsonErr := json.Marshal(result)
		return errors.Join(err, jsonErr)
	}))
	require.NoError(t, d.Close())
}

func TestTimelines(t *testing.T) {
	cfg := testConfig()
	var calls [][2]int
	cfg.Progress = func(done, total int) { calls = append(calls, [2]int{done, total}) }
	result, _ := run(t, cfg, func(r *Rank) { r.Beside = nil })
	assert.Equal(t, [][2]int{{1, 4}, {2, 4}, {3, 4}, {4, 4}}, calls, "only rank 0 tells")
	require.Len(t, result.Timelines, 2)

	type span struct {
		kind       Kind
		name       string
		start, end float64 // milliseconds
	}
	passes := []span{
		{Forward, "forward 0", 0, 10}, {Forward, "forward 1", 10, 20}, {Forward, "forward 2", 20, 30},
		{Backward, "gradient 2", 30, 40}, {Backward, "backward 2", 40, 50},
		{Backward, "gradient 1", 50, 60}, {Backward, "backward 1", 60, 70},
		{Backward, "gradient 0", 70, 80},
	}
	for i, want := range []struct {
		name    string
		total   float64
		buckets []span
	}{
		{"one after the other", 98, []span{{AllReduce, "bucket 0", 80, 86}, {AllReduce, "bucket 1", 86, 92}, {AllReduce, "bucket 2", 92, 98}}},
		{"overlapped", 86, []span{{AllReduce, "bucket 0", 40, 46}, {AllReduce, "bucket 1", 60, 66}, {AllReduce, "bucket 2", 80, 86}}},
	} {
		got := result.Timelines[i]
		assert.Equal(t, want.name, got.Name)
		assert.InDelta(t, want.total*1e3, got.Total, 1)
		spans := append(append([]span{}, passes...), want.buckets...)
		require.Len(t, got.Spans, len(spans))
		for j, w := range spans {
			g := got.Spans[j]
			assert.Equal(t, w.kind, g.Kind)
			assert.Equal(t, w.name, g.Name)
			assert.InDelta(t, w.start*1e3, g.Start, 1, g.Name)
			assert.InDelta(t, w.end*1e3, g.End, 1, g.Name)
		}
	}
}

// TestBucketsWaitForEachOther checks reductions that are slower than products: a bucket begins when the one before is
// done.
func TestBucketsWaitForEachOther(t *testing.T) {
	result, _ := run(t, testConfig(), func(r *Rank) {
		r.Comm.(*simComm).perByte = 50 * ms / layerSize
		r.Beside = nil
	})
	spans := result.Timelines[1].Spans
	for i, want := range [][2]float64{{40, 90}, {90, 140}, {140, 190}} {
		bucket := spans[len(spans)-3+i]
		assert.InDelta(t, want[0]*1e3, bucket.Start, 1)
		assert.InDelta(t, want[1]*1e3, bucket.End, 1)
	}
	assert.InDelta(t, 190, result.OverlappedMS, exact)
	assert.InDelta(t, 110, result.TailMS, exact)
}

// TestGradientsAreTheAverages has buckets that divide the first layer, that hold one layer each, and that hold
// several layers.
func TestGradientsAreTheAverages(t *testing.T) {
	for name, bucket := range bucketSizes {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig()
			cfg.BucketBytes = bucket
			var reduced []int
			checkGradients(t, cfg, testRanks, func(body func(context.Context, Rank) error) {
				eachRank(t, func(ctx context.Context, r Rank) error {
					err := body(ctx, r)
					if r.Comm.Rank() == 0 {
						reduced = r.Beside.(*simComm).reduced
					}
					return err
				})
			})
			total := 0
			for _, n := range reduced {
				assert.LessOrEqual(t, n, max(bucket, layerSize))
				total += n
			}
			assert.Equal(t, layers*layerSize, total, "everything was reduced once")
		})
	}
}

var bucketSizes = map[string]int{"parts": layerSize / 4, "layers": layerSize, "pairs": 2 * layerSize, "all": 1 << 20}

// checkGradients compares the gradients of an overlapped step on all ranks with a float64 computation of the same
// model.
func checkGradients(t *testing.T, cfg Config, ranks int, eachRank func(body func(context.Context, Rank) error)) {
	t.Helper()
	gradients, inputs := make([][]float64, ranks), make([][]float64, ranks)
	var weights []float64
	eachRank(func(ctx context.Context, r Rank) (err error) {
		s, err := newSession(ctx, r, cfg)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.close(ctx, err != nil)) }()
		for _, p := range s.phases() {
			if p.name == overlapped {
				if _, _, err := s.step(ctx, p, nil); err != nil {
					return err
				}
			}
		}
		if err := r.Runtime.Synchronize(ctx); err != nil {
			return err
		}
		rank := r.Comm.Rank()
		first := s.model.products[0] // of the first layer, forward
		if rank == 0 {
			weights = load(r.Runtime, first.b.Addr, width*width)
		}
		inputs[rank] = load(r.Runtime, first.a.Addr, batch*width)
		gradients[rank] = load(r.Runtime, s.model.gradient(0, 0, 1).Addr, layers*width*width)
		return nil
	})
	want := make([]float64, layers*width*width)
	largest := 0.0
	for rank, x := range inputs {
		for i, g := range reference(x, weights) {
			want[i] += g / float64(ranks)
			largest = max(largest, math.Abs(want[i]))
		}
		if rank > 0 {
			assert.NotEqual(t, inputs[0], x, "ranks have data of their own")
		}
	}
	for rank, got := range gradients {
		assert.Equal(t, gradients[0], got, "rank %d has other bits", rank)
		for i := range got {
			// A few roundings to the eight bits of bfloat16.
			require.InDelta(t, want[i], got[i], 0.03*largest, "seed %d, element %d", cfg.Seed, i)
		}
	}
}

// load reads elements of a runtime's memory.
func load(rt runtime.Runtime, addr uintptr, n int) []float64 {
	raw, x := make([]byte, n*Element.Size()), make([]float32, n)
	if err := errors.Join(rt.CopyOut(raw, addr), dtype.ToFloat32(x, raw, Element)); err != nil {
		panic(err)
	}
	out := make([]float64, n)
	for i, v := range x {
		out[i] = float64(v)
	}
	return out
}

// reference returns the gradients of the sum of the last layer's output, layer by layer, by the chain rule for a
// single input row at a time.
func reference(inputs, w []float64) []float64 {
	gradients := make([]float64, layers*width*width)
	for row := range batch {
		values := [][]float64{inputs[row*width : (row+1)*width]}
		for range layers {
			x, y := values[len(values)-1], make([]float64, width)
			for o := range y {
				for i := range x {
					y[o] += w[o*width+i] * x[i]
				}
			}
			values = append(values, y)
		}
		delta := make([]float64, width)
		for i := range delta {
			delta[i] = 1
		}
		for layer := layers - 1; layer >= 0; layer-- {
			before := make([]float64, width)
			for o := range width {
				for i := range width {
					gradients[(layer*width+o)*width+i] += delta[o] * values[layer][i]
					before[i] += delta[o] * w[o*width+i]
				}
			}
			delta = before
		}
	}
	return gradients
}

// TestSymmetricMemoryIsFreedTogether checks that all ranks free the memory when all are done. A rank that fails alone
// leaves it to its communicator's Close, because its peers are making another call.
func TestSymmetricMemoryIsFreedTogether(t *testing.T) {
	failure := errors.New("device failed")
	for name, k := range map[string]struct {
		broken brokenDevice // rank 1's
		want   [testRanks]error
		frees  int
	}{
		"success": {frees: 1},
		"a rank cannot compute": {brokenDevice{multiply: failure},
			[testRanks]error{comm.ErrPeerFailed, failure, comm.ErrPeerFailed}, 0},
		"a rank has no memory": {brokenDevice{allocate: failure},
			[testRanks]error{comm.ErrPeerFailed, failure, comm.ErrPeerFailed}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			eachRank(t, func(ctx context.Context, r Rank) error {
				c := &symmetricComm{simComm: r.Comm.(*simComm)}
				r.Comm, r.Beside = c, nil
				if c.Rank() == 1 {
					k.broken.simDevice = c.device
					r.Runtime, r.Compute = k.broken, k.broken
				}
				_, err := Run(ctx, r, testConfig())
				assert.ErrorIs(t, err, k.want[c.Rank()], "rank %d", c.Rank())
				assert.Equal(t, k.frees, c.frees, "rank %d", c.Rank())
				return c.Close()
			})
		})
	}
}

func TestWithoutStreams(t *testing.T) {
	rt := cpu.New()
	d := newSimDevice()
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		_, err := Run(ctx, Rank{Runtime: rt, Compute: d, Comm: c}, testConfig())
		assert.ErrorIs(t, err, comm.ErrUnsupported, "a runtime without streams")
		_, err = Run(ctx, Rank{Runtime: d, Compute: d, Comm: c}, testConfig())
		assert.ErrorIs(t, err, comm.ErrUnsupported, "a communicator without streams")
		return nil
	}))
	require.NoError(t, errors.Join(rt.Close(), d.Close()))
}

func TestValidateNamesTheSetting(t *testing.T) {
	require.NoError(t, Default().Validate())
	for name, change := range map[string]func(*Config){
		"layers is 0": func(c *Config) { c.Layers = 0 },
		"width is -1": func(c *Config) { c.Width = -1 },
		"batch":       func(c *Config) { c.Batch = 0 },
		"bucket":      func(c *Config) { c.BucketBytes = 0 },
		"sms is -2":   func(c *Config) { c.Multiprocessors = -2 },
		"steps":       func(c *Config) { c.Steps = 0 },
		"rounds":      func(c *Config) { c.Rounds = 0 },
	} {
		cfg := Default()
		change(&cfg)
		assert.ErrorContains(t, cfg.Validate(), name)
	}
}

func TestMedianTimeline(t *testing.T) {
	middle := medianTimeline([]Timeline{{Name: "c", Total: 3}, {Name: "a", Total: 1}, {Name: "b", Total: 2}})
	assert.Equal(t, "b", middle.Name)
}

// TestGradientsOfSparsePatternsAreNew checks that a pattern that sends the largest entries gets different numbers on
// each rank and in each step, cut from the model's noise, whatever products or reductions have left there.
func TestGradientsOfSparsePatternsAreNew(t *testing.T) {
	seen := make([][][]float64, testRanks)
	eachRank(t, func(ctx context.Context, r Rank) (err error) {
		cfg := testConfig()
		cfg.Pattern, cfg.Density = "topkA", 0.1
		m, err := newModel(ctx, r.Runtime, r.Comm, cfg, r.Comm.Rank(), testRanks)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.free(ctx, false)) }()
		s := &session{Rank: r, cfg: cfg, model: m}
		noise := load(r.Runtime, m.noise, width*width+2*noiseShift)
		for step := range 3 {
			pass := func() error { return s.compute(nil, nil) }
			if step == 1 {
				pass = func() error { return s.drawAll(ctx, nil) }
			}
			if err := pass(); err != nil {
				return err
			}
			got := load(r.Runtime, m.memory.Ptr, layers*width*width)
			seen[r.Comm.Rank()] = append(seen[r.Comm.Rank()], got)
			for i, g := range got {
				require.Equal(t, noise[step*noiseShift+i%(width*width)], g, "seed %d: step %d, element %d", cfg.Seed, step, i)
			}
		}
		return nil
	})
	for rank := range seen {
		assert.NotEqual(t, seen[rank][0], seen[rank][1], "steps")
		assert.NotEqual(t, seen[rank][0], seen[(rank+1)%testRanks][0], "ranks")
	}
}
