package p2p_test

import (
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// standInVariable marks the process of TestOnStandIns.
const standInVariable = "TUTTI_TEST_STAND_IN"

// TestOnStandIns runs the suite without a GPU, on the stand-ins for NCCL and the
// driver with one rank: everything but what kernels compute, which the driver's
// stand-in does not run. The libraries are opened once a process, so this test
// binary runs again.
func TestOnStandIns(t *testing.T) {
	if os.Getenv(standInVariable) != "" {
		t.Skip("is in the process of the stand-ins already")
	}
	if goruntime.GOOS != "linux" {
		t.Skipf("the stand-ins are for Linux, not %s", goruntime.GOOS)
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skipf("needs a C compiler: %v", err)
	}
	dir := t.TempDir()
	build := func(source string) string {
		if _, err := os.Stat(source); err != nil {
			t.Skipf("is a test binary away from its sources: %v", err)
		}
		library := filepath.Join(dir, filepath.Base(source)+".so")
		out, err := exec.Command(cc, "-O2", "-shared", "-fPIC", "-o", library, source, "-lpthread").CombinedOutput()
		require.NoError(t, err, "%s", out)
		return library
	}
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.v", "-test.timeout=2m", "-test.run=^TestConformance$", "-test.skip=//^(allreduce|reduce|reducescatter)$")
	// Capability 8.0: the driver's stand-in has no launches with attributes.
	cmd.Env = append(os.Environ(), standInVariable+"=1", "FAKE_CUDA_MAJOR=8", "FAKE_CUDA_MEMORY=2147483648",
		"TUTTI_NCCL_LIB="+build(filepath.Join("..", "nccl", "testdata", "nccl.c")),
		"TUTTI_CUDA_LIB="+build(filepath.Join("..", "..", "runtime", "cuda", "testdata", "driver.c")))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: TestConformance ")
}
