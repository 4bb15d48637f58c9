package nccl

import (
	"context"
	"errors"
	"math"
	"math/bits"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Whether a collective is faster on windows depends on its size, the number of
// ranks and the links between them, and not in a simple way: in allreduces on
// four H200s windows win up to 64 KiB and from 2 to 8 MiB, and lose at 256 KiB.
// So it is measured, once for each communicator that has windows, at powers of
// two.

const (
	smallestTunedBits = 10 // 1 KiB
	tunedSizes        = 16 // up to 32 MiB
)

// tunedBytes is the size of class i.
func tunedBytes(i int) int { return 1 << (smallestTunedBits + i) }

// isFaster reports whether windows win at that size: at both of the measured
// sizes that it lies between. Above the largest they do not.
func (w *windows) isFaster(kind windowKind, bytes int) bool {
	if kind == noWindow || bytes > tunedBytes(tunedSizes-1) {
		return false
	}
	above := max(bits.Len(uint(bytes-1))-smallestTunedBits, 0)
	below := max(bits.Len(uint(bytes))-1-smallestTunedBits, 0)
	return w.faster[kind][above] && w.faster[kind][below]
}

// How a time is measured: the shortest of some rounds of some calls, because
// what disturbs only ever adds.
const (
	tuneRounds = 4
	tuneCalls  = 8
	tuneWarmup = 2 // before each round, also to bring the ranks together
)

// gain is how much less time windows must take to be preferred, so that noise
// does not decide for them.
const gain = 0.97

// tune fills in where windows are faster, by measurements on a window of the
// largest size, on zeros.
func (c *Comm) tune(ctx context.Context, op string, buf uintptr) error {
	start, startErr := c.rt.NewTimingEvent()
	end, endErr := c.rt.NewTimingEvent()
	err := errors.Join(startErr, endErr, c.rt.Fill(buf, tunedBytes(tunedSizes-1), dtype.U8, 0), c.rt.Synchronize(ctx))
	if err != nil {
		return c.breakDown(op, err) // the peers go on with the measurements
	}
	defer func() { _ = errors.Join(start.Close(), end.Close()) }()
	for kind := noWindow + 1; kind < windowKinds; kind++ {
		times := make([]int64, 2*tunedSizes) // nanoseconds, without windows and with
		for i := range tunedSizes {
			n := c.tuningCall(kind, buf, tunedBytes(i))
			for path, on := range []*native{c.data, c.windows.native.Load()} {
				d, err := c.shortest(ctx, op, n, on, start, end)
				if err != nil {
					return err
				}
				times[2*i+path] = d.Nanoseconds()
			}
		}
		// The slowest rank counts, and all ranks must decide alike.
		if err := c.maximum(ctx, op, times); err != nil {
			return err
		}
		c.mu.Lock()
		for i := range tunedSizes {
			c.windows.faster[kind][i] = float64(times[2*i+1]) < gain*float64(times[2*i])
		}
		c.mu.Unlock()
	}
	return nil
}

// tuningCall is a collective of that many bytes, in place.
func (c *Comm) tuningCall(kind windowKind, buf uintptr, bytes int) call {
	part := bytes / c.WorldSize() / dtype.F32.Size() * dtype.F32.Size()
	own := buf + uintptr(c.Rank()*part)
	switch kind {
	case windowAllGather:
		return c.allGather(own, buf, part)
	case windowReduceScatter:
		return c.reduceScatter(buf, own, part/dtype.F32.Size(), dtype.F32, comm.Sum)
	}
	return c.allReduce(buf, buf, bytes/dtype.F32.Size(), dtype.F32, comm.Sum)
}

// shortest times a call on one of the native communicators.
func (c *Comm) shortest(ctx context.Context, op string, n call, on *native, start, end *cuda.Event) (time.Duration, error) {
	best := time.Duration(math.MaxInt64)
	for range tuneRounds {
		err := c.guarded(ctx, func() error {
			return c.rt.Current(func() error { return c.repeat(n, on, start, end) })
		})
		if err != nil {
			return 0, c.breakDown(op, err)
		}
		if err := c.sync(ctx, op); err != nil {
			return 0, err
		}
		d, err := end.Since(start)
		if err != nil {
			return 0, c.breakDown(op, err)
		}
		best = min(best, d)
	}
	return best, nil
}

// repeat submits the calls of a round.
func (c *Comm) repeat(n call, on *native, start, end *cuda.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !on.enter() {
		return comm.ErrBroken
	}
	defer on.leave()
	for i := range tuneWarmup + tuneCalls {
		if i == tuneWarmup {
			if err := c.stream.Record(start); err != nil {
				return err
			}
		}
		if err := c.invoke(&n, on.handle); err != nil {
			return err
		}
	}
	return c.stream.Record(end)
}
