package tcp_test

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"os"
	"runtime"
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
	// Tests that run side by side wait for silence and deadlines, and need no processor for it.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	m.Run()
}

// togetherVariable has the process of a test share memory.
const togetherVariable = "TUTTI_TEST_TOGETHER"

// Machines of the ranks of a test.
func apart(int) int64          { return 0 }
func together(int) int64       { return 1 }
func twoAndOthers(r int) int64 { return int64(1 + r/2) }

// processors has Go use at least some processors until the test ends, unless the environment says how many. Ranks that
// share memory keep one each while they wait. As goroutines of one process they would leave none to its connections,
// which Go then looks at every 10 ms. A process of its own has more processors than its rank takes.
func processors(t *testing.T, atLeast int) {
	if os.Getenv("GOMAXPROCS") != "" {
		return
	}
	before := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(max(before, atLeast))
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
}

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

// suiteWorld is a world in which the cases of a suite follow each other, as a connection for each pair and each case
// takes longer than most cases.
type suiteWorld struct {
	change func(c *tcp.Config)
	comms  []comm.Communicator // nil before the first case, and behind one that failed
}

// newSuiteWorld returns a world that is made at its first use and closed when the test ends.
func newSuiteWorld(t *testing.T, change func(c *tcp.Config)) *suiteWorld {
	w := &suiteWorld{change: change}
	t.Cleanup(func() { require.NoError(t, w.close(nil)) })
	return w
}

// run runs body on the ranks of the world. A body that fails aborts its rank, so that no other one waits for it, and
// the next case has another world.
func (w *suiteWorld) run(ctx context.Context, size int, body func(ctx context.Context, c comm.Communicator) error) error {
	if len(w.comms) != size {
		err := w.close(nil)
		if err != nil {
			return err
		}
		w.comms, err = world(ctx, size, w.change)
		if err != nil {
			return err
		}
	}
	errs := make([]error, size)
	var all sync.WaitGroup
	for rank, c := range w.comms {
		all.Go(func() {
			errs[rank] = body(ctx, c)
			if errs[rank] != nil {
				_ = comm.CloseAll(c, errs[rank]) // the cause is returned
			}
		})
	}
	all.Wait()
	err := errors.Join(errs...)
	if err != nil {
		_ = w.close(err)
	}
	return err
}

// close closes the world's ranks, or aborts them because of cause.
func (w *suiteWorld) close(cause error) error {
	var errs []error
	for _, c := range w.comms {
		errs = append(errs, comm.CloseAll(c, cause))
	}
	w.comms = nil
	return errors.Join(errs...)
}

// open returns a world that the test closes.
func open(t *testing.T, size int, change func(c *tcp.Config)) []comm.Communicator {
	t.Helper()
	comms, err := world(soon(t), size, change)
	require.NoError(t, err)
	return comms
}
