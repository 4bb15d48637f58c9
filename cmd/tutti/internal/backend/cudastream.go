package backend

import (
	"context"
	"errors"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// cudaStream is the [Stream] of an NCCL communicator.
type cudaStream struct {
	comm       *nccl.Comm
	bound      comm.Communicator // the same, with waits that end as the rank's do
	start, end *cuda.Event
}

// newCUDAStream makes the stream of c, whose waits go through bound. What was
// made is returned also with an error, to be closed.
func newCUDAStream(c *nccl.Comm, bound comm.Communicator) (*cudaStream, error) {
	s := &cudaStream{comm: c, bound: bound}
	var startErr, endErr error
	s.start, startErr = c.Runtime().NewTimingEvent()
	s.end, endErr = c.Runtime().NewTimingEvent()
	return s, errors.Join(startErr, endErr)
}

// Time implements [Stream].
func (s *cudaStream) Time(ctx context.Context, submit func() error) (time.Duration, error) {
	stream := s.comm.Stream()
	if err := stream.Record(s.start); err != nil {
		return 0, err
	}
	if err := submit(); err != nil {
		return 0, err
	}
	if err := stream.Record(s.end); err != nil {
		return 0, err
	}
	if err := s.bound.Sync(ctx); err != nil {
		return 0, err
	}
	return s.end.Since(s.start)
}

// Capture implements [Stream].
func (s *cudaStream) Capture(submit func() error) (Graph, error) {
	return capture(s.comm.Stream(), submit)
}

// free frees the events.
func (s *cudaStream) free() error {
	var err error
	for _, e := range []*cuda.Event{s.start, s.end} {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	return err
}

// cudaGraph is a graph with the stream that it runs on.
type cudaGraph struct {
	*cuda.Graph
	stream *cuda.Stream
}

// capture makes a graph of what submit submits to a stream.
func capture(stream *cuda.Stream, submit func() error) (Graph, error) {
	g, err := stream.Capture(submit)
	if err != nil {
		return nil, err
	}
	return cudaGraph{g, stream}, nil
}

// Launch implements [Graph].
func (g cudaGraph) Launch() error { return g.Graph.Launch(g.stream) }
