package launch

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/comm"
)

// With fewer processes and threads than these, the runtime of a launcher, guard or keeper has always crashed.
const (
	launcherTasks = 8 // of a launcher and its guard
	rankTasks     = 6 // of a keeper and its rank's first process
)

// checkProcesses returns an error if this user may not start enough processes and threads for a number of ranks. Go's
// runtime ends a process that may start no more threads, with a dump instead of a reason.
func checkProcesses(ranks int) error {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NPROC, &limit)
	if err != nil || limit.Cur == unix.RLIM_INFINITY || isUnbound() {
		return nil
	}
	need := launcherTasks + ranks*rankTasks
	used := otherTasks()
	if limit.Cur >= uint64(used+need) {
		return nil
	}
	const format = "%w: this job takes %d processes and threads or more, and of the user's %d (ulimit -u), %d are in use"
	return fmt.Errorf(format, comm.ErrExhausted, need, limit.Cur, used)
}

// isUnbound reports whether the system lets this process exceed the user's bound, or counts by other users than those
// that it shows.
func isUnbound() bool {
	const mayExceed = 1<<unix.CAP_SYS_RESOURCE | 1<<unix.CAP_SYS_ADMIN
	rights, err := strconv.ParseUint(statusField(os.Getpid(), "CapEff"), 16, 64)
	users, _ := os.ReadFile("/proc/self/uid_map")
	isNamespace := strings.Join(strings.Fields(string(users)), " ") != "0 0 4294967295"
	return os.Getuid() == 0 || err != nil || rights&mayExceed != 0 || isNamespace
}

// otherTasks counts the threads of this user's other processes.
func otherTasks() (count int) {
	user := strconv.Itoa(os.Getuid())
	for _, children := range listProcesses() {
		for _, p := range children {
			owner, _, _ := strings.Cut(statusField(p.pid, "Uid"), "\t")
			threads, err := strconv.Atoi(statusField(p.pid, "Threads"))
			if err == nil && owner == user && p.pid != os.Getpid() {
				count += threads
			}
		}
	}
	return count
}
