package distributedtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Reducer adds the case "Reducer": gradients in buckets that a program's own reducer reduces
// ([ddp.Config].Reducer). All ranks get the same bits; steps that fail or are skipped leave no trace, a run
// goes on from its state, and a rank without data takes part.
func Reducer(make func(b ddp.Bucket) (ddp.Reducer, error)) Option {
	return func(s *suite) { s.reducer = make }
}

var errReduce = errors.New("this Reduce is to fail")

// failing is a Reducer of which Reduce fails once it has done its work, when it is told to.
type failing struct {
	ddp.Reducer
	fails *bool
}

func (f failing) Reduce(ctx context.Context, b ddp.Bucket) error {
	err := f.Reducer.Reduce(ctx, b)
	if err == nil && *f.fails {
		err = errReduce
	}
	return err
}

// testReducer compares a run that is disturbed with one that is not.
func testReducer(r *rank) error {
	const steps = 6
	want, err := r.reduceSteps(steps, false)
	if err != nil {
		return err
	}
	got, err := r.reduceSteps(steps, true)
	if err != nil {
		return fmt.Errorf("disturbed: %w", err)
	}
	for step := range want {
		if !bytes.Equal(want[step], got[step]) {
			return fmt.Errorf("step %d has other bits after steps that failed, were skipped or restored", step)
		}
	}
	all, err := distributed.AllGatherBytes(r.ctx, r.rt, r.c, slices.Concat(want...))
	if err != nil {
		return err
	}
	for peer := range all {
		if !bytes.Equal(all[peer], all[0]) {
			return fmt.Errorf("rank %d has other results than rank 0", peer)
		}
	}
	return nil
}

// reduceSteps returns the results of steps, of which the last rank has no data in the last one.
func (r *rank) reduceSteps(steps int, disturbed bool) (results [][]byte, err error) {
	var params []*runtime.Tensor
	for _, shape := range [][]int{{20, 15}, {0}, {7}, {32, 2, 10}} {
		t, err := runtime.New(r.rt, dtype.F32, shape...)
		if err != nil {
			return nil, err
		}
		r.live, params = append(r.live, t), append(params, t)
	}
	fails := false
	cfg := ddp.Config{BucketBytes: 1300, Uneven: true, Config: sparse.Config{NonFinite: sparse.SkipNonFinite},
		Reducer: func(b ddp.Bucket) (ddp.Reducer, error) {
			own, err := r.reducer(b)
			return failing{own, &fails}, err
		}}
	g, err := ddp.New(r.ctx, r.rt, r.c, params, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	load := func(step int, spoilt bool) error {
		for i, t := range params {
			x := r.gradient(families[0], t.Len(), r.rank, r.size, 10*step+i)
			if spoilt && len(x) > 5 && r.rank == r.size-1 {
				x[5] = float32(math.NaN())
			}
			if err := r.write(t, x); err != nil {
				return err
			}
		}
		return nil
	}
	collect := func() error {
		var all []byte
		for _, t := range params {
			x, err := r.bytes(t)
			if err != nil {
				return err
			}
			all = append(all, x...)
		}
		results = append(results, all)
		return r.c.Sync(r.ctx)
	}
	for step := range steps {
		if step == steps-1 && r.rank == r.size-1 {
			break
		}
		if disturbed && step == 1 {
			if err := errors.Join(load(step, true), g.ReduceAll(r.ctx, params)); err != nil {
				return nil, err
			}
			stats, err := g.Stats(r.ctx)
			if err != nil || !stats.Skipped {
				return nil, errors.Join(err, fmt.Errorf("a step with a NaN is skipped: %v", stats.Skipped))
			}
		}
		if disturbed && step == 2 {
			fails = true
			if err := errors.Join(load(step, false), g.ReduceAll(r.ctx, params)); !errors.Is(err, errReduce) {
				return nil, fmt.Errorf("a step in which Reduce fails: %w", err)
			}
			fails = false
		}
		if disturbed && step == 3 {
			state, err := g.State(r.ctx)
			if err = errors.Join(err, g.Close()); err != nil {
				return nil, err
			}
			if g, err = ddp.New(r.ctx, r.rt, r.c, params, cfg); err != nil {
				return nil, err
			}
			if err := g.Restore(r.ctx, state); err != nil {
				return nil, err
			}
		}
		if err := errors.Join(load(step, false), g.ReduceAll(r.ctx, params), collect()); err != nil {
			return nil, err
		}
	}
	return results, g.Join(r.ctx, params, collect)
}
