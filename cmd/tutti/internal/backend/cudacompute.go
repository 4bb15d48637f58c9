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
	events []*cuda.Event     // pairs: before a step, after it
}

// Steps implements [ComputeStream].
func (c *cudaCompute) Steps(ctx context.Context, n int, prepare, step func() error) (time.Duration, error) {
	for len(c.events) < 2*n {
		e, err := c.rt.NewTimingEvent()
		if err != nil {
			return 0, err
		}
		c.events = append(c.events, e)
	}
	stream := c.rt.Stream()
	for i := range n {
		if ctx.Err() != nil {
			return 0, comm.ContextError(ctx)
		}
		if err := prepare(); err != nil {
			return 0, err
		}
		if err := stream.Record(c.events[2*i]); err != nil {
			return 0, err
		}
		if err := step(); err != nil {
			return 0, err
		}
		if err := stream.Record(c.events[2*i+1]); err != nil {
			return 0, err
		}
	}
	// The communicator first: it ends its work when ctx ends the wait.
	if err := c.bound.Sync(ctx); err != nil {
		return 0, err
	}
	if err := c.rt.Synchronize(ctx); err != nil {
		return 0, err
	}
	var total time.Duration
	for i := range n {
		took, err := c.events[2*i+1].Since(c.events[2*i])
		if err != nil {
			return 0, err
		}
		total += took
	}
	return total, nil
}

// Capture implements [ComputeStream].
func (c *cudaCompute) Capture(submit func() error) (Graph, error) {
	stream := c.rt.Stream()
	g, err := stream.Capture(submit)
	if err != nil {
		return nil, err
	}
	return cudaGraph{g, stream}, nil
}

// free frees the events.
func (c *cudaCompute) free() error {
	var err error
	for _, e := range c.events {
		err = errors.Join(err, e.Close())
	}
	return err
}
