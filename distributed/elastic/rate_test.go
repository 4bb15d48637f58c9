package elastic

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestJoinRate prints how fast a member that joins gets a state of TUTTI_JOIN_BYTES. docs/elastic.md has the command.
func TestJoinRate(t *testing.T) {
	bytes, _ := strconv.Atoi(os.Getenv("TUTTI_JOIN_BYTES"))
	if bytes == 0 {
		t.Skip("is for tutti cluster")
	}
	rt := cpu.New()
	x, err := runtime.New(rt, dtype.F32, bytes/4)
	require.NoError(t, err)
	const first = "10.77.0.1:29401"
	rank := os.Getenv("TUTTI_RANK")
	cfg := Config{Name: rank, Min: 1, Runtime: rt, Tensors: []*runtime.Tensor{x}}
	cfg.Dial = func(ctx context.Context) (store.Store, error) {
		kv, err := store.Dialer{Addresses: []string{first}, TLS: conf, Name: rank}.Dial(ctx)
		if err != nil {
			return nil, err
		}
		return kv, nil
	}
	if rank == "0" {
		l, err := net.Listen("tcp", first)
		require.NoError(t, err)
		server := store.NewServer(store.Options{Silence: DefaultSilence})
		defer server.Close() //nolint:errcheck // the members have ended
		server.Serve(l, conf)
		address, err := x.Ptr()
		require.NoError(t, err)
		weights := weightBytes(rand.New(rand.NewPCG(1, 2)), bytes/4, 4)
		require.NoError(t, rt.CopyIn(address, weights))
	} else {
		require.NoError(t, x.Fill(0))
		time.Sleep(time.Second) // until the job has begun
	}
	cfg.Form = func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Silence: DefaultSilence})
	}
	var bound, loaded time.Time
	m, err := Join(t.Context(), cfg, &altered{
		Trainer: Plain{},
		save:    func(context.Context) ([]byte, error) { return []byte{1}, nil },
		load: func(context.Context, ...[]byte) error {
			loaded = time.Now()
			return nil
		},
		bind: func(context.Context, comm.Communicator) error {
			bound = time.Now()
			return nil
		},
	})
	require.NoError(t, err)
	steps, together := 0, false
	require.NoError(t, m.Run(t.Context(), func(ctx context.Context, e *Epoch) error {
		if e.Joined && steps == 0 {
			took := loaded.Sub(bound)
			t.Logf("%d bytes in %v: %.1f MB/s, and their hash in %v", bytes, took, float64(bytes)/took.Seconds()/1e6, time.Since(loaded))
		}
		if together = together || len(e.Members) == 2; together && (steps > 3 && rank != "0" || len(e.Members) == 1) {
			return io.EOF
		}
		steps++
		return m.Commit(ctx)
	}))
	require.NoError(t, m.Close())
}
