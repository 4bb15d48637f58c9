package machine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const boundVariable = "TUTTI_TEST_BOUND"

// TestBound starts this test as a launcher does that binds its ranks to a processor each.
func TestBound(t *testing.T) {
	if os.Getenv(boundVariable) != "" {
		fmt.Println(Bound())
		return
	}
	require.Positive(t, online())
	if runtime.NumCPU() == 1 {
		t.Skip("needs two processors")
	}
	assert.Empty(t, Bound(), "several processors")

	runtime.LockOSThread() // for good: the thread ends with the test
	var all, one unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &all))
	for i := 0; one.Count() == 0; i++ {
		if all.IsSet(i) {
			one.Set(i)
		}
	}
	require.NoError(t, unix.SchedSetaffinity(0, &one))
	cmd := exec.Command(os.Args[0], "-test.run=^TestBound$")
	cmd.Env = append(os.Environ(), boundVariable+"=1")
	out, err := cmd.CombinedOutput()
	if errors.Is(err, unix.ENOEXEC) {
		t.Skip("an emulator runs this test, which the kernel cannot start")
	}
	require.NoError(t, err, "%s", out)
	assert.Contains(t, string(out), fmt.Sprintf("1 of the host's %d processors", online()))
	assert.Contains(t, string(out), "--bind-to none")
}
