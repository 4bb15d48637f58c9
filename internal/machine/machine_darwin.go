package machine

import "golang.org/x/sys/unix"

// Memory returns the host's memory in bytes, 0 if not known.
func Memory() (total, free uint64) {
	total, err := unix.SysctlUint64("hw.memsize")
	if err != nil {
		return 0, 0
	}
	return total, 0
}

func online() int { return 0 }
