package machine

import (
	"runtime"

	"golang.org/x/sys/windows"

	"github.com/tutti-go/tutti/internal/hostmem"
)

var globalMemoryStatus = windows.NewLazySystemDLL("kernel32.dll").NewProc("GlobalMemoryStatusEx")

// Memory returns the host's total and free memory in bytes, 0 if not known.
func Memory() (total, free uint64) {
	status := []uint64{64, 0, 0, 0, 0, 0, 0, 0} // MEMORYSTATUSEX, which begins with its size
	ok, _, _ := globalMemoryStatus.Call(hostmem.Addr(status))
	runtime.KeepAlive(status)
	if ok == 0 {
		return 0, 0
	}
	return status[1], status[2]
}

func online() int { return 0 }
