//go:build unix && !linux

package launch

import "syscall"

// attributes give a rank a process group of its own.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
