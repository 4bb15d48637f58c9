package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// atMost is far more than anything here takes, and less than the patience with
// which rank 0 waits for a silent connection.
const atMost = patience / 2

// freeAddress returns the first of as many successive ports that nobody
// listens on now.
func freeAddress(t testing.TB) string {
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		j := Job{Address: l.Addr().String()}
		free := l.Close() == nil
		for i := range ports {
			address, err := j.portAddress("127.0.0.1", i)
			require.NoError(t, err)
			l, err := net.Listen("tcp", address)
			free = free && err == nil && l.Close() == nil
		}
		if free {
			return j.Address
		}
	}
}

// occupy has a stranger at some of the ports of an address.
func occupy(t *testing.T, address string, stranger func(net.Conn), which ...int) {
	for _, i := range which {
		port, err := Job{Address: address}.portAddress("127.0.0.1", i)
		require.NoError(t, err)
		l, err := net.Listen("tcp", port)
		require.NoError(t, err)
		t.Cleanup(func() { l.Close() }) //nolint:errcheck
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				t.Cleanup(func() { c.Close() }) //nolint:errcheck
				go stranger(c)
			}
		}()
	}
}

func deadline(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// within returns what f does, which must not take long.
func within[T any](t testing.TB, f func() T) (result T) {
	done := make(chan T, 1)
	go func() { done <- f() }()
	select {
	case result = <-done:
	case <-time.After(atMost):
		require.Fail(t, "still waiting")
	}
	return result
}

// result is that of a Broadcast.
type result struct {
	payload []byte
	err     error
}

// start begins a Broadcast.
func (j Job) start(ctx context.Context, payload string) <-chan result {
	done := make(chan result, 1)
	go func() {
		got, err := j.Broadcast(ctx, []byte(payload))
		done <- result{got, err}
	}()
	return done
}

// await returns what a started Broadcast gives, soon.
func await(t testing.TB, started <-chan result) result {
	return within(t, func() result { return <-started })
}

// dial connects to rank 0 as soon as that listens.
func dial(t testing.TB, address string) net.Conn {
	for {
		if c, err := net.Dial("tcp", address); err == nil {
			t.Cleanup(func() { c.Close() }) //nolint:errcheck
			return c
		}
		require.NoError(t, t.Context().Err())
	}
}

// logged collects what the package logs.
func logged(t *testing.T) *syncBuffer {
	log, old := new(syncBuffer), slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(func() { slog.SetDefault(old) })
	return log
}

func TestBroadcastReachesEveryRank(t *testing.T) {
	address := freeAddress(t)
	ctx := deadline(t, 20*time.Second)
	const size = 9
	payload := bytes.Repeat([]byte("unique id "), 13)
	got, errs := make([][]byte, size), make([]error, size)
	var wg sync.WaitGroup
	for rank := size - 1; rank >= 0; rank-- { // rank 0 comes last
		wg.Go(func() {
			var own []byte
			if rank == 0 {
				own = payload
			}
			got[rank], errs[rank] = Job{Rank: rank, WorldSize: size, Address: address, Secret: []byte("s")}.Broadcast(ctx, own)
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for rank := range size {
		assert.Equal(t, payload, got[rank], "rank %d", rank)
	}
}

// Rank 0 cannot bind what the others call its host (an address of documentation,
// RFC 5737, which no host has), and is reached all the same.
func TestRankZeroListensOnAllInterfaces(t *testing.T) {
	log := logged(t)
	local := freeAddress(t)
	_, port, err := net.SplitHostPort(local)
	require.NoError(t, err)
	ctx := deadline(t, 20*time.Second)
	served := Job{WorldSize: 2, Address: net.JoinHostPort("192.0.2.1", port), Secret: []byte("s"), Guessable: true}.start(ctx, "id")
	got, err := Job{Rank: 1, WorldSize: 2, Address: local, Secret: []byte("s")}.Broadcast(ctx, nil)
	require.NoError(t, err)
	assert.Equal(t, "id", string(got))
	require.NoError(t, await(t, served).err)
	assert.Contains(t, log.String(), "set TUTTI_SECRET")
}

// A job without a secret, or with one that others can guess, is warned about on a loopback
// address, too.
func TestAGuessableSecretIsWarnedAbout(t *testing.T) {
	for _, job := range []Job{{}, {Secret: []byte("job 7"), Guessable: true}, {Secret: []byte("random")}} {
		log := logged(t)
		job.Address = freeAddress(t)
		l, err := job.listen(t.Context())
		require.NoError(t, err)
		require.NoError(t, l.Close())
		want := job.Guessable || job.Secret == nil
		assert.Equal(t, want, strings.Contains(log.String(), "every user of this host can connect"), log.String())
		assert.Equal(t, want, strings.Contains(log.String(), "set TUTTI_SECRET"), log.String())
	}
}

// What is given as loopback is not opened to the network.
func TestLoopbackIsNotOpenedToTheNetwork(t *testing.T) {
	port := strings.TrimPrefix(freeAddress(t), "127.0.0.1:")
	for host, want := range map[string]string{
		"127.0.0.1":   "127.0.0.1",
		"127.0.1.1":   "127.0.1.1",
		"::1":         "::1",
		"localhost":   "127.0.0.1",
		"node7":       "::",
		"10.0.0.1":    "::",
		"2001:db8::1": "::",
	} {
		l, err := Job{Address: net.JoinHostPort(host, port)}.listen(t.Context())
		if err != nil && want != "127.0.0.1" {
			t.Logf("%s: %v", host, err) // a host without IPv6, or with one loopback address
			continue
		}
		require.NoError(t, err)
		assert.Equal(t, want, l.Addr().(*net.TCPAddr).IP.String(), host)
		require.NoError(t, l.Close())
	}
	_, err := Job{WorldSize: 2, Address: "node7"}.Broadcast(t.Context(), nil)
	assert.ErrorContains(t, err, "missing port")
}

// Without a secret nobody listens to the network, and every rank says why.
func TestTheNetworkNeedsASecret(t *testing.T) {
	for rank := range 2 {
		_, err := Job{Launcher: "torchrun", Rank: rank, WorldSize: 2, Address: "192.0.2.1:4000"}.Broadcast(t.Context(), nil)
		assert.ErrorIs(t, err, ErrEnvironment)
		assert.ErrorContains(t, err, "set TUTTI_SECRET")
	}
}

func TestAJobOfOneNeedsNobody(t *testing.T) {
	got, err := Job{WorldSize: 1}.Broadcast(t.Context(), []byte("x"))
	require.NoError(t, err)
	assert.Equal(t, []byte("x"), got)
}

func TestARankThatDoesNotComeIsNamed(t *testing.T) {
	_, err := Job{WorldSize: 3, Address: freeAddress(t)}.Broadcast(deadline(t, 100*time.Millisecond), nil)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "[1 2]")
	_, err = Job{Rank: 1, WorldSize: 2, Address: freeAddress(t)}.Broadcast(deadline(t, 100*time.Millisecond), nil)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
}

// Connections that say nothing, also more than rank 0 keeps, delay neither the
// ranks nor rank 0.
func TestSilentConnectionsDelayNobody(t *testing.T) {
	for _, n := range []int{1, mostStrangers + 50} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			logged(t)
			job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("s")}
			served := job.start(t.Context(), "id")
			for range n {
				greeted(t, dial(t, job.Address))
			}
			job.Rank = 1
			got := await(t, job.start(t.Context(), ""))
			require.NoError(t, got.err)
			assert.Equal(t, "id", string(got.payload))
			require.NoError(t, await(t, served).err)
		})
	}
}

// greeted waits until rank 0 has seen a connection.
func greeted(t testing.TB, c net.Conn) {
	_, err := io.ReadFull(c, make([]byte, len(magic)+keyBytes))
	require.NoError(t, err)
}

// A wait ends with its context while the other side says nothing.
func TestCancellingEndsAWaitAtOnce(t *testing.T) {
	t.Run("rank 0", func(t *testing.T) {
		logged(t)
		ctx, cancel := context.WithCancel(t.Context())
		job := Job{WorldSize: 2, Address: freeAddress(t)}
		served := job.start(ctx, "id")
		greeted(t, dial(t, job.Address))
		cancel()
		assert.ErrorIs(t, await(t, served).err, context.Canceled)
	})
	t.Run("rank 1", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		job := Job{Rank: 1, WorldSize: 2, Address: freeAddress(t)}
		occupy(t, job.Address, func(c net.Conn) {
			io.WriteString(c, magic+strings.Repeat("x", keyBytes)) //nolint:errcheck
			io.ReadFull(c, make([]byte, len(magic)))               //nolint:errcheck
			cancel()
		}, 0)
		assert.ErrorIs(t, await(t, job.start(ctx, "")).err, context.Canceled)
	})
}

// tiredListener has no descriptors left at first.
type tiredListener struct {
	net.Listener
	failures int
}

func (l *tiredListener) Accept() (net.Conn, error) {
	if l.failures > 0 {
		l.failures--
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return l.Listener.Accept()
}

func TestAFailedAcceptIsSurvived(t *testing.T) {
	log := logged(t)
	job := Job{WorldSize: 2, Address: freeAddress(t)}
	l, err := job.listen(t.Context())
	require.NoError(t, err)
	zero, served := newServer(job, []byte("id")), make(chan result, 1)
	go func() { served <- result{err: zero.run(t.Context(), &tiredListener{l, 5})} }()
	job.Rank = 1
	got := await(t, job.start(t.Context(), ""))
	require.NoError(t, got.err)
	assert.Equal(t, "id", string(got.payload))
	require.NoError(t, await(t, served).err)
	assert.Contains(t, log.String(), "cannot accept")
}

// Strangers (garbage, silence, another secret) are refused; the job's own rank
// still gets its answer.
func TestStrangersAreRefused(t *testing.T) {
	log := logged(t)
	address := freeAddress(t)
	ctx := deadline(t, 20*time.Second)
	served := Job{WorldSize: 2, Address: address, Secret: []byte("right")}.start(ctx, "treasure")
	for _, say := range []string{"", "GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 1000)} {
		c := dial(t, address)
		_, _ = io.WriteString(c, say) // fails if the refusal is faster
		_ = c.(*net.TCPConn).CloseWrite()
		answer, _ := io.ReadAll(c)
		assert.NotContains(t, string(answer), "treasure")
	}
	_, err := Job{Rank: 1, WorldSize: 2, Address: address, Secret: []byte("wrong")}.ask(ctx, address, newHello(1, 2))
	assert.ErrorIs(t, err, ErrRefused)
	assert.ErrorContains(t, err, "TUTTI_SECRET is not the same everywhere")

	got, err := Job{Rank: 1, WorldSize: 2, Address: address, Secret: []byte("right")}.Broadcast(ctx, nil)
	require.NoError(t, err)
	assert.Equal(t, "treasure", string(got))
	require.NoError(t, await(t, served).err)
	for _, reason := range []string{reasonSilence, reasonLanguage, reasonSecret} {
		assert.Contains(t, log.String(), reason)
	}
}

// A rank with another secret goes on looking for rank 0, and its error says
// what it met.
func TestARankWithAnotherSecretLearnsWhy(t *testing.T) {
	log := logged(t)
	job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("right")}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := job.start(ctx, "id")
	greeted(t, dial(t, job.Address))
	job.Rank, job.Secret = 1, []byte("wrong")
	patience, giveUp := context.WithCancel(t.Context())
	asked := job.start(patience, "")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "found somebody else") }, time.Minute, time.Millisecond)
	giveUp()
	err := await(t, asked).err
	assert.ErrorIs(t, err, context.Canceled)
	assert.ErrorIs(t, err, ErrRefused)
	assert.ErrorContains(t, err, "TUTTI_SECRET")
	cancel()
	assert.ErrorContains(t, await(t, served).err, "ranks [1] did not come")
}

// Who knows the secret, but cannot be of the job as rank 0 knows it, hears of
// that at once.
func TestContradictionsAreNamed(t *testing.T) {
	logged(t)
	job := Job{WorldSize: 3, Address: freeAddress(t), Secret: []byte("s")}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := job.start(ctx, "id")
	greeted(t, dial(t, job.Address))
	as := func(rank, size int) Job {
		other := job
		other.Rank, other.WorldSize = rank, size
		return other
	}
	conn := dial(t, job.Address)
	first := &talk{conn: conn, key: job.key()}
	_, err := first.receive(len(magic) + keyBytes)
	require.NoError(t, err)
	_, err = first.introduce(newHello(1, 3))
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, conn) // rank 0 hangs up when it has the receipt
	require.NoError(t, err)
	for _, c := range []struct {
		name string
		job  Job
		says string
	}{
		{"another size", as(2, 5), "rank 2 of 5 in a job of 3"},
		{"a rank beyond the size", as(7, 3), "rank 7 in a job of 3"},
		{"a rank that has been here", as(1, 3), "rank 1 is here already, from 127.0.0.1:"},
		{"another rank 0", as(0, 3), "rank 0 is here already"},
	} {
		err := await(t, c.job.start(t.Context(), "")).err
		assert.ErrorIs(t, err, ErrRefused, c.name)
		assert.ErrorContains(t, err, c.says, c.name)
	}
	cancel()
	err = await(t, served).err
	assert.ErrorContains(t, err, "ranks [2] did not come")
	assert.ErrorContains(t, err, "rank 0 is here already")
}

// A process that lost its connection comes again; another one takes the place
// of a process that died before it had the payload.
func TestARankComesAgain(t *testing.T) {
	logged(t)
	job := Job{WorldSize: 3, Address: freeAddress(t), Secret: []byte("s")}
	served := job.start(t.Context(), "id")
	greets := func(self hello) net.Conn {
		c := dial(t, job.Address)
		talk := &talk{conn: c, key: job.key()}
		_, err := talk.receive(len(magic) + keyBytes)
		require.NoError(t, err)
		// The receipt fails for want of a connection, once rank 0 has the hello.
		_, err = (&talkUntilReply{talk}).introduce(self)
		require.ErrorIs(t, err, io.ErrClosedPipe)
		return c
	}
	self := newHello(1, 3)
	greets(self) // its connection stays open, as to rank 0 that of a lost host does
	_, err := job.ask(t.Context(), job.Address, self)
	require.NoError(t, err)

	require.NoError(t, greets(newHello(2, 3)).Close())
	job.Rank = 2
	for { // rank 0 sees the end of the connection at its own time
		got := await(t, job.start(t.Context(), ""))
		if got.err == nil {
			break
		}
		require.ErrorContains(t, got.err, "rank 2 is here already")
	}
	require.NoError(t, await(t, served).err)
}

// talkUntilReply does not send the receipt.
type talkUntilReply struct{ *talk }

func (t *talkUntilReply) introduce(self hello) ([]byte, error) {
	t.conn = &muteAfterReply{Conn: t.conn}
	return t.talk.introduce(self)
}

type muteAfterReply struct {
	net.Conn
	heard bool
}

func (c *muteAfterReply) Read(b []byte) (int, error) {
	c.heard = true
	return c.Conn.Read(b)
}

func (c *muteAfterReply) Write(b []byte) (int, error) {
	if c.heard {
		return 0, io.ErrClosedPipe
	}
	return c.Conn.Write(b)
}

// Refusals for one reason are logged ever more rarely.
func TestRefusalsDoNotFillTheLog(t *testing.T) {
	log := logged(t)
	job := Job{WorldSize: 2, Address: freeAddress(t)}
	served := job.start(t.Context(), "id")
	const strangers = 300
	for range strangers {
		c := dial(t, job.Address)
		_, _ = io.WriteString(c, strings.Repeat("x", len(magic)))
		_, _ = io.ReadAll(c)
	}
	job.Rank = 1
	require.NoError(t, await(t, job.start(t.Context(), "")).err)
	require.NoError(t, await(t, served).err)
	assert.Equal(t, 9, strings.Count(log.String(), reasonLanguage), "times 1, 2, 4 … 256")
	assert.Contains(t, log.String(), "times=256")
}

// A program that has rank 0's port, whatever it says, keeps nobody waiting: the
// next port is taken, or all ranks hear of it.
func TestThePortIsInUse(t *testing.T) {
	for name, stranger := range map[string]func(net.Conn){
		"by one that hangs up": func(c net.Conn) { c.Close() },
		"by one that talks": func(c net.Conn) {
			io.WriteString(c, "220 mail.example ESMTP "+strings.Repeat("x", 200)) //nolint:errcheck
		},
		"by one that listens": func(c net.Conn) { io.Copy(io.Discard, c) }, //nolint:errcheck
	} {
		t.Run(name, func(t *testing.T) {
			log := logged(t)
			job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("s")}
			occupy(t, job.Address, stranger, 0)
			served := job.start(t.Context(), "id")
			job.Rank = 1
			fetched := job.start(t.Context(), "")
			got := <-fetched
			require.NoError(t, got.err)
			assert.Equal(t, "id", string(got.payload))
			require.NoError(t, (<-served).err)
			assert.Contains(t, log.String(), "in use")
		})
	}
	t.Run("with all that come next", func(t *testing.T) {
		logged(t)
		job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("s")}
		occupy(t, job.Address, func(c net.Conn) { c.Close() }, 0, 1, 2, 3)
		assert.ErrorContains(t, await(t, job.start(t.Context(), "id")).err, "listen tcp ")
		job.Rank = 1
		err := await(t, job.start(t.Context(), "")).err
		assert.ErrorIs(t, err, ErrRefused)
		assert.ErrorContains(t, err, "set MASTER_PORT")
	})
	t.Run("for longer than rank 0 has", func(t *testing.T) {
		logged(t)
		job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("s")}
		ctx, cancel := context.WithCancel(t.Context())
		occupy(t, job.Address, func(c net.Conn) { cancel() }, 0)
		err := await(t, job.start(ctx, "id")).err
		assert.ErrorIs(t, err, context.Canceled)
		assert.ErrorContains(t, err, "listen tcp ")
	})
}

// Two jobs that were given one port do not take each other's payload.
func TestTwoJobsOnOnePort(t *testing.T) {
	logged(t)
	address := freeAddress(t)
	var started [2][3]<-chan result
	for j := range started {
		for rank := range started[j] {
			started[j][rank] = Job{Rank: rank, WorldSize: 3, Address: address, Secret: []byte{byte(j)}}.start(t.Context(), strconv.Itoa(j))
		}
	}
	for j := range started {
		for rank := range started[j] {
			got := await(t, started[j][rank])
			require.NoError(t, got.err)
			assert.Equal(t, strconv.Itoa(j), string(got.payload))
		}
	}
}

// A rank does not take the payload of a server that does not know the secret.
func TestAFalseRankZeroIsNotBelieved(t *testing.T) {
	for name, answer := range map[string]func(*talk) error{
		"payload": func(t *talk) error { return t.reply(replyPayload, []byte("evil")) },
		"refusal": func(t *talk) error { return t.reply(replyRefusal, []byte("\x1b[2Jevil")) },
		"length":  func(t *talk) error { return t.send([]byte{replyPayload, 0xff, 0xff, 0xff, 0xff}) },
		"essay":   func(t *talk) error { return t.send([]byte{replyRefusal, 0, 1, 0, 0}) },
		"kind":    func(t *talk) error { return t.reply(7, nil) },
		"nothing": func(t *talk) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			job := Job{Rank: 1, WorldSize: 2, Address: freeAddress(t), Secret: []byte("real")}
			occupy(t, job.Address, func(c net.Conn) {
				defer c.Close() //nolint:errcheck
				impostor := &talk{conn: c, key: Job{Address: job.Address, Secret: []byte("guess")}.key()}
				if impostor.greet() == nil {
					impostor.hear()
					answer(impostor) //nolint:errcheck
				}
			}, 0)
			got, err := job.ask(t.Context(), job.Address, newHello(1, 2))
			assert.ErrorIs(t, err, ErrRefused)
			assert.Nil(t, got)
			var r *refusal
			require.ErrorAs(t, err, &r)
			assert.False(t, r.proven)
			assert.NotContains(t, err.Error(), "\x1b")
		})
	}
}

// syncBuffer is a buffer that a logger and a test may use at the same time.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
