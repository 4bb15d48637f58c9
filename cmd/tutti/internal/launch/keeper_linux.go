package launch

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tutti-go/tutti/internal/printable"
)

// attributes give a rank its own process group, and have it die with its keeper.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// self is this program, also when its file was replaced.
func self() (string, error) { return "/proc/self/exe", nil }

// hideName has the process go by another name than that of the program's file.
func hideName(name string) { _ = os.WriteFile("/proc/self/comm", []byte(name), 0) }

// adoptOrphans makes this process the parent of its descendants whose parents end.
func adoptOrphans() error {
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// awaitGroup has nothing to wait for: all of a group are descendants.
func awaitGroup(int) {}

// canList says that [descendants] finds a process's.
const canList = true

// descendants lists the processes that a process has started, directly or not.
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

// readStatus reads the line of a process. ok is false if there is none.
func readStatus(pid int) (e entry, ok bool) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	// The name before these fields may have any character.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if err != nil || len(fields) < 3 {
		return entry{}, false
	}
	e = entry{pid: pid, stopped: string(fields[0]) == "T", zombie: string(fields[0]) == "Z"}
	e.parent, err = strconv.Atoi(string(fields[1]))
	if err != nil {
		return entry{}, false
	}
	e.group, err = strconv.Atoi(string(fields[2]))
	return e, err == nil
}

// processName is the name of a process in lists, "" if it has ended.
func processName(pid int) string {
	text, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	return printable.Text(strings.TrimSpace(string(text)))
}

// catches reports whether a process has a handler for a signal, which would end it otherwise.
func catches(pid int, s syscall.Signal) bool {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return false
	}
	_, mask, _ := strings.Cut(string(text), "\nSigCgt:\t")
	mask, _, _ = strings.Cut(mask, "\n")
	bits, err := strconv.ParseUint(mask, 16, 64)
	return err == nil && bits>>(s-1)&1 == 1
}

// memoryKills is how many processes the kernel has killed for want of memory.
func memoryKills() int { return memoryKillsIn("/") }

// memoryKillsIn is memoryKills with the system's files below a directory: those killed in the control group of this
// process and below it, or on the whole machine where the group does not count them.
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

// counter reads a number from a file with a name and a number in each line.
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
