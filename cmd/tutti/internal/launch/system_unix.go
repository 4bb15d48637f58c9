//go:build unix

package launch

import (
	"os"
	"syscall"
)

// signal sends a signal to a rank and what it started.
func signal(p *os.Process, s syscall.Signal) { _ = syscall.Kill(-p.Pid, s) }

// killedBy is the signal that ended a process, 0 if none did.
func killedBy(s *os.ProcessState) syscall.Signal {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return w.Signal()
	}
	return 0
}
