package ddp_test

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
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestCloseInFlight checks that Close frees no bucket that the communicator
// still works on. The host waits: an event would bound no time and could fail.
func TestCloseInFlight(t *testing.T) {
	standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
		params := standin.Gradients(t, s, 2)
		defer standin.Free(t, params)
		live := s.Stats().LiveBlocks
		g, err := ddp.New(ctx, s, c, params, ddp.Config{})
		require.NoError(t, err)
		require.NoError(t, errors.Join(g.Ready(ctx, 0, params[0]), g.Ready(ctx, 1, params[1])))
		s.Take()
		require.NoError(t, g.Close())
		assert.Equal(t, "HOST-WAITS", s.Take())
		assert.Equal(t, live, s.Stats().LiveBlocks, "the bucket was freed")
	})
}

// TestCloseStuck checks that memory which the communicator may still write is not freed, whether the step was abandoned
// before Wait or failed in it.
func TestCloseStuck(t *testing.T) {
	unordered := errors.New("order lost")
	s := &standin.Streamed{Runtime: cpu.New(), Reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		c = standin.NewStreamedComm(c, s)
		params := standin.Gradients(t, s, 2)
		defer standin.Free(t, params)
		for _, orderFails := range []error{nil, unordered} {
			live := s.Stats().LiveBlocks
			g, err := ddp.New(ctx, s, c, params, ddp.Config{})
			require.NoError(t, err)
			require.NoError(t, errors.Join(g.Ready(ctx, 0, params[0]), g.Ready(ctx, 1, params[1])))
			if orderFails != nil {
				s.OrderFails = orderFails
				require.ErrorIs(t, g.Wait(ctx), unordered)
			}
			s.SyncFails = comm.ErrTimeout
			err = g.Close()
			require.ErrorIs(t, err, comm.ErrTimeout)
			assert.ErrorContains(t, err, "not freed")
			assert.Equal(t, live+1, s.Stats().LiveBlocks, "the bucket may still be written")
			require.ErrorIs(t, g.Close(), comm.ErrTimeout, "again")
			s.SyncFails = comm.ErrClosed
			require.NoError(t, g.Close(), "nobody writes any more")
			assert.Equal(t, live, s.Stats().LiveBlocks)
			s.SyncFails, s.OrderFails = nil, nil
		}
		return nil
	}))
	assert.NoError(t, s.Close())
}

// TestRebindStuck: as long as the old communicator may write memory, a Rebind changes nothing, and can be called again.
func TestRebindStuck(t *testing.T) {
	unordered := errors.New("order lost")
	for _, cfg := range []ddp.Config{{}, {Config: sparse.Config{ClipNorm: 1e9}}} {
		standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
			params := standin.Gradients(t, s, 2)
			g, err := ddp.New(ctx, s, c, params, cfg)
			require.NoError(t, err)
			s.OrderFails = unordered
			require.ErrorIs(t, g.ReduceAll(ctx, params), unordered)
			s.OrderFails, s.SyncFails = nil, comm.ErrTimeout
			require.ErrorIs(t, g.Rebind(ctx, c), comm.ErrTimeout)
			s.SyncFails = nil
			require.NoError(t, g.Rebind(ctx, c))
			require.NoError(t, g.ReduceAll(ctx, params))
			require.NoError(t, g.Close())
			standin.Free(t, params)
		})
	}
}

// TestVoteInFlight: a rank votes when the host knows that it has the results, and what they are is known then without communication.
func TestVoteInFlight(t *testing.T) {
	for _, cfg := range []sparse.Config{{}, {NonFinite: sparse.SkipNonFinite}, {Pattern: sparse.TopkA, Density: 0.1}} {
		standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
			params := standin.Gradients(t, s, 2)
			g, err := ddp.New(ctx, s, c, params, ddp.Config{Config: cfg, DenseUpTo: -1})
			require.NoError(t, err)
			votes := 0
			g.BeforeCommit(func(context.Context) error {
				votes++
				s.SyncFails = comm.ErrPeerFailed // after the vote
				return nil
			})
			s.SyncFails = comm.ErrPeerFailed
			require.ErrorIs(t, g.ReduceAll(ctx, params), comm.ErrPeerFailed)
			assert.Zero(t, votes)
			s.SyncFails = nil
			require.NoError(t, g.Rebind(ctx, c))
			require.NoError(t, g.ReduceAll(ctx, params))
			assert.Equal(t, 1, votes)
			_, err = g.Stats(ctx)
			require.NoError(t, err)
			s.SyncFails = nil
			require.NoError(t, g.Close())
			standin.Free(t, params)
		})
	}
}

// otherStream is the runtime of a device on another compute stream.
type otherStream struct{ *cpu.Runtime }

func (otherStream) ComputeStream() uintptr { return standin.ComputeStream + 1 }

// TestTwoRuntimesOfOneDevice: events order one compute stream against the
// communicator, so memory of a runtime with another is refused, before anything
// is sent.
func TestTwoRuntimesOfOneDevice(t *testing.T) {
	standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
		other := otherStream{cpu.New()}
		mine, theirs := standin.Gradients(t, s, 2), standin.Gradients(t, other, 1)
		defer func() {
			standin.Free(t, mine)
			standin.Free(t, theirs)
			assert.NoError(t, other.Close())
		}()
		assert.ErrorIs(t, distributed.AllGather(ctx, c, mine[0], theirs[0]), runtime.ErrDevice)
		assert.ErrorIs(t, distributed.AllToAll(ctx, c, theirs[0], mine[0]), runtime.ErrDevice)
		_, err := ddp.New(ctx, s, c, append(mine, theirs...), ddp.Config{})
		assert.ErrorIs(t, err, runtime.ErrDevice)
		assert.ErrorContains(t, err, "gradient 2")
		topk, err := sparse.New(s, c, 100, sparse.Config{Pattern: "topkA", Density: 0.1})
		require.NoError(t, err)
		assert.ErrorIs(t, topk.AllReduce(ctx, theirs[0]), runtime.ErrDevice)
		require.NoError(t, topk.Close())
		assert.Empty(t, s.Take())

		// One runtime's tensors, whichever it is, are ordered by its own stream.
		require.NoError(t, distributed.AllGather(ctx, c, mine[0], mine[1]))
		assert.Equal(t, fmt.Sprintf(standin.Fenced, "allgather"), s.Take())
		require.NoError(t, distributed.AllReduce(ctx, c, theirs[0], comm.Sum))
		assert.Equal(t, "comm-after-78 allreduce 78-after-comm", s.Take())
	})
}

// TestBucketsOverlap checks that a bucket is submitted as soon as it and those
// before it are ready, and that the compute stream waits only in Wait.
func TestBucketsOverlap(t *testing.T) {
	standin.WithStreams(t, func(ctx context.Context, s *standin.Streamed, c comm.Communicator) {
		params := standin.Gradients(t, s, 4)
		defer standin.Free(t, params)
		g, err := ddp.New(ctx, s, c, params, ddp.Config{BucketBytes: 800})
		require.NoError(t, err)
		assert.Equal(t, [][]int{{3, 2}, {1, 0}}, g.Buckets())
		const launch = "comm-after-77 allreduce"
		for _, k := range []struct {
			ready int
			want  string
		}{
			{3, ""},
			{0, ""},
			{1, ""}, // bucket 1 is full, but waits for bucket 0
			{2, launch + " " + launch},
		} {
			require.NoError(t, g.Ready(ctx, k.ready, params[k.ready]))
			assert.Equal(t, k.want, s.Take(), "ready %d", k.ready)
		}
		require.NoError(t, g.Wait(ctx))
		assert.Equal(t, "77-after-comm", s.Take())
		require.NoError(t, g.Close())
	})
}
