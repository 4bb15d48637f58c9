package p2p

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"os"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/runtime/cuda"
)

func init() {
	if os.Getenv(gputest.StandInVariable) == "" {
		return
	}
	worldSizes = func(ranks int) sizes {
		s := defaults(ranks)
		s.words >>= 4
		s.oneStep >>= 4
		s.twoSteps >>= 4
		return s
	}
	r, err := gzip.NewReader(bytes.NewReader(compressed))
	if err == nil {
		compressed, err = io.ReadAll(r)
	}
	if err != nil {
		panic(err)
	}
}

// NewWithLimit makes a communicator that runs operations on pieces of up to that many bytes over peer memory,
// instead of up to the size of the table.
func NewWithLimit(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, bytes int) (*Comm, error) {
	c, err := New(ctx, base, rt)
	if err == nil && c.WorldSize() > 1 {
		for class := range c.offload.limit {
			c.offload.limit[class] = bytes
		}
	}
	return c, err
}

// Patience is how long a communicator's kernels wait for a peer.
func Patience(c *Comm) time.Duration { return time.Duration(c.end.watch.limit) }

// CloseWithin bounds the abort and the drain in Close.
func CloseWithin(c *Comm, d time.Duration) { c.life.Timeout = d }

// Launching reports whether a communicator is in a launch.
func Launching(c *Comm) bool {
	if c.end.mu.TryLock() {
		c.end.mu.Unlock()
		return false
	}
	return true
}
