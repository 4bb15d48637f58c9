package bench

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
)

// GraphCalls is the number of calls in a timed graph: enough to spread the cost of its launch over many calls.
const GraphCalls = 20

// operation is a call in its measured form: submitted each time, or captured in graphs.
type operation struct {
	backend.Rank
	submit func() error    // one call
	run    round           // many calls, and their time
	graphs []backend.Graph // closed by close; nil if calls are submitted each time
}

// newOperation prepares a call that submit submits.
func newOperation(ctx context.Context, r backend.Rank, submit func() error, graph bool) (_ *operation, err error) {
	o := &operation{Rank: r, submit: submit}
	if r.Stream == nil {
		o.run = timeCalls(r, func() error { return o.call(ctx) })
		return o, nil
	}
	if !graph {
		o.run = timeSubmissions(r, submit)
		return o, nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.close())
		}
	}()
	// A graph must not contain the set-up of a backend's first call.
	if err := o.call(ctx); err != nil {
		return nil, err
	}
	batch, err := o.capture(submit, GraphCalls)
	if err != nil {
		return nil, err
	}
	single, err := o.capture(submit, 1)
	if err != nil {
		return nil, err
	}
	o.submit = single.Launch
	o.run = inBatches(timeSubmissions(r, batch.Launch), GraphCalls)
	return o, nil
}

// capture makes a graph of a number of calls.
func (o *operation) capture(submit func() error, calls int) (backend.Graph, error) {
	g, err := o.Stream.Capture(func() error {
		for range calls {
			if err := submit(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	o.graphs = append(o.graphs, g)
	return g, nil
}

// call makes one call and waits for its result.
func (o *operation) call(ctx context.Context) error {
	if err := o.submit(); err != nil {
		return err
	}
	return o.Comm.Sync(ctx)
}

// close frees the graphs.
func (o *operation) close() error {
	var err error
	for _, g := range o.graphs {
		err = errors.Join(err, g.Close())
	}
	return err
}
