package metrics_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/adapters/metrics"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// value reads a metric that must exist exactly once.
func value(t *testing.T, from prometheus.Gatherer, name string) float64 {
	families, err := from.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == "tutti_"+name {
			require.Len(t, f.GetMetric(), 1)
			m := f.GetMetric()[0]
			assert.Equal(t, "7", m.GetLabel()[0].GetValue())
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	t.Fatal("no metric ", name)
	return 0
}

func newMetrics(t *testing.T) (*metrics.Metrics, *prometheus.Registry) {
	r := prometheus.NewRegistry()
	m, err := metrics.New(r, prometheus.Labels{"rank": "7"})
	require.NoError(t, err)
	return m, r
}

func TestNames(t *testing.T) {
	_, r := newMetrics(t)
	problems, err := testutil.GatherAndLint(r)
	require.NoError(t, err)
	assert.Empty(t, problems)
	_, err = metrics.New(r, prometheus.Labels{"rank": "7"})
	assert.ErrorContains(t, err, "duplicate")
}

// A step counts once, even if it was skipped. A failed step does not count.
func TestStep(t *testing.T) {
	m, r := newMetrics(t)
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		layer, err := runtime.New(rt, dtype.F32, 1000)
		require.NoError(t, err)
		all := []*runtime.Tensor{layer}
		sync, err := ddp.New(ctx, rt, c, all, ddp.Config{Config: sparse.Config{Pattern: sparse.TopkA, Density: 0.1}, DenseUpTo: -1})
		require.NoError(t, err)
		if c.Rank() == 0 {
			sync.OnStep(m.Step)
		}
		for _, v := range []float64{1, float64(float32(1e38)) * 10, 2} {
			require.NoError(t, layer.Fill(v))
			require.NoError(t, sync.ReduceAll(ctx, all))
		}
		canceled, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, sync.ReduceAll(canceled, all), comm.ErrCanceled)
		return errors.Join(sync.Close(), layer.Free(), rt.Close())
	}))
	for name, want := range map[string]float64{"steps_total": 3, "skipped_total": 1, "sent_bytes_total": 2 * 800, "rounds_total": 0} {
		got := value(t, r, name)
		if name == "sent_bytes_total" { // and the counter of skipped steps
			assert.GreaterOrEqual(t, got, want)
			assert.Less(t, got, 2*want)
			continue
		}
		assert.Equal(t, want, got, name)
	}
	assert.Positive(t, value(t, r, "exchange_seconds_total"))
}

func TestReduced(t *testing.T) {
	m, r := newMetrics(t)
	m.Step(ddp.Stats{WaitTime: time.Second, ExchangeTime: 4 * time.Second, HiddenTime: 3 * time.Second})
	m.Reduced(sparse.Stats{SentBytes: 5, ExchangeTime: time.Second})
	assert.Equal(t, 3.0, value(t, r, "hidden_seconds_total"))
	assert.Equal(t, 5.0, value(t, r, "sent_bytes_total"))
	assert.Equal(t, 2.0, value(t, r, "wait_seconds_total"))
	assert.Equal(t, 2.0, value(t, r, "steps_total"))
}

// Totals of a loop are counted once, even if the loop is restored.
func TestOuter(t *testing.T) {
	m, r := newMetrics(t)
	m.Outer(outer.Stats{Steps: 10, Rounds: 1, Exchanges: 1, SentBytes: 100})
	m.Outer(outer.Stats{Steps: 20, Rounds: 2, Exchanges: 2, SentBytes: 150, Skipped: 1})
	m.Outer(outer.Stats{Steps: 20, Rounds: 2}) // restored
	m.Outer(outer.Stats{Steps: 30, Rounds: 3, Exchanges: 1, SentBytes: 50})
	for name, want := range map[string]float64{"steps_total": 30, "rounds_total": 3, "sent_bytes_total": 200, "skipped_total": 1} {
		assert.Equal(t, want, value(t, r, name), name)
	}
	m.Epoch(&elastic.Epoch{Number: 4, Members: strings.Fields("a b c")})
	assert.Equal(t, 4.0, value(t, r, "epoch"))
	assert.Equal(t, 3.0, value(t, r, "members"))
}

// counters are the names of metrics that only grow.
var counters = []string{"steps_total", "rounds_total", "skipped_total", "sent_elements_total", "sent_bytes_total", "launch_seconds_total",
	"wait_seconds_total", "exchange_seconds_total", "hidden_seconds_total"}

// A loop that continues from a saved state counts its own work, without the work before. This holds in another
// process, and in the same process if the loop is restored to an earlier or the same step, or replaced by a loop that
// sends less.
func TestRestoredOuter(t *testing.T) {
	const window = 4
	require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
		rt := cpu.New()
		x, err := runtime.New(rt, dtype.F32, 1000)
		require.NoError(t, err)
		make := func(pattern string) *outer.Loop {
			l, err := outer.New(ctx, rt, c, []*runtime.Tensor{x}, outer.Config{Every: window,
				Reduce: ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.01}, DenseUpTo: -1}})
			require.NoError(t, err)
			return l
		}
		step := func(l *outer.Loop, m *metrics.Metrics, steps int) {
			for range steps {
				require.NoError(t, l.Step(ctx))
				m.Outer(l.Stats())
			}
		}
		m, r := newMetrics(t)
		check := func(steps, rounds int, sent int64) {
			t.Helper()
			assert.EqualValues(t, steps, value(t, r, "steps_total"))
			assert.EqualValues(t, rounds, value(t, r, "rounds_total"))
			assert.EqualValues(t, sent, value(t, r, "sent_bytes_total"))
		}
		first := make(sparse.Dense)
		step(first, m, 40)
		state, err := first.State(ctx)
		require.NoError(t, err)
		sent := first.Stats().SentBytes
		check(40, 10, sent)

		m, r = newMetrics(t) // as in another process
		second := make(sparse.Dense)
		require.NoError(t, second.Restore(ctx, state))
		assert.Equal(t, outer.Stats{Steps: 40, Rounds: 10, FirstStep: 40, FirstRound: 10}, second.Stats())
		step(second, m, 1)
		check(1, 0, 0)
		step(second, m, 3)
		each := second.Stats().SentBytes
		check(4, 1, each)
		require.NoError(t, second.Restore(ctx, state))
		step(second, m, 9)
		check(13, 3, 3*each)

		third := make(sparse.TopkA) // as many exchanges, fewer bytes
		step(third, m, 2*window)
		check(13+2*window, 5, 3*each+third.Stats().SentBytes)
		return errors.Join(first.Close(), second.Close(), third.Close(), x.Free())
	}))
}

// No counter falls and nothing panics, for any numbers in any order.
func TestCountersNeverFall(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	m, r := newMetrics(t)
	before := map[string]float64{}
	number := func() int { return rng.IntN(7) - 1 }
	for range 2000 {
		switch rng.IntN(3) {
		case 0:
			m.Step(ddp.Stats{SentElements: int64(number()), SentBytes: int64(number()), LaunchTime: time.Duration(number()), WaitTime: time.Duration(number()),
				ExchangeTime: time.Duration(number()), HiddenTime: time.Duration(number())})
		case 1:
			m.Reduced(sparse.Stats{SentElements: int64(number()), SelectTime: time.Duration(number())})
		default:
			m.Outer(outer.Stats{Steps: number(), Rounds: number(), FirstStep: number(), FirstRound: number(), Exchanges: number(), Skipped: number(),
				SentElements: int64(number()), SentBytes: int64(number()), WaitTime: time.Duration(number())})
		}
		for _, name := range counters {
			now := value(t, r, name)
			require.GreaterOrEqual(t, now, before[name], name)
			before[name] = now
		}
	}
}
