package comm_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// newRuntime returns a runtime that fails the test if memory leaks.
func newRuntime(t testing.TB) *cpu.Runtime {
	rt := cpu.New()
	t.Cleanup(func() { require.NoError(t, rt.Close()) })
	return rt
}

// allocate returns zeroed memory until the test ends.
func allocate(t testing.TB, rt *cpu.Runtime, bytes int) uintptr {
	ptr, err := rt.Allocate(bytes)
	require.NoError(t, err)
	require.NoError(t, rt.CopyIn(ptr, make([]byte, bytes)))
	t.Cleanup(func() { require.NoError(t, rt.Deallocate(ptr)) })
	return ptr
}

// decorated is the conformance backend of local ranks inside a decorator, which
// a rank closes when it is done.
func decorated(rt *cpu.Runtime, decorate func(c comm.Communicator) (comm.Communicator, error)) func(context.Context, int, func(context.Context, commtest.Rank) error) error {
	return func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
		return local.Run(ctx, size, func(ctx context.Context, c comm.Communicator) error {
			d, err := decorate(c)
			if err != nil {
				return err
			}
			if err := body(ctx, commtest.Rank{Comm: d, Runtime: rt}); err != nil {
				return err
			}
			return d.Close()
		})
	}
}
