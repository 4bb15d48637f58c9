package launch

import (
	"os"
	"syscall"
)

// attributes of a rank.
func attributes() *syscall.SysProcAttr { return nil }

// signal ends a rank: there are no other signals.
func signal(p *os.Process, _ syscall.Signal) { _ = p.Kill() }

// killedBy is 0: signals do not end processes.
func killedBy(*os.ProcessState) syscall.Signal { return 0 }
