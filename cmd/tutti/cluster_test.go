//go:build unix

package main

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/cluster"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// onClusters runs a test with each MPI library that can run jobs on emulated clusters here.
func onClusters(t *testing.T, test func(t *testing.T, mpi string)) {
	for _, mpi := range cluster.MPIs() {
		t.Run(mpi, func(t *testing.T) {
			if err := cluster.Available(mpi); err != nil {
				t.Skip(err)
			}
			test(t, mpi)
		})
	}
}

func TestClusterHasHosts(t *testing.T) {
	tutti := build(t)
	t.Setenv("OMPI_MCA_plm", "isolated") // some containers keep Open MPI to one host
	onClusters(t, func(t *testing.T, mpi string) {
		const script = `echo $(hostname) $(readlink /proc/self/ns/net) $(echo /sys/class/net/*) $TUTTI_NETWORK`
		stdout, stderr, err := execute(t, tutti, "cluster", "--mpi", mpi, "--hosts", "2", "--per-host", "2", "--rate", "10gbit", "sh", "-c", script)
		require.NoError(t, err, stderr)
		ranks := strings.Split(strings.TrimSpace(stdout), "\n")
		slices.Sort(ranks)
		require.Len(t, ranks, 4, stdout)
		hosts := slices.Compact(slices.Clone(ranks))
		require.Len(t, hosts, 2, stdout)
		assert.Equal(t, []string{ranks[0], ranks[2]}, hosts, "two ranks on each")
		here, err := os.Readlink("/proc/self/ns/net")
		require.NoError(t, err)
		networks := []string{here}
		for i, line := range hosts {
			words := strings.SplitN(line, " ", 3)
			assert.Equal(t, []string{"host0", "host1"}[i], words[0])
			assert.NotContains(t, networks, words[1], "a network of its own")
			networks = append(networks, words[1])
			assert.Equal(t, "/sys/class/net/eth0 /sys/class/net/lo 2 hosts, 10gbit", words[2])
		}

		_, stderr, err = execute(t, tutti, "cluster", "--mpi", mpi, "--hosts", "2", "sh", "-c", "exit 7")
		assert.ErrorContains(t, err, "exit status 7", "%s", stderr)
	})
}

// Ranks on different hosts communicate over their links, which hold the rate. Without links this machine would be
// some hundred times as fast.
func TestClusterHoldsTheRate(t *testing.T) {
	t.Parallel()
	tutti := build(t)
	onClusters(t, func(t *testing.T, mpi string) {
		stdout, stderr, err := execute(t, tutti, "cluster", "--mpi", mpi, "--hosts", "2", "--rate", "100mbit",
			"bench", "sendrecv", "--min", "2M", "--max", "2M", "--warmup", "0", "--iters", "2", "--rounds", "1", "--json")
		require.NoError(t, err, stderr)
		results := lines[struct {
			Backend   string
			Ranks     int
			Wrong     int64
			AlgBWGBPS float64 `json:"algbw_gb_per_s"`
		}](t, stdout)
		require.Len(t, results, 1)
		r := results[0]
		assert.Equal(t, map[bool]string{false: "mpi", true: "tcp"}[mpi == "none"], r.Backend, "unless told otherwise")
		assert.Equal(t, 2, r.Ranks)
		assert.Zero(t, r.Wrong)
		assert.Less(t, r.AlgBWGBPS, 2*0.0125, "100mbit are 0.0125 GB/s")
		assert.Contains(t, stderr, "tutti: 2 hosts, 100mbit: ")
	})
}

// A message takes the links' delay, and arrives over links that lose packets.
func TestClusterDelaysAndLoses(t *testing.T) {
	t.Parallel()
	tutti := build(t)
	onClusters(t, func(t *testing.T, mpi string) {
		if tun, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0); err != nil {
			t.Skipf("needs TAP devices: %v", err)
		} else {
			_ = tun.Close()
		}
		stdout, stderr, err := execute(t, tutti, "cluster", "--mpi", mpi, "--hosts", "2", "--delay", "20ms", "--loss", "2%",
			"bench", "sendrecv", "--min", "400K", "--max", "400K", "--warmup", "0", "--iters", "1", "--rounds", "1", "--json")
		require.NoError(t, err, stderr)
		results := lines[struct {
			Wrong int64
			Time  float64 `json:"time_us"`
		}](t, stdout)
		require.Len(t, results, 1)
		assert.Zero(t, results[0].Wrong)
		assert.GreaterOrEqual(t, results[0].Time, 20e3)
		assert.Regexp(t, `tutti: 2 hosts, 1gbit, delay 20000us, loss 2%: .*; [1-9]\d* packets were lost; the busiest forwarder worked for`, stderr)
	})
}

// Four hosts train, and the cable of one is pulled and put back. The test loss after each step equals the loss of an
// undisturbed training: except for rounding, the sum of a batch's gradients does not depend on the number of members.
func TestPulled(t *testing.T) {
	if os.Getenv("TUTTI_EXTENDED") == "" {
		t.Skip("waits for the silence of a host; set TUTTI_EXTENDED")
	}
	withoutMPI(t)
	t.Setenv("AFTER", "1")
	t.Setenv("DOWN", "4")
	tutti, out := build(t), t.TempDir()
	type result struct {
		Ranks int
		Tests []struct {
			Step    int
			Seconds float64 `json:"s"`
			Loss    float64
		}
	}
	train := []string{"train", "--pattern", "dense", "--momentum", "0", "--lr", "0.02", "--hidden", "512", "--epochs", "10", "--target", "100", "--json", "--out", out}
	stdout, stderr, err := execute(t, tutti, append(train, "--ranks", "4")...)
	require.NoError(t, err, stderr)
	want := lines[result](t, stdout)[0]

	script, err := filepath.Abs("../../docs/pulled.sh")
	require.NoError(t, err)
	stdout, stderr, err = execute(t, tutti, append(append([]string{"cluster", "--hosts", "4", "--mpi", "none", "--rate", "100mbit", script, tutti}, train...), "--elastic")...)
	require.NoError(t, err, stderr)
	t.Log(stderr)
	_, object, found := strings.Cut(stdout, "{")
	require.True(t, found, stdout)
	object, _, _ = strings.Cut(object, "\n")
	got := lines[result](t, "{"+object)[0]
	assert.Equal(t, 4, got.Ranks, "all are there in the end")
	assert.Regexp(t, `lost="rank \d"`, stderr)
	require.Len(t, got.Tests, len(want.Tests))
	pause := 0.0
	for i, test := range got.Tests {
		assert.Equal(t, want.Tests[i].Step, test.Step)
		assert.InDelta(t, want.Tests[i].Loss, test.Loss, 1e-4, "after step %d", test.Step)
		if i > 0 {
			pause = max(pause, test.Seconds-got.Tests[i-1].Seconds)
		}
	}
	t.Logf("the longest of %d times from test to test is %.2f s", len(got.Tests), pause)
}

// A job's secret is in the environment of its processes, and on no command line, which others can see.
func TestClusterKeepsTheSecret(t *testing.T) {
	t.Parallel()
	withoutMPI(t)
	stdout, stderr, err := execute(t, build(t), "cluster", "--mpi", cluster.NoMPI, "--hosts", "2", "sh", "-c",
		`printenv TUTTI_SECRET && if printenv TUTTI_SECRET | grep -qasFf - /proc/[0-9]*/cmdline; then exit 9; fi`)
	require.NoError(t, err, "%s%s", stdout, stderr)
	secrets := strings.Fields(stdout)
	require.Len(t, secrets, 2, stdout)
	assert.Equal(t, secrets[0], secrets[1])
}

// withoutMPI skips the test if ranks cannot run on emulated clusters without MPI.
func withoutMPI(t *testing.T) {
	t.Helper()
	if err := cluster.Available(cluster.NoMPI); err != nil {
		t.Skip(err)
	}
}

// Without MPI, a failed rank ends the others, and its exit code is the job's.
func TestClusterEndsWithTheFirstRankThatFails(t *testing.T) {
	t.Parallel()
	withoutMPI(t)
	const script = `if [ "$(hostname)" = host1 ]; then exit 7; fi; trap 'echo told; exit 9' TERM; while :; do sleep 0.05; done`
	stdout, stderr, err := execute(t, build(t), "cluster", "--mpi", cluster.NoMPI, "--hosts", "3", "sh", "-c", script)
	assert.ErrorContains(t, err, "exit status 7")
	assert.Contains(t, stderr, "tutti: rank 1 on host1: exit status 7\n")
	assert.LessOrEqual(t, strings.Count(stdout, "told\n"), 2)

	_, stderr, err = execute(t, build(t), "cluster", "--mpi", cluster.NoMPI, "--hosts", "2", "sh", "-c", `if [ "$(hostname)" = host1 ]; then kill -KILL $$; fi; sleep 1000`)
	assert.ErrorContains(t, err, "exit status 137", "as shells have it")
	assert.Contains(t, stderr, "tutti: rank 1 on host1: signal: killed (out of memory? see dmesg)\n")
}

// Without MPI, each running rank gets the signal that the command gets, even while others start.
func TestClusterTellsItsRanks(t *testing.T) {
	t.Parallel()
	withoutMPI(t)
	heedSignals(t)
	for signal, code := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143, syscall.SIGHUP: 129} {
		const script = `trap 'echo told $0; exit' INT; trap 'echo told $0; exit' TERM; trap 'echo told $0; exit' HUP; echo up; while :; do sleep 0.05; done`
		cmd := command(t, build(t), "cluster", "--mpi", cluster.NoMPI, "--hosts", "2", "--per-host", "8", "sh", "-c", script, signal.String())
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		require.NoError(t, cmd.Start())
		up, told := 0, 0
		for out := bufio.NewScanner(stdout); out.Scan(); {
			switch out.Text() {
			case "up":
				if up++; up == 1 {
					require.NoError(t, cmd.Process.Signal(signal))
				}
			case "told " + signal.String():
				told++
			}
		}
		_ = cmd.Wait()
		assert.Equal(t, code, cmd.ProcessState.ExitCode(), "%s", stderr.String())
		assert.GreaterOrEqual(t, told, up)
		assert.Positive(t, told)
		assert.NotContains(t, stderr.String(), "rank")
	}
}

// Without MPI, ranks get the same variables as ranks of tutti launch.
func TestClusterNumbersItsRanks(t *testing.T) {
	t.Parallel()
	withoutMPI(t)
	stdout, stderr, err := execute(t, build(t), "cluster", "--mpi", cluster.NoMPI, "--hosts", "2", "--per-host", "2", "sh", "-c",
		`echo "$(hostname) $TUTTI_RANK $TUTTI_WORLD_SIZE $TUTTI_LOCAL_RANK $TUTTI_LOCAL_WORLD_SIZE $TUTTI_BACKEND $1"`, "sh", `it's $5 "all in"  one`)
	require.NoError(t, err, stderr)
	ranks := strings.Split(strings.TrimSpace(stdout), "\n")
	slices.Sort(ranks)
	assert.Equal(t, []string{
		`host0 0 4 0 2 tcp it's $5 "all in"  one`,
		`host0 1 4 1 2 tcp it's $5 "all in"  one`,
		`host1 2 4 0 2 tcp it's $5 "all in"  one`,
		`host1 3 4 1 2 tcp it's $5 "all in"  one`,
	}, ranks)
}

// marker is the variable that identifies the processes of a test.
const marker = "TUTTI_TEST_CLUSTER"

// marked lists the processes on this machine with the marker in their environment.
func marked(t *testing.T, value string) (commands []string) {
	t.Helper()
	environments, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range environments {
		if text, err := os.ReadFile(path); err == nil && bytes.Contains(text, []byte(marker+"="+value)) {
			command, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
			commands = append(commands, string(bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
		}
	}
	return commands
}

// However a run ends, nothing of it is left.
func TestClusterLeavesNothing(t *testing.T) {
	t.Parallel()
	heedSignals(t)
	tutti := build(t)
	onClusters(t, func(t *testing.T, mpi string) {
		links, err := filepath.Glob("/sys/class/net/*")
		require.NoError(t, err)
		for signal, want := range map[syscall.Signal]int{0: 0, syscall.SIGINT: 130, syscall.SIGTERM: 143, syscall.SIGKILL: -1} {
			script := "echo up; exec sleep 1000"
			if signal == 0 {
				script = "echo up"
			}
			value := t.TempDir()
			cmd := command(t, tutti, "cluster", "--mpi", mpi, "--hosts", "2", "sh", "-c", script)
			cmd.Env = append(cmd.Env, marker+"="+value)
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			out := bufio.NewScanner(stdout)
			for range 2 {
				require.True(t, out.Scan(), "%v", signal)
				require.Equal(t, "up", out.Text())
			}
			if signal != 0 {
				assert.NotEmpty(t, marked(t, value), "the test would see them")
				require.NoError(t, cmd.Process.Signal(signal))
			}
			for out.Scan() { // until the last process that could write has ended
			}
			_ = cmd.Wait()
			assert.Equal(t, want, cmd.ProcessState.ExitCode(), "%v", signal)
			if signal == syscall.SIGKILL { // the kernel cleans up by itself
				assert.Eventually(t, func() bool { return len(marked(t, value)) == 0 }, time.Minute, 20*time.Millisecond)
			}
			assert.Empty(t, marked(t, value), "%v", signal)
			mounts, err := os.ReadFile("/proc/self/mounts")
			require.NoError(t, err)
			assert.NotContains(t, string(mounts), "/dev/shm/cluster", "%v", signal)
			assert.NoDirExists(t, "/dev/shm/cluster", "%v", signal)
			now, err := filepath.Glob("/sys/class/net/*")
			require.NoError(t, err)
			assert.Subset(t, links, now, "%v", signal)
		}
	})
}

// A program's own Reducer runs on clusters of all kinds, and tutti plot draws its output.
func TestClusterRunsReducer(t *testing.T) {
	tutti := build(t)
	t.Setenv("OMPI_MCA_plm", "isolated") // some containers keep Open MPI to one host
	program := jobtest.Build(t, "github.com/tutti-go/tutti/examples/powersgd")
	t.Chdir(t.TempDir())
	onClusters(t, func(t *testing.T, mpi string) {
		stdout, stderr, err := execute(t, tutti, "cluster", "--mpi", mpi, "--hosts", "2", "--rate", "1gbit", "--", program, "-json")
		require.NoError(t, err, stderr)
		require.NoError(t, os.WriteFile(mpi+".jsonl", []byte(stdout), 0o666))
		_, stderr, err = execute(t, tutti, "plot", mpi+".jsonl", "--x", "seconds", "-o", mpi+".svg")
		require.NoError(t, err, stderr)
		picture, err := os.ReadFile(mpi + ".svg")
		require.NoError(t, err)
		for _, name := range []string{"rank 0", "rank 4", "rank 1"} {
			assert.Contains(t, string(picture), ">"+name+"<")
		}
	})
}
