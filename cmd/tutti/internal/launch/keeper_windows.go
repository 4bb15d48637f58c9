package launch

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// Keep returns: a rank has no keeper here.
func Keep() {}

// listProcesses lists none here.
func listProcesses() family { return nil }

// processName is not known here.
func processName(int) string { return "" }

// process is a rank.
type process struct {
	cmd *exec.Cmd // the rank's own
}

// separate gives a process its own group: what a terminal sends comes from the launcher alone.
func separate() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{CreationFlags: syscall.CREATE_NEW_PROCESS_GROUP}
}

// guard has nothing to do here.
type guard struct{}

// newGuard returns one.
func newGuard() (*guard, error) { return &guard{}, nil }

// ended is false here.
func (*guard) ended() bool { return false }

// kill has nothing to do: the first signal has killed the ranks.
func (*guard) kill() {}

// wait has nothing to wait for.
func (*guard) wait() {}

// startProcess starts a rank, with files for its output and its errors. Windows has no signals, and so no grace.
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

// signal ends the rank: there are no other signals.
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

// pid is the number of the process.
func (p *process) pid() int { return p.cmd.Process.Pid }
