package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func environment(pairs ...string) func(string) string {
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return func(name string) string { return m[name] }
}

func TestFromEnv(t *testing.T) {
	for _, c := range []struct {
		name string
		env  []string
		want Job
	}{
		{"alone", nil, Job{Launcher: "none", WorldSize: 1}},
		{"torchrun", []string{"RANK", "3", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "MASTER_ADDR", "node7", "MASTER_PORT", "29500", "TUTTI_SECRET", "s"},
			Job{"torchrun", 3, 8, 1, "node7:29500", []byte("s")}},
		{"torchrun serving its port itself", []string{"RANK", "0", "WORLD_SIZE", "2", "LOCAL_RANK", "0", "MASTER_ADDR", "node7", "MASTER_PORT", "29500",
			"TORCHELASTIC_USE_AGENT_STORE", "True", "TORCHELASTIC_RUN_ID", "r1"},
			Job{"torchrun", 0, 2, 0, "node7:29501", []byte("torchrun job r1")}},
		{"openmpi on one host", []string{"OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2", "OMPI_COMM_WORLD_LOCAL_RANK", "1",
			"OMPI_COMM_WORLD_LOCAL_SIZE", "2", "MASTER_PORT", "4000", "PMIX_NAMESPACE", "n"},
			Job{"openmpi", 1, 2, 1, "127.0.0.1:4000", []byte("openmpi job n")}},
		// srun run on the login node 10.1.2.3, in a job of more tasks than the step.
		{"slurm", []string{"SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "6", "SLURM_NTASKS", "16", "SLURM_LOCALID", "1",
			"SLURM_LAUNCH_NODE_IPADDR", "10.1.2.3", "SLURM_STEP_NUM_NODES", "3", "SLURM_STEP_NODELIST", "gpu[07-08,12]",
			"MASTER_PORT", "4000", "SLURM_JOB_ID", "77"},
			Job{"slurm", 5, 6, 1, "gpu07:4000", []byte("slurm job 77")}},
		{"slurm with an address", []string{"SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "6", "SLURM_LOCALID", "0",
			"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1", "SLURM_STEP_NUM_NODES", "3", "SLURM_STEP_NODELIST", "gpu[07-09]",
			"MASTER_ADDR", "node7", "MASTER_PORT", "4000", "SLURM_JOB_ID", "77"},
			Job{"slurm", 5, 6, 0, "node7:4000", []byte("slurm job 77")}},
		{"slurm on one host", []string{"SLURM_PROCID", "1", "SLURM_STEP_NUM_TASKS", "2", "SLURM_LOCALID", "1",
			"SLURM_STEP_NUM_NODES", "1", "SLURM_STEP_NODELIST", "gpu07", "MASTER_PORT", "4000", "SLURM_JOB_ID", "77"},
			Job{"slurm", 1, 2, 1, "127.0.0.1:4000", []byte("slurm job 77")}},
		{"a step of one task", []string{"SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "1", "SLURM_NTASKS", "16", "SLURM_LOCALID", "0",
			"SLURM_STEP_NUM_NODES", "1", "MASTER_PORT", "4000", "SLURM_JOB_ID", "77"},
			Job{"slurm", 0, 1, 0, "127.0.0.1:4000", []byte("slurm job 77")}},
		{"slurm's batch script", []string{"SLURM_PROCID", "0", "SLURM_NTASKS", "16", "SLURM_LOCALID", "0", "SLURM_JOB_ID", "77"},
			Job{Launcher: "none", WorldSize: 1}},
		{"pmi", []string{"PMI_RANK", "0", "PMI_SIZE", "2", "MPI_LOCALRANKID", "0", "MPI_LOCALNRANKS", "2", "MASTER_PORT", "4000"},
			Job{"pmi", 0, 2, 0, "127.0.0.1:4000", []byte("pmi job ")}},
		{"torchrun inside slurm", []string{"RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "1", "SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "1"},
			Job{"torchrun", 1, 2, 0, "h:1", []byte("torchrun job ")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := FromEnv(environment(c.env...))
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
}

func TestFromEnvRefusesNonsense(t *testing.T) {
	for _, c := range []struct {
		name, says string
		env        []string
	}{
		{"rank that is no number", `RANK="x"`, []string{"RANK", "x", "WORLD_SIZE", "2"}},
		{"negative rank", `RANK="-1"`, []string{"RANK", "-1", "WORLD_SIZE", "2"}},
		{"rank beyond the size", "WORLD_SIZE=2", []string{"RANK", "2", "WORLD_SIZE", "2"}},
		{"port that is none", `MASTER_PORT="70000"`, []string{"RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "h", "MASTER_PORT", "70000"}},
		{"slurm's hosts without names", "MASTER_ADDR", []string{"SLURM_PROCID", "1", "SLURM_STEP_NUM_TASKS", "4", "SLURM_STEP_NUM_NODES", "2"}},
		{"several hosts without an address", "MASTER_ADDR", []string{"OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := FromEnv(environment(c.env...))
			assert.ErrorIs(t, err, ErrEnvironment)
			assert.ErrorContains(t, err, c.says)
		})
	}
}

func TestFirstHost(t *testing.T) {
	for list, want := range map[string]string{
		"":                      "",
		"node7":                 "node7",
		"node7,node9":           "node7",
		"node[7-9,12]":          "node7",
		"node[007,012-014]":     "node007",
		"node[7]-ib":            "node7-ib",
		"login,node[7-9]":       "login",
		"rack[2-3]node[10-11],": "rack2node10",
		"broken[4":              "broken4",
	} {
		assert.Equal(t, want, firstHost(list), "%q", list)
	}
}

// The port that follows from a job's name is the same for all its ranks, and
// another for other jobs (with this pair of names at least).
func TestPortFollowsTheJob(t *testing.T) {
	address := func(job, rank string) string {
		j, err := FromEnv(environment("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", "2", "SLURM_JOB_ID", job, "MASTER_ADDR", "h"))
		require.NoError(t, err)
		return j.Address
	}
	assert.Equal(t, address("1", "0"), address("1", "1"))
	assert.NotEqual(t, address("1", "0"), address("2", "0"))
}

// freeAddress returns an address that nobody listens on now.
func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close() //nolint:errcheck
	return l.Addr().String()
}

func deadline(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
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
	local := freeAddress(t)
	_, port, err := net.SplitHostPort(local)
	require.NoError(t, err)
	ctx := deadline(t, 20*time.Second)
	served := make(chan error, 1)
	go func() {
		_, err := Job{WorldSize: 2, Address: net.JoinHostPort("192.0.2.1", port), Secret: []byte("s")}.Broadcast(ctx, []byte("id"))
		served <- err
	}()
	got, err := Job{Rank: 1, WorldSize: 2, Address: local, Secret: []byte("s")}.Broadcast(ctx, nil)
	require.NoError(t, err)
	assert.Equal(t, "id", string(got))
	require.NoError(t, <-served)
}

// What is given as loopback is not opened to the network.
func TestListenAddress(t *testing.T) {
	for address, want := range map[string]string{
		"127.0.0.1:4000":     "127.0.0.1:4000",
		"127.0.1.1:4000":     "127.0.1.1:4000",
		"[::1]:4000":         "[::1]:4000",
		"localhost:4000":     "localhost:4000",
		"node7:4000":         ":4000",
		"10.0.0.1:4000":      ":4000",
		"[2001:db8::1]:4000": ":4000",
	} {
		got, err := Job{Address: address}.listenAddress()
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
	_, err := Job{WorldSize: 2, Address: "node7"}.Broadcast(t.Context(), nil)
	assert.ErrorContains(t, err, "missing port")
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

// Strangers (garbage, silence, another secret, another job's size) are refused
// and logged; the job's own rank still gets its answer.
func TestStrangersAreRefused(t *testing.T) {
	var log syncBuffer
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(old)

	address := freeAddress(t)
	ctx := deadline(t, 20*time.Second)
	served := make(chan error, 1)
	go func() {
		_, err := Job{WorldSize: 2, Address: address, Secret: []byte("right")}.Broadcast(ctx, []byte("treasure"))
		served <- err
	}()
	dial := func() net.Conn {
		for {
			if c, err := net.Dial("tcp", address); err == nil {
				return c
			}
			require.NoError(t, ctx.Err())
		}
	}
	for _, say := range []string{"", "GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 1000)} {
		c := dial()
		_, _ = io.WriteString(c, say) // fails if the refusal is faster
		_ = c.(*net.TCPConn).CloseWrite()
		answer, _ := io.ReadAll(c)
		assert.NotContains(t, string(answer), "treasure")
		require.NoError(t, c.Close())
	}
	for _, stranger := range []Job{
		{Rank: 1, WorldSize: 2, Address: address, Secret: []byte("wrong")},
		{Rank: 1, WorldSize: 5, Address: address, Secret: []byte("right")},
		{Rank: 7, WorldSize: 2, Address: address, Secret: []byte("right")},
	} {
		_, err := stranger.ask(ctx)
		assert.ErrorIs(t, err, ErrRefused)
	}
	assert.GreaterOrEqual(t, strings.Count(log.String(), "connection refused"), 4)

	got, err := Job{Rank: 1, WorldSize: 2, Address: address, Secret: []byte("right")}.Broadcast(ctx, nil)
	require.NoError(t, err)
	assert.Equal(t, "treasure", string(got))
	require.NoError(t, <-served)
}

// A rank does not take the payload of a server that does not know the secret.
func TestAFalseRankZeroIsNotBelieved(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close() //nolint:errcheck
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			impostor := Job{WorldSize: 2, Secret: []byte("guess")}
			nonce := make([]byte, nonceBytes)
			c.Write(nonce)                           //nolint:errcheck
			io.ReadFull(c, make([]byte, helloBytes)) //nolint:errcheck
			reply := append([]byte{0, 0, 0, 4}, "evil"...)
			c.Write(append(reply, impostor.mac("reply", reply)...)) //nolint:errcheck
			c.Close()                                               //nolint:errcheck
		}
	}()
	_, err = Job{Rank: 1, WorldSize: 2, Address: l.Addr().String(), Secret: []byte("real")}.ask(deadline(t, 5*time.Second))
	assert.ErrorIs(t, err, ErrRefused)
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
