package nccl

import (
	"context"
	"errors"
	"math/bits"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/measure"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Whether a collective is faster on windows depends on its size, the number of
// ranks and the links between them, and not in a simple way. On two H200s,
// allreduces on windows are faster up to 32 KiB and from 2 MiB on, and up to 30 % slower in
// between; allgathers are faster at every size. So each communicator with windows measures
// it once, at powers of two.

const (
	smallestTunedBits = 10 // 1 KiB
	tunedSizes        = 16 // up to 32 MiB
)

// tunedBytes is the size of class i.
func tunedBytes(i int) int { return 1 << (smallestTunedBits + i) }

// isFaster reports whether windows are faster at a size: they are if they were at both of the
// measured sizes around it. Above the largest measured size they are not used.
func (w *windows) isFaster(op comm.Op, bytes int) bool {
	if bytes < 1 || bytes > tunedBytes(tunedSizes-1) {
		return false
	}
	above := max(bits.Len(uint(bytes-1))-smallestTunedBits, 0)
	below := max(bits.Len(uint(bytes))-1-smallestTunedBits, 0)
	return w.faster[op][above] && w.faster[op][below]
}

// A time is the shortest of tuneRounds rounds of tuneCalls calls, because disturbances only
// add.
//
// The host takes longer to submit a small collective (8 µs with NCCL 2.28) than
// the GPU to run it, on windows or not. So the calls queue up behind large ones,
// a gate, and the GPU alone is timed, as in a graph and where the host is ahead.
const (
	tuneRounds = 4
	tuneGates  = 2 // before each round, of the largest size: 0.25 ms on two H200s
	tuneWarmup = 2
	tuneCalls  = 8
)

// gain is the fraction of the time without windows below which windows are used, so that
// noise does not decide.
const gain = 0.97

// tune measures where windows are faster, on a window of the largest size filled with zeros.
func (c *Comm) tune(ctx context.Context, buf uintptr) error {
	start, startErr := c.rt.NewTimingEvent()
	end, endErr := c.rt.NewTimingEvent()
	err := errors.Join(startErr, endErr, c.rt.Fill(buf, tunedBytes(tunedSizes-1), dtype.U8, 0), c.rt.Synchronize(ctx))
	if err != nil {
		return c.fail(err) // the peers go on with the measurements
	}
	defer func() { _ = errors.Join(start.Close(), end.Close()) }()
	gate := c.tuningCall(comm.OpAllReduce, buf, tunedBytes(tunedSizes-1))
	for _, op := range windowOps {
		var rounds []measure.Round // of each size, without windows and with
		for i := range tunedSizes {
			x := c.tuningCall(op, buf, tunedBytes(i))
			for _, on := range []*native{c.data, c.windows.native.Load()} {
				rounds = append(rounds, func() (float64, error) { return c.round(ctx, gate, x, on, start, end) })
			}
		}
		best, err := measure.Best(tuneRounds, measure.Alone, rounds...)
		if err != nil {
			return err
		}
		times := make([]int64, len(best)) // nanoseconds
		for i, seconds := range best {
			times[i] = int64(seconds * 1e9)
		}
		// The slowest rank counts, and all ranks must decide alike.
		if err := c.maximum(ctx, times); err != nil {
			return err
		}
		c.mu.Lock()
		for i := range tunedSizes {
			c.windows.faster[op][i] = float64(times[2*i+1]) < gain*float64(times[2*i])
		}
		c.mu.Unlock()
	}
	return nil
}

// tuningCall is a collective of that many bytes, in place.
func (c *Comm) tuningCall(op comm.Op, buf uintptr, bytes int) comm.Call {
	const dt = dtype.F32
	part := bytes / c.WorldSize() / dt.Size()
	own := buf + uintptr(c.Rank()*part*dt.Size())
	switch op {
	case comm.OpAllGather:
		return comm.AllGatherCall(own, buf, part, dt)
	case comm.OpReduceScatter:
		return comm.ReduceScatterCall(buf, own, part, dt, comm.Sum)
	}
	return comm.AllReduceCall(buf, buf, bytes/dt.Size(), dt, comm.Sum)
}

// round runs the calls of a round on one of the native communicators, and returns the seconds
// between both events.
func (c *Comm) round(ctx context.Context, gate, x comm.Call, on *native, start, end *cuda.Event) (float64, error) {
	repeat := func(n int, x *comm.Call, on *native) (err error) {
		for range n {
			if err == nil {
				err = c.submit(ctx, x, on)
			}
		}
		return err
	}
	err := c.guarded(ctx, func() error {
		// The ranks come together in the gate.
		err := errors.Join(repeat(tuneGates, &gate, c.data), repeat(tuneWarmup, &x, on), c.stream.Record(start))
		return errors.Join(err, repeat(tuneCalls, &x, on), c.stream.Record(end))
	})
	if err != nil {
		return 0, c.fail(err)
	}
	if err := c.sync(ctx); err != nil {
		return 0, err
	}
	d, err := end.Since(start)
	if err != nil {
		return 0, c.fail(err)
	}
	return d.Seconds(), nil
}
