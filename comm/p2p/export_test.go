package p2p

import (
	"context"
	"math"
	"os"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// memoryVariable is what has the tests use scratch memory of the host if it is "host".
const memoryVariable = "TUTTI_TEST_MEMORY"

// tested reports whether tests do.
func tested() bool { return os.Getenv(memoryVariable) == "host" }

// Tested is the option for that.
func Tested(o *options) { o.inHost = tested() }

// WithLimit runs operations of up to that many bytes by peer memory, instead of up to
// the measured size.
func WithLimit(bytes int) Option { return func(o *options) { o.most = bytes } }

// InHostMemory reports whether a communicator's scratch memory is the host's.
func InHostMemory(c *Comm) bool { return c.here.host }

// Measured are the sizes that New measures.
var Measured = &measured

// Patience is how long a communicator's kernels wait for a peer.
func Patience(c *Comm) time.Duration { return time.Duration(c.here.watch.limit) }

// CloseWithin bounds the abort and the drain in Close.
func CloseWithin(c *Comm, d time.Duration) { c.life.Timeout = d }

// Launching reports whether a communicator is in a launch.
func Launching(c *Comm) bool {
	if c.here.mu.TryLock() {
		c.here.mu.Unlock()
		return false
	}
	return true
}

// NewLevels makes two levels of communicators, which have hosts of so many ranks each, of memory that is given
// back by free. All calls that can run in levels do. over makes a sub-communicator.
func NewLevels(base, within, between comm.Communicator, each int, idle func() bool, memory func(bytes int) (uintptr, error), free func(uintptr) error,
	over func(context.Context, comm.Communicator) (comm.Communicator, error)) (c comm.Communicator, err error) {
	member := func(c comm.Communicator, first, step int) level {
		m := level{Communicator: c, streams: c.(streams)}
		for i := range c.WorldSize() {
			m.ranks = append(m.ranks, first+i*step)
		}
		return m
	}
	l := newLevels(base, base.(streams))
	l.within, l.between = member(within, base.Rank()/each*each, 1), member(between, base.Rank()%each, each)
	l.idle, l.free = idle, free
	l.over = func(ctx context.Context, base comm.Communicator, _ *offloadTable) (comm.Communicator, error) {
		return over(ctx, base)
	}
	for k := range l.offload.limit {
		l.offload.limit[k] = math.MaxInt
	}
	l.share, err = memory(shareBytes)
	return l, err
}

// WithHost has a rank pretend to be on a host.
func WithHost(name string) Option {
	return func(o *options) { o.host = func() ([16]byte, error) { return identity(name), nil } }
}

// BytesOf returns from and up to which number of bytes a communicator in two levels runs a call in them.
func BytesOf(c comm.Communicator, x comm.Call) (least, most int) {
	l := c.(*levels)
	k, _ := classOf(&x)
	return l.offload.least[k], l.offload.limit[k]
}
