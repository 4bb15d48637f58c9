// Package metrics exports statistics of training steps to [Prometheus], and so to anything that reads its format,
// such as an OpenTelemetry collector.
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

// Metrics are the metrics of one rank. Its methods are safe for concurrent use.
type Metrics struct {
	steps          prometheus.Counter // completed steps
	rounds         prometheus.Counter // of outer loops
	skipped        prometheus.Counter // steps that were rolled back because of a non-finite number
	elements       prometheus.Counter // sent by this rank
	bytes          prometheus.Counter // sent by this rank
	launch         prometheus.Counter // seconds in Ready
	wait           prometheus.Counter // seconds in Wait
	exchange       prometheus.Counter // seconds of asynchronous exchanges
	hidden         prometheus.Counter // seconds of these that the backward pass hides
	epoch, members prometheus.Gauge   // of an elastic job, and its number of members

	mu    sync.Mutex  // guards outer
	outer outer.Stats // counted last; zero: none; guarded by mu
}

// New registers the metrics with labels. It returns the registry's error if a name is taken.
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

// Reduced counts a step of a [sparse.Reducer]. The host waits for its exchange.
func (m *Metrics) Reduced(s sparse.Stats) {
	m.count(s.Skipped, s.SentElements, s.SentBytes, s.SelectTime, s.ExchangeTime)
}

// Outer counts the work of an [outer.Loop] in this process since the previous call. Rounds of a restored loop before
// it was saved do not count. Call Outer after each step. Numbers lower than before belong to another loop, or to one
// that was restored, and count from its beginning.
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

// increase returns the growth of a count, or its growth since its beginning if it is lower than before.
func increase[T int | int64 | time.Duration](now, before, first T) T {
	if now < before {
		return now - first
	}
	return now - before
}

// add adds to a counter, which would panic if x were negative.
func add(c prometheus.Counter, x float64) {
	if x > 0 {
		c.Add(x)
	}
}

// Epoch sets the gauges to the epoch of an elastic job. Call it in each step of [elastic.Member.Run].
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
