package cuda

import (
	"context"
	"os"
	"os/exec"
	goruntime "runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// brokenVariable marks the process that breaks its GPU's context.
const brokenVariable = "TUTTI_TEST_BROKEN"

// A kernel that reads where no memory is makes the context of its process
// unusable, for good, so that happens in its own process.
func TestAnIllegalAccessBreaksTheRuntime(t *testing.T) {
	openGPU(t)
	if os.Getenv(brokenVariable) == "" {
		self, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.Command(self, "-test.run=^TestBreakTheRuntime$", "-test.v", "-test.timeout=2m")
		cmd.Env = append(os.Environ(), brokenVariable+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS")
	}
}

func TestBreakTheRuntime(t *testing.T) {
	if os.Getenv(brokenVariable) == "" {
		t.Skip("breaks the GPU for its process; see TestAnIllegalAccessBreaksTheRuntime")
	}
	rt, err := Open(0)
	require.NoError(t, err)
	p, err := rt.Allocate(1 << 20)
	require.NoError(t, err)
	event, err := rt.NewEvent()
	require.NoError(t, err)

	require.NoError(t, rt.Kernels().Store(1<<20, dtype.F32, 1<<20, 1000, 2, 0), "the fault shows when the kernel runs")
	err = rt.Synchronize(context.Background())
	require.ErrorIs(t, err, runtime.ErrBroken)
	var cause *Error
	require.ErrorAs(t, err, &cause)
	assert.True(t, cause.Sticky)
	t.Log(err)

	_, allocateErr := rt.Allocate(1 << 30)
	for name, err := range map[string]error{
		"allocate":   allocateErr,
		"fill":       rt.Fill(p, 10, dtype.F32, 1),
		"copy":       rt.CopyOut(make([]byte, 8), p),
		"record":     rt.Stream().Record(event),
		"deallocate": rt.Deallocate(p),
		"event":      event.Close(),
	} {
		assert.ErrorIs(t, err, runtime.ErrBroken, name)
		assert.ErrorContains(t, err, cause.Name, name)
	}
	called := make(chan bool, 1)
	go func() {
		goruntime.LockOSThread() // and let the thread end with the goroutine
		rt.drv.sym.CtxSetCurrent.Int(0)
		rt.CurrentToFree(func() { called <- true })
		close(called)
	}()
	assert.True(t, <-called, "a broken context can be made current, for libraries to free things")
	err = rt.Close()
	assert.ErrorIs(t, err, runtime.ErrBroken)
	t.Log(err)
	_, err = Open(0) // fails or not, but must not crash
	t.Log(err)
}
