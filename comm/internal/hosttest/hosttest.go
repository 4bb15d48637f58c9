// Package hosttest has common parts of the tests of decorators on the host.
package hosttest

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// NewRuntime returns a runtime that fails the test if memory leaks.
func NewRuntime(t testing.TB) *cpu.Runtime {
	rt := cpu.New()
	t.Cleanup(func() { require.NoError(t, rt.Close()) })
	return rt
}

// Allocate returns zeroed memory until the test ends.
func Allocate(t testing.TB, rt *cpu.Runtime, bytes int) uintptr {
	ptr, err := rt.Allocate(bytes)
	require.NoError(t, err)
	require.NoError(t, rt.CopyIn(ptr, make([]byte, bytes)))
	t.Cleanup(func() { require.NoError(t, rt.Deallocate(ptr)) })
	return ptr
}

// World runs body on the ranks of a world in this process, as local.Run does.
type World func(ctx context.Context, ranks int, body func(ctx context.Context, c comm.Communicator) error) error

// Decorated is the Run of a conformance backend: ranks of a world inside a decorator, which a rank closes when it is
// done.
func Decorated(
	world World,
	rt *cpu.Runtime,
	decorate func(ctx context.Context, c comm.Communicator) (comm.Communicator, error),
) func(context.Context, int, func(context.Context, commtest.Rank) error) error {
	return func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
		return world(ctx, size, func(ctx context.Context, c comm.Communicator) error {
			d, err := decorate(ctx, c)
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
