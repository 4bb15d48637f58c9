//go:build unix && !linux

package launch

import (
	"os"
	"syscall"
	"time"
)

// attributes gives a rank its own process group.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// guardAttributes give a guard its own session: what a terminal sends, or a user to the launcher's, is not its.
func guardAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// self is this program.
func self() (string, error) { return os.Executable() }

// hideName does nothing here.
func hideName(string) {}

// adoptOrphans does nothing here.
func adoptOrphans() error { return nil }

// emptyTime is the interval at which a keeper checks whether a process group is empty: this system reports no event.
const emptyTime = 20 * time.Millisecond

// awaitGroup waits until a process group is empty.
func awaitGroup(group int) {
	for syscall.Kill(-group, 0) == nil {
		time.Sleep(emptyTime)
	}
}

// canList tells that [descendants] finds no process.
const canList = false

// listProcesses lists no process here.
func listProcesses() family { return nil }

// descendants lists no process here: a rank is its process group.
func descendants(int) []entry { return nil }

// signal sends a process a signal.
func (e entry) signal(s syscall.Signal) error { return syscall.Kill(e.pid, s) }

// processName is unknown here.
func processName(int) string { return "" }

// catches is always true here: handlers are unknown.
func catches(int, syscall.Signal) bool { return true }

// memoryKills is always 0 here: the count is unknown.
func memoryKills() int { return 0 }
