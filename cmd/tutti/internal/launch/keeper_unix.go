//go:build unix

package launch

import (
	"bufio"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"
)

// Names of this program's processes in lists. They have neither the program's name nor each other's in them, so that a
// signal by name (pkill) reaches ranks and launchers, keepers or guards alone.
const (
	keeperName = "rank-keeper"
	guardName  = "orphan-guard"
)

// order is what a keeper is told first. It comes on the standard input, and each byte after it is a signal.
type order struct {
	Words []string      // of the command
	Grace time.Duration // from the first signal until the rank is killed
}

// passedOn are signals that a keeper gives to its rank when it gets them itself. They do not end its guard.
var passedOn = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
}

// Keep returns at once, unless this process is one that a launcher has started for a rank: a keeper, the parent of all
// that the rank starts, or a keeper's guard. Programs with launchers call it first.
//
// A keeper ends when nothing of its rank is left. When its launcher ends, however that happens, it kills the rank. When
// the keeper is killed, its guard kills the rank. When the guard is killed, the launcher ends the keeper.
func Keep() {
	var work func(report *os.File) error
	switch os.Args[0] {
	case keeperName:
		runtime.LockOSThread() // the rank dies with this thread, where systems can do that
		work = func(report *os.File) error { return keep(bufio.NewReader(os.Stdin), report) }
	case guardName:
		work = guard
	default:
		return
	}
	runtime.GOMAXPROCS(1)
	report := os.NewFile(3, "report")
	syscall.CloseOnExec(int(report.Fd()))
	hideName(os.Args[0])
	if err := work(report); err != nil {
		fmt.Fprintf(os.Stderr, "tutti: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// keeper is the state of a keeper's process.
type keeper struct {
	grace  time.Duration // of its order; never changed
	leader int           // the rank's first process, which is also the number of its group
	told   bool          // to end

	lingered <-chan time.Time // nil unless only processes that the rank has started are left
	expired  <-chan time.Time // nil unless the rank was told to end
	killing  <-chan time.Time // nil unless the rank is being killed
}

// keep starts a rank, reports how its first process ended, and returns when all of its processes have ended.
func keep(control *bufio.Reader, report *os.File) error {
	var o order
	if err := gob.NewDecoder(control).Decode(&o); err != nil {
		return fmt.Errorf("%s is started by tutti launch: %w", keeperName, err)
	}
	if err := adoptOrphans(); err != nil {
		return err
	}
	k := &keeper{grace: o.Grace}
	before := memoryKills()
	reports := gob.NewEncoder(report)
	if err := k.start(o.Words); err != nil {
		return reports.Encode(outcome{Text: err.Error(), Code: 1})
	}
	signals := make(chan syscall.Signal)
	go listen(control, signals)
	ended := make(chan syscall.WaitStatus) // without room: it is reported before gone is closed
	gone := make(chan struct{})
	go k.reap(ended, gone)
	for {
		select {
		case s := <-signals:
			k.pass(s)
		case status := <-ended:
			// A launcher that has gone needs no report.
			_ = reports.Encode(newOutcome(status, memoryKills()-before))
			if !k.told {
				k.lingered = time.After(linger)
			}
		case <-k.lingered:
			sayLeft()
			k.end(syscall.SIGTERM)
		case <-k.expired:
			k.kill()
		case <-k.killing:
			k.kill()
		case <-gone:
			return nil
		}
	}
}

// sayLeft says in the rank's output what its command has left behind. A reader that has stopped does not hold up the
// end.
func sayLeft() {
	text := "what it has started is"
	if canList {
		all := descendants(os.Getpid())
		switch len(all) {
		case 0:
			return
		case 1:
			text = fmt.Sprintf("process %d (%s) that it has started is", all[0].pid, processName(all[0].pid))
		default:
			const format = "process %d (%s) and %d more that it has started are"
			text = fmt.Sprintf(format, all[0].pid, processName(all[0].pid), len(all)-1)
		}
	}
	said := make(chan struct{})
	go func() {
		fmt.Fprintf(os.Stderr, "tutti: the rank's command has ended, and %s told to end: have its shell wait\n", text)
		close(said)
	}()
	select {
	case <-said:
	case <-time.After(linger):
	}
}

// start starts the rank's first process, in its own process group and without standard input.
func (k *keeper) start(words []string) error {
	path, err := exec.LookPath(words[0])
	if err != nil {
		return err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close() //nolint:errcheck // nothing was written
	k.leader, err = syscall.ForkExec(path, words, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{null.Fd(), 1, 2},
		Sys:   attributes(),
	})
	if err != nil {
		return &os.PathError{Op: "fork/exec", Path: path, Err: err}
	}
	return nil
}

// listen sends the signals that the launcher asks for, SIGKILL when it has ended, and those that this process gets.
func listen(control *bufio.Reader, signals chan<- syscall.Signal) {
	received := catchSignals()
	go func() {
		for s := range received {
			signals <- s.(syscall.Signal)
		}
	}()
	for {
		number, err := control.ReadByte()
		if err != nil {
			signals <- syscall.SIGKILL
			return
		}
		signals <- syscall.Signal(number)
	}
}

// catchSignals returns the signals that this process gets, and does not end by any more.
func catchSignals() <-chan os.Signal {
	received := make(chan os.Signal, 8)
	for _, s := range passedOn {
		if !signal.Ignored(s) { // what is ignored here is ignored by the rank
			signal.Notify(received, s)
		}
	}
	return received
}

// reap waits for all processes that are this one's children, also by adoption, and then for the rank's group.
func (k *keeper) reap(ended chan<- syscall.WaitStatus, gone chan<- struct{}) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			awaitGroup(k.leader)
			close(gone)
			return
		case pid == k.leader:
			ended <- status
		}
	}
}

// pass gives a signal to the rank.
func (k *keeper) pass(s syscall.Signal) {
	switch s {
	case syscall.SIGKILL:
		k.kill()
	case syscall.SIGUSR1, syscall.SIGUSR2:
		k.send(s, catches)
	default:
		k.end(s)
	}
}

// end tells the rank to end, and gives it time until it is killed. Processes that are stopped go on, to heed it.
func (k *keeper) end(s syscall.Signal) {
	k.lingered = nil
	k.send(s, everyone)
	k.send(syscall.SIGCONT, everyone)
	if !k.told {
		k.told = true
		k.expired = time.After(k.grace)
	}
}

// kill kills what there is of the rank, and does so again soon: processes may have started others meanwhile.
func (k *keeper) kill() {
	k.told = true
	k.lingered = nil
	k.expired = nil
	k.send(syscall.SIGKILL, everyone)
	k.killing = time.After(killTime)
}

// everyone is a choice of processes.
func everyone(int, syscall.Signal) bool { return true }

// send sends a signal once to each process of the rank that is chosen.
func (k *keeper) send(s syscall.Signal, chosen func(pid int, s syscall.Signal) bool) {
	all := descendants(os.Getpid())
	for _, p := range all {
		if chosen(p.pid, s) {
			_ = syscall.Kill(p.pid, s) // it may have ended
		}
	}
	// A group is sent to where its processes cannot be listed.
	listed := slices.ContainsFunc(all, func(p entry) bool { return p.pid == k.leader })
	if !listed && !canList {
		_ = syscall.Kill(-k.leader, s)
	}
}

// newOutcome reads the status of a process that has ended.
func newOutcome(status syscall.WaitStatus, kills int) outcome {
	o := outcome{Code: status.ExitStatus(), Kills: kills}
	if status.Signaled() {
		o.Signal = status.Signal()
		o.Code = 128 + int(o.Signal)
	}
	return o
}

// err is nil for success.
func (o outcome) err() error {
	if o == (outcome{Kills: o.Kills}) {
		return nil
	}
	return &exitError{o}
}

// process is a rank as its launcher sees it.
type process struct {
	cmd     *exec.Cmd     // the keeper's guard, or the keeper where it has none
	control *os.File      // the keeper's standard input, for its order and signals
	report  *os.File      // on which the keeper says how the rank has ended; it ends with the keeper
	gone    chan struct{} // closed when cmd has ended, and control
	err     error         // of cmd; written before gone is closed
}

// startProcess starts words as a rank, with the environment and the output of cmd. When it is told to end it has grace.
func startProcess(cmd *exec.Cmd, words []string, grace time.Duration) (*process, error) {
	input, control, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer input.Close() //nolint:errcheck // the keeper has it
	report, output, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, control.Close())
	}
	defer output.Close() //nolint:errcheck // the keeper has it
	cmd.Stdin = input
	cmd.ExtraFiles = []*os.File{output}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what a terminal sends, or a user to its session, is not theirs
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, control.Close(), report.Close())
	}
	// One that ends before it has read all of it says so by its end.
	_ = gob.NewEncoder(control).Encode(order{Words: words, Grace: grace})
	p := &process{cmd: cmd, control: control, report: report, gone: make(chan struct{})}
	go p.watch()
	return p, nil
}

// watch waits for the end of the guard. A keeper that it leaves kills its rank when control ends.
func (p *process) watch() {
	p.err = errors.Join(p.cmd.Wait(), p.control.Close())
	close(p.gone)
}

// separate gives a process its own group: what a terminal sends comes from the launcher alone.
func separate() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// newCommand is the command of a rank's guard, or keeper. A program that does not call [Keep] would start one after the
// other.
func newCommand() (*exec.Cmd, error) {
	if os.Args[0] == outermost || os.Args[0] == keeperName {
		return nil, errors.New("launch: this program does not call Keep first")
	}
	path, err := self()
	if err != nil {
		return nil, err
	}
	return &exec.Cmd{Path: path, Args: []string{outermost}}, nil
}

// signal gives the rank a signal, and kills the keeper of one that was not killed in time.
func (p *process) signal(s syscall.Signal) {
	_, _ = p.control.Write([]byte{byte(s)})
}

// ended waits for the end of the rank's first process.
func (p *process) ended() error {
	var o outcome
	if err := gob.NewDecoder(p.report).Decode(&o); err != nil {
		if !errors.Is(err, io.EOF) {
			return err
		}
		o = outcome{Code: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL} // and the rank with it
	}
	return o.err()
}

// wait waits until nothing of the rank is left.
func (p *process) wait() error {
	<-p.gone
	_, err := io.Copy(io.Discard, p.report) // until the keeper of a guard that was killed has ended
	return errors.Join(p.err, err, p.report.Close())
}

// pid is the number of the process whose children's descendants are the rank's.
func (p *process) pid() int { return p.cmd.Process.Pid }
