package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/gate"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/internal/networktest"
)

// patience ends waits that would last forever.
const patience = time.Minute

// freeAddress returns an address at which, and at the next ports where rank 0 may be, nobody listens.
func freeAddress(t testing.TB) string { return jobtest.Address(t, ports) }

// places are the addresses where the store of a job may be.
func places(t testing.TB, address string) []string {
	host, _, err := net.SplitHostPort(address)
	require.NoError(t, err)
	all, err := Job{Address: address}.addresses(host)
	require.NoError(t, err)
	return all
}

// occupy has a stranger at some of the ports of an address.
func occupy(t *testing.T, address string, stranger func(net.Conn), which ...int) {
	all := places(t, address)
	for _, i := range which {
		l, err := net.Listen("tcp", all[i])
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

// result is the result of a share.
type result struct {
	payload []byte
	err     error
}

// share connects, and gives the payload of rank 0 to all ranks.
func (j Job) share(ctx context.Context, payload string) ([]byte, error) {
	kv, err := j.Connect(ctx)
	if err != nil {
		return nil, err
	}
	var got []byte
	err = j.Round(ctx, kv, "test", func(ctx context.Context, number string) (err error) {
		key, receipts := "payload/"+number, "receipt/"+number+"/"
		if j.Rank > 0 {
			if got, err = kv.Get(ctx, key); err != nil {
				return err
			}
			kv.Post(receipts+strconv.Itoa(j.Rank), nil)
			return nil
		}
		got = []byte(payload)
		if err := kv.Set(ctx, key, got); err != nil {
			return err
		}
		for rank := 1; rank < j.WorldSize; rank++ { // rank 0 keeps the store
			if _, err := kv.Get(ctx, receipts+strconv.Itoa(rank)); err != nil {
				return err
			}
		}
		return nil
	})
	return got, errors.Join(err, kv.Close())
}

// start begins that.
func (j Job) start(ctx context.Context, payload string) <-chan result {
	done := make(chan result, 1)
	go func() {
		got, err := j.share(ctx, payload)
		done <- result{got, err}
	}()
	return done
}

// await returns what a started share gives, soon.
func await(t testing.TB, started <-chan result) (r result) {
	select {
	case r = <-started:
	case <-time.After(patience):
		require.Fail(t, "still waiting")
	}
	return r
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

// Parts of a process that need the job's store share a connection to it, and one that is lost is made again.
func TestSharedConnections(t *testing.T) {
	zero := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
	one := zero
	one.Rank = 1
	a, err := zero.Shared(t.Context())
	require.NoError(t, err)
	b, err := one.Shared(t.Context())
	require.NoError(t, err)
	again, err := one.Shared(t.Context())
	require.NoError(t, err)
	require.Same(t, b, again)
	require.NoError(t, b.Close())
	again, err = one.Shared(t.Context())
	require.NoError(t, err)
	require.NotSame(t, b, again)
	require.NoError(t, errors.Join(again.Close(), a.Close()))
}

// stalling is a network over which nobody answers before the caller stops waiting.
type stalling struct {
	begun chan struct{} // gets a value with each call
}

func (s stalling) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	select {
	case s.begun <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (s stalling) Listen(string, string) (net.Listener, error) { return nil, net.ErrClosed }

// A wait for another caller's connection lasts no longer than its own context allows.
func TestSharedContexts(t *testing.T) {
	network := stalling{make(chan struct{}, 1)}
	job := Job{WorldSize: 2, Rank: 1, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is"), Network: network}
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := job.Shared(ctx)
		first <- err
	}()
	<-network.begun
	ended, end := context.WithCancel(t.Context())
	end()
	second := make(chan error, 1)
	go func() {
		_, err := job.Shared(ended)
		second <- err
	}()
	select {
	case err := <-second:
		assert.ErrorIs(t, err, comm.ErrCanceled)
	case <-time.After(patience):
		assert.Fail(t, "it waits as long as the first")
	}
	cancel()
	assert.ErrorIs(t, <-first, comm.ErrCanceled)
}

// If the launcher keeps the store, all ranks are clients of it, rank 0 too, and the store outlives it.
func TestAStoreOfTheLauncher(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	job := Job{WorldSize: 2, Address: l.Addr().String(), Secret: []byte("a secret of tests, long enough as it is"), Hosted: true}
	conf, err := job.TLS("store")
	require.NoError(t, err)
	server := store.NewServer(store.Options{Size: 2})
	server.Serve(l, conf)
	defer server.Close() //nolint:errcheck // nothing is lost
	zero, err := job.Connect(t.Context())
	require.NoError(t, err)
	job.Rank = 1
	one, err := job.Connect(t.Context())
	require.NoError(t, err)
	require.NoError(t, zero.Set(t.Context(), "k", []byte("v")))
	require.NoError(t, zero.Close())
	v, err := one.Get(t.Context(), "k")
	require.NoError(t, err)
	assert.Equal(t, "v", string(v))
	require.NoError(t, one.Close())
}

// Rank 0 cannot bind what the others call its host (an address of documentation, RFC 5737, which no host has), and is
// reached all the same.
func TestRankZeroListensOnAllInterfaces(t *testing.T) {
	log := logtest.Capture(t)
	local := freeAddress(t)
	_, port, err := net.SplitHostPort(local)
	require.NoError(t, err)
	ctx := deadline(t, time.Minute)
	served := Job{WorldSize: 2, Address: net.JoinHostPort("192.0.2.1", port), Secret: []byte("a secret of tests, long enough as it is"), Guessable: true}.start(ctx, "id")
	got, err := Job{Rank: 1, WorldSize: 2, Address: local, Secret: []byte("a secret of tests, long enough as it is")}.share(ctx, "")
	require.NoError(t, err)
	assert.Equal(t, "id", string(got))
	require.NoError(t, await(t, served).err)
	assert.Contains(t, log.String(), "set TUTTI_SECRET")
}

// noHome has the user have no directory for a file.
func noHome(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", "/dev/null/nowhere")
	t.Setenv("HOME", "/dev/null/nowhere")
	t.Setenv("AppData", "")
}

// A job without a secret, or with one that others can guess, takes the user's secret on a loopback address, and is
// warned about where that cannot be.
func TestAGuessableSecretIsWarnedAbout(t *testing.T) {
	for _, home := range []bool{true, false} {
		for _, job := range []Job{{}, {Secret: []byte("job 7"), Guessable: true}, {Secret: []byte("a secret of tests, long enough as it is")}} {
			t.Run("", func(t *testing.T) {
				if !home {
					noHome(t)
				}
				log := logtest.Capture(t)
				job.WorldSize, job.Address = 2, freeAddress(t)
				kv, err := job.Connect(t.Context())
				require.NoError(t, err)
				require.NoError(t, kv.Close())
				want := !home && (job.Guessable || job.Secret == nil)
				assert.Equal(t, want, strings.Contains(log.String(), "every user of this host can connect"), log.String())
				assert.Equal(t, want, strings.Contains(log.String(), "set TUTTI_SECRET"), log.String())
				conf, err := job.TLS("x")
				require.NoError(t, err)
				_, port, err := net.SplitHostPort(job.Address)
				require.NoError(t, err)
				bare, err := store.TLS(job.Secret, "x "+port)
				require.NoError(t, err)
				uses := home && (job.Guessable || job.Secret == nil)
				assert.Equal(t, uses, !bytes.Equal(conf.Certificates[0].Certificate[0], bare.Certificates[0].Certificate[0]), "the user's secret is used")
			})
		}
	}
}

// The file with a secret is made once, whole, and for its owner alone.
func TestSecretFiles(t *testing.T) {
	dir, err := os.MkdirTemp("", "secret")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) }) //nolint:errcheck // Wine does not always remove a file that had two names
	path := filepath.Join(dir, "a", "secret")
	_, err = ReadSecret(path, false)
	require.ErrorIs(t, err, os.ErrNotExist)
	secrets := make([]string, 20)
	var wg sync.WaitGroup
	for i := range secrets {
		wg.Go(func() {
			s, err := ReadSecret(path, true)
			assert.NoError(t, err)
			secrets[i] = s
		})
	}
	wg.Wait()
	for _, s := range secrets {
		require.Equal(t, secrets[0], s)
		require.GreaterOrEqual(t, len(s), 26)
	}
	files, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	if goruntime.GOOS != "windows" {
		require.Len(t, files, 1)
	}
	job, err := FromEnv(environment("RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", "TUTTI_SECRET_FILE", path))
	require.NoError(t, err)
	assert.Equal(t, secrets[0]+"\x00torchrun\x00", string(job.Secret))
	assert.False(t, job.Guessable)
	require.NoError(t, os.WriteFile(path, []byte("\n"), 0o600))
	_, err = ReadSecret(path, true)
	require.ErrorContains(t, err, "has 0 bytes; a secret has 16 to 4096: (umask 077; head -c 24 /dev/urandom | base64 > "+path)
	if info, err := os.Stat(path); err == nil && info.Mode().Perm() == 0o600 { // not so on Windows
		require.NoError(t, os.Chmod(path, 0o640))
		_, err = FromEnv(environment("RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", "TUTTI_SECRET_FILE", path))
		require.ErrorIs(t, err, ErrEnvironment)
		require.ErrorContains(t, err, "chmod 600")
	}
}

// A loopback address is not opened to the network.
func TestLoopbackIsNotOpenedToTheNetwork(t *testing.T) {
	_, port, err := net.SplitHostPort(freeAddress(t))
	require.NoError(t, err)
	for host, want := range map[string]string{
		"127.0.0.1":   "127.0.0.1",
		"127.0.1.1":   "127.0.1.1",
		"::1":         "::1",
		"localhost":   "127.0.0.1",
		"node7":       "::",
		"10.0.0.1":    "::",
		"2001:db8::1": "::",
	} {
		l, err := Job{Address: net.JoinHostPort(host, port)}.listen(t.Context(), store.Dialer{})
		if err != nil && want != "127.0.0.1" {
			t.Logf("%s: %v", host, err) // a host without IPv6, or with one loopback address
			continue
		}
		require.NoError(t, err)
		assert.Equal(t, want, l.Addr().(*net.TCPAddr).IP.String(), host)
		require.NoError(t, l.Close())
	}
	_, err = Job{WorldSize: 2, Address: "node7"}.Connect(t.Context())
	assert.ErrorContains(t, err, "missing port")
}

// Without a secret nobody listens to the network, and every rank says why.
func TestTheNetworkNeedsASecret(t *testing.T) {
	for rank := range 2 {
		_, err := Job{Launcher: "torchrun", Rank: rank, WorldSize: 2, Address: "192.0.2.1:4000"}.Connect(t.Context())
		assert.ErrorIs(t, err, ErrEnvironment)
		assert.ErrorContains(t, err, "set TUTTI_SECRET")
	}
}

func TestAJobOfOneNeedsNobody(t *testing.T) {
	got, err := Job{WorldSize: 1}.share(t.Context(), "x")
	require.NoError(t, err)
	assert.Equal(t, []byte("x"), got)
}

func TestARankThatDoesNotComeIsNamed(t *testing.T) {
	t.Parallel()
	job := Job{WorldSize: 4, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
	ctx, cancel := context.WithCancel(t.Context())
	served := job.start(ctx, "id")
	job.Rank = 2
	two, err := job.Connect(t.Context())
	require.NoError(t, err)
	defer two.Close() //nolint:errcheck // nothing is lost
	entered := make(chan struct{})
	go func() {
		_ = job.Round(ctx, two, "test", func(ctx context.Context, _ string) error {
			close(entered)
			<-ctx.Done()
			return comm.ContextError(ctx)
		})
	}()
	<-entered
	cancel()
	err = await(t, served).err
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.ErrorContains(t, err, "ranks 1, 3 did not come")
	_, err = Job{Rank: 1, WorldSize: 2, Address: freeAddress(t)}.share(deadline(t, 100*time.Millisecond), "")
	assert.ErrorIs(t, err, comm.ErrTimeout)
}

// Connections that say nothing, also more than rank 0 keeps, delay neither the ranks nor rank 0.
func TestSilentConnectionsDelayNobody(t *testing.T) {
	for _, n := range []int{1, 306} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			logtest.Capture(t)
			synctest.Test(t, func(t *testing.T) {
				network := new(networktest.Pipes)
				job := networkJob(network)
				job.WorldSize = 2
				began := time.Now()
				served := job.start(t.Context(), "id")
				synctest.Wait()
				for range n {
					c, err := network.Dial(t.Context(), "tcp", job.Address)
					require.NoError(t, err)
					defer c.Close() //nolint:errcheck // nothing is lost
				}
				job.Rank = 1
				got := <-job.start(t.Context(), "")
				require.NoError(t, got.err)
				assert.Equal(t, "id", string(got.payload))
				require.NoError(t, (<-served).err)
				assert.Less(t, time.Since(began), gate.Patience)
			})
		})
	}
}

// A wait ends with its context while the other side says nothing.
func TestCancellingEndsAWaitAtOnce(t *testing.T) {
	t.Run("rank 0", func(t *testing.T) {
		logtest.Capture(t)
		ctx, cancel := context.WithCancel(t.Context())
		job := Job{WorldSize: 2, Address: freeAddress(t)}
		served := job.start(ctx, "id")
		dial(t, job.Address)
		cancel()
		assert.ErrorIs(t, await(t, served).err, comm.ErrCanceled)
	})
	t.Run("rank 1", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		job := Job{Rank: 1, WorldSize: 2, Address: freeAddress(t)}
		occupy(t, job.Address, func(c net.Conn) {
			io.ReadFull(c, make([]byte, 10)) //nolint:errcheck
			cancel()
		}, 0)
		assert.ErrorIs(t, await(t, job.start(ctx, "")).err, comm.ErrCanceled)
	})
}

// Strangers (garbage, silence, another secret) are refused; the job's own rank still gets its answer.
func TestStrangersAreRefused(t *testing.T) {
	log := logtest.Capture(t)
	job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("the right secret of this job")}
	served := job.start(t.Context(), "treasure")
	for _, say := range []string{"", "GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 1000)} {
		c := dial(t, job.Address)
		_, _ = io.WriteString(c, say) // fails if the refusal is faster
		_ = c.(*net.TCPConn).CloseWrite()
		answer, _ := io.ReadAll(c)
		assert.NotContains(t, string(answer), "treasure")
	}
	job.Rank = 1
	other := job
	other.Secret = []byte("a wrong secret for this job")
	// A rank with another secret goes on looking for rank 0, and its error says what it met.
	ctx, cancel := context.WithCancel(t.Context())
	asked := other.start(ctx, "")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "found somebody else") }, time.Minute, time.Millisecond)
	cancel()
	err := await(t, asked).err
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.ErrorIs(t, err, store.ErrRefused)
	assert.ErrorContains(t, err, "TUTTI_SECRET")

	got := await(t, job.start(t.Context(), ""))
	require.NoError(t, got.err)
	assert.Equal(t, "treasure", string(got.payload))
	require.NoError(t, await(t, served).err)
	for _, reason := range []string{"it did not say who it is", "it does not speak this protocol", "it knows another secret"} {
		require.Eventually(t, func() bool { return strings.Contains(log.String(), reason) }, time.Minute, time.Millisecond, reason)
	}
}

// A process that knows the secret, but does not fit the job as rank 0 knows it, learns that at once.
func TestContradictionsAreNamed(t *testing.T) {
	logtest.Capture(t)
	job := Job{WorldSize: 3, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := job.start(ctx, "id")
	as := func(rank, size int) Job {
		other := job
		other.Rank, other.WorldSize = rank, size
		return other
	}
	kv, err := as(1, 3).Connect(t.Context())
	require.NoError(t, err)
	for _, c := range []struct {
		name string
		job  Job
		says string
	}{
		{"another size", as(2, 5), "rank 2 of 5 in a job of 3"},
		{"a rank beyond the size", as(7, 3), "rank 7 in a job of 3"},
		{"a rank that is here", as(1, 3), "rank 1 is here already, from 127.0.0.1:"},
		{"another rank 0", as(0, 3), "rank 0 is here already"},
	} {
		err := await(t, c.job.start(t.Context(), "")).err
		assert.ErrorContains(t, err, c.says, c.name)
		if c.job.Rank < c.job.WorldSize {
			assert.ErrorIs(t, err, store.ErrRefused, c.name)
		}
	}
	cancel()
	err = await(t, served).err
	assert.ErrorContains(t, err, "ranks 1, 2 did not come")
	assert.ErrorContains(t, err, "rank 0 is here already")
	require.NoError(t, kv.Close())
}

// A program that has rank 0's port, whatever it says, keeps nobody waiting: the next port is taken, or all ranks hear
// of it.
func TestThePortIsInUse(t *testing.T) {
	t.Parallel()
	for name, stranger := range map[string]func(net.Conn){
		"by one that hangs up": func(c net.Conn) { c.Close() },
		"by one that talks": func(c net.Conn) {
			io.WriteString(c, "220 mail.example ESMTP "+strings.Repeat("x", 200)) //nolint:errcheck
		},
		"by one that listens": func(c net.Conn) { io.Copy(io.Discard, c) }, //nolint:errcheck
	} {
		t.Run(name, func(t *testing.T) {
			log := logtest.Capture(t)
			job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
			occupy(t, job.Address, stranger, 0)
			ctx := deadline(t, time.Minute)
			served := job.start(ctx, "id")
			job.Rank = 1
			fetched := job.start(ctx, "")
			got := <-fetched
			require.NoError(t, got.err)
			assert.Equal(t, "id", string(got.payload))
			require.NoError(t, (<-served).err)
			assert.NotEmpty(t, log.Lines("listen tcp "+job.Address+": "), "in use")
		})
	}
	t.Run("with all that come next", func(t *testing.T) {
		logtest.Capture(t)
		job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
		occupy(t, job.Address, func(c net.Conn) { io.WriteString(c, "220 mail.example ESMTP") }, 0, 1, 2, 3) //nolint:errcheck
		assert.ErrorContains(t, await(t, job.start(t.Context(), "id")).err, "listen tcp ")
		job.Rank = 1
		err := await(t, job.start(t.Context(), "")).err
		assert.ErrorIs(t, err, store.ErrRefused)
		assert.ErrorContains(t, err, "set MASTER_PORT")
	})
	t.Run("for longer than rank 0 has", func(t *testing.T) {
		logtest.Capture(t)
		job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
		ctx, cancel := context.WithCancel(t.Context())
		occupy(t, job.Address, func(c net.Conn) { cancel() }, 0)
		err := await(t, job.start(ctx, "id")).err
		assert.ErrorIs(t, err, context.Canceled)
		assert.ErrorContains(t, err, "listen tcp ")
	})
}

// Two jobs that were given one port, or ports next to each other and one secret, do not take each other's payload.
func TestTwoJobsOnOnePort(t *testing.T) {
	t.Parallel()
	for name, job := range map[string]func(j int, address, next string) Job{
		"two secrets": func(j int, address, _ string) Job {
			return Job{Address: address, Secret: []byte(fmt.Sprint("a secret of tests, number ", j))}
		},
		"one secret": func(j int, address, next string) Job {
			return Job{Address: []string{address, next}[j], Secret: []byte("a secret of tests, long enough as it is")}
		},
	} {
		t.Run(name, func(t *testing.T) {
			logtest.Capture(t)
			address := freeAddress(t)
			all := places(t, address)
			var started [2][3]<-chan result
			for j := range started {
				for rank := range started[j] {
					job := job(j, address, all[1])
					job.Rank, job.WorldSize = rank, 3
					started[j][rank] = job.start(t.Context(), strconv.Itoa(j))
				}
			}
			for j := range started {
				for rank := range started[j] {
					got := await(t, started[j][rank])
					require.NoError(t, got.err)
					assert.Equal(t, strconv.Itoa(j), string(got.payload))
				}
			}
		})
	}
}
