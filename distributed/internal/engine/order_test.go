package engine_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestStreams checks that with streams on both sides these are ordered, and
// that the host waits only where it needs a number.
func TestStreams(t *testing.T) {
	standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
		g, err := runtime.FromSlice(s, standin.Normal(64, 1), 64)
		require.NoError(t, err)
		defer g.Free()

		require.NoError(t, distributed.AllReduce(ctx, c, g, comm.Sum))
		assert.Equal(t, fmt.Sprintf(standin.Fenced, "allreduce"), s.Take())

		topk, err := engine.New(s, c, 64, engine.Config{Pattern: "topkA", Density: 0.1})
		require.NoError(t, err)
		copies := s.In
		require.NoError(t, topk.AllReduce(ctx, g))
		assert.Equal(t, copies, s.In)
		assert.Equal(t, fmt.Sprintf(standin.Fenced, "allgather"), s.Take())
		require.NoError(t, topk.Close())

		sized, err := engine.New(s, c, 64, engine.Config{Pattern: "topkAopt", Density: 0.1})
		require.NoError(t, err)
		require.NoError(t, sized.AllReduce(ctx, g))
		assert.Equal(t, fmt.Sprintf(standin.Fenced, "allgather"), s.Take(), "lengths go with the lists")
		require.NoError(t, sized.Close())

		s.Reach = runtime.CUDA
		assert.ErrorIs(t, distributed.AllReduce(ctx, c, g, comm.Sum), comm.ErrDevice)
		_, err = engine.New(s, c, 64, engine.Config{})
		assert.ErrorIs(t, err, comm.ErrDevice)
	})
}

// TestSparseCloseWaits is for a step that failed after its communication: the host waits before the memory is freed,
// and keeps it if that fails.
func TestSparseCloseWaits(t *testing.T) {
	unordered := errors.New("order lost")
	s := &standin.Streamed{Runtime: cpu.New(), Reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		c = standin.NewStreamedComm(c, s)
		for _, syncFails := range []error{nil, comm.ErrTimeout} {
			g, err := runtime.FromSlice(s, standin.Normal(64, 1), 64)
			require.NoError(t, err)
			live := s.Stats().LiveBlocks
			topk, err := engine.New(s, c, 64, engine.Config{Pattern: "topkA", Density: 0.1})
			require.NoError(t, err)
			s.OrderFails, s.SyncFails = unordered, syncFails
			require.ErrorIs(t, topk.AllReduce(ctx, g), unordered)
			s.Take()
			err = topk.Close()
			assert.Equal(t, "HOST-WAITS", s.Take())
			require.ErrorIs(t, err, syncFails)
			assert.Equal(t, syncFails == nil, s.Stats().LiveBlocks == live, "memory is freed exactly if nobody writes it")
			s.OrderFails, s.SyncFails = nil, comm.ErrClosed
			require.NoError(t, topk.Close())
			s.SyncFails = nil
			require.NoError(t, g.Free())
		}
		return nil
	}))
	assert.NoError(t, s.Close())
}

// TestVoteInFlight: a rank votes when the host knows that it has the result. Where the exchange fails on the device, it does not.
func TestVoteInFlight(t *testing.T) {
	for _, policy := range []engine.NonFinitePolicy{engine.PassNonFinite, engine.SkipNonFinite} {
		for _, pattern := range []string{sparsity.Dense, sparsity.TopkA} {
			standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
				g, err := runtime.FromSlice(s, standin.Normal(64, 1), 64)
				require.NoError(t, err)
				u, err := engine.New(s, c, 64, engine.Config{Pattern: pattern, Density: 0.1, NonFinite: policy})
				require.NoError(t, err)
				given, votes := standin.Bits(g), 0
				u.BeforeCommit(func(context.Context) error { votes++; return nil })
				s.SyncFails = comm.ErrPeerFailed
				require.ErrorIs(t, u.AllReduce(ctx, g), comm.ErrPeerFailed)
				assert.Zero(t, votes)
				assert.Equal(t, given, standin.Bits(g))
				s.SyncFails = nil
				require.NoError(t, u.AllReduce(ctx, g))
				assert.Equal(t, 1, votes)
				require.NoError(t, errors.Join(u.Close(), g.Free()))
			})
		}
	}
}
