package engine

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// terms returns the terms on which all ranks of a step must agree, one per line.
func (s *Reducer) terms(dt dtype.DType) string {
	lines := []string{"version " + base.Version(), fmt.Sprintf("%d elements", s.n), dt.String(), s.Terms()}
	cfg := reflect.ValueOf(s.cfg.Config)
	for i := range cfg.NumField() {
		lines = append(lines, fmt.Sprintf("%s %v", cfg.Type().Field(i).Name, cfg.Field(i)))
	}
	lines = append(lines, fmt.Sprint("chosen by auto: ", s.cfg.chosen))
	return strings.Join(lines, "\n")
}

// Terms returns the position of the next step in its [Schedule]. The ranks of a step must agree on it: if a step has
// failed on some ranks alone, the others are one step ahead.
func (s *Reducer) Terms() string {
	if s.cfg.scheduleIsOver(s.steps) {
		return "no schedule any more"
	}
	return fmt.Sprintf("step %d of the schedule", s.steps)
}

// agree compares terms between the ranks, once for each communicator.
func (e *engine) agree(ctx context.Context, terms string) {
	if e.agreed || e.err != nil {
		return
	}
	e.check(base.Agree(ctx, e.rt, e.c, &e.order, &e.buffers, terms))
	e.agreed = e.err == nil
}

// largest returns the largest of the ranks' values.
func largest(ctx context.Context, rt runtime.Runtime, c comm.Communicator, value float64) (maximum float64, err error) {
	t, err := runtime.FromSlice(rt, []float64{value})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, t.Free()) }()
	if err := distributed.AllReduce(ctx, c, t, comm.Max); err != nil {
		return 0, err
	}
	all, err := runtime.ToSlice[float64](t)
	return append(all, value)[0], err
}
