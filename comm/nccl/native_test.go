package nccl

import (
	"os"
	goruntime "runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// A communicator that takes too long to be freed is waited for once, not by every launch.
func TestWhatIsNeverFreed(t *testing.T) {
	stuck := &native{freed: make(chan struct{})}
	var f frees
	f.begin(stuck, -time.Second)
	f.await(t.Context())
	require.False(t, f.busy.Load())
	f.ended(stuck) // after all
	require.False(t, f.busy.Load())
}

// Memory that a thread freed below an allocation that it kept returns to the system.
func TestTrim(t *testing.T) {
	if !libc().Trim.Found() {
		t.Skip("the C library has no malloc_trim")
	}
	var sym struct {
		Malloc dl.Func `sym:"malloc"`
		Free   dl.Func `sym:"free"`
	}
	lib, err := dl.Open("libc.so.6")
	require.NoError(t, err)
	require.NoError(t, lib.Bind(&sym))
	resident := func() int {
		text, err := os.ReadFile("/proc/self/statm")
		require.NoError(t, err)
		pages, err := strconv.Atoi(strings.Fields(string(text))[1])
		require.NoError(t, err)
		return pages * os.Getpagesize()
	}
	const blocks, size = 1 << 10, 32 << 10
	kept := make(chan uintptr)
	go func() { // on another thread, and so perhaps in another arena
		goruntime.LockOSThread()
		defer goruntime.UnlockOSThread()
		all := make([]uintptr, blocks)
		for i := range all {
			all[i] = sym.Malloc.Call(size)
			clear(hostmem.Slice[byte](all[i], size)) // as memory comes to be
			hostmem.Slice[byte](all[i], size)[0] = 1
		}
		for _, p := range all[:blocks-1] {
			sym.Free.Call(p)
		}
		kept <- all[blocks-1]
	}()
	last := <-kept
	defer sym.Free.Call(last)
	before := resident()
	trim()
	require.Less(t, resident(), before-blocks*size/2)
}
