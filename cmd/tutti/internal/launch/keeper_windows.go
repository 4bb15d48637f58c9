package launch

import (
	"errors"
	"os/exec"
	"syscall"
	"time"
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

// newCommand is the command of a rank, which [startProcess] completes.
func newCommand() (*exec.Cmd, error) { return &exec.Cmd{}, nil }

// startProcess starts words as a rank, which writes to the files of cmd. Windows has no signals, and so no grace.
func startProcess(cmd *exec.Cmd, words []string, _ time.Duration) (*process, error) {
	path, err := exec.LookPath(words[0])
	if err != nil {
		return nil, err
	}
	cmd.Path = path
	cmd.Args = words
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &process{cmd: cmd}, nil
}

// signal ends the rank: there are no other signals.
func (p *process) signal(syscall.Signal) { p.kill() }

// kill ends the rank.
func (p *process) kill() { _ = p.cmd.Process.Kill() }

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
