package poll

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// yielded moves this thread home if a yield has taken so long that others use its processor.
func (h *Home) yielded(length time.Duration, now time.Time) {
	if length < sharedYield {
		return
	}
	if !h.mu.TryLock() {
		return // another wait of this rank decides
	}
	defer h.mu.Unlock()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Read each time, as launchers and containers change it while a process runs.
	var usable unix.CPUSet
	if unix.SchedGetaffinity(0, &usable) != nil {
		return // the host has more processors than a set
	}
	if _, _, e := unix.RawSyscall(unix.SYS_GETCPU, hostmem.AddrOf(&h.current), 0, 0); e != 0 {
		return
	}
	place := h.choose(length, now, preceding(&usable, int(h.current)), usable.Count())
	if place == stay {
		return
	}
	var home unix.CPUSet
	home.Set(processor(&usable, place))
	if unix.SchedSetaffinity(0, &home) == nil { // returns on that processor
		_ = unix.SchedSetaffinity(0, &usable)
	}
}

// preceding returns the number of processors of a set before one.
func preceding(set *unix.CPUSet, processor int) (n int) {
	for i := range processor {
		if set.IsSet(i) {
			n++
		}
	}
	return n
}

// processor returns the processor with a number of others of the set before it.
func processor(set *unix.CPUSet, place int) (i int) {
	for place > 0 || !set.IsSet(i) {
		if set.IsSet(i) {
			place--
		}
		i++
	}
	return i
}
