package machine

import (
	"os"

	"golang.org/x/sys/unix"
)

// Memory returns the host's total and free memory in bytes, 0 if not known.
func Memory() (total, free uint64) {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0, 0
	}
	unit := uint64(info.Unit)
	return uint64(info.Totalram) * unit, uint64(info.Freeram) * unit
}

func online() int {
	list, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return 0
	}
	return count(string(list))
}
