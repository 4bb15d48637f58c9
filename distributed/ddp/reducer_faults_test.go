package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var errReducer = errors.New("this Reducer is to fail")

// counter averages a bucket, and keeps two numbers that all ranks share: their sum is the number of ranks times the
// steps that were reduced.
type counter struct {
	steps *runtime.Tensor
	fail  func(ctx context.Context, b ddp.Bucket, p uintptr) error // nil: does not fail
}

func newCounter(rt runtime.Runtime) (*counter, error) {
	steps, err := runtime.New(rt, dtype.F32, 2)
	if err != nil {
		return nil, err
	}
	return &counter{steps: steps}, steps.Fill(0)
}

func (r *counter) Memory() ddp.Memory { return ddp.Memory{Shared: []*runtime.Tensor{r.steps}} }

func (r *counter) Reduce(ctx context.Context, b ddp.Bucket) error {
	values, err := runtime.ToSlice[float32](r.steps)
	if err != nil {
		return err
	}
	for i := range values {
		values[i] = values[i]/float32(b.Comm.WorldSize()) + 1 // of this rank
	}
	if err := runtime.CopyIn(r.steps, values); err != nil {
		return err
	}
	if r.fail != nil {
		p, err := r.steps.Ptr()
		if err != nil {
			return err
		}
		return r.fail(ctx, b, p)
	}
	if err := distributed.AllReduce(ctx, b.Comm, r.steps, comm.Sum); err != nil {
		return err
	}
	return distributed.AllReduce(ctx, b.Comm, b.Tensor, comm.Avg)
}

// waiting is a communicator that says when somebody waits for it.
type waiting struct {
	comm.Methods
	comm.Wrapped
	begun func()
}

func newWaiting(c comm.Communicator, begun func()) *waiting {
	return &waiting{Wrapped: comm.Wrap(c), begun: begun, Methods: comm.Methods{
		Do:       func(call comm.Call) error { return call.Make(c) },
		Together: func(calls []comm.Call) error { return c.Group(calls...) },
	}}
}

func (c *waiting) Sync(ctx context.Context) error {
	c.begun()
	return c.Communicator.Sync(ctx)
}

// TestReducerFailsInFlight: a Reducer that fails by itself leaves nothing in flight. Rank 1 takes part in what rank 0
// has submitted when rank 0 waits for it, or has returned: what arrives then must not change what was rolled back.
func TestReducerFailsInFlight(t *testing.T) {
	for _, name := range []string{"submitted", "waits and fails", "made, and reported as failed"} {
		t.Run(name, func(t *testing.T) {
			proceed := make(chan struct{})
			release := sync.OnceFunc(func() { close(proceed) })
			var armed atomic.Bool // of rank 0
			var both sync.WaitGroup
			both.Add(2)
			standin.World(t, 2, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
				defer release()
				rank := c.Rank()
				if rank == 0 {
					c = newWaiting(c, func() {
						if armed.Load() {
							release()
						}
					})
				}
				own, err := newCounter(rt)
				require.NoError(t, err)
				all := standin.Gradients(t, rt, 1)
				g, err := ddp.New(ctx, rt, c, all, ddp.Config{Reducer: func(ddp.Bucket) (ddp.Reducer, error) { return own, nil }})
				require.NoError(t, err)
				require.NoError(t, errors.Join(all[0].Fill(float64(1+rank)), g.ReduceAll(ctx, all)))

				own.fail = func(ctx context.Context, b ddp.Bucket, p uintptr) error {
					if rank == 1 {
						<-proceed
					}
					if name == "made, and reported as failed" {
						g, err := b.Tensor.Ptr()
						return errors.Join(err, b.Comm.AllReduce(p, p, 2, dtype.F32, comm.Sum),
							b.Comm.AllReduce(g, g, b.Tensor.Len(), dtype.F32, comm.Avg), errReducer)
					}
					c := b.Comm
					if name == "waits and fails" {
						f := standin.NewFaulty(c)
						f.At = 1 // the Sync behind the call
						c = f
					}
					if name == "submitted" {
						return errors.Join(b.Comm.AllReduce(p, p, 2, dtype.F32, comm.Sum), errReducer)
					}
					return errors.Join(distributed.AllReduce(ctx, c, own.steps, comm.Sum), errReducer)
				}
				armed.Store(true)
				require.NoError(t, all[0].Fill(float64(10+rank)))
				assert.ErrorIs(t, g.ReduceAll(ctx, all), errReducer)
				armed.Store(false)
				release()
				both.Done()
				both.Wait()
				require.NoError(t, c.Sync(ctx))
				steps, err := runtime.ToSlice[float32](own.steps)
				require.NoError(t, err)
				assert.Equal(t, []float32{2, 2}, steps, "one step of two ranks, on rank %d", rank)

				own.fail = nil
				require.NoError(t, errors.Join(all[0].Fill(float64(20+rank)), g.ReduceAll(ctx, all)))
				values, err := runtime.ToSlice[float32](all[0])
				require.NoError(t, err)
				assert.Equal(t, float32(20.5), values[0])
				err = g.Close()
				standin.Free(t, all)
				return err
			})
		})
	}
}

// TestReducerFaults has each call and each wait of a step fail on all ranks, before or after it was made, and repeats the step with
// the same communicator and other gradients.
func TestReducerFaults(t *testing.T) {
	for _, mesh := range []bool{false, true} {
		for _, size := range []int{2, 3} {
			for at := 0; ; at++ {
				more := false
				label := fmt.Sprintf("mesh %v, %d ranks, call %d", mesh, size, at)
				standin.World(t, size, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
					f := standin.NewFaulty(c)
					cfg := ddp.Config{Reducer: func(ddp.Bucket) (ddp.Reducer, error) { return newCounter(rt) }}
					if mesh {
						cfg.Mesh = func(ctx context.Context, c comm.Communicator) (*distributed.Mesh, error) {
							return distributed.NewMesh(ctx, c, distributed.Dim{Name: "hosts", Size: -1}, distributed.Dim{Name: "ranks", Size: 1})
						}
					}
					all := standin.Gradients(t, rt, 3)
					g, err := ddp.New(ctx, rt, f, all, cfg)
					require.NoError(t, err)
					step := func(value int) error {
						for i, x := range all {
							require.NoError(t, x.Fill(float64(value*(1+c.Rank())+i)))
						}
						return g.ReduceAll(ctx, all)
					}
					require.NoError(t, step(1))
					f.Calls, f.At = 0, at
					err = step(100)
					f.At = -1
					if c.Rank() == 0 {
						more = f.Calls > at
					}
					if err != nil {
						assert.ErrorIs(t, err, standin.ErrFault, label)
						require.NoError(t, step(7), label)
						for i, x := range all {
							values, err := runtime.ToSlice[float32](x)
							require.NoError(t, err)
							for _, v := range values {
								require.InDelta(t, 7*float64(size+1)/2+float64(i), float64(v), 1e-4, "%s, gradient %d", label, i)
							}
						}
					}
					err = g.Close()
					standin.Free(t, all)
					return err
				})
				if !more {
					break
				}
			}
		}
	}
}
