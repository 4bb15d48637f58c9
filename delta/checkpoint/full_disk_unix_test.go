//go:build unix

package checkpoint

import (
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// fileLimit is the signal of a write beyond the limit of a file's size, beside its error.
const fileLimit = syscall.Signal(25)

// childVariable is set in the process whose files cannot become longer. The log of a test's process is such a file.
const childVariable = "TUTTI_TEST_FULL_DISK"

// TestFullDisk: whichever write fails, for want of room, the file from before stays, and nothing else.
func TestFullDisk(t *testing.T) {
	if os.Getenv(childVariable) == "" {
		exe, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.Command(exe, "-test.run=^TestFullDisk$")
		cmd.Env = append(os.Environ(), childVariable+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return
	}
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit))
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, fileLimit)
	defer signal.Stop(signals)
	for name, w := range works(t) {
		t.Run(name, func(t *testing.T) {
			dir, before := outputs(t, w)
			failed := 0
			for size := uint64(0); ; size = size*3/2 + 1 {
				err := within(t, limit, size, func() error { return w.do(t.Context(), filepath.Join(dir, "out")) })
				if err == nil {
					break
				}
				require.ErrorIs(t, err, syscall.EFBIG, "%d bytes", size)
				untouched(t, dir, before, size)
				failed++
			}
			require.Greater(t, failed, 10)
		})
	}
}

// within does something while no file can become longer.
func within(t *testing.T, limit syscall.Rlimit, bytes uint64, do func() error) error {
	low := limit
	low.Cur = min(limit.Cur, bytes)
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &low))
	defer func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit)) }()
	return do()
}
