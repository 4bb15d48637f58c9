package rendezvous

import (
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/networktest"
)

// networkJob is a job whose processes reach each other over their own network.
func networkJob(n *networktest.Pipes) Job {
	return Job{WorldSize: 3, Address: "somewhere:29500", Secret: []byte("a secret of tests, long enough as it is"), Network: n}
}

// Ranks find rank 0 over the network of the program, behind a port of it that is taken.
func TestNetwork(t *testing.T) {
	t.Parallel()
	network := new(networktest.Pipes)
	l, err := network.Listen("tcp", ":29500")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	job := networkJob(network)
	var done []<-chan result
	for rank := range job.WorldSize {
		job.Rank = rank
		done = append(done, job.start(deadline(t, patience), "payload"))
	}
	for rank, d := range done {
		r := <-d
		require.NoError(t, r.err, "rank %d", rank)
		assert.Equal(t, "payload", string(r.payload))
	}
}

// Without a secret, a network of the program's is as open as the system's.
func TestNetworkNeedsSecret(t *testing.T) {
	t.Parallel()
	job := networkJob(new(networktest.Pipes))
	job.Secret = nil
	_, err := job.Connect(deadline(t, patience))
	require.ErrorIs(t, err, ErrEnvironment)
}

// stalled is a connection on which nothing arrives any more once it has stalled.
type stalled struct {
	net.Conn
	stalls *atomic.Bool
}

func (s stalled) Write(b []byte) (int, error) {
	if s.stalls.Load() {
		return len(b), nil
	}
	return s.Conn.Write(b)
}

// The store and its clients notice that a connection carries nothing any more, which the system would have told of.
func TestNetworkStalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var stalls atomic.Bool
		network := &networktest.Pipes{Conn: func(conn net.Conn) net.Conn { return stalled{conn, &stalls} }}
		job := networkJob(network)
		owner, err := job.Connect(t.Context())
		require.NoError(t, err)
		job.Rank = 1
		kv, err := job.Connect(t.Context())
		require.NoError(t, err)
		time.Sleep(5 * time.Minute)
		require.NoError(t, kv.Set(t.Context(), "key", nil), "signs of life keep it")
		stalls.Store(true)
		time.Sleep(time.Minute)
		require.ErrorIs(t, kv.Err(), comm.ErrPeerFailed)
		require.NoError(t, kv.Close())
		require.NoError(t, owner.Close())
	})
}
