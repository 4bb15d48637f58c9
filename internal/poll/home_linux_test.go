package poll

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestThreadsReturn: the thread is at home after slow yields, and may use all processors that it could use before.
func TestThreadsReturn(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &all))
	n := all.Count()
	if n < 2 {
		t.Skip("needs two processors")
	}
	const tries = 100
	returns := 0
	for i := range tries {
		rank := i % n
		h := NewHome(rank, n)
		var other unix.CPUSet
		other.Set(processor(&all, (rank+1)%n))
		require.NoError(t, unix.SchedSetaffinity(0, &other))
		require.NoError(t, unix.SchedSetaffinity(0, &all))
		for range manyShared {
			h.yielded(sharedYield, began)
		}
		h.yielded(sharedYield, began.Add(time.Second)) // names the processor
		if preceding(&all, int(h.current)) == rank {
			returns++
		}
		var now unix.CPUSet
		require.NoError(t, unix.SchedGetaffinity(0, &now))
		require.Equal(t, all, now)
	}
	assert.Greater(t, returns, tries/2, "the kernel may move the thread, but not each time")
	h := NewHome(0, n)
	for range 100 {
		h.yielded(sharedYield-1, began)
	}
	assert.Zero(t, h.shared, "short yields do not count")
	assert.Zero(t, testing.AllocsPerRun(100, func() { h.yielded(sharedYield, began) }))
}

func TestPlaces(t *testing.T) {
	var set unix.CPUSet
	for _, p := range []int{2, 3, 64, 100} {
		set.Set(p)
	}
	for place, p := range []int{2, 3, 64, 100} {
		assert.Equal(t, place, preceding(&set, p))
		assert.Equal(t, p, processor(&set, place))
	}
}
