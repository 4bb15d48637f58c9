package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/bench"
	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// execute runs a command line and returns its exit code and output.
func execute(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), args, &out, &err)
	return code, out.String(), err.String()
}

// jsonLines reads an object from each line.
func jsonLines(t *testing.T, text string) []map[string]any {
	t.Helper()
	var objects []map[string]any
	for line := range strings.Lines(text) {
		var object map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &object), line)
		objects = append(objects, object)
	}
	return objects
}

func keys(object map[string]any) []string { return slices.Collect(maps.Keys(object)) }

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		want string
	}{
		{"trian", `did you mean "train"?`},
		{"train --pattern topk", `did you mean "topkA"?`},
		{"train --pattern dense,ok-topk", `did you mean "oktopk"?`},
		{"train --pattern nonsense", `unknown pattern "nonsense" (want one of dense, topkA`},
		{"train --ranks 0", `"--ranks" flag: must be 1 or more`},
		{"train --ranks -2", `"--ranks" flag: must be 1 or more`},
		{"train --ranks many", "many"},
		{"train --density 0", "density 0 is not in (0, 1]"},
		{"train --epochs 0", "epochs 0"},
		{"train --target 0.97", "target accuracy 0.97 is not in [1, 100] percent"},
		{"cluster", "the command to run"},
		{"cluster trian", "trian is neither a command of tutti nor a program"},
		{"cluster --rate fast hostname", `"fast" is not a rate`},
		{"cluster --hosts 0 hostname", "0 hosts"},
		{"cluster --loss 100 hostname", "loss 100"},
		{"cluster --hosts 250 --per-host 1000 hostname", "250 hosts with 1000 ranks each are more than 4096 ranks"},
		{"cluster --mpi openmp hostname", `did you mean "openmpi"?`},
		{"launch", "the program to run"},
		{"launch -n 2 ./nothing", "./nothing is neither a command of tutti nor a program"},
		{"launch -n 0 hostname", `"-n, --ranks" flag: must be a number from 1 to 4096`},
		{"launch -n 99999999999 hostname", `"-n, --ranks" flag: must be a number from 1 to 4096`},
		{"launch --machines 0 hostname", `"--machines" flag: must be 1 or more`},
		{"launch --restarts -1 hostname", `"--restarts" flag: must be 0 or more`},
		{"launch --min -1 hostname", `"--min" flag: must be 0 or more`},
		{"launch --max 2 hostname", "--max is for an elastic job, which --min makes"},
		{"launch --min 3 --max 2 hostname", "--max is 2, less than --min, 3"},
		{"launch -n 2 --min 3 hostname", "--min is 3, but 2 ranks start here, and others need --listen to join them: start 3 (-n 3), or give an address"},
		{"launch --hosts a:1,b:1 --min 3 hostname", "--min is 3, but 2 ranks start on the hosts, and others need --listen to join them"},
		{"launch --min 2 --machines 2 hostname", "--machines is not for an elastic job"},
		{"launch --join foo hostname", `"--join" flag: must be HOST:PORT`},
		{"launch --join= hostname", `"--join" flag: must be HOST:PORT`},
		{"launch --join :29400 hostname", `"--join" flag: must be HOST:PORT`},
		{"launch --join h:1x hostname", `"--join" flag: must be HOST:PORT`},
		{"launch --listen foo hostname", `"--listen" flag: must be HOST:PORT or :PORT`},
		{"launch --listen :99999 hostname", `"--listen" flag: must be HOST:PORT or :PORT`},
		{"launch --job a\x1b[2J hostname", `"--job" flag: must be printable, and of at most 2048 bytes`},
		{"launch --job " + strings.Repeat("j", 2049) + " hostname", `"--job" flag: must be printable, and of at most 2048 bytes`},
		{"launch --wait 0s hostname", `"--wait" flag: must be more than 0s`},
		{"launch --wait -1s hostname", `"--wait" flag: must be more than 0s`},
		{"launch --wait 5 hostname", `"--wait" flag: must be a duration`},
		{"launch --join h:1 --restarts 2 hostname", "--restarts is for the first machine, which has no --join"},
		{"launch --join h:1,h hostname", "HOST:PORT"},
		{"launch --join h:1 --max 2 hostname", "--max is for the first machine"},
		{"launch --tcp-connections many hostname", `TUTTI_TCP_CONNECTIONS="many": want a number from 1 on`},
		{"launch --tcp-silence 1ms hostname", `TUTTI_TCP_SILENCE="1ms": want a time of at least 1s, such as 30s`},
		{"cluster --loss much hostname", `"much" is not a percentage`},
		{"train --outer-lr 0.7", "--outer-lr is for an outer loop, which --outer makes"},
		{"train --outer 5 --outer-lr 0", `"--outer-lr" flag: must be a positive number`},
		{"train --outer 5 --outer-momentum 1", `"--outer-momentum" flag: must be in [0, 1)`},
		{"train --outer 5 --outer-decay NaN", `"--outer-decay" flag: must be in (0, 1]`},
		{"train --outer 5 --outer-fragments 0", `"--outer-fragments" flag: must be 1 or more`},
		{"train --outer 5 --outer-delay -1", `"--outer-delay" flag: must be 0 or more`},
		{"train --outer 5 --outer-delay 2 --outer-mix 1", `"--outer-mix" flag: must be in [0, 1)`},
		{"train --outer 5 --outer-delay 2 --outer-mix NaN", `"--outer-mix" flag: must be in [0, 1)`},
		{"train --outer 5 --outer-mix 0.5", "--outer-mix is for parts that arrive later, which --outer-delay makes"},
		{"train --outer-mix 0.5", "--outer-mix is for an outer loop, which --outer makes"},
		{"train --outer 5 --outer-fragments 9", "an outer window of 5 steps is too short for 9 fragments"},
		{"train --outer 6 --outer-fragments 2 --outer-delay 4", "delay 4 exceeds the 3 steps between two of 2 fragments"},
		{"train --hosts -1", "number of hosts -1 is not 0 or more"},
		{"train --pattern auto --values auto", `unknown values "auto"`},
		{"train --backend tcp --ranks 2", "tcp: --ranks 2 but no launcher started others; leave --ranks out, or use tutti launch -n 2"},
		{"train -x", "unknown shorthand flag: 'x' in -x\n"},
		{"train extra", `tutti train takes no arguments, but got "extra"`},
		{"bench allreduce extra", `tutti bench allreduce takes no arguments, but got "extra"`},
		{"help nosuch", `unknown command "nosuch"`},
		{"completion fsh", `did you mean "fish"?`},
		{"train --timeout -1s", `"--timeout" flag: must be 0 or more`},
		{"train --backend locale", `did you mean "local"?`},
		{"train --backend tpc", `did you mean "tcp"?`},
		{"train --backend gpu", `unknown backend "gpu" (want one of local, noop, mpi, tcp, nccl); did you mean "nccl"?`},
		{"train --backend CUDA", `did you mean "nccl"?`},
		{"train --backend openmpi", `did you mean "mpi"?`},
		{"train --backend mpich", `did you mean "mpi"?`},
		{"train --backend nop", `did you mean "noop"?`},
		{"train --backend udp", `unknown backend "udp" (want one of local, noop, mpi, tcp, nccl); did you mean "tcp"?`},
		{"train --ranks 100000", "local: --ranks 100000, at most 1024 work in one process"},
		{"bench allreduce --ranks 1024 --max 1024G", "local: the buffers of 1024 ranks are 2097152.0 GiB"},
		{"bench sparse --ranks 1024 --max 1024G", "local: the buffers of 1024 ranks are 3145728.0 GiB"},
		{"train --backend noop --ranks 2", "noop: has one rank, not 2"},
		{"train --speed", "unknown flag: --speed; did you mean --seed?"},
		{"bench allreduce --vrify", "did you mean --verify?"},
		{"train --nonsense", "unknown flag: --nonsense\n"},
		{"train now", "now"},
		{"info now", "now"},
		{"bench allreduc", `did you mean "allreduce"?`},
		{"bench allreduce --dtype f31", `unknown element type "f31"`},
		{"bench allreduce --op mean", `unknown reduction "mean"`},
		{"bench allreduce --op avg --dtype i32", "op avg is not defined on dtype i32"},
		{"bench allreduce --min 64Q", `"64Q" is not a size`},
		{"bench allreduce --min 1M --max 1K", "largest size 1024 is below the smallest, 1048576"},
		{"bench allreduce --step 1", "step 1"},
		{"bench allreduce --rounds 0", "rounds 0"},
		{"bench allreduce --rounds 9223372036854775807", "rounds 9223372036854775807 is not in [1, "},
		{"bench sparse --iters 9223372036854775807", "iters 9223372036854775807 is not in [0, "},
		{"bench buckets --size 1073741824G", "lower --size, --buckets or --ranks"},
		{"bench buckets --backward 2562047h", "backward 2562047h0m0s is not in [0s, 1h0m0s]"},
		{"cluster --per-host 9223372036854775807 hostname", "9223372036854775807 ranks per host are not in [1, "},
		{"train --epochs 9223372036854775807", "epochs 9223372036854775807 is not in [1, "},
		{"bench alltoall --in-place", "unknown flag: --in-place"},
		{"bench broadcast --op sum", "unknown flag: --op"},
		{"bench sparse --density 1.5", "density 1.5"},
		{"bench sparse --values i3", `unknown values "i3" (want one of f32, lossless, bf16, f16, fp8, i8, i4, i2, 1bit)`},
		{"bench sparse --density 0.1,much", `"much" is not a number`},
		{"bench sparse --graph", "--graph needs a backend with CUDA graphs"},
		{"bench allreduce --graph", "local: --graph needs a backend with CUDA graphs: nccl"},
		{"bench allreduce --p2p", "local: --p2p needs a backend with GPUs: nccl"},
		{"train --p2p", "local: --p2p needs"},
		{"bench allreduce --symmetric", "local: --symmetric needs a backend with symmetric memory: nccl"},
	} {
		args := strings.Fields(c.args)
		if args[0] == "train" {
			args = append(args, "--out", t.TempDir())
		}
		code, stdout, stderr := execute(t, args...)
		assert.Equal(t, exitUsage, code, c.args)
		assert.Empty(t, stdout, c.args)
		assert.Contains(t, stderr, c.want, c.args)
		assert.Contains(t, stderr, "--help' for usage", c.args)
	}
}

func TestEveryCommandHasHelpWithExamples(t *testing.T) {
	root, _ := newRoot()
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		args := append(strings.Fields(cmd.CommandPath())[1:], "--help")
		code, stdout, stderr := execute(t, args...)
		assert.Equal(t, exitOK, code, args)
		assert.Empty(t, stderr, args)
		assert.Contains(t, stdout, "Usage:", args)
		assert.Contains(t, stdout, "Examples:", args)
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			kind, usage := pflag.UnquoteUsage(f)
			assert.NotRegexp(t, `[A-Z]|\d`, kind, "--%s: a type of Go", f.Name)
			assert.NotContains(t, f.DefValue, "[", "--%s: a value of Go", f.Name)
			assert.NotRegexp(t, `^[A-Z]|\.$`, usage, "--%s", f.Name)
		})
		for line := range strings.Lines(stdout) {
			assert.LessOrEqual(t, utf8.RuneCountInString(line), 80+len("\n"), line)
			assert.NotContains(t, line, "[=", "%s: a flag that takes no value", args)
		}
		for _, sub := range cmd.Commands() {
			if sub.Name() != "help" && sub.Name() != "completion" { // from cobra
				visit(sub)
			}
		}
	}
	visit(root)
	code, stdout, _ := execute(t)
	assert.Equal(t, exitOK, code)
	for _, text := range []string{"Run:", "Inspect:", "completion "} {
		assert.Contains(t, stdout, text)
	}
}

func TestInfo(t *testing.T) {
	code, stdout, stderr := execute(t, "info", "--json")
	require.Equal(t, exitOK, code, stderr)
	info := jsonLines(t, stdout)[0]
	assert.Len(t, info["patterns"], 11)
	assert.Len(t, info["dtypes"], 15)
	assert.Positive(t, info["memory_bytes"])
	available := map[any]any{}
	for _, b := range info["backends"].([]any) {
		backend := b.(map[string]any)
		available[backend["name"]] = backend["available"]
		assert.NotEmpty(t, backend["detail"])
	}
	assert.Equal(t, true, available["local"])
	assert.Equal(t, true, available["noop"])
	assert.Contains(t, available, "mpi")
	assert.Contains(t, available, "nccl")

	gpus, _ := info["gpus"].([]any)
	assert.NotNil(t, gpus, "a list, not null")
	for _, key := range []string{"driver", "cuda", "nccl", "nccl_library", "gpu_unavailable", "nccl_unavailable", "cluster_unavailable"} {
		assert.Contains(t, info, key)
	}

	code, stdout, _ = execute(t, "info")
	assert.Equal(t, exitOK, code)
	assert.Contains(t, stdout, "oktopk")
	assert.Contains(t, stdout, "bf16")
	if len(gpus) == 0 {
		words, reason := strings.Join(strings.Fields(stdout), " "), info["gpu_unavailable"].(string)
		assert.Contains(t, words, "GPU none: "+reason)
		assert.Equal(t, 1, strings.Count(words, reason), "said once: %s", stdout)
	}
}

// One rank has no bus and thus no bus bandwidth.
func TestBenchOfOneRank(t *testing.T) {
	code, stdout, stderr := execute(t, "bench", "allreduce", "--backend", "noop", "--max", "8", "--rounds", "1")
	assert.Equal(t, exitOK, code, stderr)
	assert.Regexp(t, `(?m)^ +8 .* N/A +0 .* N/A +0$`, stdout)
	assert.Contains(t, stdout, "Avg bus bandwidth: N/A")
	for _, collective := range []string{"allreduce", "sparse"} {
		for ranks, linked := range map[string]bool{"1": false, "2": true} {
			code, stdout, stderr := execute(t, "bench", collective, "--ranks", ranks, "--min", "1K", "--max", "1K", "--rounds", "1", "--json")
			assert.Equal(t, exitOK, code, stderr)
			for _, line := range jsonLines(t, stdout) {
				assert.Contains(t, line, "busbw_gb_per_s")
				assert.Equal(t, linked, line["busbw_gb_per_s"] != nil, "%s over %s ranks", collective, ranks)
			}
		}
	}
}

// The version is printed by a command as well as by a flag.
func TestVersion(t *testing.T) {
	code, flag, stderr := execute(t, "--version")
	assert.Equal(t, exitOK, code, stderr)
	code, word, stderr := execute(t, "version")
	assert.Equal(t, exitOK, code, stderr)
	assert.Equal(t, flag, word)
	assert.Contains(t, word, version())
}

func TestInfoIsPrintedByTheFirstProcess(t *testing.T) {
	t.Setenv("OMPI_COMM_WORLD_SIZE", "2")
	for rank, empty := range map[string]bool{"0": false, "1": true} {
		t.Setenv("OMPI_COMM_WORLD_RANK", rank)
		for _, flag := range []string{"--json=false", "--json"} {
			code, stdout, stderr := execute(t, "info", flag)
			assert.Equal(t, exitOK, code, stderr)
			assert.Equal(t, empty, stdout == "", "rank %s, %s", rank, flag)
		}
	}
}

func TestTrain(t *testing.T) {
	out := filepath.Join(t.TempDir(), "new", "directory")
	args := []string{"train", "--pattern", "dense,TOPKA", "--epochs", "1", "--hidden", "16", "--ranks", "2", "--out", out}
	code, stdout, stderr := execute(t, args...)
	require.Equal(t, exitOK, code, stderr)
	assert.NotContains(t, stderr, "\x1b", "no progress bars where there is no terminal")
	for _, want := range []string{"pattern", "dense", "topkA", "100.00", "loss-vs-bytes.png"} {
		assert.Contains(t, stdout, want)
	}
	assert.NotContains(t, stdout, "never")
	for _, name := range []string{"loss-vs-bytes.png", "loss-vs-bytes.svg", "loss-vs-time.png", "accuracy-vs-time.png", "accuracy-vs-time.svg"} {
		file, err := os.Stat(filepath.Join(out, name))
		require.NoError(t, err)
		assert.Greater(t, file.Size(), int64(1000))
	}

	code, stdout, stderr = execute(t, append(args, "--json")...)
	require.Equal(t, exitOK, code, stderr)
	lines := jsonLines(t, stdout)
	require.Len(t, lines, 2)
	for _, line := range lines {
		assert.ElementsMatch(t, []string{"pattern", "backend", "device", "ranks", "values", "density", "accuracy", "loss", "sent_elements_per_rank_step",
			"sent_bytes_per_rank_step", "ratio_to_dense", "rounds", "comm_s", "total_s", "tests", "hash"}, keys(line))
		assert.EqualValues(t, 2, line["ranks"])
		assert.Equal(t, "local", line["backend"])
		assert.Equal(t, "cpu", line["device"])
	}

	t.Setenv("TUTTI_NETWORK", "2 tins and a string")
	code, stdout, stderr = execute(t, append(args, "--target", "100")...)
	require.Equal(t, exitOK, code, stderr)
	assert.Regexp(t, `total +to 100 %\n(.*\n)?.* \(s, steps\)\n`, stdout)
	assert.Contains(t, stdout, "never")
	assert.Contains(t, stdout, "\n2 ranks on 2 tins and a string; ")
	code, stdout, stderr = execute(t, append(args, "--target", "1", "--json")...)
	require.Equal(t, exitOK, code, stderr)
	for _, line := range jsonLines(t, stdout) {
		assert.Equal(t, "2 tins and a string", line["network"])
		assert.EqualValues(t, 1, line["target"])
		assert.Positive(t, line["target_s"])
		assert.LessOrEqual(t, line["target_s"], line["total_s"])
	}

	// A dense step on two ranks sends every parameter once.
	assert.EqualValues(t, 64*16+16+16*10+10, lines[0]["sent_elements_per_rank_step"])
}

func TestTrainOnOneRankDrawsNothing(t *testing.T) {
	out := t.TempDir()
	code, stdout, stderr := execute(t, "train", "--backend", "noop", "--pattern", "dense", "--epochs", "1", "--out", out)
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, stdout, "dense")
	assert.Contains(t, stdout, "\n1 rank; ")
	assert.NotContains(t, stdout, "wrote")
	assert.DirExists(t, out, "it was there before")

	for _, more := range [][]string{nil, {"--hidden", "0"}, {"--ranks", "2"}} {
		out = filepath.Join(t.TempDir(), "new")
		execute(t, append([]string{"train", "--backend", "noop", "--pattern", "dense", "--epochs", "1", "--out", filepath.Join(out, "a", "b")}, more...)...)
		assert.NoDirExists(t, out, more)
	}
}

func TestTrainFindsOutBeforeThatItCannotWrite(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	code, stdout, stderr := execute(t, "train", "--out", filepath.Join(file, "x"))
	assert.Equal(t, exitFailure, code)
	assert.Empty(t, stdout)
	assert.Contains(t, stderr, "cannot use --out")
	code, _, stderr = execute(t, "train", "--out", "")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, stderr, "--out is empty")
}

func TestBackendThatIsNotThereIsAFailure(t *testing.T) {
	t.Setenv("TUTTI_MPI_LIB", filepath.Join(t.TempDir(), "libmpi.so"))
	for _, b := range []string{"mpi", "nccl"} {
		found, err := backend.Find(b)
		require.NoError(t, err)
		if _, err := found.Probe(t.Context()); err == nil {
			continue
		}
		code, _, stderr := execute(t, "bench", "allreduce", "--backend", b, "--max", "8")
		assert.Equal(t, exitFailure, code, b)
		assert.Contains(t, stderr, "not available")
	}
}

func TestInterruptEndsCleanly(t *testing.T) {
	for want, cause := range map[string]syscall.Signal{"tutti: hung up\n": syscall.SIGHUP, "tutti: interrupted\n": syscall.SIGINT, "tutti: terminated\n": syscall.SIGTERM} {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(launch.Signaled(cause))
		for _, args := range [][]string{
			{"train", "--out", t.TempDir()},
			{"bench", "allreduce"},
		} {
			var stdout, stderr bytes.Buffer
			assert.Equal(t, 128+int(cause), run(ctx, args, &stdout, &stderr), args)
			assert.Equal(t, want, stderr.String(), args)
		}
	}
}

// A second interrupt insists. Another signal insists only if it comes again later, and SIGHUP of a terminal never
// does.
func TestSignalsThatInsist(t *testing.T) {
	began := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	type arrival struct {
		signal os.Signal
		after  time.Duration
	}
	for name, c := range map[string]struct {
		arrivals []arrival
		insists  bool // expected of the last signal
	}{
		"one":                       {[]arrival{{os.Interrupt, 0}}, false},
		"two interrupts":            {[]arrival{{os.Interrupt, 0}, {os.Interrupt, time.Millisecond}}, true},
		"timeout's two":             {[]arrival{{syscall.SIGTERM, 0}, {syscall.SIGTERM, time.Millisecond}}, false},
		"a later one":               {[]arrival{{syscall.SIGTERM, 0}, {syscall.SIGTERM, time.Second}}, true},
		"the third is later":        {[]arrival{{syscall.SIGTERM, 0}, {syscall.SIGTERM, 600 * time.Millisecond}, {syscall.SIGTERM, 1200 * time.Millisecond}}, true},
		"a terminal that is closed": {[]arrival{{syscall.SIGHUP, 0}, {syscall.SIGHUP, time.Millisecond}, {syscall.SIGHUP, time.Hour}}, false},
		"another one":               {[]arrival{{syscall.SIGHUP, 0}, {syscall.SIGTERM, time.Hour}}, false},
		"an interrupt after it":     {[]arrival{{syscall.SIGTERM, 0}, {os.Interrupt, time.Hour}}, false},
	} {
		received := received{}
		insists := false
		for _, a := range c.arrivals {
			insists = received.insists(a.signal, began.Add(a.after))
		}
		assert.Equal(t, c.insists, insists, name)
	}
}

// full is a disk with little free space.
type full struct{ room int }

func (f *full) Write(p []byte) (int, error) {
	n := min(len(p), f.room)
	f.room -= n
	if n < len(p) {
		return n, errors.New("no space left")
	}
	return n, nil
}

func TestOutputThatCannotBeWrittenIsAFailure(t *testing.T) {
	quick := []string{"--ranks", "2", "--min", "8", "--max", "64", "--iters", "1", "--rounds", "1"}
	for _, args := range [][]string{
		{"info"},
		{"info", "--json"},
		{"--help"},
		append([]string{"bench", "allreduce"}, quick...),
		append([]string{"bench", "allreduce", "--json"}, quick...),
		append([]string{"bench", "sparse"}, quick...),
		append([]string{"bench", "sparse", "--json"}, quick...),
		{"train", "--epochs", "1", "--pattern", "dense", "--out", t.TempDir()},
		{"train", "--epochs", "1", "--pattern", "dense", "--json", "--out", t.TempDir()},
	} {
		for _, room := range []int{0, 10} {
			var stderr bytes.Buffer
			assert.Equal(t, exitFailure, run(t.Context(), args, &full{room}, &stderr), args)
			assert.Equal(t, "tutti: writing the output: no space left\n", stderr.String(), args)
		}
	}
}

// A variable sets the backend of a command without --backend.
func TestDefaultBackendOfTheEnvironment(t *testing.T) {
	t.Setenv("TUTTI_BACKEND", "noop")
	quick := []string{"bench", "allreduce", "--max", "8", "--iters", "1", "--rounds", "1", "--json"}
	for want, args := range map[string][]string{"noop": quick, "local": append(quick, "--backend", "local")} {
		code, stdout, stderr := execute(t, args...)
		require.Equal(t, exitOK, code, stderr)
		assert.Equal(t, want, jsonLines(t, stdout)[0]["backend"])
	}
	t.Setenv("TUTTI_BACKEND", "nonsense")
	code, _, stderr := execute(t, quick...)
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, stderr, `unknown backend "nonsense"`)
}

// Each process of a launcher is a separate world on the backend local.
func TestJobsOfSeveralWorldsAreNoted(t *testing.T) {
	t.Setenv("OMPI_COMM_WORLD_SIZE", "2")
	for rank, notes := range map[string]int{"0": 1, "1": 0} {
		t.Setenv("OMPI_COMM_WORLD_RANK", rank)
		code, _, stderr := execute(t, "bench", "allreduce", "--max", "8", "--iters", "1", "--rounds", "1")
		assert.Equal(t, exitOK, code)
		assert.Equal(t, notes, strings.Count(stderr, "mpirun started 2 processes"), stderr)
	}
}

// Users who request only other codecs see the gain over f32.
func TestValuesBesideF32(t *testing.T) {
	common := []string{"bench", "sparse", "--json", "--ranks", "2", "--min", "1K", "--max", "1K", "--iters", "1", "--rounds", "1", "--warmup", "0", "--values", "i2"}
	for want, args := range map[string][]string{"dense f32, dense i2, topkA f32, topkA i2, oktopk f32, oktopk i2": nil, "topkA i2": {"--pattern", "topkA"}} {
		code, stdout, stderr := execute(t, append(common, args...)...)
		require.Equal(t, exitOK, code, stderr)
		var rows []string
		for _, line := range jsonLines(t, stdout) {
			rows = append(rows, fmt.Sprintf("%v %v", line["pattern"], line["values"]))
		}
		assert.Equal(t, want, strings.Join(rows, ", "))
	}
}

// Patterns beside an outer loop train as they do alone.
func TestPatternsBesideAnOuterLoop(t *testing.T) {
	for _, pattern := range append(sparsity.Patterns(), sparse.Auto) {
		code, stdout, stderr := execute(t, "train", "--json", "--ranks", "2", "--epochs", "1", "--hidden", "8", "--outer", "5",
			"--pattern", "chunked", "--beside", pattern, "--out", t.TempDir())
		require.Equal(t, exitOK, code, stderr)
		var names []any
		for _, line := range jsonLines(t, stdout) {
			names = append(names, line["pattern"])
		}
		assert.Equal(t, []any{pattern, "chunked"}, names)
	}
}

func TestBench(t *testing.T) {
	common := []string{"--ranks", "2", "--min", "8", "--max", "2K", "--step", "16", "--iters", "2", "--rounds", "1", "--warmup", "0"}
	names := []string{"sparse"}
	for _, k := range bench.Collectives() {
		names = append(names, k.String())
	}
	for _, name := range names {
		code, stdout, stderr := execute(t, append([]string{"bench", name, "--json"}, common...)...)
		require.Equal(t, exitOK, code, stderr)
		lines := jsonLines(t, stdout)
		assert.GreaterOrEqual(t, len(lines), 3, name)
		for _, line := range lines {
			assert.Subset(t, keys(line), []string{"collective", "backend", "device", "ranks", "bytes", "count", "dtype", "op", "graph", "symmetric", "p2p", "p2p_up_to_bytes", "time_us", "algbw_gb_per_s", "busbw_gb_per_s", "wrong", "place", "root"})
			assert.Equal(t, name, line["collective"])
			assert.Equal(t, "local", line["backend"])
			assert.Equal(t, "cpu", line["device"])
			assert.Equal(t, false, line["graph"])
			assert.EqualValues(t, 0, line["wrong"], name)
			if name != "sparse" {
				assert.Len(t, line, 18, name)
			}
		}
		code, stdout, stderr = execute(t, append([]string{"bench", name}, common...)...)
		require.Equal(t, exitOK, code, stderr)
		assert.Contains(t, stdout, "# Wrong elements   : 0")
		columns := 80 - len("[10] ") // the prefix that launch writes
		for line := range strings.Lines(stdout) {
			assert.LessOrEqual(t, len(strings.TrimRight(line, "\n")), columns, line)
		}
		code, stdout, stderr = execute(t, append([]string{"bench", name, "--wide"}, common...)...)
		require.Equal(t, exitOK, code, stderr)
		assert.Contains(t, stdout, "busbw")
	}
}

func TestBenchPlaces(t *testing.T) {
	args := []string{"bench", "allreduce", "--ranks", "2", "--max", "8", "--iters", "1", "--rounds", "1"}
	_, both, _ := execute(t, args...)
	assert.Contains(t, both, "out-of-place")
	assert.Contains(t, both, "in-place\n")
	for line := range strings.Lines(both) {
		assert.LessOrEqual(t, len(line), 80, line)
	}
	_, wide, _ := execute(t, append(args, "--wide")...)
	assert.Regexp(t, `size +count +type +redop +root +time +algbw +busbw +#wrong +time +algbw`, wide)
	_, one, _ := execute(t, append(args, "--in-place")...)
	assert.NotContains(t, one, "out-of-place")
	_, unverified, _ := execute(t, append(args, "--verify=false")...)
	assert.Contains(t, unverified, "N/A")
	places := func(args ...string) (places []any) {
		_, stdout, _ := execute(t, append(args, "--verify=false", "--json")...)
		for _, line := range jsonLines(t, stdout) {
			assert.Nil(t, line["wrong"])
			assert.EqualValues(t, -1, line["root"])
			places = append(places, line["place"])
		}
		return places
	}
	assert.Equal(t, []any{"out-of-place", "in-place"}, places(args...))
	assert.Equal(t, []any{"in-place"}, places(append(args, "--in-place")...))
}

func TestWrongResultsAreAFailure(t *testing.T) {
	wrong := int64(3)
	counted := tally{}
	counted.add(bench.Result{Wrong: &wrong})
	var out bytes.Buffer
	assert.ErrorContains(t, counted.finish(&out, true), "3 elements")
	assert.Contains(t, out.String(), "# Wrong elements   : 3")
}

func TestShellsCompleteNames(t *testing.T) {
	for line, want := range map[string]string{
		"train --backend m":           "mpi",
		"bench sparse --pattern okt":  "oktopk",
		"train --pattern dense,okt":   "dense,oktopk",
		"bench allreduce --dtype bf":  "bf16",
		"bench reducescatter --op su": "sum",
		"cluster --mpi open":          "openmpi",
	} {
		code, stdout, stderr := execute(t, append([]string{"__complete"}, strings.Fields(line)...)...)
		require.Equal(t, exitOK, code, stderr)
		assert.Contains(t, strings.Split(stdout, "\n"), want, line)
	}
}

// The help lists every environment variable that the library or the command reads.
func TestHelpListsTheEnvironment(t *testing.T) {
	code, help, stderr := execute(t, "--help")
	require.Equal(t, exitOK, code, stderr)
	variable := regexp.MustCompile(`"(TUTTI_[A-Z_]+)"`)
	found := map[string]bool{}
	require.NoError(t, filepath.WalkDir("../../../..", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && entry.Name() == "lab" {
			return fs.SkipDir
		}
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || strings.Contains(filepath.ToSlash(path), "test/") || strings.Contains(filepath.ToSlash(path), "internal/standin/") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range variable.FindAllSubmatch(text, -1) {
			found[string(match[1])] = true
		}
		return err
	}))
	require.Contains(t, found, env.Record)
	for name := range found {
		assert.Regexp(t, `\b`+name+`\b`, help)
	}
}

func TestMessageSaysThingsOnce(t *testing.T) {
	err := errors.Join(errors.New("rank failed"), errors.New("other"), errors.New("rank failed"))
	assert.Equal(t, "rank failed\nother", message(err))
}

func TestMessageLeavesRanksOut(t *testing.T) {
	var ranks, echoes []error
	for rank := range 256 {
		ranks = append(ranks, fmt.Errorf("size: %w", &comm.OpError{Backend: "mpi", Op: "sync", Rank: rank, Err: comm.ErrTimeout}))
		echoes = append(echoes, &comm.OpError{Backend: "local", Op: "barrier", Rank: rank, Err: fmt.Errorf("%w: rank 7", comm.ErrPeerFailed)})
	}
	assert.Equal(t, "size: mpi: sync on rank 0: timed out\nand 255 more ranks", message(errors.Join(ranks...)))
	assert.Equal(t, "local: barrier on rank 0: peer failed: rank 7\nand 255 more ranks", message(errors.Join(echoes...)), "a rank of another process failed")

	cause := errors.New("rank 7 fell over")
	assert.Equal(t, "rank 7 fell over\nand 256 more ranks", message(errors.Join(errors.Join(echoes...), cause)))
	assert.Equal(t, "rank 7 fell over\nand 1 more rank", message(errors.Join(cause, echoes[0])))

	refused := &backend.OptionError{Backend: "local", Reason: "no"}
	assert.Equal(t, "local: no", message(errors.Join(append(echoes, fmt.Errorf("rank 1: %w", refused))...)))

	whole := fmt.Errorf("several: %w", errors.Join(cause, echoes[0]))
	assert.Equal(t, whole.Error(), message(whole), "its text is its own")
	assert.Equal(t, "ranks 1, 2 and 3 of 8\nand 1 more rank", message(errors.Join(errors.New("ranks 1, 2 and 3 of 8"), errors.New("ranks 4 and 5 of 8"))))
}

// With a delay a rank keeps half of its weights unless --outer-mix sets another share; 0 is a share too.
func TestOuterMix(t *testing.T) {
	hash := func(flags ...string) any {
		args := []string{"train", "--ranks", "2", "--hidden", "8", "--epochs", "1", "--pattern", "dense", "--outer", "8", "--outer-fragments", "2",
			"--outer-delay", "4", "--out", t.TempDir(), "--json"}
		code, stdout, stderr := execute(t, append(args, flags...)...)
		require.Zero(t, code, stderr)
		return jsonLines(t, stdout)[0]["hash"]
	}
	half := hash()
	assert.Equal(t, half, hash("--outer-mix", "0.5"))
	assert.NotEqual(t, half, hash("--outer-mix", "0"))
	assert.NotEqual(t, hash("--outer-mix", "0.25"), hash("--outer-mix", "0"))
}
