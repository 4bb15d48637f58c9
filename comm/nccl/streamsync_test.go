package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/race"
)

// Steps of copy, sum and copy on two streams, which only the communicator's own
// event orders: in calls, in a graph and mixed, while other goroutines order
// other streams.
func TestStreamOrder(t *testing.T) {
	runtimes := openGPUs(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	world, err := nccl.InProcess(ctx, runtimes)
	require.NoError(t, err)
	require.NoError(t, each(world, func(c *nccl.Comm) error { return orderedSteps(ctx, c) }))
	require.NoError(t, each(world, (*nccl.Comm).Close))
}

func orderedSteps(ctx context.Context, c *nccl.Comm) error {
	const n, bytes, steps = 1 << 18, 4 << 18, 12
	const others = 20 // between the patterns of a rank's first and second source
	rt, stream := c.Runtime(), c.Runtime().ComputeStream()
	memory, err := rt.Allocate((4 + steps) * bytes)
	if err != nil {
		return err
	}
	place := func(i int) uintptr { return memory + uintptr(i*bytes) }
	buf, captured, results := place(2), place(3), 4
	for i := range 2 {
		if err := write(rt, place(i), c.Rank()+i*others, n); err != nil {
			return err
		}
	}
	step := func(source int, to uintptr) error {
		return errors.Join(
			rt.Copy(buf, place(source), bytes),
			c.CommAfter(stream),
			c.AllReduce(buf, buf, n, dtype.F32, comm.Sum),
			c.AfterComm(stream),
			rt.Copy(to, buf, bytes))
	}
	graph, err := rt.Stream().Capture(func() error { return step(0, captured) })
	if err != nil {
		return err
	}
	var beside sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		beside.Go(func() {
			s, err := rt.NewStream(0)
			if err != nil {
				errs[i] = err
				return
			}
			for range 200 {
				errs[i] = errors.Join(errs[i], c.CommAfter(s.Handle()), c.AfterComm(s.Handle()))
			}
			errs[i] = errors.Join(errs[i], s.Close())
		})
	}
	for i := range steps {
		if i%2 == 0 {
			err = errors.Join(graph.Launch(rt.Stream()), rt.Copy(place(results+i), captured, bytes))
		} else {
			err = step(1, place(results+i))
		}
		if err != nil {
			return err
		}
	}
	beside.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for i := range steps {
		got, err := read(rt, place(results+i), n)
		if err != nil {
			return err
		}
		for at, v := range got {
			var want float32
			for r := range c.WorldSize() {
				want += pattern(r+i%2*others, at)
			}
			if v != want {
				return fmt.Errorf("step %d: element %d is %v, want %v", i, at, v, want)
			}
		}
	}
	return errors.Join(graph.Close(), c.Barrier(ctx), rt.Deallocate(memory))
}

func TestStreamOrderCostsNothing(t *testing.T) {
	runtimes := openGPUs(t)
	world, err := nccl.InProcess(t.Context(), runtimes[:1])
	require.NoError(t, err)
	c := world[0]
	other := runtimes[0].ComputeStream()
	require.NotEqual(t, other, c.CommStream())
	for _, stream := range []uintptr{other, c.CommStream()} {
		race.NoAllocs(t, 100, func() error { return errors.Join(c.CommAfter(stream), c.AfterComm(stream)) })
	}
	require.NoError(t, c.UseStream(other))
	assert.Equal(t, other, c.CommStream())
	assert.NoError(t, c.Close())
	assert.ErrorIs(t, c.CommAfter(other), comm.ErrClosed)
	assert.ErrorIs(t, c.AfterComm(other), comm.ErrClosed)
}
