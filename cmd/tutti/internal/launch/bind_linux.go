package launch

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// usableProcessors lists the processors that this launcher may use.
func usableProcessors() (list []int, err error) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return nil, fmt.Errorf("the processors of this launcher: %w", err)
	}
	for p := 0; len(list) < all.Count(); p++ {
		if all.IsSet(p) {
			list = append(list, p)
		}
	}
	return list, nil
}

// startBound calls start, so that what it starts runs on these processors, or on all if they are nil. Processes inherit
// them from the thread that starts them.
func startBound(processors []int, start func() (*process, error)) (*process, error) {
	if processors == nil {
		return start()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, share unix.CPUSet
	for _, p := range processors {
		share.Set(p)
	}
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("--bind: the processors of this launcher: %w", err)
	}
	if err := unix.SchedSetaffinity(0, &share); err != nil {
		return nil, fmt.Errorf("--bind: processors %v: %w", processors, err)
	}
	// It fails if the system has taken all of them away meanwhile, and has then moved this thread itself.
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	return start()
}
