package launch

import (
	"fmt"

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

// bind binds the calling thread, and the processes that it starts from now on, to these processors. It does nothing if
// they are nil.
func bind(processors []int) error {
	if processors == nil {
		return nil
	}
	var share unix.CPUSet
	for _, p := range processors {
		share.Set(p)
	}
	if err := unix.SchedSetaffinity(0, &share); err != nil {
		return fmt.Errorf("--bind: processors %v: %w", processors, err)
	}
	return nil
}
