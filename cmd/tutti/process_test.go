//go:build unix

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// built builds the command once.
var built = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "tutti-test-"); err != nil {
		return "", err
	}
	out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "tutti"), ".").CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return dir, err
})

// build returns the path of the command.
func build(t *testing.T) (path string) {
	t.Helper()
	dir, err := built()
	require.NoError(t, err)
	return filepath.Join(dir, "tutti")
}

func TestMain(m *testing.M) {
	launch.Keep() // a test that is a launcher starts its ranks with it
	if role, ok := roles[os.Getenv(roleVariable)]; ok {
		os.Exit(play(role))
	}
	jobtest.DefaultSignals()
	code := m.Run()
	if dir, _ := built(); dir != "" {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// heedSignals makes the processes that a test starts heed signals that a shell may have made this one ignore: SIGHUP
// under nohup, SIGINT after a script's &.
func heedSignals(t *testing.T) {
	t.Helper()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT)
	t.Cleanup(func() { signal.Stop(signals) })
}

// A write beyond the limit of a file's size is an error that names the file and leaves no part of it behind.
func TestAFileThatMayNotGrow(t *testing.T) {
	dir := t.TempDir()
	cmd := command(t, "sh", "-c", `ulimit -f 4; exec "$0" "$@"`, build(t), "train", "--ranks", "2", "--epochs", "1", "--pattern", "dense", "--out", dir)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, "%s", out)
	assert.Equal(t, 1, exit.ExitCode(), "%s", out)
	assert.Contains(t, string(out), "file too large")
	assert.Contains(t, string(out), "loss-vs-bytes.png")
	assert.NotContains(t, string(out), "goroutine")
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	for _, f := range left {
		info, err := os.Stat(f)
		require.NoError(t, err)
		assert.Less(t, info.Size(), int64(4*512), "%s", f)
	}
}

// A signal ends a measurement that would run for hours, with the exit code that shells expect.
func TestSignalsEndTheCommand(t *testing.T) {
	heedSignals(t)
	tutti := build(t)
	for signal, want := range map[syscall.Signal]struct {
		text string
		code int
	}{
		syscall.SIGHUP:  {"tutti: hung up\n", 129},
		syscall.SIGINT:  {"tutti: interrupted\n", 130},
		syscall.SIGTERM: {"tutti: terminated\n", 143},
	} {
		cmd := command(t, tutti, "bench", "allreduce", "--ranks", "2", "--max", "8", "--iters", "1000000000", "--rounds", "1")
		// The note that such a job writes to stderr shows that it is about to begin.
		cmd.Env = append(cmd.Env, "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0")
		stderr, err := cmd.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewReader(stderr)
		note, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, note, "started 2 processes")
		require.NoError(t, cmd.Process.Signal(signal))
		var rest strings.Builder
		_, err = lines.WriteTo(&rest)
		require.NoError(t, err)
		var exit *exec.ExitError
		require.ErrorAs(t, cmd.Wait(), &exit)
		assert.Equal(t, want.code, exit.ExitCode())
		assert.Equal(t, want.text, rest.String())
	}
}

// A signal that a shell has ignored stays ignored.
func TestNohup(t *testing.T) {
	tutti := build(t)
	cmd := command(t, "sh", "-c", `trap "" HUP; exec "$0" "$@"`, tutti, "bench", "allreduce", "--ranks", "2", "--max", "8", "--iters", "1000000000", "--rounds", "1")
	cmd.Env = append(cmd.Env, "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0")
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewReader(stderr)
	_, err = lines.ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	assert.Equal(t, "tutti: terminated\n", string(rest))
	assert.Error(t, cmd.Wait())
}

// The command starts itself to look for MPI, not another program with the name by which it was called.
func TestInfoStartsItself(t *testing.T) {
	tutti := build(t)
	witness := filepath.Join(t.TempDir(), "tutti-by-another-name")
	ran := witness + ".ran"
	require.NoError(t, os.WriteFile(witness, []byte("#!/bin/sh\ntouch "+ran+"\n"), 0o700))
	cmd := command(t, tutti, "info")
	cmd.Args[0] = witness
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.NoFileExists(t, ran)
}

// The output of commands in the README and the tutorial equals the commands' output, except for numbers, and fits 80
// columns. A line of dots stands for the lines that follow.
func TestOutputInTheDocuments(t *testing.T) {
	t.Parallel()
	number := regexp.MustCompile(`^([0-9.]+|─+)$`)
	words := func(text string) (all []string) {
		for line := range strings.Lines(text) {
			assert.LessOrEqual(t, utf8.RuneCountInString(strings.TrimRight(line, "\n")), 80, line)
			for _, word := range strings.Fields(line) {
				all = append(all, number.ReplaceAllString(word, "n"))
			}
		}
		return all
	}
	for _, document := range []string{"README.md", "docs/tutorial.md"} {
		text, err := os.ReadFile("../../" + document)
		require.NoError(t, err)
		blocks := strings.Split(string(text), "```console\n$ tutti ")[1:]
		require.NotEmpty(t, blocks, document)
		for _, block := range blocks {
			block, _, _ = strings.Cut(block, "```")
			args, shown, _ := strings.Cut(block, "\n")
			want, cut := strings.CutSuffix(shown, "…\n")
			cmd := command(t, build(t), strings.Fields(args)...)
			cmd.Dir = t.TempDir()
			out, err := cmd.Output()
			require.NoError(t, err, args)
			got := words(string(out))
			if cut {
				got = got[:min(len(got), len(words(want)))]
			}
			assert.Equal(t, words(want), got, args)
		}
	}
}

// When the reader of the output or of the errors ends, the ranks are asked to end, with their grace period, and no line
// is printed: the exit code of a pipe says it.
func TestAReaderThatEnds(t *testing.T) {
	for _, stream := range []int{1, 2} {
		t.Run(fmt.Sprint(stream), func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "saved")
			script := fmt.Sprintf(`trap 'echo saved > "$0"; exit 0' TERM; while :; do echo line >&%d; sleep 0.01; done`, stream)
			cmd := command(t, build(t), "launch", "-n", "1", "sh", "-c", script, file)
			var other bytes.Buffer
			cmd.Stdout = &other
			cmd.Stderr = &other
			read, write, err := os.Pipe()
			require.NoError(t, err)
			if stream == 1 {
				cmd.Stdout = write
			} else {
				cmd.Stderr = write
			}
			require.NoError(t, cmd.Start())
			require.NoError(t, write.Close())
			_, err = read.Read(make([]byte, 1))
			require.NoError(t, err)
			require.NoError(t, read.Close())
			require.Error(t, cmd.Wait())
			assert.FileExists(t, file)
			assert.Equal(t, 141, cmd.ProcessState.ExitCode())
			assert.NotContains(t, other.String(), "tutti:")
		})
	}
}

// A closed terminal hangs up more than once, and the ranks keep their grace period. A second interrupt kills them.
func TestSignalsThatComeAgain(t *testing.T) {
	heedSignals(t)
	tutti := build(t)
	script := `trap 'echo told; sleep 0.5; echo saved; exit 0' HUP
		trap "echo told" INT; echo ready; while :; do sleep 0.05; done`
	for signal, want := range map[syscall.Signal]struct {
		saved bool
		text  string
	}{
		syscall.SIGHUP: {true, "tutti: hung up"},
		syscall.SIGINT: {false, "tutti: interrupted again: killing the ranks"},
	} {
		cmd := command(t, tutti, "launch", "-n", "1", "sh", "-c", script)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		var text []string
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			text = append(text, lines.Text())
			if lines.Text() == "[0] ready" || lines.Text() == "[0] told" && len(text) == 2 {
				require.NoError(t, cmd.Process.Signal(signal))
			}
		}
		require.Error(t, cmd.Wait())
		assert.Equal(t, want.saved, slices.Contains(text, "[0] saved"), "%v: %v", signal, text)
		assert.Contains(t, stderr.String(), want.text)
	}
}
