package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestFirstBucket: the first bucket is smaller than the others.
func TestFirstBucket(t *testing.T) {
	standin.World(t, 1, func(ctx context.Context, c comm.Communicator, rt *cpu.Runtime) error {
		params := standin.Gradients(t, rt, 7) // of 400 bytes each
		g, err := ddp.New(ctx, rt, c, params, ddp.Config{BucketBytes: 1200, FirstBucketBytes: 400})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{6}, {5, 4, 3}, {2, 1, 0}}, g.Buckets())
		require.NoError(t, g.Close())
		standin.Free(t, params)
		return nil
	})
}

// stingy is a runtime that fails when it is told to.
type stingy struct {
	*cpu.Runtime
	left       int // allocations until all fail; < 0: none does
	copiesFail atomic.Bool
}

func (s *stingy) Allocate(bytes int) (uintptr, error) {
	if s.left == 0 {
		return 0, fmt.Errorf("%w: told to fail", runtime.ErrOutOfMemory)
	}
	s.left--
	return s.Runtime.Allocate(bytes)
}

func (s *stingy) Copy(dst, src uintptr, bytes int) error {
	if s.copiesFail.Load() {
		return errStingy
	}
	return s.Runtime.Copy(dst, src, bytes)
}

var errStingy = errors.New("copy told to fail")
