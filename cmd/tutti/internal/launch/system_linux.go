package launch

import "syscall"

// attributes give a rank a process group of its own, so that a terminal's interrupt reaches it once, from the
// launcher, and have it die with the launcher.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
