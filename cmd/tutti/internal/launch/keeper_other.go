//go:build unix && !linux

package launch

import (
	"os"
	"syscall"
	"time"
)

// attributes give a rank its own process group.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// self is this program.
func self() (string, error) { return os.Executable() }

// hideName does nothing here.
func hideName(string) {}

// adoptOrphans does nothing here.
func adoptOrphans() error { return nil }

// emptyTime is how often a keeper looks whether a process group is empty, which no event tells here.
const emptyTime = 20 * time.Millisecond

// awaitGroup waits until a process group is empty.
func awaitGroup(group int) {
	for syscall.Kill(-group, 0) == nil {
		time.Sleep(emptyTime)
	}
}

// canList says that [descendants] finds none.
const canList = false

// listProcesses lists none here.
func listProcesses() family { return nil }

// descendants are not listed here: a rank is its process group.
func descendants(int) []entry { return nil }

// processName is not known here.
func processName(int) string { return "" }

// catches is not known here.
func catches(int, syscall.Signal) bool { return true }

// memoryKills is not known here.
func memoryKills() int { return 0 }
