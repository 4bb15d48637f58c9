package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// useEverything makes a communicator, has it do what it can, and gives all back.
func useEverything(ctx context.Context, rt *cuda.Runtime,
	connect func(context.Context, *cuda.Runtime) (*nccl.Comm, error)) (err error) {
	buf, err := rt.Allocate(64)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Deallocate(buf)) }()
	other, err := rt.NewStream(0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, other.Close()) }()
	c, err := connect(ctx, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	reduce := func() error { return c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum) }
	err = errors.Join(
		c.CommAfter(rt.ComputeStream()),
		reduce(),
		c.AfterComm(rt.ComputeStream()),
		c.Sync(ctx),
		c.Barrier(ctx),
		c.Group(comm.SendCall(buf, 4, dtype.F32, 0, 0), comm.RecvCall(buf+32, 4, dtype.F32, 0, 0)), c.Sync(ctx))
	graph, failed := c.Stream().Capture(reduce)
	if err = errors.Join(err, failed); graph != nil {
		err = errors.Join(err, graph.Launch(c.Stream()), c.Sync(ctx), graph.Close())
	}
	symmetric, failed := c.AllocateSymmetric(ctx, 1<<20)
	err = errors.Join(err, failed, c.FreeSymmetric(ctx, symmetric))
	part, failed := c.Split(ctx, 0, 0)
	if err = errors.Join(err, failed); part != nil {
		err = errors.Join(err, part.AllReduce(buf, buf, 8, dtype.F32, comm.Max), part.Barrier(ctx), part.Close())
	}
	return errors.Join(err, c.UseStream(other.Handle()), reduce(), c.Sync(ctx), c.UseStream(0), reduce())
}

// If any call of a library fails, the communicator says so, nothing is lost, and the next one works.
func TestStandInAnyCallFails(t *testing.T) {
	s, rt := openStandIns(t)
	ways := map[string]func(context.Context, *cuda.Runtime) (*nccl.Comm, error){
		"in process": func(ctx context.Context, rt *cuda.Runtime) (*nccl.Comm, error) {
			world, err := nccl.InProcess(ctx, []*cuda.Runtime{rt})
			if err != nil {
				return nil, err
			}
			return world[0], nil
		},
		"from env": func(ctx context.Context, rt *cuda.Runtime) (*nccl.Comm, error) { return nccl.FromEnv(ctx, rt) },
	}
	libraries := map[string]func(n int) (came bool){
		"driver": func(n int) bool {
			whatever := make([]byte, 1)
			left := s.driver.Fail.Int(hostmem.Addr(whatever), 2, uintptr(-n))
			runtime.KeepAlive(whatever)
			return left >= 0
		},
		"nccl": func(n int) bool { return s.nccl.Fail.Int(uintptr(n)) == 0 },
	}
	for way, connect := range ways {
		for library, fail := range libraries {
			for n := 1; ; n++ {
				what := fmt.Sprintf("%s, call %d of %s", way, n, library)
				fail(n)
				err := useEverything(t.Context(), rt, connect)
				if !fail(0) {
					require.NoError(t, err, what)
					require.Greater(t, n, 10, what)
					break
				}
				var ofDriver *cuda.Error
				var ofNCCL *nccl.Error
				assert.True(t, errors.As(err, &ofDriver) || errors.As(err, &ofNCCL), "%s: %v", what, err)
				require.NoError(t, useEverything(t.Context(), rt, connect), what)
			}
		}
	}
}
