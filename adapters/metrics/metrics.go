// Package metrics exports what steps of a training did to [Prometheus], and so to what reads its format, such as a
// collector of OpenTelemetry.
//
//	m, err := metrics.New(prometheus.DefaultRegisterer, prometheus.Labels{"rank": strconv.Itoa(c.Rank())})
//	…
//	gradients.OnStep(m.Step) // a ddp.Gradients
//	http.Handle("/metrics", promhttp.Handler())
//
// [Prometheus]: https://prometheus.io/docs/concepts/data_model/
package metrics

import (
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
)

// Metrics are those of one rank. Its methods may be called by several goroutines.
type Metrics struct {
	steps          prometheus.Counter // that were made
	rounds         prometheus.Counter // of outer loops
	skipped        prometheus.Counter // steps that were rolled back for a number that is not finite
	elements       prometheus.Counter // that this rank has sent
	bytes          prometheus.Counter // that this rank has sent
	launch         prometheus.Counter // seconds in Ready
	wait           prometheus.Counter // seconds in Wait
	exchange       prometheus.Counter // seconds of asynchronous exchanges
	hidden         prometheus.Counter // seconds of these behind the backward pass
	epoch, members prometheus.Gauge   // of an elastic job, and its number of members

	mu    sync.Mutex  // guards outer
	outer outer.Stats // those that were counted last; zero: none; guarded by mu
}

// New registers the metrics, with these labels. An error is one of the registry: a name that is taken.
func New(r prometheus.Registerer, labels prometheus.Labels) (*Metrics, error) {
	r = prometheus.WrapRegistererWith(labels, r)
	var errs []error
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "tutti_" + name, Help: help})
		errs = append(errs, r.Register(c))
		return c
	}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "tutti_" + name, Help: help})
		errs = append(errs, r.Register(g))
		return g
	}
	m := &Metrics{
		steps:  counter("steps_total", "Steps of the optimizer; with an outer loop those of the inner one."),
		rounds: counter("rounds_total", "Windows of an outer loop that ended."),
		skipped: counter(
			"skipped_total",
			"Steps, or fragments of an outer loop, that the ranks skipped because a number was not finite.",
		),
		elements: counter("sent_elements_total", "Elements that this rank sent."),
		bytes:    counter("sent_bytes_total", "Bytes that this rank sent."),
		launch:   counter("launch_seconds_total", "The host's time in starting exchanges."),
		wait:     counter("wait_seconds_total", "The host's time in waiting for exchanges: those that no computation hid."),
		exchange: counter("exchange_seconds_total", "What exchanges took, where a worker of the host made them."),
		hidden:   counter("hidden_seconds_total", "The part of these exchanges in which the backward pass went on."),
		epoch:    gauge("epoch", "Number of the epoch of an elastic job."),
		members:  gauge("members", "Members of the epoch of an elastic job."),
	}
	return m, errors.Join(errs...)
}

// Step counts a step, for [ddp.Gradients.OnStep].
func (m *Metrics) Step(s ddp.Stats) {
	m.count(s.Skipped, s.SentElements, s.SentBytes, s.LaunchTime, s.WaitTime)
	add(m.exchange, s.ExchangeTime.Seconds())
	add(m.hidden, s.HiddenTime.Seconds())
}

// Reduced counts a step of a [sparse.Reducer], of which the host waits for the exchange.
func (m *Metrics) Reduced(s sparse.Stats) {
	m.count(s.Skipped, s.SentElements, s.SentBytes, s.SelectTime, s.ExchangeTime)
}

// Outer counts what an [outer.Loop] has done in this process since the call before. Rounds of a restored loop before it
// was saved do not count. Call it after each step. Numbers that are lower than before are those of another loop, or of
// one that was restored, and count from its beginning.
func (m *Metrics) Outer(s outer.Stats) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.outer
	m.outer = s
	if s.FirstStep != before.FirstStep || s.FirstRound != before.FirstRound {
		before = outer.Stats{Steps: s.FirstStep, Rounds: s.FirstRound}
	}
	add(m.steps, float64(increase(s.Steps, before.Steps, s.FirstStep)))
	add(m.rounds, float64(increase(s.Rounds, before.Rounds, s.FirstRound)))
	add(m.skipped, float64(increase(s.Skipped, before.Skipped, 0)))
	add(m.elements, float64(increase(s.SentElements, before.SentElements, 0)))
	add(m.bytes, float64(increase(s.SentBytes, before.SentBytes, 0)))
	add(m.wait, increase(s.WaitTime, before.WaitTime, 0).Seconds())
}

// increase returns by how much a count has grown, or has grown since its beginning if it is lower than before.
func increase[T int | int64 | time.Duration](now, before, first T) T {
	if now < before {
		return now - first
	}
	return now - before
}

// add adds to a counter, which panics where a number would make it decrease.
func add(c prometheus.Counter, x float64) {
	if x > 0 {
		c.Add(x)
	}
}

// Epoch shows the epoch of an elastic job. Call it in each step of [elastic.Member.Run].
func (m *Metrics) Epoch(e *elastic.Epoch) {
	m.epoch.Set(float64(e.Number))
	m.members.Set(float64(len(e.Members)))
}

// count counts a step.
func (m *Metrics) count(skipped bool, elements, bytes int64, launch, wait time.Duration) {
	m.steps.Inc()
	if skipped {
		m.skipped.Inc()
	}
	add(m.elements, float64(elements))
	add(m.bytes, float64(bytes))
	add(m.launch, launch.Seconds())
	add(m.wait, wait.Seconds())
}
