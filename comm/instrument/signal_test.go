//go:build unix

package instrument_test

import (
	"context"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/internal/env"
)

// SIGTERM ends a process that does not handle it, after its dump is written. A process that
// handles it, and ends the context, goes on.
func TestDumpBeforeTermination(t *testing.T) {
	const variable = "TUTTI_TEST_TERMINATES"
	if role := os.Getenv(variable); role != "" {
		ctx := t.Context()
		if role == "handles" {
			var stop context.CancelFunc
			ctx, stop = signal.NotifyContext(ctx, syscall.SIGTERM)
			defer stop()
		}
		err := instrument.Run(ctx, nil, noop.New(hosttest.NewRuntime(t)), func(ctx context.Context, c comm.Communicator) error {
			if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Minute):
			}
			for { // so that it is the signal that has it written
				if _, err := os.Stat(filepath.Join(os.Getenv(env.RecordDir), "tutti-record-0.json")); err == nil {
					return context.Cause(ctx)
				}
				time.Sleep(time.Millisecond)
			}
		})
		require.ErrorIs(t, err, context.Canceled)
		return
	}
	for _, role := range []string{"handles", "does not"} {
		dir := t.TempDir()
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), variable+"="+role, env.Record+"=10", env.RecordDir+"="+dir)
		out, err := cmd.CombinedOutput()
		if role == "handles" {
			require.NoError(t, err, "%s", out)
		} else {
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "%s", out)
			require.Equal(t, syscall.SIGTERM, exit.Sys().(syscall.WaitStatus).Signal(), "%s", out)
		}
		require.FileExists(t, filepath.Join(dir, "tutti-record-0.json"))
	}
}
