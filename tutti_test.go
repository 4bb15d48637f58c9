package tutti_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/jobtest"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/internal/networktest"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// programVariable makes the test binary the program of a launcher.
const programVariable = "TUTTI_TEST_PROGRAM"

// apart has the program believe that each rank is on its own host.
const apart = "apart"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) == "" {
		os.Exit(m.Run())
	}
	if os.Getenv(programVariable) == apart {
		os.Setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
		os.Setenv("MPI_LOCALNRANKS", "1")
	}
	if err := tutti.Run(context.Background(), sum(os.Stdout.WriteString)); err != nil {
		fmt.Println("ERROR", err)
		os.Exit(1)
	}
}

// sum returns a body in which each rank gives its number, and tells what the sum is.
func sum(tell func(line string) (int, error)) func(context.Context, tutti.Rank) error {
	return func(ctx context.Context, r tutti.Rank) error {
		tensor, err := runtime.FromSlice(r.Runtime, []float32{1, float32(r.Comm.Rank())})
		if err != nil {
			return err
		}
		defer tensor.Free()
		if err := distributed.AllReduce(ctx, r.Comm, tensor, comm.Sum); err != nil {
			return err
		}
		values, err := runtime.ToSlice[float32](tensor)
		if err != nil {
			return err
		}
		_, err = tell(fmt.Sprintf("rank %d of %d has %v\n", r.Comm.Rank(), r.Comm.WorldSize(), values))
		return err
	}
}

// want is what all ranks of a world tell.
func want(ranks int) []string {
	var lines []string
	for rank := range ranks {
		lines = append(lines, fmt.Sprintf("rank %d of %d has [%d %d]", rank, ranks, ranks, ranks*(ranks-1)/2))
	}
	return lines
}

func lines(text string) []string { return strings.Split(strings.TrimSpace(text), "\n") }

// noLauncher hides a launcher that started the tests.
func noLauncher(t *testing.T) {
	for _, name := range []string{env.Backend, env.Ranks, "TUTTI_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"} {
		t.Setenv(name, "")
	}
}

func TestGoroutines(t *testing.T) {
	for _, c := range []struct {
		config tutti.Config
		ranks  string // of the environment
		want   int
	}{
		{want: 4},
		{ranks: "3", want: 3},
		{config: tutti.Config{Ranks: 2}, ranks: "3", want: 2},
		{config: tutti.Config{Backend: tutti.Local, Ranks: 1}, want: 1},
	} {
		noLauncher(t)
		t.Setenv(env.Ranks, c.ranks)
		var mu sync.Mutex
		var told strings.Builder
		require.NoError(t, c.config.Run(t.Context(), sum(func(line string) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return told.WriteString(line)
		})))
		assert.ElementsMatch(t, want(c.want), lines(told.String()))
	}
}

func TestErrors(t *testing.T) {
	nobody := func(context.Context, tutti.Rank) error { return errors.New("a rank ran") }
	for name, c := range map[string]struct {
		config tutti.Config
		env    map[string]string
		says   string
	}{
		"no backend":        {config: tutti.Config{Backend: "gloo"}, says: `unknown backend "gloo": want local, tcp, mpi or nccl`},
		"no number":         {env: map[string]string{env.Ranks: "two"}, says: `TUTTI_RANKS is "two", want a number of ranks`},
		"none":              {env: map[string]string{env.Ranks: "0"}, says: `TUTTI_RANKS is "0"`},
		"negative":          {config: tutti.Config{Ranks: -1}, says: "-1 ranks"},
		"own worlds":        {config: tutti.Config{Backend: tutti.Local}, env: map[string]string{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, says: "torchrun started 2 processes"},
		"too few members":   {env: map[string]string{env.Min: "3", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, says: "an elastic job of 3 ranks or more (--min), and tutti.Run has 2: elastic.Join waits for others"},
		"a network for MPI": {config: tutti.Config{Backend: tutti.MPI, Network: new(networktest.Pipes)}, says: "mpi has connections of its own and uses no Network"},
		"another number":    {config: tutti.Config{Ranks: 3}, env: map[string]string{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, says: "3 ranks over tcp, but there is a process for each of 2"},
	} {
		t.Run(name, func(t *testing.T) {
			noLauncher(t)
			for key, value := range c.env {
				t.Setenv(key, value)
			}
			err := c.config.Run(t.Context(), nobody)
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, c.says)
		})
	}
}

// An error and a panic of one rank end the others.
func TestFailures(t *testing.T) {
	noLauncher(t)
	failure := errors.New("no disk space")
	for name, fail := range map[string]func() error{
		"error": func() error { return failure },
		"panic": func() error { panic(failure) },
	} {
		err := tutti.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
			if r.Comm.Rank() == 1 {
				return fail()
			}
			err := r.Comm.Barrier(ctx)
			assert.ErrorIs(t, err, comm.ErrPeerFailed, name)
			return err
		})
		assert.ErrorIs(t, err, failure, name)
	}
}

// The error of a rank names it once, also behind decorators, and says nothing of what the rank had no time to free.
func TestARankIsNamedOnce(t *testing.T) {
	noLauncher(t)
	for _, check := range []string{"", "1"} {
		t.Setenv(env.Check, check)
		err := tutti.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
			if _, err := cpu.Wrap(r.Runtime, make([]float32, 3)); err != nil || r.Comm.Rank() != 1 {
				return err
			}
			return errors.New("no disk space")
		})
		assert.ErrorContains(t, err, "rank 1: no disk space")
		assert.NotContains(t, err.Error(), "rank 1: rank 1")
		assert.NotContains(t, err.Error(), "rank 1: no disk space\ncpu")
	}
}

func TestDecorators(t *testing.T) {
	noLauncher(t)
	t.Setenv(env.Check, "1")
	require.NoError(t, tutti.Run(t.Context(), func(_ context.Context, r tutti.Rank) error {
		_, is := comm.As[*checked.Communicator](r.Comm)
		assert.True(t, is)
		return nil
	}))
}

// Variables of torchrun make a world over TCP of processes.
func TestProcesses(t *testing.T) {
	noLauncher(t)
	const ranks = 3
	host, port, _ := strings.Cut(jobtest.Address(t, 4), ":")
	outputs := make([]string, ranks)
	var all sync.WaitGroup
	for rank := range ranks {
		all.Go(func() {
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), programVariable+"=1", fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("WORLD_SIZE=%d", ranks),
				fmt.Sprintf("LOCAL_RANK=%d", rank), fmt.Sprintf("LOCAL_WORLD_SIZE=%d", ranks), "MASTER_ADDR="+host, "MASTER_PORT="+port,
				"TUTTI_SECRET=of this test, and long enough")
			out, err := cmd.CombinedOutput()
			assert.NoError(t, err)
			outputs[rank] = string(out)
		})
	}
	all.Wait()
	assert.Equal(t, want(ranks), lines(strings.Join(outputs, "")))
}

// A process that no launcher has started is the only rank, which the log says where the backend is one of processes.
func TestOneRankIsSaid(t *testing.T) {
	noLauncher(t)
	for name, c := range map[string]struct {
		variables map[string]string
		says      int
	}{
		"no launcher":       {map[string]string{"TUTTI_BACKEND": "tcp"}, 1},
		"asked for":         {map[string]string{"TUTTI_BACKEND": "tcp", "TUTTI_RANKS": "1"}, 0},
		"launched":          {map[string]string{"TUTTI_BACKEND": "tcp", "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}, 0},
		"goroutines, local": {map[string]string{"TUTTI_BACKEND": "local", "TUTTI_RANKS": "1"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			for key, value := range c.variables {
				t.Setenv(key, value)
			}
			log := logtest.Capture(t)
			require.NoError(t, tutti.Run(t.Context(), func(_ context.Context, r tutti.Rank) error {
				assert.Equal(t, 1, r.Comm.WorldSize())
				return nil
			}))
			assert.Len(t, log.Lines("one rank over tcp, as no launcher started this process: tutti launch -n 4 PROGRAM starts four"), c.says)
		})
	}
}

// Errors name launchers as users do.
func TestLaunchersAreNamed(t *testing.T) {
	noLauncher(t)
	t.Setenv("TUTTI_BACKEND", "local")
	t.Setenv("MASTER_PORT", "29400")
	for want, variables := range map[string][3]string{
		"MPICH's mpirun (PMI) started 2 processes": {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
		"MVAPICH's mpirun started 2 processes":     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"},
		"IBM's jsrun started 2 processes":          {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"},
		"Open MPI's mpirun started 2 processes":    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
	} {
		t.Run(want, func(t *testing.T) {
			for i, value := range []string{"0", "2", "2"} {
				t.Setenv(variables[i], value)
			}
			err := tutti.Run(t.Context(), func(context.Context, tutti.Rank) error { return nil })
			assert.ErrorContains(t, err, want)
		})
	}
}

// The processes of an MPI's launcher communicate over MPI, and those of others over TCP.
func TestBackendsOfLaunchers(t *testing.T) {
	for _, c := range []struct{ rank, size, want string }{
		{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpi"},
		{"PMI_RANK", "PMI_SIZE", "mpi"},
		{"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "mpi"},
		{"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "tcp"},
		{"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "tcp"},
		{"RANK", "WORLD_SIZE", "tcp"},
	} {
		t.Run(c.rank, func(t *testing.T) {
			noLauncher(t)
			t.Setenv("MASTER_ADDR", "127.0.0.1")
			t.Setenv("MASTER_PORT", "29400")
			t.Setenv(c.rank, "0")
			t.Setenv(c.size, "2")
			err := tutti.Config{Ranks: 3}.Run(t.Context(), func(context.Context, tutti.Rank) error { return nil })
			assert.ErrorContains(t, err, "3 ranks over "+c.want+", but there is a process for each of 2")
		})
	}
}

// A network of the program's makes a world of one rank or goroutines, and a world over TCP where a launcher has started several, also
// under mpirun.
func TestNetwork(t *testing.T) {
	noLauncher(t)
	count := 0
	for _, variables := range []map[string]string{
		{"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_PORT": "29500"},
		{"RANK": "0", "WORLD_SIZE": "1"},
	} {
		t.Run("", func(t *testing.T) {
			for key, value := range variables {
				t.Setenv(key, value)
			}
			config := tutti.Config{Network: new(networktest.Pipes)}
			require.NoError(t, config.Run(t.Context(), func(_ context.Context, r tutti.Rank) error {
				count += r.Comm.WorldSize()
				assert.True(t, strings.Contains(fmt.Sprintf("%T", r.Comm), "tcp."))
				return nil
			}))
		})
	}
	assert.Equal(t, 2, count)
}

// Variables of mpirun make a world over its library, also on several hosts, where nobody says an address of rank 0.
func TestLaunchedByMPI(t *testing.T) {
	noLauncher(t)
	for _, launcher := range jobtest.Launchers {
		for _, program := range []string{"1", apart} {
			t.Run(launcher+"/"+program, func(t *testing.T) {
				t.Setenv(programVariable, program)
				if _, err := exec.LookPath(launcher); err != nil {
					t.Skip(err)
				}
				assert.ElementsMatch(t, want(3), lines(jobtest.Output(t, launcher, "-n", "3", os.Args[0])))
			})
		}
	}
}

// A rank has a GPU of this host, and an error says which are missing: on libraries that stand in for the driver and
// for NCCL, with one rank.
func TestGPUs(t *testing.T) {
	noLauncher(t)
	library := func(source ...string) string {
		file, err := cc.Build(t, "cc", filepath.Join(source...), "", "-O2", "-shared", "-fPIC", "-lpthread")
		require.NoError(t, err)
		return file
	}
	t.Setenv(programVariable, "1")
	t.Setenv(env.Backend, tutti.NCCL)
	t.Setenv("TUTTI_NCCL_LIB", library("comm", "nccl", "testdata", "nccl.c"))
	t.Setenv("TUTTI_CUDA_LIB", library("runtime", "cuda", "testdata", "driver.c"))
	t.Setenv("FAKE_CUDA_MEMORY", "2147483648")
	for name, c := range map[string]struct {
		gpus  string
		ranks string   // of TUTTI_RANKS
		job   []string // of torchrun: rank, number of ranks and number on the host
		says  string
	}{
		"one":                  {gpus: "1", says: "rank 0 of 1 has [1 0]"},
		"the first":            {gpus: "2", ranks: "1", says: "rank 0 of 1 has [1 0]"},
		"none":                 {gpus: "0", says: "ERROR cuda: not available"},
		"none for a job":       {gpus: "0", job: []string{"1", "2", "1"}, says: "ERROR cuda: not available"},
		"too few":              {gpus: "2", ranks: "3", says: "ERROR nccl: not available: 3 ranks need 3 GPUs, and this process sees 2"},
		"too few on this host": {gpus: "2", job: []string{"6", "8", "2"}, says: "ERROR nccl: not available: rank 6 is process 3 of this host, which has 2 GPUs: start at most one process per GPU"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), "FAKE_CUDA_DEVICES="+c.gpus, env.Ranks+"="+c.ranks)
			if c.job != nil {
				cmd.Env = append(cmd.Env, "RANK="+c.job[0], "WORLD_SIZE="+c.job[1], "LOCAL_RANK="+c.job[2], "LOCAL_WORLD_SIZE="+c.job[1],
					"MASTER_ADDR=127.0.0.1", "MASTER_PORT=1")
			}
			out, err := cmd.CombinedOutput()
			assert.Equal(t, strings.HasPrefix(c.says, "ERROR"), err != nil)
			assert.Contains(t, string(out), c.says)
		})
	}
}
