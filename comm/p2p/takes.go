package p2p

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// class is a kind of operation whose speed is that of its members: what goes over
// which wire, by which kernel.
type class uint8

const (
	reduceSums   class = iota // allreduce, sum and average of f64, f32, f16 and bf16
	reduceOthers              // allreduce, other reductions of these
	reduceTagged              // allreduce, other types
	scatterSums
	scatterOthers
	scatterTagged
	gathers
	exchanges
	broadcasts
	classes
)

// classOf returns the class of a call, and whether it has one.
func classOf(x *comm.Call) (class, bool) {
	first := reduceSums
	switch x.Op {
	case comm.OpAllReduce:
	case comm.OpReduceScatter:
		first = scatterSums
	case comm.OpAllGather:
		return gathers, true
	case comm.OpAllToAll:
		return exchanges, true
	case comm.OpBroadcast:
		return broadcasts, true
	default:
		return 0, false
	}
	switch {
	case !x.DType.Valid() || !elements[x.DType].words:
		return first + 2, true
	case !sums(x.Reduce):
		return first + 1, true
	}
	return first, true
}

// takes is what a communicator takes over from its base: calls up to so many
// bytes of a piece, and reductions that the base does not have. The same on all
// ranks.
type takes struct {
	limit [classes]int
	lacks [len(elements)][5]bool // by type and reduction
}

// alone reports whether the base lacks the call.
func (t *takes) alone(x *comm.Call) bool {
	return x.Op.Reduces() && x.Reduce.Defined(x.DType) && t.lacks[x.DType][x.Reduce]
}

// call reports whether a call is taken over.
func (t *takes) call(x *comm.Call) bool {
	k, ok := classOf(x)
	return ok && x.Bytes() <= t.limit[k] || t.alone(x)
}

// choose finds out what to take over.
func (c *Comm) choose(ctx context.Context) error {
	for _, dt := range dtype.All() {
		for _, op := range dtype.ReduceOps() {
			if op.Defined(dt) {
				err := c.Communicator.AllReduce(0, 0, 0, dt, op) // sends nothing
				c.takes.lacks[dt][op] = errors.Is(err, comm.ErrUnsupported)
				if err != nil && !errors.Is(err, comm.ErrUnsupported) {
					return err
				}
			}
		}
	}
	switch {
	case c.WorldSize() == 1: // the base copies
	case c.most >= 0:
		for k := range c.takes.limit {
			c.takes.limit[k] = c.most
		}
	default:
		return c.measure(ctx)
	}
	return nil
}

// The sizes at which the two are compared, and how: the shortest of some rounds
// of some calls, because what disturbs only ever adds.
var measured = []int{4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20}

const (
	measureRounds = 4
	measureCalls  = 8
	measureWarmup = 2
)

// measure sets the limits to the largest sizes up to which the base is never
// faster; none, if it is not at the largest either.
func (c *Comm) measure(ctx context.Context) (err error) {
	most := measured[len(measured)-1]
	send, err := c.rt.Allocate(most)
	if err != nil {
		return err
	}
	recv, err := c.rt.Allocate(most)
	if err != nil {
		return errors.Join(err, c.rt.Deallocate(send))
	}
	start, err1 := c.rt.NewTimingEvent()
	end, err2 := c.rt.NewTimingEvent()
	err = errors.Join(err1, err2, c.rt.Fill(send, most, dtype.U8, 0x3c), c.rt.Fill(recv, most, dtype.U8, 0x3c), c.rt.Synchronize(ctx))
	if err == nil {
		err = c.compare(ctx, send, recv, start, end)
	}
	if err != nil {
		return err // the base may still use the memory, which is not given back
	}
	return errors.Join(start.Close(), end.Close(), c.rt.Deallocate(send), c.rt.Deallocate(recv))
}

func (c *Comm) compare(ctx context.Context, send, recv uintptr, start, end *cuda.Event) (err error) {
	b, err := newBootstrap(c.Communicator, c.rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for k := range classes {
		won := true
		for _, bytes := range measured {
			x := c.sample(k, send, recv, bytes)
			own, err1 := c.shortest(ctx, start, end, func() error { return c.submit(&x) })
			base, err2 := c.shortest(ctx, start, end, func() error { return x.Make(c.Communicator) })
			if errors.Is(err2, comm.ErrUnsupported) {
				base, err2 = math.MaxInt64, nil
			}
			if err := errors.Join(err1, err2); err != nil {
				return fmt.Errorf("p2p: measuring: %w", err)
			}
			// The slowest rank counts, and all decide alike.
			all, err := b.share(ctx, hello{times: [2]time.Duration{own, base}})
			if err != nil {
				return err
			}
			for _, h := range all {
				own, base = max(own, h.times[0]), max(base, h.times[1])
			}
			if won = own <= base; !won {
				break
			}
			c.takes.limit[k] = x.Bytes()
		}
		if won {
			c.takes.limit[k] = math.MaxInt
		}
	}
	return nil
}

// sample is an operation of a class that uses so many bytes of the larger buffer.
func (c *Comm) sample(k class, send, recv uintptr, bytes int) comm.Call {
	part := bytes / c.WorldSize() / 16 * 4 // float32
	switch k {
	case reduceOthers:
		return comm.AllReduceCall(send, recv, bytes/4, dtype.F32, comm.Min)
	case reduceTagged:
		return comm.AllReduceCall(send, recv, bytes/4, dtype.I32, comm.Sum)
	case scatterSums:
		return comm.ReduceScatterCall(send, recv, part, dtype.F32, comm.Sum)
	case scatterOthers:
		return comm.ReduceScatterCall(send, recv, part, dtype.F32, comm.Min)
	case scatterTagged:
		return comm.ReduceScatterCall(send, recv, part, dtype.I32, comm.Sum)
	case gathers:
		return comm.AllGatherCall(send, recv, part, dtype.F32)
	case exchanges:
		return comm.AllToAllCall(send, recv, part, dtype.F32)
	case broadcasts:
		return comm.BroadcastCall(send, bytes/4, dtype.F32, 0)
	}
	return comm.AllReduceCall(send, recv, bytes/4, dtype.F32, comm.Sum)
}

// shortest times a call.
func (c *Comm) shortest(ctx context.Context, start, end *cuda.Event, call func() error) (time.Duration, error) {
	best := time.Duration(math.MaxInt64)
	for range measureRounds {
		for i := range measureWarmup + measureCalls {
			if i == measureWarmup {
				if err := c.current().Record(start); err != nil {
					return 0, err
				}
			}
			if err := call(); err != nil {
				return 0, err
			}
		}
		if err := errors.Join(c.current().Record(end), c.sync(ctx)); err != nil {
			return 0, err
		}
		d, err := end.Since(start)
		if err != nil {
			return 0, err
		}
		best = min(best, d)
	}
	return best, nil
}
