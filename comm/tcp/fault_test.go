//go:build unix

package tcp_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/faulttest"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestFaults(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	b := ofThree(rt)
	b.Elsewhere = map[string]func(*testing.T){
		"dead": TestLostProcess, "exit": TestLostProcess, "stopped": TestLostProcess, "cut off": TestCutOff,
		"stranger": TestStrangers, "garbage": TestStrangers, "silence": TestStrangers, "another version": TestAnotherVersion,
		"absent at the rendezvous": TestAbsent,
	}
	faulttest.Run(t, "tcp", b)
}

// Variables of the processes of TestLostProcess.
const lossVariable = "TUTTI_TEST_LOSS"

// TestLostProcess loses the last of three processes in the middle of a job.
func TestLostProcess(t *testing.T) {
	for _, how := range []string{"killed", "exits", "stopped"} {
		t.Run(how, func(t *testing.T) {
			l, err := net.Listen("tcp", "localhost:0")
			require.NoError(t, err)
			_, port, _ := net.SplitHostPort(l.Addr().String())
			require.NoError(t, l.Close())
			commands, goes, outputs := make([]*exec.Cmd, 3), make([]io.Closer, 3), make([]bytes.Buffer, 3)
			for rank := range commands {
				c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestRankOfLostProcess$", "-test.timeout", "50s")
				c.Env = append(os.Environ(), lossVariable+"="+how, fmt.Sprint("RANK=", rank), "WORLD_SIZE=3", "LOCAL_RANK=0",
					"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "TUTTI_SECRET=of a test")
				c.Stdout, c.Stderr = &outputs[rank], &outputs[rank]
				stdin, err := c.StdinPipe()
				require.NoError(t, err)
				require.NoError(t, c.Start())
				commands[rank], goes[rank] = c, stdin
			}
			for rank, c := range commands {
				if rank == 2 && how == "stopped" {
					require.NoError(t, c.Process.Signal(syscall.SIGCONT))
					require.NoError(t, goes[rank].Close())
				}
				err := c.Wait()
				if rank < 2 || how == "stopped" {
					assert.NoError(t, err, "rank %d: %s", rank, &outputs[rank])
				}
			}
		})
	}
}

// TestRankOfLostProcess is a process of it.
func TestRankOfLostProcess(t *testing.T) {
	how := os.Getenv(lossVariable)
	if how == "" {
		t.Skip("is part of TestLostProcess")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	job, err := rendezvous.FromEnv(os.Getenv)
	require.NoError(t, err)
	kv, err := job.Connect(ctx)
	require.NoError(t, err)
	conf, err := job.TLS("comm/tcp")
	require.NoError(t, err)
	c, err := tcp.New(ctx, kv, tcp.Config{Rank: job.Rank, WorldSize: job.WorldSize, TLS: conf, Listen: "localhost", Silence: 2 * time.Second})
	require.NoError(t, err)
	require.NoError(t, c.Barrier(ctx))
	if job.Rank == 2 {
		switch how {
		case "killed":
			require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGKILL))
		case "exits":
			os.Exit(0)
		case "stopped":
			require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGSTOP))
			_, _ = io.ReadAll(os.Stdin) // another thread may take the signal, later
		}
	}
	err = c.Barrier(ctx)
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	if job.Rank < 2 {
		require.ErrorContains(t, err, "rank 2")
	}
	require.NoError(t, c.Close())
}

// cable is a forwarder to an address, with a delay, that can be cut.
type cable struct {
	net.Listener
	cut atomic.Bool
}

func newCable(t *testing.T, to string, delay time.Duration) *cable {
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	c := &cable{Listener: l}
	t.Cleanup(func() { _ = l.Close() })
	type piece struct {
		due   time.Time
		bytes []byte
	}
	forward := func(to, from net.Conn) {
		pieces := make(chan piece, 1<<14)
		go func() {
			for p := range pieces {
				time.Sleep(time.Until(p.due)) // this is the delay, and waits for nothing else
				if !c.cut.Load() {
					_, _ = to.Write(p.bytes)
				}
			}
			if !c.cut.Load() {
				_ = to.Close()
			}
		}()
		defer close(pieces)
		for {
			b := make([]byte, 64<<10)
			n, err := from.Read(b)
			if err != nil {
				return
			}
			pieces <- piece{time.Now().Add(delay), b[:n]}
		}
	}
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", to)
			if err != nil {
				_ = a.Close()
				continue
			}
			go forward(a, b)
			go forward(b, a)
		}
	}()
	return c
}

// free is an address on which nothing listens.
func free(t *testing.T) string {
	l, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	defer l.Close() //nolint:errcheck // it has no connections
	return l.Addr().String()
}

// A link that is cut in the middle of a transfer closes no connection.
func TestCutOff(t *testing.T) {
	at := free(t)
	link := newCable(t, at, 0)
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	comms := open(t, 2, func(c *tcp.Config) {
		c.Silence = time.Second
		if c.Rank == 0 {
			c.Listen, c.Advertise = at, []string{link.Addr().String()}
		}
	})
	const n = 4 << 20
	var all sync.WaitGroup
	for r, c := range comms {
		all.Go(func() {
			p, err := rt.Allocate(4 * n)
			assert.NoError(t, err)
			for i := 0; err == nil && i < 1000; i++ {
				if r == 0 && i == 3 {
					link.cut.Store(true)
				}
				if err = c.AllReduce(p, p, n, dtype.F32, comm.Sum); err == nil {
					err = c.Sync(t.Context())
				}
			}
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, fmt.Sprintf("rank %d is gone", 1-r))
			assert.ErrorContains(t, err, "nothing has come from it for 1s")
			assert.NoError(t, c.Close())
			assert.NoError(t, rt.Deallocate(p))
		})
	}
	all.Wait()
}

// Over a link with a long round trip, a pair has several connections, and more may come early.
func TestLongRoundTrip(t *testing.T) {
	at := free(t)
	const delay = 10 * time.Millisecond
	link := newCable(t, at, delay)
	comms := open(t, 2, func(c *tcp.Config) {
		if c.Rank == 0 {
			c.Listen, c.Advertise = at, []string{link.Addr().String()}
		}
	})
	lanes, window := tcp.LanesOf(2 * delay)
	assert.Equal(t, 19, lanes)
	assert.Equal(t, 5_000_000, window)
	assert.GreaterOrEqual(t, tcp.Lanes(comms[0]), lanes)
	assert.Equal(t, tcp.Lanes(comms[0]), tcp.Lanes(comms[1]))
	lanes, window = tcp.LanesOf(100 * time.Microsecond)
	assert.Equal(t, 1, lanes)
	assert.Equal(t, 4<<20, window)
	lanes, window = tcp.LanesOf(100 * time.Millisecond)
	assert.Equal(t, 95, lanes)
	assert.Equal(t, 25_000_000, window)

	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	const n = 2 << 20
	require.NoError(t, comm.Run(t.Context(), comms, func(ctx context.Context, c comm.Communicator) error {
		values := make([]float32, n)
		for i := range values {
			values[i] = float32(i % 1000 * (c.Rank() + 1))
		}
		tensor, err := cpu.Wrap(rt, values)
		if err != nil {
			return err
		}
		defer tensor.Free() //nolint:errcheck // it is the slice's
		for range 3 {
			if err := distributed.AllReduce(ctx, c, tensor, comm.Avg); err != nil {
				return err
			}
		}
		for i, v := range values {
			if v != float32(i%1000)*1.5 {
				return fmt.Errorf("element %d is %v", i, v)
			}
		}
		return nil
	}))
}

// Strangers of all kinds, many at once, are refused and delay nobody.
func TestStrangers(t *testing.T) {
	at := free(t)
	stop := make(chan struct{})
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
				conn, err := net.Dial("tcp", at)
				if err != nil {
					continue
				}
				switch i % 4 {
				case 0: // says nothing
					_ = conn.SetDeadline(time.Now().Add(time.Second))
					_, _ = conn.Read(make([]byte, 1))
				case 1:
					_, _ = io.WriteString(conn, strings.Repeat("garbage", 1000))
				case 2:
					other, _ := store.TLS([]byte("another secret"), "comm/tcp")
					other.NextProtos = []string{"tutti-tcp/1"}
					assert.Error(t, talk(tls.Client(conn, other)))
				case 3: // knows the secret, and says nothing sensible
					own := conf.Clone()
					own.NextProtos = []string{"tutti-tcp/1"}
					_ = talk(tls.Client(conn, own))
				}
				_ = conn.Close()
			}
		})
	}
	require.NoError(t, run(t.Context(), 3, func(c *tcp.Config) {
		if c.Rank == 0 {
			c.Listen = at
		}
	}, func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) }))
	close(stop)
	all.Wait()
}

// talk sends what is no hello, and returns the error of reading an answer.
func talk(conn *tls.Conn) error {
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Write(bytes.Repeat([]byte{0xff}, 64)); err != nil {
		return err
	}
	_, err := conn.Read(make([]byte, 1))
	return err
}

func TestAnotherVersion(t *testing.T) {
	at := free(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		server := store.NewServer(store.Options{})
		defer server.Close() //nolint:errcheck // it is in this process
		_, err := tcp.New(ctx, server.Local("test"), tcp.Config{WorldSize: 2, TLS: conf, Listen: at})
		assert.ErrorIs(t, err, comm.ErrTimeout)
	}()
	own := conf.Clone()
	own.NextProtos = []string{"tutti-tcp/2"}
	for {
		conn, err := net.Dial("tcp", at)
		if err != nil {
			continue
		}
		assert.ErrorContains(t, tls.Client(conn, own).Handshake(), "no application protocol")
		_ = conn.Close()
		break
	}
	<-done
}

func TestAbsent(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	_, err := tcp.New(ctx, server.Local("test"), tcp.Config{Rank: 1, WorldSize: 3, TLS: conf, Listen: "localhost"})
	require.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorContains(t, err, "no connection to ranks 0, 2")
}

// Another process that takes a rank for its own is refused, and the first one connects.
func TestTwoOfOneRank(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	connect := func(name string, rank int) (comm.Communicator, error) {
		return tcp.New(t.Context(), server.Local(name), tcp.Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: "localhost"})
	}
	observer := server.Local("observer")
	var all sync.WaitGroup
	all.Go(func() {
		c, err := connect("first", 1)
		if assert.NoError(t, err) {
			assert.NoError(t, c.Close())
		}
	})
	_, err := observer.Get(t.Context(), "tcp//1")
	require.NoError(t, err)
	_, err = connect("second", 1)
	require.ErrorIs(t, err, store.ErrRefused)
	assert.ErrorContains(t, err, "another process connects as rank 1")
	c, err := connect("rank 0", 0)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	all.Wait()
}
