//go:build unix

package tcp_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
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
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestFaults(t *testing.T) { faults(t) }

// TestSharedFaults is TestFaults of ranks that share memory.
func TestSharedFaults(t *testing.T) {
	processors(t, 4)
	tcp.Neighbors(t, together)
	faults(t)
}

func faults(t *testing.T) {
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	b := ofThree(rt)
	b.Elsewhere = map[string]func(*testing.T){
		"dead": TestLostProcess, "exit": TestLostProcess, "stopped": TestLostProcess, "cut off": TestCutOff,
		"stranger": TestStrangers, "garbage": TestStrangers, "silence": TestStrangers, "slow sender": TestStrangers,
		"crowd": TestCrowd, "replay": TestReplay, "half-open": tcp.TestHalfOpen, "another version": TestAnotherVersion,
		"missing at the rendezvous": TestAbsent,
	}
	faulttest.Run(t, "tcp", b)
}

// Variables of the processes of TestLostProcess.
const lossVariable = "TUTTI_TEST_LOSS"

// TestLostProcess loses the last of three processes in the middle of a job.
func TestLostProcess(t *testing.T) {
	t.Parallel() // it is silence that they wait for
	for _, how := range []string{"killed", "exits", "stopped", "killed neighbor", "exits neighbor", "stopped neighbor"} {
		how, neighbor := strings.CutSuffix(how, " neighbor")
		t.Run(fmt.Sprintf("%s,shared=%v", how, neighbor), func(t *testing.T) {
			t.Parallel()
			host, port, err := net.SplitHostPort(jobtest.Address(t, 4))
			require.NoError(t, err)
			commands, goes, outputs := make([]*exec.Cmd, 3), make([]io.Closer, 3), make([]bytes.Buffer, 3)
			for rank := range commands {
				c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestRankOfLostProcess$", "-test.timeout", "50s")
				c.Env = append(os.Environ(), lossVariable+"="+how, fmt.Sprint("RANK=", rank), "WORLD_SIZE=3", "LOCAL_RANK=0",
					"MASTER_ADDR="+host, "MASTER_PORT="+port, "TUTTI_SECRET=of a test, and more than 32 bytes long")
				if neighbor {
					c.Env = append(c.Env, togetherVariable+"=1")
				}
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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
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

	mu   sync.Mutex
	kept []byte // what was sent first, by who connects
}

// keep keeps the beginning of what is sent.
func (c *cable) keep(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.kept) < 8<<10 {
		c.kept = append(c.kept, b...)
	}
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
	forward := func(to, from net.Conn, keep bool) {
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
			if keep {
				c.keep(b[:n])
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
			go forward(a, b, false)
			go forward(b, a, true)
		}
	}()
	return c
}

// A link that is cut in the middle of a transfer closes no connection.
func TestCutOff(t *testing.T) {
	t.Parallel()
	at := jobtest.Address(t, 1)
	link := newCable(t, at, 0)
	rt := cpu.New()
	defer func() { require.NoError(t, rt.Close()) }()
	comms := open(t, 2, func(c *tcp.Config) {
		c.Silence = time.Second
		if c.Rank == 0 {
			c.Listen, c.Advertise = at, []string{link.Addr().String()}
		}
	})
	const n = 1 << 20
	ctx := soon(t)
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
					err = c.Sync(ctx)
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

// A process that is slow to answer does not get more connections to answer on than its processors use.
func TestSlowProcess(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the kernel does not tell the round trip")
	}
	at := jobtest.Address(t, 1)
	slow := newCable(t, at, 10*time.Millisecond) // its kernel is not
	comms := open(t, 2, func(c *tcp.Config) {
		if c.Rank == 0 {
			c.Listen, c.Advertise = at, []string{slow.Addr().String()}
		}
	})
	assert.Equal(t, tcp.ParallelLanesOf(2, runtime.GOMAXPROCS(0)), tcp.Lanes(comms[0]))
	require.NoError(t, comm.Run(soon(t), comms, func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) }))
}

// Over a link with a long round trip, a pair has several connections, and more may come early.
func TestLongRoundTrip(t *testing.T) {
	tcp.MeasureByMessages(t)
	at := jobtest.Address(t, 1)
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
	require.NoError(t, comm.Run(soon(t), comms, func(ctx context.Context, c comm.Communicator) error {
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

// refusals are what the log says of those whom a rank has refused.
type refusals struct {
	slog.Handler
	mu    sync.Mutex
	times map[string]int64 // by reason, the last number that was logged; guarded by mu
	lines map[string]int   // by reason; guarded by mu
}

// Enabled implements [slog.Handler].
func (*refusals) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements [slog.Handler].
func (l *refusals) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var reason string
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "reason":
			reason = a.Value.String()
		case "times":
			l.times[reason] = max(l.times[reason], a.Value.Int64())
			l.lines[reason]++
		}
		return true
	})
	return nil
}

// longest is how many lines the reason with the largest number of them has.
func (l *refusals) longest() (lines int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.lines {
		lines = max(lines, n)
	}
	return lines
}

// until waits until refusals were logged that often, by whatever else they say; the log has powers of two for each.
func (l *refusals) until(t *testing.T, reason string, times int64) {
	t.Helper()
	assert.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		logged := int64(0)
		for r, n := range l.times {
			if strings.Contains(r, reason) {
				logged += n
			}
		}
		return logged >= times
	}, time.Minute, time.Millisecond, "%s: %v", reason, l.times)
}

// siege is a world of three whose rank 2 has not come: the others wait for it, while strangers connect to rank 0.
type siege struct {
	at     string
	server *store.Server
	log    *refusals
	all    sync.WaitGroup
	change func(*tcp.Config)
}

// besiege begins one. Rank 0 may say that it is at the end of a cable.
func besiege(t *testing.T, change func(*tcp.Config)) *siege {
	s := &siege{at: jobtest.Address(t, 1), server: store.NewServer(store.Options{}), change: change,
		log: &refusals{times: map[string]int64{}, lines: map[string]int{}}}
	was := slog.Default()
	slog.SetDefault(slog.New(s.log))
	t.Cleanup(func() { slog.SetDefault(was) })
	s.join(t, 0)
	_, err := s.server.Local("observer").Get(soon(t), "tcp//0")
	require.NoError(t, err)
	s.join(t, 1)
	return s
}

// join has a rank connect and compute with the others.
func (s *siege) join(t *testing.T, rank int) {
	s.all.Go(func() {
		cfg := tcp.Config{Rank: rank, WorldSize: 3, TLS: conf, Listen: "localhost"}
		if rank == 0 {
			cfg.Listen = s.at
		}
		if s.change != nil {
			s.change(&cfg)
		}
		c, err := tcp.New(soon(t), s.server.Local(fmt.Sprint("rank ", rank)), cfg)
		if !assert.NoError(t, err) {
			return
		}
		rt := cpu.New()
		values := []float64{float64(rank)}
		tensor, err := cpu.Wrap(rt, values)
		assert.NoError(t, err)
		for range 10 {
			assert.NoError(t, distributed.AllReduce(soon(t), c, tensor, comm.Sum))
		}
		assert.Equal(t, []float64{3 * 3 * 3 * 3 * 3 * 3 * 3 * 3 * 3 * 3}, values)
		assert.NoError(t, errors.Join(tensor.Free(), c.Close(), rt.Close()))
	})
}

// end has the last rank come, and waits until all have computed.
func (s *siege) end(t *testing.T) {
	t.Helper()
	s.join(t, 2)
	s.all.Wait()
	assert.NoError(t, s.server.Close())
}

// Strangers of all kinds, many at once, are refused with a reason. The job goes on, and none of them stays.
func TestStrangers(t *testing.T) {
	s := besiege(t, nil)
	const each = 20
	other, err := store.TLS([]byte("another secret"), "comm/tcp")
	require.NoError(t, err)
	own := conf.Clone()
	other.NextProtos, own.NextProtos = []string{protocol}, []string{protocol}
	var strangers, slow sync.WaitGroup
	stay := make(chan net.Conn, 2*each)
	for range each {
		for _, kind := range []func(conn net.Conn){
			func(conn net.Conn) { stay <- conn }, // silence
			func(conn net.Conn) { // a slow sender of what may become a handshake
				stay <- conn
				slow.Go(func() {
					for b := []byte{22, 3, 1, 2, 0}; ; b = []byte{1} {
						if _, err := conn.Write(b[:1]); err != nil {
							return
						}
						time.Sleep(time.Millisecond) // that is its pace
					}
				})
			},
			func(conn net.Conn) { // garbage
				_, _ = io.WriteString(conn, strings.Repeat("garbage", 1000))
				_, _ = io.Copy(io.Discard, conn)
				_ = conn.Close()
			},
			func(conn net.Conn) { // another secret
				_, err := talk(tls.Client(conn, other))
				assert.Error(t, err)
			},
			func(conn net.Conn) { // knows the secret, and says nothing sensible
				answer, _ := talk(tls.Client(conn, own))
				assert.Contains(t, answer, "another start of the job; this is rank 0")
			},
		} {
			strangers.Go(func() {
				conn, err := net.Dial("tcp", s.at)
				if assert.NoError(t, err) {
					kind(conn)
				}
			})
		}
	}
	strangers.Wait()
	for _, reason := range []string{"does not speak this protocol", "another secret", "another start of the job"} {
		s.log.until(t, reason, 16) // of 20
	}
	assert.LessOrEqual(t, s.log.longest(), 6, "powers of two, of at most 40 for a reason")
	s.end(t)
	for range 2 * each {
		conn := <-stay
		assert.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
		_, err := io.Copy(io.Discard, conn)
		assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, "rank 0 has closed it")
		_ = conn.Close()
	}
	slow.Wait()
}

// protocol is what ranks speak.
const protocol = "tutti-tcp/5"

// talk sends what is no sensible hello, and returns the answer.
func talk(conn *tls.Conn) (string, error) {
	defer conn.NetConn().Close() //nolint:errcheck // nothing is lost
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := conn.Write(bytes.Repeat([]byte{0xff}, 64)); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	return string(answer), err
}

// Thousands of connections at once that say nothing take a bounded number of descriptors and bytes, and the job goes on.
func TestCrowd(t *testing.T) {
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	const most = 256 + 3*96 // strangers of a rank of three
	n := 2_000
	if extended {
		n = 10_000
	}
	n = min(n, int(limit.Cur)-most-200)
	if n < 2*most {
		t.Skipf("%d descriptors are too few", limit.Cur)
	}
	s := besiege(t, nil)
	descriptors := func() int {
		list, _ := os.ReadDir("/proc/self/fd")
		return len(list)
	}
	before := descriptors()
	crowd := make([]net.Conn, n)
	var dialers sync.WaitGroup
	const at = 64
	for from := range at {
		dialers.Go(func() {
			for i := from; i < n; i += at {
				var err error
				if crowd[i], err = net.Dial("tcp", s.at); !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	dialers.Wait()
	s.log.until(t, "it did not say who it is", int64(n-most)/2) // all but those that stay, as powers of two
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	assert.Less(t, memory.HeapInuse, uint64(256<<20))
	assert.Less(t, descriptors()-before, n+most+100, "the strangers' own side is in this process, too")
	s.end(t)
	for _, conn := range crowd {
		if conn != nil {
			_ = conn.Close()
		}
	}
}

// A rank's message is refused when somebody else repeats it.
func TestReplay(t *testing.T) {
	var link *cable
	var once sync.Once
	s := besiege(t, func(c *tcp.Config) {
		if c.Rank == 0 {
			once.Do(func() { link = newCable(t, c.Listen, 0) })
			c.Advertise = []string{link.Addr().String()}
		}
	})
	kept := func() []byte {
		link.mu.Lock()
		defer link.mu.Unlock()
		return bytes.Clone(link.kept)
	}
	require.Eventually(t, func() bool { return len(kept()) > 1000 }, time.Minute, time.Millisecond, "a certificate and a greeting")
	const times = 4
	for range times {
		conn, err := net.Dial("tcp", s.at)
		require.NoError(t, err)
		_, err = conn.Write(append(kept(), make([]byte, 20<<10)...)) // whatever is missing of a record
		require.NoError(t, err)
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		_, err = io.Copy(io.Discard, conn)
		assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, "refused at once")
		require.NoError(t, conn.Close())
	}
	s.log.until(t, "does not speak this protocol", times-1) // 3 and 1 of two kinds are logged as 2 and 1
	s.end(t)
}

// A rank of another version is refused at the handshake, and finds it in the store before that; one that comes later is not.
func TestAnotherVersion(t *testing.T) {
	s := besiege(t, nil)
	own := conf.Clone()
	own.NextProtos = []string{"tutti-tcp/0"}
	conn, err := net.Dial("tcp", s.at)
	require.NoError(t, err)
	require.Error(t, tls.Client(conn, own).HandshakeContext(soon(t)))
	require.NoError(t, conn.Close())
	s.log.until(t, "another version of this library", 1)
	s.end(t)

	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	kv := server.Local("a rank")
	require.NoError(t, kv.Set(t.Context(), "tcp//0", []byte(`{"Protocol":"tutti-tcp/6"}`)))
	_, err = tcp.New(soon(t), kv, tcp.Config{Rank: 1, WorldSize: 2, TLS: conf, Listen: "localhost"})
	require.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, `rank 0 speaks "tutti-tcp/6", this one "tutti-tcp/5"`)
}

// Ranks that would take each other for lost after different times are refused by both sides, which name the times.
func TestAnotherSilence(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	var all sync.WaitGroup
	for rank := range 2 {
		all.Go(func() {
			_, err := tcp.New(ctx, server.Local(fmt.Sprint(rank)), tcp.Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: "localhost",
				Silence: time.Duration(1+rank) * time.Second})
			assert.ErrorContains(t, err, "rank 1 may be silent for 2s, rank 0 for 1s: all ranks need the same")
			if rank == 1 {
				assert.ErrorIs(t, err, store.ErrRefused)
			}
			cancel()
		})
	}
	all.Wait()
}

// Somebody else of the job at the first address of a rank does not keep others from finding it at the next one.
func TestAddressOfAnother(t *testing.T) {
	other, own := jobtest.Address(t, 1), jobtest.Address(t, 1)
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	var all sync.WaitGroup
	all.Go(func() {
		_, err := tcp.New(ctx, server.Local("other"), tcp.Config{WorldSize: 2, TLS: conf, Listen: other})
		assert.ErrorIs(t, err, comm.ErrCanceled)
	})
	_, err := server.Local("observer").Get(ctx, "tcp//0")
	require.NoError(t, err)
	require.NoError(t, run(soon(t), 2, func(c *tcp.Config) {
		if c.Rank == 0 {
			c.Listen, c.Advertise = own, []string{other, own}
		}
	}, func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) }))
	cancel()
	all.Wait()
}

func TestAbsent(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	observer := server.Local("observer")
	nobody := fmt.Sprintf(`{"Protocol":%q,"Nonce":1,"Addresses":["127.0.0.1:1"]}`, protocol)
	require.NoError(t, observer.Set(ctx, "tcp//0", []byte(nobody)))
	go func() { // when it has tried to reach one, and waits
		_, err := observer.Get(ctx, "tcp//reports/0/1")
		assert.NoError(t, err)
		cancel()
	}()
	_, err := tcp.New(ctx, server.Local("test"), tcp.Config{Rank: 1, WorldSize: 3, TLS: conf, Listen: "localhost"})
	require.ErrorIs(t, err, comm.ErrCanceled)
	assert.ErrorContains(t, err, "no connection to ranks 0, 2")
	var missing interface{ MissingRanks() []int }
	require.ErrorAs(t, err, &missing)
	assert.Equal(t, []int{0, 2}, missing.MissingRanks())
}

// Another process that takes a rank for its own is refused, and the first one connects.
func TestTwoOfOneRank(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	connect := func(name string, rank int) (comm.Communicator, error) {
		return tcp.New(soon(t), server.Local(name), tcp.Config{Rank: rank, WorldSize: 2, TLS: conf, Listen: "localhost"})
	}
	observer := server.Local("observer")
	var all sync.WaitGroup
	all.Go(func() {
		c, err := connect("first", 1)
		if assert.NoError(t, err) {
			assert.NoError(t, c.Close())
		}
	})
	_, err := observer.Get(soon(t), "tcp//1")
	require.NoError(t, err)
	_, err = connect("second", 1)
	require.ErrorIs(t, err, store.ErrRefused)
	assert.ErrorContains(t, err, "another process connects as rank 1")
	c, err := connect("rank 0", 0)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	all.Wait()
}
