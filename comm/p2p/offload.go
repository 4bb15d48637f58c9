package p2p

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/measure"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// class is a kind of operation: all members take about as long, because they use the same
// wire and the same kernel.
type class uint8

const (
	reduceSums   class = iota // allreduce, sum and average of f64, f32, f16 and bf16
	reduceOthers              // allreduce, other reductions of these
	reduceTagged              // allreduce, other types of two bytes and more
	reduceBytes               // allreduce, types of one byte
	scatterSums
	scatterOthers
	scatterTagged
	scatterBytes
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
	case x.DType.Valid() && x.DType.Size() == 1:
		return first + 3, true
	case !x.DType.Valid() || !elements[x.DType].words:
		return first + 2, true
	case !sums(x.Reduce):
		return first + 1, true
	}
	return first, true
}

// offloadTable says which calls a communicator runs itself and does not pass to its base:
// those up to a limit, and reductions that the base lacks. It is the same on all ranks.
type offloadTable struct {
	limit [classes]int           // bytes of a piece
	lacks [len(elements)][5]bool // by type and reduction
}

// lacked reports whether the base lacks the call.
func (t *offloadTable) lacked(x *comm.Call) bool {
	return x.Op.Reduces() && x.Reduce.Defined(x.DType) && t.lacks[x.DType][x.Reduce]
}

// faster reports whether the communicator runs a call faster than its base.
func (t *offloadTable) faster(x *comm.Call) bool {
	k, ok := classOf(x)
	return ok && x.Bytes() <= t.limit[k]
}

// has reports whether the communicator runs a call itself.
func (t *offloadTable) has(x *comm.Call) bool { return t.faster(x) || t.lacked(x) }

// HandOver returns the size in bytes above which calls of an operation go to the base: 0
// if all do, [math.MaxInt] if none does. The size is that of a piece (see [comm.Call]), and
// the same on all ranks. dt and reduce matter for reductions only.
func (c *Comm) HandOver(op comm.Op, dt dtype.DType, reduce comm.ReduceOp) int {
	x := comm.Call{Op: op, DType: dt, Reduce: reduce}
	if c.offload.lacked(&x) {
		return math.MaxInt
	}
	if k, ok := classOf(&x); ok {
		return c.offload.limit[k]
	}
	return 0
}

// contest is between a communicator and its base.
type contest struct {
	comm.Communicator // the base
	limit             int
	rt                *cuda.Runtime
	runs              func(x *comm.Call) bool
	submit            func(x *comm.Call) error
	sync              func(ctx context.Context) error
	stream            func() *cuda.Stream
	// The sizes to compare at first, in that order, until the base is faster.
	sizes []int
}

// choose returns the offload table.
func (c *contest) choose(ctx context.Context) (t offloadTable, err error) {
	b, err := newBootstrap(c.Communicator, c.rt)
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	measures := c.limit < 0 && c.WorldSize() > 1
	var m measurement
	if err = t.probe(c.Communicator); err == nil && measures {
		m, err = newMeasurement(ctx, c.rt)
	}
	// No rank starts what another cannot take part in.
	if err := b.agree(ctx, err); err != nil {
		return t, errors.Join(err, m.free())
	}
	switch {
	case measures:
		if err = c.measure(ctx, b, &m, &t); err != nil {
			err = fmt.Errorf("p2p: measuring: %w", err)
		}
		if b.broken() {
			return t, err // work in flight may still use the memory, which is not given back
		}
		return t, errors.Join(err, m.free())
	case c.WorldSize() > 1: // alone, the base copies
		for k := range t.limit {
			t.limit[k] = c.limit
		}
	}
	return t, nil
}

// probe asks the base which reductions it lacks.
func (t *offloadTable) probe(base comm.Communicator) error {
	for _, dt := range dtype.All() {
		for _, op := range dtype.ReduceOps() {
			if !op.Defined(dt) {
				continue
			}
			err := base.AllReduce(0, 0, 0, dt, op) // sends nothing
			if t.lacks[dt][op] = errors.Is(err, comm.ErrUnsupported); err != nil && !t.lacks[dt][op] {
				return err
			}
		}
	}
	return nil
}

// measured are the sizes at which the communicator is compared with its base first. A time is
// the shortest of measureRounds rounds of measureCalls calls, because disturbances only add.
var measured = []int{4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20}

const (
	measureRounds = 4
	measureCalls  = 8
	measureWarmup = 2
)

// measurement is the memory and the events that a rank measures with.
type measurement struct {
	rt         *cuda.Runtime
	send, recv uintptr
	start, end *cuda.Event
}

func newMeasurement(ctx context.Context, rt *cuda.Runtime) (m measurement, err error) {
	m.rt = rt
	for _, buf := range []*uintptr{&m.send, &m.recv} {
		if *buf, err = rt.Allocate(measured[len(measured)-1]); err != nil {
			return m, err
		}
		if err = rt.Fill(*buf, measured[len(measured)-1], dtype.U8, 0x3c); err != nil {
			return m, err
		}
	}
	for _, event := range []**cuda.Event{&m.start, &m.end} {
		if *event, err = rt.NewTimingEvent(); err != nil {
			return m, err
		}
	}
	return m, rt.Synchronize(ctx)
}

func (m *measurement) free() error {
	var errs []error
	for _, buf := range []uintptr{m.send, m.recv} {
		if buf != 0 {
			errs = append(errs, m.rt.Deallocate(buf))
		}
	}
	for _, event := range []*cuda.Event{m.start, m.end} {
		if event != nil {
			errs = append(errs, event.Close())
		}
	}
	return errors.Join(errs...)
}

// measure sets the bound of each class to the last size of a sequence, to a power of two, up to which the
// base is never faster.
func (c *contest) measure(ctx context.Context, b *bootstrap, m *measurement, t *offloadTable) error {
	for k := range classes {
		if x := c.sample(k, m.send, m.recv, c.sizes[0]); !c.runs(&x) {
			continue
		}
		won, lost := 0, 0
		for _, bytes := range c.sizes {
			ok, err := c.wins(ctx, b, m, k, bytes)
			if err != nil {
				return err
			}
			if !ok {
				lost = bytes
				break
			}
			won = bytes
		}
		for won > 0 && lost > 2*won {
			doublings := bits.Len(uint(lost/won)) - 1
			between := won << (doublings / 2)
			ok, err := c.wins(ctx, b, m, k, between)
			if err != nil {
				return err
			}
			if ok {
				won = between
			} else {
				lost = between
			}
		}
		x := c.sample(k, 0, 0, won)
		switch {
		case lost == 0:
			t.limit[k] = math.MaxInt
		case won > 0:
			t.limit[k] = x.Bytes()
		}
	}
	return nil
}

// wins reports whether a call of a class is at least as fast here as on the base. The
// slowest rank decides, on all ranks alike.
func (c *contest) wins(ctx context.Context, b *bootstrap, m *measurement, k class, bytes int) (bool, error) {
	x := c.sample(k, m.send, m.recv, bytes)
	var first error // measuring goes on: ranks that make different numbers of calls are out of step for good
	lacks := false
	timed := func(call func() error) measure.Round {
		return func() (float64, error) {
			seconds, err := c.round(ctx, m, call)
			if first == nil {
				first = err
			}
			return seconds, nil
		}
	}
	base := func() error {
		err := x.Make(c.Communicator)
		if lacks = errors.Is(err, comm.ErrUnsupported); lacks {
			return nil
		}
		return err
	}
	best, _ := measure.Best(measureRounds, measure.Alone, timed(func() error { return c.submit(&x) }), timed(base))
	if lacks {
		best[1] = math.Inf(1)
	}
	all, err := b.share(ctx, hello{state: verdictOf(first), times: [2]float64(best)})
	if err != nil {
		return false, errors.Join(first, err)
	}
	for _, h := range all {
		best[0], best[1] = max(best[0], h.times[0]), max(best[1], h.times[1])
	}
	return best[0] <= best[1], worst(all, first)
}

// sample is a call of a class whose larger buffer has that many bytes.
func (c *contest) sample(k class, send, recv uintptr, bytes int) comm.Call {
	part := bytes / c.WorldSize() / 16 * 4 // float32
	switch k {
	case reduceOthers:
		return comm.AllReduceCall(send, recv, bytes/4, dtype.F32, comm.Min)
	case reduceTagged:
		return comm.AllReduceCall(send, recv, bytes/4, dtype.I32, comm.Sum)
	case reduceBytes:
		return comm.AllReduceCall(send, recv, bytes, dtype.FP8E4M3, comm.Sum)
	case scatterSums:
		return comm.ReduceScatterCall(send, recv, part, dtype.F32, comm.Sum)
	case scatterOthers:
		return comm.ReduceScatterCall(send, recv, part, dtype.F32, comm.Min)
	case scatterTagged:
		return comm.ReduceScatterCall(send, recv, part, dtype.I32, comm.Sum)
	case scatterBytes:
		return comm.ReduceScatterCall(send, recv, 4*part, dtype.FP8E4M3, comm.Sum)
	case gathers:
		return comm.AllGatherCall(send, recv, part, dtype.F32)
	case exchanges:
		return comm.AllToAllCall(send, recv, part, dtype.F32)
	case broadcasts:
		return comm.BroadcastCall(send, bytes/4, dtype.F32, 0)
	}
	return comm.AllReduceCall(send, recv, bytes/4, dtype.F32, comm.Sum)
}

// round times a call, which it repeats after an error, too.
func (c *contest) round(ctx context.Context, m *measurement, call func() error) (seconds float64, err error) {
	var errs []error
	for i := range measureWarmup + measureCalls {
		if i == measureWarmup {
			errs = append(errs, c.stream().Record(m.start))
		}
		errs = append(errs, call())
	}
	errs = append(errs, c.stream().Record(m.end), c.sync(ctx))
	took, err := m.end.Since(m.start)
	return took.Seconds(), errors.Join(append(errs, err)...)
}
