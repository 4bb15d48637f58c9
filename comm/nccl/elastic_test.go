package nccl_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Variables of TestMembers: how many times the second member comes and goes, and, in its process, where the store is.
const (
	cyclesVariable = "TUTTI_CYCLES"
	storeVariable  = "TUTTI_TEST_STORE"
)

// TestMembers: members of an elastic job over NCCL, processes with a GPU each. The second one is killed, and another joins, again
// and again; the first one goes on, and uses no more than before. On the stand-in, which has one rank, its communicator is aborted instead.
func TestMembers(t *testing.T) {
	const warm, steps = 3, 3
	gpus, err := cuda.Count()
	alone, address := os.Getenv(gputest.StandInVariable) != "", os.Getenv(storeVariable)
	if err != nil || gpus < 2 && !alone {
		t.Skipf("needs two NVIDIA GPUs: %d, %v", gpus, err)
	}
	cycles := 10
	if n, err := strconv.Atoi(os.Getenv(cyclesVariable)); err == nil {
		cycles = n
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Duration(cycles)*5*time.Second)
	defer cancel()
	if address != "" {
		rt, err := cuda.Open(1)
		require.NoError(t, err)
		fmt.Println("ready")
		_, err = bufio.NewReader(os.Stdin).ReadString('\n')
		require.NoError(t, err)
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(1) // the first one has ended
		}()
		m, step := join(ctx, t, rt, "process "+strconv.Itoa(os.Getpid()), address)
		require.NoError(t, m.Run(ctx, step))
		return
	}
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	conf, err := store.TLS([]byte(secret), "elastic")
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	server := store.NewServer(store.Options{Silence: elastic.DefaultSilence})
	defer server.Close() //nolint:errcheck // the members have ended
	server.Serve(listener, conf)
	address = listener.Addr().String()
	m, step := join(ctx, t, rt, "first", address)
	next := func() *second { return nil }
	if !alone {
		next = func() *second { return start(t, address) }
	}
	other := next()
	var (
		last         *elastic.Epoch
		made, cycle  int
		from         time.Time // since a member was killed, or let go
		losses, gets []time.Duration
		before, now  usage
	)
	require.NoError(t, m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
		if err := step(ctx, e); err != nil {
			return err
		}
		if e != last {
			last, made = e, 0
			switch took := time.Since(from); {
			case len(e.Members) == 2:
				gets = append(gets, took)
			case cycle > 0:
				losses = append(losses, took)
			}
		}
		if made++; made != steps {
			return nil
		}
		switch {
		case len(e.Members) == 2:
			gone := other
			other = next() // before the time is taken
			from = time.Now()
			return gone.kill()
		case cycle == warm:
			before = use(t, rt)
		case cycle == cycles:
			// Goroutines of what was lost last may be ending.
			limit := time.Now().Add(time.Minute)
			for now = use(t, rt); now.goroutines > before.goroutines+2 && time.Now().Before(limit); now = use(t, rt) {
				time.Sleep(10 * time.Millisecond)
			}
			return io.EOF
		}
		cycle++
		if from = time.Now(); alone {
			comm.AbortAll(e.Comm, comm.ErrPeerFailed)
			return comm.ErrPeerFailed
		}
		_, err := io.WriteString(other.in, "\n")
		return err
	}))
	require.NoError(t, m.Close())
	if other != nil {
		_ = other.kill()
	}
	for what, list := range map[string][]time.Duration{"loss": losses, "join": gets} {
		if slices.Sort(list); len(list) > 0 {
			t.Logf("%s: %d times, median %v, most %v", what, len(list), list[len(list)/2], list[len(list)-1])
		}
	}
	t.Logf("after %d cycles %+v, after %d %+v", warm, before, cycles, now)
	assert.LessOrEqual(t, now.goroutines, before.goroutines+2)
	open := func(u usage) (n int) {
		for what, k := range u.descriptors {
			// NCCL's service for reliability keeps a connection to a process that was lost for a minute.
			if what != "socket:[]" || os.Getenv("NCCL_RAS_ENABLE") == "0" {
				n += k
			}
		}
		return n
	}
	assert.LessOrEqual(t, open(now), open(before)+2)
	assert.GreaterOrEqual(t, now.free, before.free-4<<20)
}

// secret is the secret of the job.
const secret = "a secret of tests"

// join makes a process a member, whose steps sum a tensor over the members.
func join(ctx context.Context, t *testing.T, rt *cuda.Runtime, name, address string) (*elastic.Member, func(context.Context, *elastic.Epoch) error) {
	const n = 1 << 20
	conf, err := store.TLS([]byte(secret), "elastic")
	require.NoError(t, err)
	state, err := runtime.New(rt, dtype.F32, n)
	require.NoError(t, err)
	require.NoError(t, state.Fill(1))
	update, err := runtime.New(rt, dtype.F32, n)
	require.NoError(t, err)
	require.NoError(t, update.Fill(0))
	cfg := elastic.Config{Name: name, Min: 1, Max: 2, Runtime: rt, Tensors: []*runtime.Tensor{state}}
	cfg.Dial = func(ctx context.Context) (store.Store, error) {
		kv, err := store.Dialer{Addresses: []string{address}, TLS: conf, Name: name}.Dial(ctx)
		if err != nil {
			return nil, err
		}
		return kv, nil
	}
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		base, err := tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: conf, Listen: "localhost"})
		if err != nil {
			return nil, err
		}
		c, err := nccl.From(ctx, base, rt)
		if err != nil {
			return nil, errors.Join(err, comm.CloseAll(base, err))
		}
		return c, base.Close()
	}
	m, err := elastic.Join(ctx, cfg, elastic.Plain{})
	require.NoError(t, err)
	return m, func(ctx context.Context, e *elastic.Epoch) error {
		if err := distributed.AllReduce(ctx, e.Comm, update, comm.Sum); err != nil {
			return err
		}
		return m.Commit(ctx)
	}
}

// second is the process of the second member.
type second struct {
	*exec.Cmd
	in io.Writer
}

// start starts it. It joins when it reads a line.
func start(t *testing.T, peer string) *second {
	self, err := os.Executable()
	require.NoError(t, err)
	s := &second{Cmd: exec.Command(self, "-test.run=^TestMembers$", "-test.timeout=1h")}
	s.Env, s.Stderr = append(os.Environ(), storeVariable+"="+peer), os.Stderr
	s.in, err = s.StdinPipe()
	require.NoError(t, err)
	out, err := s.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.Start())
	text, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", text)
	return s
}

// kill ends it.
func (s *second) kill() error {
	err := s.Process.Kill()
	_ = s.Wait() // says that it was killed
	return err
}

// usage is what a process uses, its descriptors by what they are, and the bytes that its GPU has left.
type usage struct {
	goroutines  int
	descriptors map[string]int
	free        int64
}

func use(t *testing.T, rt *cuda.Runtime) usage {
	goruntime.GC()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	free, _, err := rt.MemoryInfo()
	require.NoError(t, err)
	u := usage{goruntime.NumGoroutine(), map[string]int{}, free}
	for _, d := range list {
		to, _ := os.Readlink("/proc/self/fd/" + d.Name())
		u.descriptors[strings.Map(func(r rune) rune {
			if unicode.IsDigit(r) {
				return -1
			}
			return r
		}, to)]++
	}
	return u
}
