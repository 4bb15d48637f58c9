package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
	"github.com/tutti-go/tutti/internal/sparsity"
)

// onTerminal gives f a terminal of the given width and returns the output.
func onTerminal(t *testing.T, columns int, f func(out *os.File)) string {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs pseudo-terminals: %v", err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: uint16(columns)}))
	var shown bytes.Buffer
	read := make(chan bool)
	go func() {
		defer close(read)
		_, _ = io.Copy(&shown, master) // ends with an error when the terminal is closed
	}()
	f(slave)
	require.NoError(t, slave.Close())
	<-read
	require.NoError(t, master.Close())
	return strings.ReplaceAll(shown.String(), "\r\n", "\n")
}

// widest returns the longest line, without sequences that move the cursor.
func widest(shown string) (line string) {
	for l := range strings.SplitSeq(regexp.MustCompile(`\x1b\[[0-9;?]*[A-Za-z]`).ReplaceAllString(shown, ""), "\n") {
		if text.StringWidth(l) > text.StringWidth(line) {
			line = l
		}
	}
	return line
}

func TestTablesFitTheTerminal(t *testing.T) {
	long := strings.Repeat("a long explanation ", 12)
	info := information{Patterns: sparsity.Patterns(), GPUs: backend.GPUs{NoGPU: long, NoNCCL: long}}
	for _, b := range backend.All() {
		info.Backends = append(info.Backends, backendInfo{Name: b.Name, Summary: b.Summary, Detail: long})
	}
	for _, columns := range []int{72, 80, 132} {
		shown := onTerminal(t, columns, func(out *os.File) { info.print(console.NewOutput(out, nil)) })
		assert.LessOrEqual(t, text.StringWidth(widest(shown)), columns, widest(shown))
		assert.Contains(t, strings.Join(strings.Fields(shown), " "), "oktopk", "nothing is left out")
		shown = onTerminal(t, columns, func(out *os.File) { run(t.Context(), []string{"bench", "alreduce"}, out, out) })
		assert.LessOrEqual(t, text.StringWidth(widest(shown)), columns, widest(shown))
		assert.Contains(t, strings.Join(strings.Fields(shown), " "), `sparse); did you mean "allreduce"? Run`)
		seconds, step := 999.99, 1000
		report := trainReport{results: []train.Result{{Pattern: "gaussiankconcat", Values: "lossless", Accuracy: 100, SentElements: 1e6, SentBytes: 4e6,
			RatioToDense: 1, TotalSeconds: 999.99, Target: 97, TargetSeconds: &seconds, TargetStep: &step}}}
		shown = onTerminal(t, 80, func(out *os.File) { report.text = out; report.printTable() })
		assert.LessOrEqual(t, text.StringWidth(widest(shown)), 80, widest(shown))
	}
}

func TestBarsFitTheTerminal(t *testing.T) {
	draw := func(out *os.File) {
		b := &console.Bars{Out: out, Pieces: 1}
		for step := range 1000 {
			b.Set("gaussiankconcat", step, 1000)
		}
		b.Stop()
	}
	t.Setenv("TERM", "xterm")
	for _, columns := range []int{40, 60, 200} {
		shown := onTerminal(t, columns, draw)
		assert.Contains(t, shown, "gauss")
		assert.Less(t, text.StringWidth(widest(shown)), columns, widest(shown))
	}
	assert.Empty(t, onTerminal(t, 39, draw))
	t.Setenv("TERM", "dumb")
	assert.Empty(t, onTerminal(t, 80, draw))
}

// TestDeltaOnTerminal checks that the output of delta stays below its bar.
func TestDeltaOnTerminal(t *testing.T) {
	t.Setenv("TERM", "xterm")
	dir := t.TempDir()
	file := append([]byte{2, 0, 0, 0, 0, 0, 0, 0}, "{}"...)
	require.NoError(t, os.WriteFile(dir+"/w", file, 0o666))
	shown := onTerminal(t, 100, func(out *os.File) {
		require.Equal(t, exitOK, run(t.Context(), []string{"delta", "diff", dir + "/w", dir + "/w", "-o", dir + "/d"}, out, out))
	})
	bar, below, ok := strings.Cut(shown, "0 of 0 weights")
	require.True(t, ok, shown)
	assert.Contains(t, bar, "done!")
	assert.NotContains(t, below, "\x1b", "which moves back over the line")
}
