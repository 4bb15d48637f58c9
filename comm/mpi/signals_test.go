//go:build unix

package mpi_test

import (
	"context"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// handleErrors tells UCX, which MPICH and Open MPI may work with, what to do on
// faults.
const handleErrors = "UCX_HANDLE_ERRORS"

// A fault of a Go program stays a panic, which may be recovered from, also where
// the library, or one below it, has its own handlers. [TestBound] runs the same ranks without the variable.
func TestSignals(t *testing.T) {
	forOneMPI(t, func(t *testing.T, l launcher) {
		l.mustRun(t, job{ranks: 2, test: "TestRankSignals", env: []string{handleErrors + "=bt"}})
	})
}

func TestRankSignals(t *testing.T) {
	onlyChild(t)
	own, set := os.LookupEnv(handleErrors)
	fault := func() (caught any) {
		defer func() { caught = recover() }()
		var p *int
		*p = 1
		return nil
	}
	check := func(when string) {
		assert.Implements(t, (*runtime.Error)(nil), fault(), when)
	}
	_, err := mpi.Library()
	require.NoError(t, err)
	check("the library is open")
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	check("MPI is initialized")
	if set {
		assert.Equal(t, own, os.Getenv(handleErrors))
	}

	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
	assert.Equal(t, os.Interrupt, <-interrupts)

	breakPipe(t)
	require.NoError(t, world.Barrier(t.Context()))
	check("there was communication")
	require.NoError(t, mpi.Finalize(context.Background()))
	check("MPI is finalized")
}

// breakPipe raises SIGPIPE on a thread that Go has not made.
func breakPipe(t *testing.T) {
	t.Helper()
	lib, err := dl.Open("libc.so.6")
	require.NoError(t, err)
	var threads struct {
		Create dl.Func `sym:"pthread_create"`
		Join   dl.Func `sym:"pthread_join"`
	}
	require.NoError(t, lib.Bind(&threads))
	raise, ok := lib.Lookup("raise")
	require.True(t, ok)
	thread := make([]uintptr, 1)
	require.Zero(t, threads.Create.Int(hostmem.Addr(thread), 0, raise, uintptr(syscall.SIGPIPE)))
	require.Zero(t, threads.Join.Int(thread[0], 0))
}
