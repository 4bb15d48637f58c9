package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	ancestor "github.com/tutti-go/tutti/internal/keeper"
	"github.com/tutti-go/tutti/internal/printable"
)

// attributes gives a rank its own process group, and kills the rank when its keeper dies.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// guardAttributes give a guard its own session: what a terminal sends, or a user to the launcher's, is not its. A guard
// that is stopped goes on when its launcher ends, or the launcher's thread that has started it.
func guardAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGCONT}
}

// self is this program, also when its file was replaced. It is an error if /proc has other numbers for processes than
// this process: descendants would be strangers, and would survive their rank.
func self() (string, error) {
	name, err := os.Readlink("/proc/self")
	if err != nil {
		return "", fmt.Errorf("%w: mount -t proc proc /proc", err)
	}
	if name != strconv.Itoa(os.Getpid()) {
		return "", errors.New("/proc is that of another PID namespace: unshare --mount-proc mounts its own")
	}
	return "/proc/self/exe", nil
}

// hideName replaces the process's name in lists, which is otherwise the name of the program's file.
func hideName(name string) { _ = os.WriteFile("/proc/self/comm", []byte(name), 0) }

// adoptOrphans makes this process the parent of descendants whose parents end.
func adoptOrphans() error {
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// awaitGroup does nothing here: every process of a group is a descendant.
func awaitGroup(int) {}

// canList tells that [descendants] finds the descendants of a process.
const canList = true

// descendants lists the processes that a process has started, directly or indirectly.
func descendants(root int) []entry { return listProcesses().descend(root) }

// listProcesses lists the processes of this machine.
func listProcesses() family {
	names, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	children := family{}
	for _, name := range names {
		pid, err := strconv.Atoi(name.Name())
		if err != nil {
			continue
		}
		if e, ok := readStatus(pid); ok {
			children[e.parent] = append(children[e.parent], e)
		}
	}
	return children
}

// readStatus reads a process's line in the list. ok is false if the process has ended.
func readStatus(pid int) (e entry, ok bool) {
	fields := ancestor.Status(pid)
	const startField = 19 // field 22 of all, as the manual counts
	if len(fields) <= startField {
		return entry{}, false
	}
	e = entry{pid: pid, stopped: string(fields[0]) == "T", zombie: string(fields[0]) == "Z"}
	var err error
	e.parent, err = strconv.Atoi(string(fields[1]))
	if err != nil {
		return entry{}, false
	}
	e.group, err = strconv.Atoi(string(fields[2]))
	if err != nil {
		return entry{}, false
	}
	e.start, err = strconv.Atoi(string(fields[startField]))
	return e, err == nil
}

// signal sends a process a signal. If the process has ended, the error is ESRCH, even if another process has its
// number.
func (e entry) signal(s syscall.Signal) error {
	fd, openErr := unix.PidfdOpen(e.pid, 0)
	if errors.Is(openErr, unix.ESRCH) {
		return openErr
	}
	if openErr == nil {
		defer unix.Close(fd) //nolint:errcheck // nothing was written
	}
	// If the process lives after the file was opened, the file is its.
	if now, ok := readStatus(e.pid); !ok || now.start != e.start {
		return syscall.ESRCH
	}
	if openErr != nil { // the kernel knows no such files, or too many are open
		return syscall.Kill(e.pid, s)
	}
	return unix.PidfdSendSignal(fd, s, nil, 0)
}

// processName returns a process's name in lists, "" if the process has ended.
func processName(pid int) string {
	text, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	return printable.Text(strings.TrimSpace(string(text)))
}

// catches reports whether a process handles a signal, which would end it otherwise.
func catches(pid int, s syscall.Signal) bool {
	bits, err := strconv.ParseUint(statusField(pid, "SigCgt"), 16, 64)
	return err == nil && bits>>(s-1)&1 == 1
}

// statusField returns what the system says of a process under a name, "" if the process has ended.
func statusField(pid int, name string) string {
	text, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	_, value, _ := strings.Cut(string(text), "\n"+name+":\t")
	value, _, _ = strings.Cut(value, "\n")
	return value
}

// memoryKills counts the processes that the kernel has killed for lack of memory.
func memoryKills() int { return memoryKillsIn("/") }

// memoryKillsIn is memoryKills for system files below root. It counts kills in this process's control group and below
// it. If the group does not count them, it counts kills on the whole machine.
func memoryKillsIn(root string) int {
	groups, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	for line := range strings.Lines(string(groups)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) < 3 {
			continue
		}
		file := filepath.Join("sys/fs/cgroup", fields[2], "memory.events")
		if fields[1] == "memory" { // the first version of control groups
			file = filepath.Join("sys/fs/cgroup/memory", fields[2], "memory.oom_control")
		} else if fields[1] != "" {
			continue
		}
		if count, ok := counter(filepath.Join(root, file), "oom_kill"); ok {
			return count
		}
	}
	count, _ := counter(filepath.Join(root, "proc/vmstat"), "oom_kill")
	return count
}

// counter reads a number from a file whose lines each hold a name and a number.
func counter(path, name string) (count int, ok bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if number, found := strings.CutPrefix(line, name+" "); found {
			count, err := strconv.Atoi(strings.TrimSpace(number))
			return count, err == nil
		}
	}
	return 0, false
}
