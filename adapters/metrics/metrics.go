// Package metrics exports what steps of a training did to [Prometheus], and so to what reads its format, such as a collector
// of OpenTelemetry.
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
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
)

// Metrics are those of one rank. Its methods may be called by several goroutines.
type Metrics struct {
	steps, rounds, skipped, elements, bytes, launch, wait, exchange, hidden prometheus.Counter
	epoch, members                                                          prometheus.Gauge
	outer                                                                   outer.Stats // that were counted
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
		steps:    counter("steps_total", "Steps of the optimizer; with an outer loop those of the inner one."),
		rounds:   counter("rounds_total", "Windows of an outer loop that ended."),
		skipped:  counter("skipped_total", "Steps, or fragments of an outer loop, that the ranks dropped as a number was not finite."),
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
	m.count(1, s.Skipped, s.SentElements, s.SentBytes, s.LaunchTime, s.WaitTime)
	m.exchange.Add(s.ExchangeTime.Seconds())
	m.hidden.Add(s.HiddenTime.Seconds())
}

// Reduced counts a step of a [sparse.Reducer], of which the host waits for the exchange.
func (m *Metrics) Reduced(s sparse.Stats) {
	m.count(1, s.Skipped, s.SentElements+s.InnerElements, s.SentBytes+s.InnerBytes, s.SelectTime, s.ExchangeTime+s.InnerTime)
}

// Outer counts what an [outer.Loop] has done since the call before. Call it after each step, by one goroutine.
func (m *Metrics) Outer(s outer.Stats) {
	was := m.outer
	if s.Exchanges < was.Exchanges || s.Steps < was.Steps { // another loop, or one that was restored
		was = outer.Stats{Steps: s.Steps, Rounds: s.Rounds}
	}
	m.outer = s
	m.rounds.Add(float64(s.Rounds - was.Rounds))
	m.skipped.Add(float64(s.Skipped - was.Skipped))
	m.count(s.Steps-was.Steps, false, s.SentElements-was.SentElements, s.SentBytes-was.SentBytes, 0, s.WaitTime-was.WaitTime)
}

// Epoch shows the epoch of an elastic job, for Bind of its [elastic.Config].
func (m *Metrics) Epoch(e *elastic.Epoch) {
	m.epoch.Set(float64(e.Number))
	m.members.Set(float64(len(e.Members)))
}

func (m *Metrics) count(steps int, skipped bool, elements, bytes int64, launch, wait time.Duration) {
	m.steps.Add(float64(steps))
	if skipped {
		m.skipped.Inc()
	}
	m.elements.Add(float64(elements))
	m.bytes.Add(float64(bytes))
	m.launch.Add(launch.Seconds())
	m.wait.Add(wait.Seconds())
}
