package rendezvous

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/jobtest"
)

// payloadVariable makes the test binary a process of a job, whose rank 0 shares
// the variable's value and whose others print what they get.
const payloadVariable = "TUTTI_TEST_PAYLOAD"

func TestMain(m *testing.M) {
	for _, home := range []string{"XDG_CONFIG_HOME", "HOME", "AppData"} { // not the files of who runs this
		if os.Getenv(payloadVariable) == "" {
			_ = os.Setenv(home, filepath.Join(os.TempDir(), fmt.Sprint("tutti-rendezvous-test-", os.Getpid())))
		}
	}
	own := os.Getenv(payloadVariable)
	if own == "" {
		code := m.Run()
		_ = os.RemoveAll(os.Getenv("HOME"))
		os.Exit(code)
	}
	job, err := FromEnv(os.Getenv)
	if err == nil && job.Rank > 0 {
		own = ""
	}
	var got []byte
	if err == nil {
		got, err = job.share(context.Background(), own)
	}
	if err != nil {
		fmt.Println("ERROR", err)
		os.Exit(1)
	}
	fmt.Printf("rank %d of %d has %s\n", job.Rank, job.WorldSize, got)
}

// Two jobs of a launcher on one host, at the same time and without any variable
// of the user's, keep apart; the processes may be started by a script. Beside tests that connect to ports which were
// free a moment ago, a launcher's own ports would be disturbed.
func TestJobsOfOneLauncher(t *testing.T) {
	if err := exec.Command(os.Args[0], "-test.list=^$").Run(); err != nil {
		t.Skipf("this binary runs in an emulator alone: %v", err)
	}
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		t.Run(launcher, func(t *testing.T) {
			if _, err := exec.LookPath(launcher); err != nil {
				t.Skip(err)
			}
			var wg sync.WaitGroup
			outputs, errs := make([]string, 2), make([]error, 2)
			for i := range outputs {
				environment := jobtest.Environment(t)
				wg.Go(func() {
					cmd := exec.CommandContext(deadline(t, time.Minute), launcher, "-n", "3", "sh", "-c", os.Args[0]+"; exit $?")
					cmd.Env = append(environment, fmt.Sprintf("%s=payload-%d", payloadVariable, i))
					out, err := cmd.CombinedOutput()
					outputs[i], errs[i] = string(out), err
				})
			}
			wg.Wait()
			for i, out := range outputs {
				require.NoError(t, errs[i], out)
				for rank := range 3 {
					assert.Contains(t, out, fmt.Sprintf("rank %d of 3 has payload-%d", rank, i))
				}
			}
		})
	}
}
