package backend

import (
	"context"
	"errors"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// cudaCompute is the [ComputeStream] of a GPU.
type cudaCompute struct {
	rt     *cuda.Runtime
	bound  comm.Communicator // of the rank, with waits that end as the rank's do
	events []*cuda.Event     // of steps: before each, and after each of its parts
}

// Steps implements [ComputeStream].
func (c *cudaCompute) Steps(ctx context.Context, n int, prepare, like, step func() error) (time.Duration, error) {
	alone, err := c.Parts(ctx, 1, 1, nothing, func(next func() error) error { return errors.Join(repeat(ctx, n, like, nothing), next()) })
	if err != nil {
		return 0, err
	}
	both, err := c.Parts(ctx, 1, 1, nothing, func(next func() error) error { return errors.Join(repeat(ctx, n, prepare, step), next()) })
	if err != nil {
		return 0, err
	}
	return max(both[0]-alone[0], 0), nil
}

func nothing() error { return nil }

// repeat calls two functions n times by turns.
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
func (c *cudaCompute) Parts(ctx context.Context, n, parts int, prepare func() error, step func(next func() error) error) ([]time.Duration, error) {
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
		return c.rt.Stream().Record(c.events[used-1])
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
	// The communicator first: it ends its work when ctx ends the wait.
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

// Capture implements [ComputeStream].
func (c *cudaCompute) Capture(submit func() error) (Graph, error) {
	return capture(c.rt.Stream(), submit)
}

// free frees the events.
func (c *cudaCompute) free() error {
	var err error
	for _, e := range c.events {
		err = errors.Join(err, e.Close())
	}
	return err
}
