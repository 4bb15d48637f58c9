//go:build unix

package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	ossignal "os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// Roles of the test binary: a rank, or the launcher of a machine.
const (
	rankVariable    = "TUTTI_TEST_RANK"
	machineVariable = "TUTTI_TEST_MACHINE"
	// launcherVariable has the script that wraps the ranks' script.
	launcherVariable = "TUTTI_TEST_LAUNCHER"
)

func TestMain(m *testing.M) {
	Keep()
	if address := os.Getenv(machineVariable); address != "" && os.Getenv("TUTTI_RANK") == "" {
		err := Run(context.Background(), Config{Command: os.Args[:1], Ranks: 1, Join: []string{address}, Wait: time.Minute, Version: "v1", Out: os.Stdout, Err: os.Stderr})
		fmt.Println(err)
		os.Exit(1)
	}
	if wrapper := os.Getenv(launcherVariable); wrapper != "" && os.Getenv("TUTTI_RANK") == "" {
		script := `trap "" TERM INT HUP; echo ready; while :; do sleep 0.05; done`
		fmt.Println(Run(context.Background(), Config{Command: []string{"sh", "-c", wrapper, script}, Ranks: 1, Machines: 1, Wait: time.Minute, Out: os.Stdout, Err: os.Stderr}))
		os.Exit(1)
	}
	way := os.Getenv(rankVariable)
	if way == "" {
		jobtest.DefaultSignals()
		os.Exit(m.Run())
	}
	code, err := rank(way)
	if err != nil {
		fmt.Println("ERROR", err)
		code = 1
	}
	os.Exit(code)
}

// rank does the work of a rank.
func rank(way string) (code int, err error) {
	ctx := context.Background()
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return 0, err
	}
	if way == "communicators" { // in sequence, and at the same time
		for range 2 {
			if err := communicators(ctx); err != nil {
				return 0, err
			}
		}
		return 0, nil
	}
	if strings.HasPrefix(way, "elastic") {
		return 0, member(ctx, way)
	}
	if strings.HasPrefix(way, "works") {
		return 0, work(ctx, job, way)
	}
	if strings.HasPrefix(way, "absent") {
		if (job.Rank == 1) == (way == "absent, first") {
			if _, err := job.Shared(ctx); err != nil {
				return 0, err
			}
			// The store takes none of these seconds, because tcp shares it.
			bounded, cancel := context.WithTimeout(ctx, 4*time.Second)
			defer cancel()
			_, err = tcp.FromEnv(bounded)
			return 0, err
		}
		way = "idles"
	}
	if way == "idles" { // it knows no other rank
		fmt.Println("idles")
		return 0, idle()
	}
	signals := make(chan os.Signal, 1)
	ossignal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	kv, err := job.Connect(ctx)
	if err != nil {
		return 0, err
	}
	if job.Rank == 0 {
		if err := kv.Set(ctx, "payload", []byte("from rank 0 of round "+os.Getenv(restartVariable))); err != nil {
			return 0, err
		}
	}
	payload, err := kv.Get(ctx, "payload")
	if err != nil {
		return 0, err
	}
	// All ranks are present and handle signals before one ends and others are told to end, or before rank 0's value is
	// cleared.
	if err := kv.Set(ctx, fmt.Sprint("here/", job.Rank), nil); err != nil {
		return 0, err
	}
	var all []string
	for r := range job.WorldSize {
		all = append(all, fmt.Sprint("here/", r))
	}
	if err := kv.Wait(ctx, all...); err != nil {
		return 0, err
	}
	fmt.Printf("rank %d of %d, local %d: %s\n", job.Rank, job.WorldSize, job.LocalRank, payload)
	last := job.Rank == job.WorldSize-1
	switch {
	case way == "fails" && last, way == "fails once" && last && os.Getenv(restartVariable) == "0":
		return 7, nil
	case way == "dies" && last:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case way == "forges" && last:
		forged := `{"text":"\u001b]0;owned\u0007\u001b[2J\ntutti: all is well","code":256,"signal":9}`
		if err := kv.Set(ctx, endKey(0), []byte(forged)); err != nil {
			return 0, err
		}
	case way == "stubborn":
		for s := range signals {
			fmt.Println("ignores", s)
		}
	case way == "succeeds", way == "fails once" && os.Getenv(restartVariable) == "1":
		return 0, nil
	}
	fmt.Println("got", <-signals)
	return 3, nil
}

// member makes steps with another member. One of them is killed once, or stopped until the other is alone.
func member(ctx context.Context, way string) error {
	stops, most := way == "elastic, stopped", 2
	if way == "elastic, recorded" {
		most = 3
	}
	cfg, err := elastic.FromEnv(elastic.Config{})
	if err != nil {
		return err
	}
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: cfg.TLS, Listen: "localhost", Silence: elastic.DefaultSilence})
	}
	m, err := elastic.Join(ctx, cfg, elastic.Plain{})
	if err != nil {
		return err
	}
	defer m.Close() //nolint:errcheck // the steps are what counts
	victim, until := cfg.Name == "rank 1" && os.Getenv(restartVariable) == "0", uint64(10)
	var sizes []int // sizes of the epochs
	var last uint64
	err = m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
		if last != e.Number {
			last, sizes = e.Number, append(sizes, len(e.Members))
			switch before := sizes[:len(sizes)-1]; {
			case stops && len(e.Members) == 1 && slices.Contains(before, 2):
				fmt.Println("alone")
			case stops && len(e.Members) == 2 && slices.Contains(before, 2): // together again
				stops, until = false, m.Steps()+10
			}
		}
		if m.Steps() >= 5 && victim && len(e.Members) == most {
			victim = false
			if !stops {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
			fmt.Println("process", os.Getpid())
			_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		}
		if m.Steps() >= until && !stops {
			fmt.Println(e.Members)
			return io.EOF
		}
		return m.Commit(ctx)
	})
	if errors.Is(err, elastic.ErrEnded) { // the other one was faster
		return nil
	}
	return err
}

// work waits for the other ranks repeatedly until one is lost.
func work(ctx context.Context, job rendezvous.Job, way string) error {
	c, err := tcp.FromEnv(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // the error of the barrier is what counts
	if job.Rank == job.WorldSize-1 {
		fmt.Printf("process %d\n", os.Getpid())
	}
	if way == "works, leaves" {
		return leave(ctx, job, c)
	}
	for {
		bounded, cancel := ctx, context.CancelFunc(func() {})
		if way == "works, sleeps" {
			if job.Rank == 1 {
				return idle()
			}
			bounded, cancel = context.WithTimeout(ctx, 2*time.Second)
		}
		err := c.Barrier(bounded)
		cancel()
		if err != nil {
			return err
		}
		time.Sleep(time.Millisecond) // or else the processors stay busy
	}
}

// leave is the work of rank 1, which succeeds, or of rank 0, which fails because rank 1 is missing. Rank 0 fails when
// nothing is left of rank 1's keeper, so the launcher hears of rank 1's end first.
func leave(ctx context.Context, job rendezvous.Job, c comm.Communicator) error {
	kv, err := job.Shared(ctx)
	if err != nil {
		return err
	}
	if job.Rank == 1 {
		return errors.Join(kv.Set(ctx, "keeper", []byte(strconv.Itoa(os.Getppid()))), c.Barrier(ctx))
	}
	text, err := kv.Get(ctx, "keeper")
	if err != nil {
		return err
	}
	keeper, err := strconv.Atoi(string(text))
	if err != nil {
		return err
	}
	if err := c.Barrier(ctx); err != nil {
		return err
	}
	err = c.Barrier(ctx)
	for !errors.Is(syscall.Kill(keeper, 0), syscall.ESRCH) {
		time.Sleep(time.Millisecond)
	}
	return err
}

// idle does nothing until its process is ended. Without cgo, Go ends a process in which nothing can happen any more.
func idle() error {
	time.Sleep(time.Hour)
	return errors.New("nobody has ended this process")
}

// communicators makes two communicators of this job, and uses both.
func communicators(ctx context.Context) error {
	var errs []error
	for range 2 {
		c, err := tcp.FromEnv(ctx)
		if err != nil {
			return err
		}
		errs = append(errs, c.Barrier(ctx))
		defer c.Close() //nolint:errcheck // the barriers are what counts
	}
	return errors.Join(errs...)
}

// buffer is a buffer for concurrent writes and reads.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// started is a launcher in this process.
type started struct {
	out, err buffer
	done     chan error
}

// begin starts ranks that run this binary.
func begin(t *testing.T, ctx context.Context, way string, change func(*Config)) *started {
	t.Helper()
	t.Setenv(rankVariable, way)
	t.Setenv(env.Secret, "")
	s := &started{done: make(chan error, 1)}
	cfg := Config{Command: []string{os.Args[0]}, Ranks: 2, Machines: 1, Wait: time.Minute, Version: "v1", Out: &s.out, Err: &s.err}
	change(&cfg)
	go func() { s.done <- Run(ctx, cfg) }()
	return s
}

// wait waits for the launcher's end and returns its error.
func (s *started) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-s.done:
		return err
	case <-time.After(time.Minute):
		t.Fatalf("still runs:\n%s\n%s", &s.out, &s.err)
		return nil
	}
}

// says waits until a launcher's ranks have written a text.
func (s *started) says(t *testing.T, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(s.out.String(), text) }, time.Minute, time.Millisecond, text)
}

// reports waits until a launcher itself has written a text.
func (s *started) reports(t *testing.T, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(s.err.String(), text) }, time.Minute, time.Millisecond, text)
}

func one(*Config) {}

// pair returns the options of two machines, on a free port.
func pair(t *testing.T) (first, second func(*Config)) {
	address := jobtest.Address(t, 1)
	file := filepath.Join(t.TempDir(), "secret")
	_, err := rendezvous.ReadSecret(file, true)
	require.NoError(t, err)
	return func(c *Config) { c.Machines, c.Listen, c.SecretFile = 2, address, file },
		func(c *Config) { c.Join, c.SecretFile, c.Ranks = []string{address}, file, 3 }
}

// ended returns the end of a job in which a rank failed.
func ended(t *testing.T, err error) *End {
	t.Helper()
	var end *End
	require.ErrorAs(t, err, &end)
	return end
}

func TestOneMachine(t *testing.T) {
	s := begin(t, t.Context(), "succeeds", one)
	require.NoError(t, s.wait(t), "%s", &s.out)
	for r := range 2 {
		assert.Contains(t, s.out.String(), fmt.Sprintf("[%d] rank %d of 2, local %d: from rank 0 of round 0\n", r, r, r))
	}
}

// The secret's file is the one that the variable names, unless an option names another.
func TestTheVariableNamesTheSecretFile(t *testing.T) {
	first, second := pair(t)
	user := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", user)
	var cfg Config
	first(&cfg)
	t.Setenv(env.SecretFile, cfg.SecretFile)
	a := begin(t, t.Context(), "succeeds", func(c *Config) { first(c); c.SecretFile = "" })
	b := begin(t, t.Context(), "succeeds", second)
	require.NoError(t, a.wait(t), "%s%s", &a.out, &a.err)
	require.NoError(t, b.wait(t), "%s%s", &b.out, &b.err)
	assert.Contains(t, a.err.String(), "a copy of "+cfg.SecretFile)
	assert.NoDirExists(t, filepath.Join(user, "tutti"))
}

// Ranks have the name of the secret's file in their environment, but not the secret.
func TestRanksHaveTheNameOfTheSecretFile(t *testing.T) {
	first, _ := pair(t)
	var cfg Config
	first(&cfg)
	secret, err := rendezvous.ReadSecret(cfg.SecretFile, false)
	require.NoError(t, err)
	t.Chdir(filepath.Dir(cfg.SecretFile))
	s := begin(t, t.Context(), "unused", func(c *Config) {
		first(c)
		c.SecretFile, c.Machines, c.Ranks, c.Command = filepath.Base(cfg.SecretFile), 1, 1, []string{"sh", "-c", "cd /; env"}
	})
	require.NoError(t, s.wait(t), "%s", &s.err)
	assert.NotContains(t, s.out.String(), secret)
	assert.Contains(t, s.out.String(), env.SecretFile+"="+cfg.SecretFile+"\n")
}

// A process may make communicators of its job repeatedly. They share its store, but no key in it.
func TestCommunicators(t *testing.T) {
	s := begin(t, t.Context(), "communicators", one)
	require.NoError(t, s.wait(t), "%s%s", &s.out, &s.err)
}

// Launchers, the store and ranks connect at an IPv6 address.
func TestIPv6(t *testing.T) {
	_, port, err := net.SplitHostPort(jobtest.Address(t, 1))
	require.NoError(t, err)
	address := net.JoinHostPort("::1", port)
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Skip(err)
	}
	require.NoError(t, l.Close())
	first, second := pair(t)
	a := begin(t, t.Context(), "communicators", func(c *Config) { first(c); c.Listen = address })
	b := begin(t, t.Context(), "communicators", func(c *Config) { second(c); c.Join = []string{address} })
	require.NoError(t, a.wait(t), "%s%s", &a.out, &a.err)
	require.NoError(t, b.wait(t), "%s%s", &b.out, &b.err)
	assert.Contains(t, a.err.String(), "tutti launch --join '[::1]:")
}

// The ranks of the first machine come first, and all ranks belong to one job.
func TestTwoMachines(t *testing.T) {
	first, second := pair(t)
	a := begin(t, t.Context(), "succeeds", first)
	b := begin(t, t.Context(), "succeeds", second)
	require.NoError(t, a.wait(t), "%s", &a.out)
	require.NoError(t, b.wait(t), "%s", &b.out)
	for r := range 5 {
		s, local := a, r
		if r > 1 {
			s, local = b, r-2
		}
		assert.Contains(t, s.out.String(), fmt.Sprintf("[%d] rank %d of 5, local %d: from rank 0 of round 0\n", r, r, local))
	}
	assert.Contains(t, a.err.String(), "secret as secret (scp -p): run\n  tutti launch --join 127.")
}

// A machine that waited for the first one gets higher ranks, in an elastic job too.
func TestFirstMachineIsFirst(t *testing.T) {
	for _, least := range []int{0, 1} {
		first, _ := pair(t)
		cfg := Config{Command: []string{os.Args[0]}, Ranks: 2, Version: "v1", Min: least, Max: 2, Err: io.Discard}
		first(&cfg)
		a := newAgent(cfg)
		require.NoError(t, a.connect(t.Context()))
		defer a.kv.Close() //nolint:errcheck // nothing is lost
		version, err := a.kv.List(t.Context(), jobKey)
		require.NoError(t, err)
		require.Len(t, version, 1)
		here, err := a.kv.List(t.Context(), machines)
		require.NoError(t, err)
		require.Len(t, here, 1)
		assert.Less(t, here[0].Version, version[0].Version, "another machine may come before the first one")
		come, err := a.kv.Add(t.Context(), ranksKey, 0)
		require.NoError(t, err)
		assert.EqualValues(t, 2, come)
	}
}

// A launcher reports that its store has no room for a rank's end. It then ends its session, which the others see.
func TestAFullStore(t *testing.T) {
	first, _ := pair(t)
	var said buffer
	cfg := Config{Command: []string{os.Args[0]}, Ranks: 1, Version: "v1", Err: &said}
	first(&cfg)
	a := newAgent(cfg)
	require.NoError(t, a.connect(t.Context()))
	var err error
	for i := 0; err == nil; i++ {
		err = a.kv.Set(t.Context(), "filling/"+strconv.Itoa(i), nil)
	}
	require.ErrorIs(t, err, store.ErrFull)
	a.finish(t.Context(), 0, End{Text: "a rank has failed", Code: 1})
	require.ErrorIs(t, a.kv.Err(), comm.ErrClosed)
	want := regexp.MustCompile("cannot tell the others how its ranks have ended.*" + store.ErrFull.Error())
	require.Eventually(t, func() bool { return want.MatchString(said.String()) }, time.Minute, time.Millisecond)
}

// A rank that fails ends the job on all machines with its error and status. No process is left.
func TestARankThatFails(t *testing.T) {
	for way, want := range map[string]struct {
		code int
		text string
	}{"fails": {7, "exit status 7"}, "dies": {137, "signal: killed (out of memory? see dmesg)"}} {
		first, second := pair(t)
		a, b := begin(t, t.Context(), way, first), begin(t, t.Context(), way, second)
		host, err := os.Hostname()
		require.NoError(t, err)
		for _, s := range []*started{a, b} {
			end := ended(t, s.wait(t))
			assert.Equal(t, want.code, end.Code)
			said := strings.TrimPrefix(end.Error(), fmt.Sprintf("rank 4 on %s (", host))
			address, text, _ := strings.Cut(said, "): ")
			assert.Equal(t, want.text, text)
			// The launchers meet at a loopback address, which may be a tunnel's end: other machines do not know it.
			assert.Contains(t, distantAddresses(t), address)
		}
		a.says(t, "got terminated")
	}
}

// distantAddresses returns the addresses by which other machines may know this one, or the loopback address if it has none.
func distantAddresses(t *testing.T) (list []string) {
	t.Helper()
	interfaces, err := net.Interfaces()
	require.NoError(t, err)
	for _, i := range interfaces {
		addresses, err := i.Addrs()
		require.NoError(t, err)
		for _, a := range addresses {
			ip, _, err := net.ParseCIDR(a.String())
			require.NoError(t, err)
			if i.Flags&net.FlagUp != 0 && !ip.IsLoopback() {
				list = append(list, ip.String(), ip.String()+"%"+i.Name)
			}
		}
	}
	if list == nil {
		list = []string{"127.0.0.1"}
	}
	return list
}

// A process that knows the secret may forge the end of the job. Its text is printed so that a terminal does not obey
// it, and the job does not count as a success.
func TestAForgedEnd(t *testing.T) {
	end := ended(t, begin(t, t.Context(), "forges", one).wait(t))
	assert.Equal(t, End{Text: `\x1b]0;owned\a\x1b[2J\ntutti: all is well`, Code: 1}, *end)
}

// With restarts, all ranks start again with an empty store, at most as often as requested.
func TestRestarts(t *testing.T) {
	first, second := pair(t)
	more := func(c *Config) { first(c); c.Restarts = 2 }
	a, b := begin(t, t.Context(), "fails once", more), begin(t, t.Context(), "fails once", second)
	require.NoError(t, a.wait(t), "%s", &a.out)
	require.NoError(t, b.wait(t), "%s", &b.out)
	for _, s := range []*started{a, b} {
		assert.Contains(t, s.out.String(), "from rank 0 of round 0")
		assert.Contains(t, s.out.String(), "from rank 0 of round 1")
	}
	assert.Contains(t, a.err.String(), "exit status 7; restart 1 of 2")
	c := begin(t, t.Context(), "fails", func(c *Config) { c.Restarts = 1 })
	assert.Equal(t, 7, ended(t, c.wait(t)).Code)
	assert.Contains(t, c.out.String(), "round 1")
	assert.NotContains(t, c.out.String(), "round 2")
}

// A failed rank of an elastic job is restarted alone, and joins the others.
func TestElastic(t *testing.T) {
	s := begin(t, t.Context(), "elastic", func(c *Config) { c.Min, c.Max, c.Restarts = 2, 2, 1 })
	require.NoError(t, s.wait(t), "%s%s", &s.out, &s.err)
	assert.Contains(t, s.err.String(), "signal: killed (out of memory? see dmesg); restart 1 of 1\n")
	for r := range 2 {
		assert.Contains(t, s.out.String(), fmt.Sprintf("[%d] [rank 0 rank 1]\n", r))
	}

	s = begin(t, t.Context(), "fails", func(c *Config) { c.Ranks, c.Min, c.Restarts = 1, 1, 1 })
	assert.Equal(t, 7, ended(t, s.wait(t)).Code)
	assert.Contains(t, s.err.String(), "exit status 7; restart 1 of 1\n")
	assert.Contains(t, s.err.String(), "exit status 7; it is not started again\n")
}

// An elastic job whose rank has ended with success goes on without it, and its launcher says so.
func TestElasticShrinks(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	s := begin(t, t.Context(), "unused", func(c *Config) {
		c.Min = 1
		c.Command = []string{"sh", "-c", "test $TUTTI_LOCAL_RANK = 1 || until test -e " + mark + "; do sleep 0.01; done"}
	})
	require.Eventually(t, func() bool {
		return strings.Contains(s.err.String(), "tutti: rank 1 has ended with success, and the job goes on: rank 0 on ")
	}, time.Minute, time.Millisecond)
	require.NoError(t, os.WriteFile(mark, nil, 0o600))
	require.NoError(t, s.wait(t), "%s", &s.err)
}

// The exit code of an elastic job's first machine is the job's, not its ranks'.
func TestElasticSucceedsElsewhere(t *testing.T) {
	first, second := pair(t)
	mark := filepath.Join(t.TempDir(), "mark")
	script := func(text string) []string { return []string{"sh", "-c", text} }
	a := begin(t, t.Context(), "unused", func(c *Config) {
		first(c)
		c.Job = "elsewhere"
		c.Ranks, c.Machines, c.Min, c.Command = 1, 1, 1, script("until test -e "+mark+"; do sleep 0.01; done; exit 3")
	})
	b := begin(t, t.Context(), "unused", func(c *Config) {
		second(c)
		c.Job = "elsewhere"
		c.Ranks, c.Command = 1, script("touch "+mark+"; until test -e "+mark+"2; do sleep 0.01; done")
	})
	require.Eventually(t, func() bool { return strings.Contains(a.err.String(), "exit status 3; it is not started again") }, time.Minute, time.Millisecond)
	stays := regexp.MustCompile(`tutti: the ranks of this machine have ended; it keeps the store until those of the others have: .* \(\S+\)\n`)
	require.Eventually(t, func() bool { return stays.MatchString(a.err.String()) }, time.Minute, time.Millisecond)
	require.NoError(t, os.WriteFile(mark+"2", nil, 0o600))
	require.NoError(t, b.wait(t), "%s", &b.err)
	require.NoError(t, a.wait(t), "%s", &a.err)
	assert.Contains(t, a.err.String(), "ranks of other machines have ended with success")
}

// A failed rank is named at once, even if the others take time to end.
func TestTheCulpritIsNamedAtOnce(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	script := `test $TUTTI_RANK = 0 && exit 3; trap "" TERM; until test -e ` + mark + `; do sleep 0.01; done`
	s := begin(t, t.Context(), "unused", func(c *Config) { c.Command = []string{"sh", "-c", script} })
	require.Eventually(t, func() bool {
		return strings.Contains(s.err.String(), ": exit status 3; the other ranks have 30s to end")
	}, time.Minute, time.Millisecond)
	require.NoError(t, os.WriteFile(mark, nil, 0o600))
	assert.Equal(t, 3, ended(t, s.wait(t)).Code)
}

// A user who interrupts a job learns at once that ranks take time to end, and how to end them immediately.
func TestTheEndOfRanksIsSaid(t *testing.T) {
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		min    int // minimum of members of an elastic job; 0 for another job
		want   string
	}{
		{"interrupted", syscall.SIGINT, 0, "; Ctrl-C kills ranks, which have 30s to end\n"},
		{"terminated", syscall.SIGTERM, 0, "; ranks have 30s to end\n"},
		{"elastic", syscall.SIGINT, 1, "; Ctrl-C kills ranks, which have 30s to end\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			mark := filepath.Join(t.TempDir(), "mark")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			s := begin(t, ctx, "unused", func(cfg *Config) {
				cfg.Min = c.min
				cfg.Command = []string{"sh", "-c", `trap "" INT TERM; echo ready; until test -e ` + mark + `; do sleep 0.01; done`}
			})
			s.says(t, "[0] ready")
			cancel(Signaled(c.signal))
			require.Eventually(t, func() bool { return strings.Contains(s.err.String(), c.want) }, time.Minute, time.Millisecond)
			require.NoError(t, os.WriteFile(mark, nil, 0o600))
			assert.Error(t, s.wait(t))
		})
	}
}

// A stopped rank of an elastic job that resumes after the other rank has continued alone joins it again.
func TestElasticStopped(t *testing.T) {
	s := begin(t, t.Context(), "elastic, stopped", func(c *Config) { c.Min, c.Max = 1, 2 })
	s.says(t, "[0] alone")
	s.says(t, "[1] process ")
	_, pid, _ := strings.Cut(s.out.String(), "[1] process ")
	pid, _, _ = strings.Cut(pid, "\n")
	process, err := strconv.Atoi(pid)
	require.NoError(t, err, s.out.String())
	require.NoError(t, syscall.Kill(process, syscall.SIGCONT))
	require.NoError(t, s.wait(t), "%s%s", &s.out, &s.err)
	for r := range 2 {
		assert.Contains(t, s.out.String(), fmt.Sprintf("[%d] [rank 0 rank 1]\n", r))
	}
	assert.Contains(t, s.err.String(), "the others have gone on without this member")
}

// link forwards connections to an address until it is cut.
type link struct {
	net.Listener
	to       string
	attempts chan struct{} // one for each connection while it is cut

	mu    sync.Mutex
	cut   bool       // guarded by mu
	conns []net.Conn // guarded by mu
}

// newLink listens on an address of this machine.
func newLink(t *testing.T, to string) *link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := &link{Listener: listener, to: to, attempts: make(chan struct{}, 1)}
	t.Cleanup(func() {
		_ = listener.Close()
		l.set(true)
	})
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			l.carry(conn)
		}
	}()
	return l
}

// carry forwards a connection to the other side, or closes it.
func (l *link) carry(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		select {
		case l.attempts <- struct{}{}:
		default:
		}
		_ = conn.Close()
		return
	}
	other, err := net.Dial("tcp", l.to)
	if err != nil {
		_ = conn.Close()
		return
	}
	l.conns = append(l.conns, conn, other)
	for from, to := range map[net.Conn]net.Conn{conn: other, other: conn} {
		go func() {
			_, _ = io.Copy(to, from)
			_ = to.Close()
		}()
	}
}

// set cuts the link and all its connections, or repairs it.
func (l *link) set(cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = cut
	if !cut {
		return
	}
	for _, conn := range l.conns {
		_ = conn.Close()
	}
	l.conns = nil
}

// A launcher that joined an elastic job finds the first one again after each loss of the network, however old the job
// is. Config.Wait counts from the loss.
func TestElasticRejoins(t *testing.T) {
	first, second := pair(t)
	cfg := Config{Command: []string{os.Args[0]}, Ranks: 1, Version: "v1", Min: 1, Err: io.Discard}
	first(&cfg)
	a := newAgent(cfg)
	require.NoError(t, a.connect(t.Context()))
	defer a.kv.Close() //nolint:errcheck // nothing is lost
	l := newLink(t, cfg.Listen)
	const wait = 5 * time.Second
	b := begin(t, t.Context(), "idles", func(c *Config) {
		second(c)
		c.Join, c.Ranks, c.Wait = []string{l.Addr().String()}, 1, wait
	})
	b.says(t, "idles")
	here := func(count int) {
		t.Helper()
		require.Eventually(t, func() bool {
			all, err := a.kv.List(t.Context(), machines)
			return err == nil && len(all) == count
		}, time.Minute, time.Millisecond, "%d machines", count)
	}
	here(2)
	time.Sleep(wait) // the job is older than that now
	for range 2 {
		l.set(true)
		here(1)
		select {
		case <-l.attempts:
		case err := <-b.done:
			require.NoError(t, err, "a launcher gives up at once")
			t.Fatal("a launcher ends with a cut link")
		case <-time.After(time.Minute):
			t.Fatal("a launcher does not look for the first machine")
		}
		l.set(false)
		here(2)
	}
	l.set(true)
	end := ended(t, b.wait(t))
	assert.Equal(t, 1, end.Code)
	assert.Contains(t, end.Text, "the launcher of the first machine: not in reach for 5s (--wait)")
	assert.NotContains(t, end.Text, "it has ended")
}

// A signal to one launcher reaches all ranks once.
func TestSignals(t *testing.T) {
	first, second := pair(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	a, b := begin(t, ctx, "waits", first), begin(t, t.Context(), "waits", second)
	a.says(t, "rank 1 of 5")
	for r := 2; r < 5; r++ {
		b.says(t, fmt.Sprintf("rank %d of 5", r))
	}
	cancel(Signaled(syscall.SIGINT))
	for s, n := range map[*started]int{a: 2, b: 3} {
		end := ended(t, s.wait(t))
		assert.Equal(t, 130, end.Code)
		assert.Contains(t, end.Error(), "interrupted on ")
		assert.Equal(t, n, strings.Count(s.out.String(), "got interrupt"), s.out.String())
	}
}

// When the job fails, the first machine gets the other machines' flight records whole, whatever their size, and no old
// records.
func TestFlightRecords(t *testing.T) {
	first, second := pair(t)
	here, there := t.TempDir(), t.TempDir()
	record := bytes.Repeat([]byte("0123456789"), 300_000)
	require.NoError(t, os.WriteFile(filepath.Join(there, "tutti-record-2.json"), record, 0o600))
	require.NoError(t, os.Chtimes(filepath.Join(there, "tutti-record-2.json"), time.Time{}, time.Now().Add(-time.Hour)))
	ctx, cancel := context.WithCancelCause(t.Context())
	a := begin(t, ctx, "waits", func(c *Config) { first(c); c.Records = here })
	b := begin(t, t.Context(), "waits", func(c *Config) { second(c); c.Records = there })
	a.says(t, "rank 1 of 5")
	b.says(t, "rank 4 of 5")
	require.NoError(t, os.WriteFile(filepath.Join(there, "tutti-record-3.json"), record, 0o600))
	cancel(Signaled(syscall.SIGTERM))
	ended(t, a.wait(t))
	ended(t, b.wait(t))
	got, err := os.ReadFile(filepath.Join(here, "tutti-record-3.json"))
	require.NoError(t, err)
	assert.True(t, bytes.Equal(record, got))
	all, err := os.ReadDir(here)
	require.NoError(t, err)
	assert.Len(t, all, 1)
}

// The first machine of an elastic job gets other machines' flight records of lost members, by epoch. It gets them even
// if the job succeeds.
func TestElasticFlightRecords(t *testing.T) {
	first, second := pair(t)
	here, there := t.TempDir(), t.TempDir()
	t.Setenv(env.Record, "100")
	records := func(c *Config, dir string) {
		c.Job = "recorded" // each machine has another command
		c.Records = dir
		c.Command = []string{"env", env.RecordDir + "=" + dir, os.Args[0]}
	}
	a := begin(t, t.Context(), "elastic, recorded", func(c *Config) {
		first(c)
		records(c, here)
		c.Ranks, c.Machines, c.Min, c.Max, c.Restarts = 1, 1, 3, 3, 1
	})
	b := begin(t, t.Context(), "elastic, recorded", func(c *Config) {
		second(c)
		records(c, there)
		c.Ranks = 2
	})
	require.NoError(t, b.wait(t), "%s%s", &b.out, &b.err)
	require.NoError(t, a.wait(t), "%s%s", &a.out, &a.err)
	assert.Contains(t, b.err.String(), "signal: killed (out of memory? see dmesg); restart 1 of 1\n")
	lost := map[string]bool{}
	for _, path := range diagnose.Files(there) {
		name, err := filepath.Rel(there, path)
		require.NoError(t, err)
		want, err := os.ReadFile(path)
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join(here, name))
		require.NoError(t, err)
		assert.Equal(t, want, got, name)
		lost[filepath.Dir(name)] = true
	}
	require.NotEmpty(t, lost)
	found := false
	for epoch := range lost {
		records, _, err := diagnose.ReadFiles([]string{filepath.Join(here, epoch)})
		require.NoError(t, err)
		report := diagnose.Diagnose(records)
		found = found || report.Ranks == 3 && len(report.States) == 2 && slices.ContainsFunc(report.Findings, func(f diagnose.Finding) bool {
			return f.Kind == diagnose.NoDump && len(f.Ranks) == 1
		})
	}
	assert.True(t, found, "the others' records name the one that was killed")
}

// Ranks that do not end are killed.
func TestStubbornRanks(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	s := begin(t, ctx, "stubborn", func(c *Config) { c.Grace = 3 * time.Second })
	s.says(t, "rank 0 of 2")
	s.says(t, "rank 1 of 2")
	cancel(errors.New("no longer wanted"))
	assert.Equal(t, 143, ended(t, s.wait(t)).Code)
	assert.Contains(t, s.out.String(), "ignores terminated")
}

// A machine whose launcher is killed ends the job, and its ranks end.
func TestALostMachine(t *testing.T) {
	first, _ := pair(t)
	var at, file string
	a := begin(t, t.Context(), "waits", func(c *Config) { first(c); at, file = c.Listen, c.SecretFile })
	secret, err := rendezvous.ReadSecret(file, false)
	require.NoError(t, err)
	lost := exec.Command(os.Args[0])
	lost.Env = append(os.Environ(), machineVariable+"="+at, env.Secret+"="+secret)
	out := new(buffer)
	lost.Stdout, lost.Stderr = out, out
	require.NoError(t, lost.Start())
	a.says(t, "rank 1 of 3")
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "[2] rank 2 of 3") }, time.Minute, time.Millisecond)
	require.NoError(t, lost.Process.Kill())
	require.Error(t, lost.Wait()) // waits until its ranks, which have its output, are gone
	end := ended(t, a.wait(t))
	assert.Equal(t, 1, end.Code)
	assert.Regexp(t, regexp.MustCompile(`the launcher of \S+ \(\S+\) has ended, or its machine cannot be reached`), end.Error())
}

// The loss of the first machine's launcher ends the job for the others too.
func TestALostFirstMachine(t *testing.T) {
	first, second := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	var cfg Config
	first(&cfg)
	secret, err := rendezvous.ReadSecret(cfg.SecretFile, false)
	require.NoError(t, err)
	l, err := net.Listen("tcp", cfg.Listen)
	require.NoError(t, err)
	job := rendezvous.Job{Secret: []byte(secret + "\x00tutti\x00"), Hosted: true}
	conf, err := job.TLS("store")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	server.Serve(l, conf)
	kv := server.Owner("the first launcher")
	require.NoError(t, kv.Set(ctx, jobKey, fmt.Appendf(nil, `{"version":"v1","protocol":%d,"job":%q}`, protocol, filepath.Base(os.Args[0]))))
	b := begin(t, ctx, "waits", func(c *Config) { second(c); c.Ranks = 1 })
	require.NoError(t, kv.Set(ctx, planKey, []byte(`{"size":1,"first":{"`+machines+`00000001":0}}`)))
	b.says(t, "rank 0 of 1")
	require.NoError(t, kv.Close())
	err = b.wait(t)
	assert.ErrorIs(t, err, comm.ErrPeerFailed)
	assert.ErrorContains(t, err, "the launcher of the first machine")
	assert.Contains(t, b.out.String(), "got terminated")
	cancel()
}

// Ordinary mistakes are named, and none harms the job.
func TestMistakes(t *testing.T) {
	first, second := pair(t)
	var cfg Config
	first(&cfg)
	ctx, cancel := context.WithCancel(t.Context())
	a := begin(t, ctx, "succeeds", first)
	require.Eventually(t, func() bool { return strings.Contains(a.err.String(), "on the other machines") }, time.Minute, time.Millisecond)

	taken := begin(t, t.Context(), "succeeds", first)
	err := taken.wait(t)
	assert.ErrorIs(t, err, syscall.EADDRINUSE)
	assert.ErrorContains(t, err, "--listen takes another address")

	other := filepath.Join(t.TempDir(), "secret")
	_, err = rendezvous.ReadSecret(other, true)
	require.NoError(t, err)
	err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.SecretFile = other }).wait(t)
	assert.ErrorIs(t, err, store.ErrRefused)
	assert.ErrorContains(t, err, "it knows another secret")

	err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.SecretFile = other + "2" }).wait(t)
	assert.ErrorIs(t, err, os.ErrNotExist)
	assert.ErrorContains(t, err, "copy the file from the first machine")

	if _, err := os.Stat("/proc/self"); err == nil { // no folder can be made there
		err = begin(t, t.Context(), "succeeds", func(c *Config) { first(c); c.SecretFile = "/proc/none/secret" }).wait(t)
		assert.ErrorIs(t, err, os.ErrNotExist)
		assert.ErrorContains(t, err, "no secret can be made there")
	}

	err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Version = "v2" }).wait(t)
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, "this is tutti v2, and the first machine has tutti v1")
	require.Eventually(t, func() bool {
		return strings.Contains(a.err.String(), "does not take part: ranks disagree: this is tutti v2")
	}, time.Minute, time.Millisecond)

	err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Typed = []string{"bin/train", "--lr", "0.02"} }).wait(t)
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, "this launcher starts train --lr 0.02, and the job at 127.")
	assert.ErrorContains(t, err, filepath.Base(os.Args[0])+": another job has another address")
	require.Eventually(t, func() bool {
		return strings.Contains(a.err.String(), "this launcher starts train --lr 0.02")
	}, time.Minute, time.Millisecond)

	err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Job = "nightly" }).wait(t)
	assert.ErrorIs(t, err, store.ErrRefused)
	assert.ErrorContains(t, err, `looks for the job "nightly", and this store, which a process of the job keeps, has one without a name`)

	err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Join = []string{"127.0.0.1"} }).wait(t)
	assert.ErrorContains(t, err, "--join takes HOST:PORT")

	b := begin(t, t.Context(), "waits", second)
	b.says(t, "rank 4 of 5")
	third := begin(t, t.Context(), "succeeds", second)
	assert.ErrorContains(t, third.wait(t), "has its 2 machines already")
	cancel()
	assert.Equal(t, 143, ended(t, a.wait(t)).Code)
	assert.Equal(t, 143, ended(t, b.wait(t)).Code)
}

// TestFolders: commands that differ only in the folders of files belong to one job, and a launcher says so. Commands
// that differ in other words do not.
func TestFolders(t *testing.T) {
	for word, want := range map[string]string{
		"train": "train", "./bin/train": "train", "/data/": "data/", "--data=/mnt/a/x.bin": "--data=x.bin", "--out": "--out",
		`C:\data\x`: "x", "a=/b/c": "c", "-c": "-c", "cd /a && ./b": "cd /a && ./b", "0.1": "0.1", "/": "/", "": "",
	} {
		assert.Equal(t, want, withoutFolder(word), word)
	}
	// Two runs of one program may use one served store, and are two jobs.
	one := &agent{Config: Config{Typed: []string{"/opt/train.exe", "runs/1/config.yaml"}}}
	other := &agent{Config: Config{Typed: []string{"./train", "runs/2/config.yaml"}}}
	assert.Equal(t, one.title(false), other.title(false))
	assert.Equal(t, "train runs/1/config.yaml", one.title(true))
	assert.Equal(t, "train runs/2/config.yaml", other.title(true))
	one.Job = "nightly"
	assert.Equal(t, "nightly", one.title(true))
	first, second := pair(t)
	a := begin(t, t.Context(), "succeeds", func(c *Config) { first(c); c.Typed = []string{"/opt/train", "--data", "/mnt/a/x"} })
	b := begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Typed = []string{"./train", "--data", "/mnt/b/x"} })
	require.NoError(t, a.wait(t), "%s", &a.err)
	require.NoError(t, b.wait(t), "%s", &b.err)
	assert.Contains(t, b.err.String(), "folders differ: the job's command is /opt/train --data /mnt/a/x there, and ./train --data /mnt/b/x here")
}

// TestJobName: machines with different commands belong to one job if they name it.
func TestJobName(t *testing.T) {
	first, second := pair(t)
	a := begin(t, t.Context(), "succeeds", func(c *Config) { first(c); c.Job = "nightly" })
	b := begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Job = "nightly"; c.Typed = []string{"another"} })
	require.NoError(t, a.wait(t), "%s", &a.err)
	require.NoError(t, b.wait(t), "%s", &b.err)
	assert.Contains(t, a.err.String(), "--job nightly")
}

// TestAnEarlierLauncher: a launcher of a version that does not compare versions is left out by name, and the job goes
// on.
func TestAnEarlierLauncher(t *testing.T) {
	first, second := pair(t)
	var cfg Config
	first(&cfg)
	a := begin(t, t.Context(), "succeeds", first)
	secret, err := rendezvous.ReadSecret(cfg.SecretFile, false)
	require.NoError(t, err)
	conf, err := rendezvous.Job{Secret: []byte(secret + "\x00tutti\x00"), Hosted: true}.TLS("store")
	require.NoError(t, err)
	kv, err := store.Dialer{Addresses: []string{cfg.Listen}, TLS: conf, Name: "an earlier launcher"}.Dial(t.Context())
	require.NoError(t, err)
	n, err := kv.Add(t.Context(), ranksKey, 1)
	require.NoError(t, err)
	key := fmt.Sprintf("%s%08d", machines, n)
	require.NoError(t, kv.Set(t.Context(), key, []byte(`{"host":"old","ranks":1,"grace":1,"address":"10.0.0.9"}`), store.Lease))
	require.Eventually(t, func() bool {
		return strings.Contains(a.err.String(), "the launcher of old (10.0.0.9) is left out: it speaks version 0")
	}, time.Minute, time.Millisecond)
	b := begin(t, t.Context(), "succeeds", second)
	require.NoError(t, a.wait(t), "%s", &a.err)
	require.NoError(t, b.wait(t), "%s", &b.err)
	require.NoError(t, kv.Close())
}

// A first machine that nobody joins reports how many machines there are. A machine that joins nobody fails with the
// reason.
func TestNobodyComes(t *testing.T) {
	first, second := pair(t)
	brief := func(c *Config) { c.Wait = 2 * time.Second }
	err := begin(t, t.Context(), "succeeds", func(c *Config) { first(c); brief(c) }).wait(t)
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorContains(t, err, "1 of 2 machines came")
	for wait := 2 * time.Second; wait < time.Minute; wait *= 2 {
		err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Wait = wait }).wait(t)
		assert.ErrorIs(t, err, comm.ErrTimeout)
		if strings.Contains(err.Error(), "connection refused") { // the time was enough for an attempt
			break
		}
	}
	assert.ErrorContains(t, err, "connection refused")
	assert.ErrorContains(t, err, "does the first machine's launcher run, with that port of --listen")
	err = begin(t, t.Context(), "succeeds", func(c *Config) { second(c); brief(c); c.Served = true }).wait(t)
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorContains(t, err, "does tutti-store run there")
}

// TestRefusalsInTheLastLine: the last line of a first machine that nobody joins names each process that it has refused
// once, with the last reason and the remedy.
func TestRefusalsInTheLastLine(t *testing.T) {
	first, second := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	a := begin(t, ctx, "succeeds", first)
	for _, version := range []string{"v2", "v3"} {
		err := begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Version = version }).wait(t)
		assert.ErrorIs(t, err, comm.ErrMismatch)
		require.Eventually(t, func() bool {
			return strings.Contains(a.err.String(), "does not take part: ranks disagree: this is tutti "+version)
		}, time.Minute, time.Millisecond)
	}
	err := begin(t, t.Context(), "succeeds", func(c *Config) { second(c); c.Job = "nightly" }).wait(t)
	assert.ErrorIs(t, err, store.ErrRefused)
	assert.ErrorContains(t, err, "all processes of a job give it one name (tutti launch --job), or none")
	cancel()
	err = a.wait(t)
	assert.ErrorContains(t, err, "1 of 2 machines came")
	assert.Regexp(t, `; refused: the launcher of \S+ \(\S+\): ranks disagree: this is tutti v3, and the first machine has tutti v1: `+
		`all machines of a job use one build of tutti .*; 127\.\d\.\d\.\d: the launcher of \S+ \(\S+\) looks for the job "nightly", .*\(tutti launch --job\), or none$`, err.Error())
	assert.NotContains(t, err.Error(), "tutti v2")
}

// TestRefusalLog: a last line names only a few of many refused processes.
func TestRefusalLog(t *testing.T) {
	var log refusalLog
	assert.Equal(t, comm.ErrTimeout, log.explain(comm.ErrTimeout))
	for i := range mostNamed + 2 {
		log.add(fmt.Sprint("process ", i), "first")
		log.add(fmt.Sprint("process ", i), "second")
	}
	err := log.explain(comm.ErrTimeout)
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.Equal(t, comm.ErrTimeout.Error()+"; refused: process 0: second (2 times); process 1: second (2 times); "+
		"process 2: second (2 times); process 3: second (2 times)", err.Error())
}

// Launchers print which machines are present while they wait for others, and which ranks go on after others have
// succeeded.
func TestWaitsSpeak(t *testing.T) {
	first, second := pair(t)
	a := begin(t, t.Context(), "unused", func(c *Config) {
		first(c)
		c.Job = "waits" // each machine has another command
		c.Machines = 3
		c.Ranks = 1
		c.Command = []string{"sh", "-c", "exit 0"}
	})
	says := func(s *started, pattern string) {
		t.Helper()
		looked := regexp.MustCompile(pattern)
		require.Eventually(t, func() bool { return looked.MatchString(s.err.String()) }, time.Minute, time.Millisecond, pattern)
	}
	says(a, `tutti: 1 of 3 machines are here after 2s: .* \(\S+\); the others join at 127\..*, within 1m0s \(--wait\): can they reach that port\?`)
	mark := filepath.Join(t.TempDir(), "mark")
	script := func(c *Config) {
		second(c)
		c.Job = "waits"
		c.Ranks, c.Command = 1, []string{"sh", "-c", "until test -e " + mark + "; do sleep 0.01; done"}
	}
	b := begin(t, t.Context(), "unused", script)
	says(b, `tutti: 2 machines are here after 2s: .*; the first one waits for more`)
	c := begin(t, t.Context(), "unused", func(cfg *Config) {
		script(cfg)
		cfg.Ranks = 2
		cfg.Command[2] = "test $TUTTI_LOCAL_RANK = 1 || " + cfg.Command[2]
	})
	says(c, `tutti: rank 3 on .* has ended with success; rank 2 on .* still running, perhaps waiting for it`)
	require.NoError(t, os.WriteFile(mark, nil, 0o600))
	for _, s := range []*started{a, b, c} {
		require.NoError(t, s.wait(t), "%s", &s.err)
	}
}

// Lines are whole without a prefix, too. All ranks of a round share one name of their run, which no other round has.
func TestNoPrefixAndRuns(t *testing.T) {
	script := []string{"sh", "-c", `printf '{"run":"%s",' $TUTTI_RUN; sleep 0.1; echo '"is":"whole"}'; exit 3`}
	s := begin(t, t.Context(), "unused", func(c *Config) { c.NoPrefix, c.Restarts, c.Command = true, 1, script })
	require.Error(t, s.wait(t))
	runs := map[string]int{}
	for line := range strings.Lines(s.out.String()) {
		var said struct{ Run, Is string }
		require.NoError(t, json.Unmarshal([]byte(line), &said), line)
		assert.Equal(t, "whole", said.Is)
		runs[said.Run]++
	}
	assert.Len(t, runs, 2)
	for run, ranks := range runs {
		assert.Len(t, run, 28)
		assert.LessOrEqual(t, ranks, 2)
	}
}

// Lines are whole even if ranks write them in parts or never end one. On request they have a colour.
func TestLines(t *testing.T) {
	var out bytes.Buffer
	a := &agent{plan: plan{Size: 12}}
	l := &lines{out: &out, prefix: a.prefix(3)}
	for _, part := range []string{"a", "b\nc\n\nd", "e"} {
		n, err := l.Write([]byte(part))
		require.NoError(t, err)
		require.Equal(t, len(part), n)
	}
	assert.Equal(t, "[ 3] ab\n[ 3] c\n[ 3] \n", out.String())
	l.flush()
	assert.Equal(t, "[ 3] ab\n[ 3] c\n[ 3] \n[ 3] de\n", out.String())
	out.Reset()
	_, err := l.Write(bytes.Repeat([]byte("x"), longestLine+10))
	require.NoError(t, err)
	l.flush()
	assert.LessOrEqual(t, len(strings.Split(out.String(), "\n")[0]), longestLine+len(l.prefix))
	assert.Equal(t, longestLine+10, strings.Count(out.String(), "x"))
	a.Color = true
	assert.Equal(t, "\x1b[34m[ 3] \x1b[0m", a.prefix(3))
	assert.Equal(t, "[11] ", (&agent{plan: a.plan}).prefix(11), strconv.Itoa(11))
}
