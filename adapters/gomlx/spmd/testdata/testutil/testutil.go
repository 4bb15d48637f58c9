// Package testutil replaces GoMLX's testutil in a test of package graph: it returns the spmd backend, whose devices are
// the processes of a job.
package testutil

import (
	"context"
	"sync"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"

	"github.com/tutti-go/tutti/adapters/gomlx/spmd"
	"github.com/tutti-go/tutti/comm/tcp"
)

// BuildTestBackend returns the backend of all tests.
var BuildTestBackend = sync.OnceValue(func() compute.Backend {
	ctx := context.Background()
	c, err := tcp.FromEnv(ctx)
	if err != nil {
		panic(err)
	}
	backend, err := spmd.New(ctx, c, gobackend.GetBackend())
	if err != nil {
		panic(err)
	}
	return backend
})

// TestOfficialBackends runs a test with it.
func TestOfficialBackends(t *testing.T, test func(t *testing.T, backend compute.Backend), _ ...string) {
	test(t, BuildTestBackend())
}
