package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// limit is far longer than any wait here.
const limit = 2 * time.Minute

// roleVariable is the role of the test binary when it runs as another process.
const roleVariable = "TUTTI_TEST_ROLE"

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(roleVariable) {
	case "":
		os.Exit(m.Run())
	case "store":
		main()
	case "member":
		err = train(context.Background())
	case "rank":
		err = tutti.Run(context.Background(), sum)
	}
	if err != nil {
		fmt.Println("ERROR", err)
		os.Exit(1)
	}
}

// sum runs a rank of a job that is not elastic.
func sum(ctx context.Context, r tutti.Rank) error {
	x, err := runtime.FromSlice(r.Runtime, []float32{float32(1 + r.Comm.Rank())})
	if err != nil {
		return err
	}
	if err := distributed.AllReduce(ctx, r.Comm, x, comm.Sum); err != nil {
		return err
	}
	total := make([]float32, 1)
	if err := runtime.CopyOut(total, x); err != nil {
		return err
	}
	fmt.Println("RESULT", r.Comm.WorldSize(), total[0])
	return x.Free()
}

// batch is the number of samples in a step, for any number of members.
const batch = 12

// sample is a sample's contribution to a step.
func sample(step uint64, i int) float32 { return float32((step*batch + uint64(i)) % 7) }

// trained returns the result of a training with this number of steps.
func trained(steps uint64) (total float32) {
	for step := range steps {
		for i := range batch {
			total += sample(step, i)
		}
	}
	return total
}

// train runs a member. When one of three is lost, the others make 20 more steps.
func train(ctx context.Context) error {
	rt := cpu.New()
	state, update := make([]float32, 1), make([]float32, 1)
	total, err := cpu.Wrap(rt, state)
	gradient, failed := cpu.Wrap(rt, update)
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	cfg, err := elastic.FromEnv(elastic.Config{Runtime: rt, Tensors: []*runtime.Tensor{total}})
	if err != nil {
		return err
	}
	cfg.Form = func(ctx context.Context, kv store.Store, p elastic.Place) (comm.Communicator, error) {
		return tcp.New(ctx, kv, tcp.Config{
			Rank: p.Rank, WorldSize: p.Size, World: p.World, TLS: cfg.TLS, Listen: "localhost", Silence: elastic.DefaultSilence,
		})
	}
	m, err := elastic.Join(ctx, cfg, elastic.Plain{})
	if err != nil {
		return err
	}
	defer m.Close() //nolint:errcheck // the result is what counts
	var last *elastic.Epoch
	made, whole := 0, false
	err = m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
		if e != last {
			last = e
			made = 0
			fmt.Println("epoch", e.Number, e.Members)
		}
		size, rank := len(e.Members), e.Comm.Rank()
		if size == 3 && made == 5 {
			whole = true
			fmt.Println("all three train")
		}
		if whole && size == 2 && made == 20 {
			return io.EOF
		}
		update[0] = 0
		for i := rank * batch / size; i < (rank+1)*batch/size; i++ {
			update[0] += sample(m.Steps(), i)
		}
		if err := distributed.AllReduce(ctx, e.Comm, gradient, comm.Sum); err != nil {
			return err
		}
		if err := m.Commit(ctx); err != nil {
			return err
		}
		state[0] += update[0]
		made++
		return nil
	})
	if err == nil {
		fmt.Println("RESULT", m.Steps(), state[0])
	}
	return err
}

// process is a process that a test has started.
type process struct {
	*exec.Cmd
	mu      sync.Mutex
	text    bytes.Buffer // output so far; guarded by mu
	changed chan struct{}
}

// Write implements [io.Writer].
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case p.changed <- struct{}{}:
	default:
	}
	return p.text.Write(b)
}

func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

// says waits until the output of a process contains a text.
func (p *process) says(ctx context.Context, t *testing.T, text string) {
	t.Helper()
	for !strings.Contains(p.said(), text) {
		select {
		case <-p.changed:
		case <-ctx.Done():
			require.Fail(t, "it does not say "+text, "%v:\n%s", p.Args, p.said())
		}
	}
}

// start runs a program as another process.
func start(ctx context.Context, t *testing.T, role, program string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.CommandContext(ctx, program, args...), changed: make(chan struct{}, 1)}
	p.Env = append(os.Environ(), roleVariable+"="+role, env.Secret+"=")
	p.Stdout, p.Stderr = p, p
	p.WaitDelay = 5 * time.Second
	require.NoError(t, p.Start())
	t.Cleanup(func() {
		_ = p.Process.Kill()
		_ = p.Wait()
		if t.Failed() {
			t.Logf("%v:\n%s", p.Args, p.said())
		}
	})
	return p
}

// serve starts a server of a store and returns a function that returns its address.
func serve(ctx context.Context, t *testing.T, secret string, more ...string) (*process, func() string) {
	t.Helper()
	args := append([]string{"--listen", "127.0.0.1:0", "--json", "--secret-file", secret}, more...)
	p := &process{Cmd: exec.CommandContext(ctx, os.Args[0], args...), changed: make(chan struct{}, 1)}
	p.Env = append(os.Environ(), roleVariable+"=store", env.Secret+"=")
	p.Stderr = p
	out, err := p.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.Start())
	t.Cleanup(func() {
		_ = p.Process.Kill()
		_ = p.Wait()
		if t.Failed() {
			t.Logf("%v:\n%s", p.Args, p.said())
		}
	})
	return p, func() string {
		line, err := bufio.NewReader(out).ReadBytes('\n')
		require.NoError(t, err, p.said)
		var said struct{ Addresses []string }
		require.NoError(t, json.Unmarshal(line, &said))
		require.Len(t, said.Addresses, 1)
		return said.Addresses[0]
	}
}

// secretFile makes a file that contains a secret.
func secretFile(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "secret")
	_, err := rendezvous.ReadSecret(path, true)
	require.NoError(t, err)
	return path
}

// tuttiCommand builds the tutti command, which is in another module and does not know etcd.
func tuttiCommand(t *testing.T) string {
	program := filepath.Join(t.TempDir(), "tutti")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = "../../../../cmd/tutti"
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

// trio is the servers on three machines, with etcd inside them.
type trio struct {
	secret    string // file
	cluster   string
	folders   [3]string
	servers   [3]*process
	addresses [3]string
}

func newTrio(ctx context.Context, t *testing.T) *trio {
	s := &trio{secret: secretFile(t)}
	var peers []string
	for i := range s.folders {
		s.folders[i] = t.TempDir()
		peers = append(peers, fmt.Sprintf("machine%d=https://%s", i, jobtest.Address(t, 1)))
	}
	s.cluster = strings.Join(peers, ",")
	s.start(ctx, t, 0, 1, 2)
	return s
}

// start starts the servers on machines and waits until they serve.
func (s *trio) start(ctx context.Context, t *testing.T, machines ...int) {
	var found []func() string
	for _, i := range machines {
		p, address := serve(ctx, t, s.secret,
			"--data-dir", s.folders[i], "--name", fmt.Sprint("machine", i), "--initial-cluster", s.cluster)
		s.servers[i] = p
		found = append(found, address)
	}
	for n, address := range found {
		s.addresses[machines[n]] = address()
	}
}

// launch makes a machine take part in a job with one member.
func (s *trio) launch(ctx context.Context, t *testing.T, command string, addresses ...string) *process {
	return start(ctx, t, "member", command, "launch", "--join", strings.Join(addresses, ","), "--job", "any",
		"--secret-file", s.secret, "--min", "2", "--restarts", "3", "--wait", "1m", os.Args[0])
}

// checkResult compares the result of a launcher's member with the expected one.
func checkResult(t *testing.T, launcher *process) {
	t.Helper()
	require.NoError(t, launcher.Wait())
	var steps uint64
	var got float32
	_, result, found := strings.Cut(launcher.said(), "RESULT ")
	require.True(t, found)
	_, err := fmt.Sscan(result, &steps, &got)
	require.NoError(t, err)
	assert.Equal(t, trained(steps), got, "after %d steps", steps)
}

// TestAnyMachine has three machines, each with a server of the store with etcd inside, a launcher and a member. One
// is killed with all its processes, including the server that the launchers are connected to and the first launcher.
// The others end the job with the right result.
func TestAnyMachine(t *testing.T) {
	if goruntime.GOOS != "linux" {
		t.Skip("ranks die with their launcher on Linux alone")
	}
	command := tuttiCommand(t)
	for victim := range 3 {
		t.Run(fmt.Sprint("machine ", victim), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			s := newTrio(ctx, t)
			var launchers []*process
			for range 3 {
				launchers = append(launchers, s.launch(ctx, t, command, s.addresses[:]...))
			}
			for _, l := range launchers {
				l.says(ctx, t, "all three train")
			}
			require.NoError(t, s.servers[victim].Process.Kill())
			require.NoError(t, launchers[victim].Process.Kill())
			others := slices.Delete(launchers, victim, victim+1)
			for _, l := range others {
				checkResult(t, l)
			}
			late := s.launch(ctx, t, command, s.addresses[:]...)
			require.Error(t, late.Wait())
			assert.Contains(t, late.said(), "has ended: another job has another name")
			survivor := s.servers[(victim+1)%3]
			require.NoError(t, survivor.Process.Signal(syscall.SIGINT))
			require.NoError(t, survivor.Wait(), "a server ends in order")
			assert.NotContains(t, survivor.said(), "closed network connection")
		})
	}
}

// TestMajorityLost checks that the third server serves nobody while the two others are away, and that members go on
// training. When the servers are back, the others notice that a member is lost.
func TestMajorityLost(t *testing.T) {
	if goruntime.GOOS != "linux" {
		t.Skip("ranks die with their launcher on Linux alone")
	}
	command := tuttiCommand(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	s := newTrio(ctx, t)
	var launchers []*process
	for range 3 {
		launchers = append(launchers, s.launch(ctx, t, command, s.addresses[2]))
	}
	for _, l := range launchers {
		l.says(ctx, t, "all three train")
	}
	for _, p := range s.servers[:2] {
		require.NoError(t, p.Process.Kill())
		_ = p.Wait()
	}
	s.servers[2].says(ctx, t, "session lost")
	s.start(ctx, t, 0, 1)
	require.NoError(t, launchers[0].Process.Kill())
	checkResult(t, launchers[1])
	checkResult(t, launchers[2])
}

// TestOutside runs a server in front of Debian's etcd, and twice a job with the same name that is not elastic.
func TestOutside(t *testing.T) {
	if _, err := exec.LookPath("etcd"); err != nil {
		t.Skip("no etcd in PATH; install etcd-server")
	}
	command := tuttiCommand(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	client, peer := "http://"+jobtest.Address(t, 1), "http://"+jobtest.Address(t, 1)
	start(ctx, t, "", "etcd", "--name", "one", "--data-dir", t.TempDir(),
		"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
		"--initial-advertise-peer-urls", peer, "--initial-cluster", "one="+peer, "--log-level", "error")
	secret := secretFile(t)
	_, address := serve(ctx, t, secret, "--endpoints", client)
	at := address()
	launch := func(join string, more ...string) *process {
		args := []string{"launch", "--join", join, "--secret-file", secret, "--machines", "2", "--wait", "1m"}
		args = append(args, more...)
		return start(ctx, t, "rank", command, append(args, os.Args[0])...)
	}
	for range 2 {
		a := launch(at, "-n", "1")
		b := launch(jobtest.Address(t, 1)+","+at, "-n", "2") // no server has the first address
		require.NoError(t, a.Wait())
		require.NoError(t, b.Wait())
		assert.Equal(t, 1, strings.Count(a.said(), "RESULT 3 6"))
		assert.Equal(t, 2, strings.Count(b.said(), "RESULT 3 6"))
	}

	stranger := launch(at, "--secret-file", secretFile(t))
	require.Error(t, stranger.Wait())
	assert.Contains(t, stranger.said(), "it knows another secret")
	nameless := launch(at, "--job", "a/b")
	require.Error(t, nameless.Wait())
	assert.Contains(t, nameless.said(), "is no name of a job")
}

// TestUsage checks that contradictions are errors with an explanation.
func TestUsage(t *testing.T) {
	secret := secretFile(t)
	for arguments, says := range map[string]string{
		"":                                    "where is the etcd?",
		"--data-dir d --endpoints http://h:1": "choose one",
		"--endpoints http://h:1 --name a":     "--name is for an etcd in this process",
		"--data-dir d --cacert f":             "--cacert is for an etcd outside",
		"--data-dir d --listen here":          "--listen takes HOST:PORT",
		"--data-dir d --silence 0s":           "--silence must be more than 0s",
		"--data-dir d --initial-cluster a":    "--initial-cluster takes NAME=https://HOST:PORT",
		"--data-dir d --name c --initial-cluster a=https://h:1,b=https://h:2":                        `--name "c" is not in --initial-cluster`,
		"--data-dir d --name a --initial-cluster a=http://h:1":                                       "does not begin with https",
		"--data-dir d --initial-cluster-state old":                                                   "new or existing",
		"--data-dir d --log-level loud":                                                              "--log-level",
		"--data-dir d --secret-file /none/here --initial-cluster default=https://127.0.0.1:1":        "the same on all machines",
		"--listen 127.0.0.1:0 --endpoints http://127.0.0.1:1 --cacert /none --secret-file " + secret: "/none",
		"--listen 127.0.0.1:0 --secret-file " + secret + " --endpoints " + jobtest.Address(t, 1):     "etcd does not run there",
		"--listen 127.0.0.1:0 --secret-file " + secret + " --endpoints http://127.0.0.1":             "is not HOST:PORT",
		"a": "unknown command",
	} {
		cmd := newCommand()
		cmd.SetArgs(strings.Fields(arguments))
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		t.Setenv(env.Secret, "")
		assert.ErrorContains(t, cmd.ExecuteContext(t.Context()), says, arguments)
	}
}

// TestPrefix checks that each job has its own keys, including a job without a name.
func TestPrefix(t *testing.T) {
	seen := map[string]string{}
	for _, job := range []string{"", "a", "ab", "a.b-c_9", "unnamed"} {
		p, err := prefix(job)
		require.NoError(t, err)
		for other, q := range seen {
			assert.False(t, strings.HasPrefix(p, q) || strings.HasPrefix(q, p), "%q and %q", job, other)
		}
		seen[job] = p
	}
	for _, job := range []string{"a/b", "..", "-a", strings.Repeat("a", 65), "a\n"} {
		_, err := prefix(job)
		assert.ErrorIs(t, err, comm.ErrArgument, job)
	}
}
