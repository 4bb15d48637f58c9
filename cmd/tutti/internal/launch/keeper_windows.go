package launch

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// Keep returns at once: ranks have no keepers here.
func Keep() {}

// listProcesses lists no process here.
func listProcesses() family { return nil }

// processName is unknown here.
func processName(int) string { return "" }

// process is a rank.
type process struct {
	cmd *exec.Cmd // the rank's process
}

// separate gives a process its own group, so that it gets a terminal's signals from the launcher alone.
func separate() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{CreationFlags: syscall.CREATE_NEW_PROCESS_GROUP}
}

// guard does nothing here.
type guard struct{}

// newGuard returns a guard.
func newGuard() (*guard, error) { return &guard{}, nil }

// ended is always false here.
func (*guard) ended() bool { return false }

// kill does nothing: the first signal has killed the ranks.
func (*guard) kill() {}

// wait has nothing to wait for.
func (*guard) wait() {}

// startProcess starts a rank with files for its output and errors. Windows has no signals, so ranks have no grace.
func startProcess(_ *guard, o order, out, errs *os.File) (*process, error) {
	path, err := exec.LookPath(o.Words[0])
	if err != nil {
		return nil, err
	}
	cmd := &exec.Cmd{Path: path, Args: o.Words, Env: o.Env, Stdout: out, Stderr: errs}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &process{cmd: cmd}, nil
}

// signal kills the rank: Windows has no other signals.
func (p *process) signal(syscall.Signal) { _ = p.cmd.Process.Kill() }

// ended waits for the end of the rank.
func (p *process) ended() error {
	err := p.cmd.Wait()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return &exitError{outcome{Code: exit.ExitCode()}}
	}
	return err
}

// wait has nothing to wait for.
func (p *process) wait() error { return nil }

// pid returns the rank's process.
func (p *process) pid() int { return p.cmd.Process.Pid }
