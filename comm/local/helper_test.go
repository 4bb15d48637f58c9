package local_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// patience is what no test waits for unless something hangs.
const patience = time.Minute

// world makes n communicators that are closed when the test ends.
func world(tb testing.TB, n int) []comm.Communicator {
	tb.Helper()
	comms, err := local.New(n)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		for _, c := range comms {
			_ = c.Close()
		}
	})
	return comms
}

// within returns a context that ends before the test binary does.
func within(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	tb.Cleanup(cancel)
	return ctx
}

// onAll runs body for each communicator on its own goroutine and returns
// the errors by rank.
func onAll(comms []comm.Communicator, body func(c comm.Communicator) error) []error {
	return onUsers(comms, func(_ int, c comm.Communicator) error { return body(c) })
}

// onUsers is onAll that also tells body the index of its communicator, of
// which there may be several for one rank.
func onUsers(comms []comm.Communicator, body func(i int, c comm.Communicator) error) []error {
	errs := make([]error, len(comms))
	var users sync.WaitGroup
	for i, c := range comms {
		users.Go(func() { errs[i] = body(i, c) })
	}
	users.Wait()
	return errs
}

// requireAll fails the test if a rank has an error.
func requireAll(tb testing.TB, errs []error) {
	tb.Helper()
	for r, err := range errs {
		require.NoError(tb, err, "rank %d", r)
	}
}

// memory allocates host buffers until the test ends.
type memory struct {
	tb testing.TB
	rt *cpu.Runtime
}

func newMemory(tb testing.TB) memory {
	rt := cpu.New()
	tb.Cleanup(func() { _ = rt.Close() })
	return memory{tb, rt}
}

// alloc returns a buffer of n elements, each of which is v, and its address.
func alloc[T any](m memory, n int, v T) ([]T, uintptr) {
	m.tb.Helper()
	var t [1]T
	p, err := m.rt.Allocate(max(n, 1) * len(hostmem.Bytes(t[:])))
	require.NoError(m.tb, err)
	s := hostmem.Slice[T](p, n)
	for i := range s {
		s[i] = v
	}
	return s, p
}

// perRank returns a buffer of n elements for each rank, filled by value.
func perRank(m memory, ranks, n int, value func(rank, i int) int32) (data [][]int32, addr []uintptr) {
	for r := range ranks {
		s, p := alloc[int32](m, n, 0)
		for i := range s {
			s[i] = value(r, i)
		}
		data, addr = append(data, s), append(addr, p)
	}
	return data, addr
}

func constant(v int32) func(int, int) int32 { return func(int, int) int32 { return v } }

func rankPlusOne(r, _ int) int32 { return int32(r + 1) }

// requireFilled fails the test unless all n elements are v.
func requireFilled(tb testing.TB, got []int32, n int, v int32, about ...any) {
	tb.Helper()
	require.Equal(tb, n, len(got), about...)
	if i := slices.IndexFunc(got, func(x int32) bool { return x != v }); i >= 0 {
		require.Fail(tb, fmt.Sprintf("element %d is %d, want %d", i, got[i], v), about...)
	}
}
