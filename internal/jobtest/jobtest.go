// Package jobtest runs programs as jobs in tests, of this module and of those below it, and provides rendezvous
// addresses.
package jobtest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Launchers are the programs that start jobs of the MPI libraries, side by side as
// Debian installs them.
var Launchers = []string{"mpirun.openmpi", "mpirun.mpich"}

// limit bounds a job.
const limit = 2 * time.Minute

// Build builds the main package in a folder, and returns the program.
func Build(t *testing.T, folder string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, folder).CombinedOutput(); err != nil {
		t.Fatalf("go build %s: %v\n%s", folder, err, out)
	}
	return program
}

// Environment returns the environment of this process plus the settings that Open MPI's launcher needs in a test. The
// launcher refuses root and more processes than processors unless told otherwise. It fails if another one makes the
// same directories in the temporary directory at once, so each call has its own temporary directory. Processes without
// that launcher make these directories themselves, and the first to end would remove empty ones while others begin; so
// the directories exist already, and stay.
func Environment(t testing.TB) []string {
	t.Helper()
	temporary, err := os.MkdirTemp("", "mpi") // short: sockets below it have at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(temporary) })
	host, _ := os.Hostname()
	host, _, _ = strings.Cut(host, ".")
	shared := filepath.Join(temporary, fmt.Sprintf("ompi.%s.%d", host, os.Getuid()))
	if err := os.MkdirAll(filepath.Join(shared, "stays"), 0o700); err != nil {
		t.Fatal(err)
	}
	return append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_mpi_yield_when_idle=1", "TMPDIR="+temporary)
}

// DefaultSignals makes processes that this one starts from now on receive signals as usual. The process that started
// the tests may ignore hangups or interrupts, as nohup does, and children inherit that, unless this process handles
// them.
func DefaultSignals() {
	for _, s := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
}

// Output runs a program to its end and returns what it printed.
func Output(t *testing.T, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = Environment(t)
	cmd.WaitDelay = 5 * time.Second
	var out, errs bytes.Buffer
	cmd.Stdout = &out
	cmd.Stderr = &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v\n%s%s", cmd, err, &out, &errs)
	}
	return out.String()
}

// SameEverywhere runs a program with -backend local and, with as many processes, with -backend mpi under each
// installed launcher. It fails unless all print the same.
func SameEverywhere(t *testing.T, program string, args ...string) {
	t.Helper()
	want := Output(t, program, append([]string{"-backend", "local", "-ranks", "4"}, args...)...)
	t.Logf("local: %s", want)
	for _, launcher := range Launchers {
		t.Run(launcher, func(t *testing.T) {
			if _, err := exec.LookPath(launcher); err != nil {
				t.Skip("it is not installed")
			}
			if got := Output(t, launcher, append([]string{"-n", "4", program, "-backend", "mpi"}, args...)...); got != want {
				t.Errorf("got %swant %s", got, want)
			}
		})
	}
}
