//go:build unix

package atomicfile

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// descriptor returns the number of the descriptor of this process that a name in a folder stands for: /dev/fd/3, or
// on Linux, where that leads to, /proc/17/fd/3 and /proc/17/task/18/fd/3.
func descriptor(dir, name string) (fd int, ok bool) {
	processDir := fmt.Sprintf("/proc/%d/", os.Getpid())
	dir = filepath.Clean(dir)
	if dir != "/dev/fd" && (filepath.Base(dir) != "fd" || !strings.HasPrefix(dir, processDir)) {
		return 0, false
	}
	fd, err := strconv.Atoi(name)
	return fd, err == nil
}

// duplicate opens a descriptor again, at the same place of the same file: opening it by its name would begin anew.
func duplicate(fd int, path string) (*os.File, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	copied, err := syscall.Dup(fd)
	if err != nil {
		return nil, &os.PathError{
			Op:   "open",
			Path: path,
			Err:  err,
		}
	}
	syscall.CloseOnExec(copied)
	return os.NewFile(uintptr(copied), path), nil
}
