package keeper

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// guardTime is how long a process waits after its keeper's end. The launcher's guard, unless it was killed as well,
	// ends the rank's processes within it, and reports the end.
	guardTime = time.Second
	// wordTime bounds the wait for a reader of the last line.
	wordTime = time.Second
)

// following is done once: a process has one keeper.
var following sync.Once

// Follow makes this process end when the process with this number ends, if that is this process's keeper. Otherwise it
// does nothing: variables of a job outlive it, and are passed to processes that do not belong to it.
func Follow(number string) {
	pid, err := strconv.Atoi(number)
	if err != nil {
		return
	}
	following.Do(func() {
		if file := open(pid); file != nil {
			go end(file, pid)
		}
	})
}

// open returns a file that can be read when the keeper has ended. It returns nil if the process is not this process's
// keeper, or if the system cannot tell.
func open(pid int) *os.File {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	// Ancestors are older than this process. The file is therefore the ancestor's, and no earlier process's of its number.
	if !isKeeper(pid) || unix.SetNonblock(fd, true) != nil {
		_ = unix.Close(fd)
		return nil
	}
	return os.NewFile(uintptr(fd), Name)
}

// isKeeper reports whether a process is a keeper and an ancestor of this one.
func isKeeper(pid int) bool {
	self, err := os.Readlink("/proc/self")
	if err != nil || self != strconv.Itoa(os.Getpid()) { // /proc numbers processes of another namespace
		return false
	}
	name, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	return err == nil && strings.TrimSpace(string(name)) == Name && isAncestor(pid)
}

// isAncestor reports whether a process is an ancestor of this one.
func isAncestor(pid int) bool {
	const tries = 100 // an ancestor that ends meanwhile leaves its children to another one
	for range tries {
		found := os.Getpid()
		for found > 1 && found != pid {
			found = parent(found)
		}
		if found >= 0 {
			return found == pid && pid != os.Getpid()
		}
	}
	return false
}

// parent returns the number of a process's parent, -1 if the process has ended.
func parent(pid int) int {
	fields := Status(pid)
	if len(fields) < 2 {
		return -1
	}
	number, err := strconv.Atoi(string(fields[1]))
	if err != nil {
		return -1
	}
	return number
}

// Status returns the fields of a process's line in the list (/proc/PID/stat, see proc_pid_stat(5)), from the third on,
// which is its state. It returns nil if the process has ended.
func Status(pid int) [][]byte {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return nil
	}
	// The name before these fields may contain any character.
	return bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
}

// end ends this process after its keeper has ended.
func end(file *os.File, pid int) {
	raw, err := file.SyscallConn()
	if err != nil || raw.Read(hasEnded) != nil {
		return // the system cannot tell when
	}
	time.Sleep(guardTime)
	said := make(chan struct{})
	go func() {
		const format = "tutti: process %d ends, because the keeper of its rank (%s, process %d) was killed\n"
		fmt.Fprintf(os.Stderr, format, os.Getpid(), Name, pid)
		close(said)
	}()
	select {
	case <-said:
	case <-time.After(wordTime):
	}
	os.Exit(128 + int(syscall.SIGKILL))
}

// hasEnded reports whether the process of a file has ended.
func hasEnded(fd uintptr) bool {
	for {
		files := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		count, err := unix.Poll(files, 0)
		if !errors.Is(err, unix.EINTR) {
			return count > 0
		}
	}
}
