package backend

import (
	"context"
	"errors"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// cudaQueue is a stream of a GPU: the [ComputeStream] of its runtime, or the [Stream] of its
// communicator.
type cudaQueue struct {
	rt     *cuda.Runtime     // of the stream's GPU
	stream *cuda.Stream      // the timed stream
	bound  comm.Communicator // of the rank; its waits have the rank's timeout
	events []*cuda.Event     // of steps: one before each, and one after each of its parts
}

// Time implements [Stream].
func (c *cudaQueue) Time(ctx context.Context, submit func() error) (time.Duration, error) {
	took, err := c.Parts(ctx, 1, 1, nothing, func(next func() error) error {
		if err := submit(); err != nil {
			return err
		}
		return next()
	})
	if err != nil {
		return 0, err
	}
	return took[0], nil
}

// Steps implements [ComputeStream].
func (c *cudaQueue) Steps(ctx context.Context, n int, prepare, step func() error) (time.Duration, error) {
	alone, err := c.Time(ctx, func() error {
		return repeat(ctx, n, prepare, nothing)
	})
	if err != nil {
		return 0, err
	}
	total, err := c.Time(ctx, func() error {
		return repeat(ctx, n, prepare, step)
	})
	return max(total-alone, 0), err
}

func nothing() error { return nil }

// repeat calls two functions alternately, n times each.
func repeat(ctx context.Context, n int, prepare, step func() error) error {
	for range n {
		if ctx.Err() != nil {
			return comm.ContextError(ctx)
		}
		if err := prepare(); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// Parts implements [ComputeStream].
func (c *cudaQueue) Parts(
	ctx context.Context,
	n, parts int,
	prepare func() error,
	step func(next func() error) error,
) ([]time.Duration, error) {
	for len(c.events) < n*(parts+1) {
		e, err := c.rt.NewTimingEvent()
		if err != nil {
			return nil, err
		}
		c.events = append(c.events, e)
	}
	used := 0
	mark := func() error {
		used++
		return c.stream.Record(c.events[used-1])
	}
	for i := range n {
		if err := prepare(); err != nil {
			return nil, err
		}
		used = i * (parts + 1)
		if err := errors.Join(mark(), step(mark)); err != nil {
			return nil, err
		}
	}
	// The communicator goes first: it aborts its work when ctx ends the wait.
	if err := c.bound.Sync(ctx); err != nil {
		return nil, err
	}
	if err := c.rt.Synchronize(ctx); err != nil {
		return nil, err
	}
	took := make([]time.Duration, parts)
	for i := range n * parts {
		first := i/parts*(parts+1) + i%parts
		d, err := c.events[first+1].Since(c.events[first])
		if err != nil {
			return nil, err
		}
		took[i%parts] += d / time.Duration(n)
	}
	return took, nil
}

// Capture implements [Stream] and [ComputeStream].
func (c *cudaQueue) Capture(submit func() error) (Graph, error) {
	g, err := c.stream.Capture(submit)
	if err != nil {
		return nil, err
	}
	return cudaGraph{g, c.stream}, nil
}

// cudaGraph is a graph with the stream that it runs on.
type cudaGraph struct {
	*cuda.Graph
	stream *cuda.Stream // of the launches
}

// Launch implements [Graph].
func (g cudaGraph) Launch() error {
	return g.Graph.Launch(g.stream)
}

// free frees the events.
func (c *cudaQueue) free() error {
	var err error
	for _, e := range c.events {
		err = errors.Join(err, e.Close())
	}
	return err
}
