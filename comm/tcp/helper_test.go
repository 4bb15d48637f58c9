package tcp_test

import (
	"context"
	"crypto/tls"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
)

// conf is what all ranks of the tests know.
var conf = func() *tls.Config {
	c, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	if err != nil {
		panic(err)
	}
	return c
}()

// TestMain keeps ranks from sharing memory, but in tests of that: the others are of connections.
func TestMain(m *testing.M) {
	if os.Getenv(togetherVariable) == "" {
		tcp.Neighbors(nil, apart)
	}
	m.Run()
}

// togetherVariable has the process of a test share memory.
const togetherVariable = "TUTTI_TEST_TOGETHER"

// Machines of the ranks of a test.
func apart(int) int64          { return 0 }
func together(int) int64       { return 1 }
func twoAndOthers(r int) int64 { return int64(1 + r/2) }

// soon is a context that ends long after what tests wait for.
func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// world connects size ranks in this process, over the loopback interface.
func world(ctx context.Context, size int, change func(c *tcp.Config)) ([]comm.Communicator, error) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	comms, errs := make([]comm.Communicator, size), make([]error, size)
	var all sync.WaitGroup
	for rank := range size {
		all.Go(func() {
			c := tcp.Config{Rank: rank, WorldSize: size, TLS: conf, Listen: "localhost"}
			if change != nil {
				change(&c)
			}
			comms[rank], errs[rank] = tcp.New(ctx, server.Local("test"), c)
		})
	}
	all.Wait()
	return comms, errors.Join(errs...)
}

// run runs body on the ranks of a world.
func run(ctx context.Context, size int, change func(c *tcp.Config), body func(ctx context.Context, c comm.Communicator) error) error {
	comms, err := world(ctx, size, change)
	if err != nil {
		return err
	}
	return comm.Run(ctx, comms, body)
}

// open returns a world that the test closes.
func open(t *testing.T, size int, change func(c *tcp.Config)) []comm.Communicator {
	t.Helper()
	comms, err := world(soon(t), size, change)
	require.NoError(t, err)
	return comms
}
