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
	"strconv"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/internal/env"
	ancestor "github.com/tutti-go/tutti/internal/keeper"
)

// Names of this program's processes in lists. Neither contains the program's name or the other one. A signal by name
// (pkill) therefore reaches ranks and launchers alone, keepers alone, or guards alone.
const (
	keeperName = ancestor.Name
	guardName  = "orphan-guard"
)

// keeperFiles is the number of files that a keeper starts with: its standard input, the rank's output and errors, and
// the report.
const keeperFiles = 4

// passedOn lists the signals that a keeper passes on to its rank. They do not end the keepers' guard.
var passedOn = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
}

// Keep returns at once, unless a launcher has started this process as a keeper or as the guard. A keeper is the parent
// of all processes that a rank starts. The guard is the parent of all keepers. Programs with launchers call Keep first.
//
// A keeper ends when nothing of its rank is left. When a keeper is killed, the guard kills its rank. When the launcher
// ends, for whatever reason, the guard kills all ranks. When the guard is killed, the launcher ends the keepers, which
// kill their ranks. When all three are killed at once, a rank's first process dies with its keeper, and the processes
// that use package rendezvous end themselves.
func Keep() {
	var work func() error
	switch os.Args[0] {
	case keeperName:
		runtime.LockOSThread() // where the system supports it, the rank dies with this thread
		report := os.NewFile(keeperFiles-1, "report")
		syscall.CloseOnExec(int(report.Fd()))
		work = func() error { return keep(bufio.NewReader(os.Stdin), report) }
	case guardName:
		work = func() error {
			launcher, err := unixConn(os.Stdin)
			if err != nil {
				return fmt.Errorf("%s is started by tutti launch: %w", guardName, err)
			}
			return guardRanks(launcher)
		}
	default:
		return
	}
	runtime.GOMAXPROCS(1)
	hideName(os.Args[0])
	if err := work(); err != nil {
		fmt.Fprintf(os.Stderr, "tutti: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// keeper is the state of a keeper's process.
type keeper struct {
	grace  time.Duration // from the order; never changed
	leader int           // the rank's first process, which is also the number of its group
	told   bool          // to end

	lingered <-chan time.Time // nil unless the rank's first process has ended, and others may be left
	expired  <-chan time.Time // nil unless the rank was told to end
	killing  <-chan time.Time // nil unless the rank is being killed
}

// keep reads an order and starts the rank. The bytes after the order are signals. keep reports how the rank's first
// process ended, and returns when all of the rank's processes have ended.
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
	if err := k.start(o); err != nil {
		return reports.Encode(outcome{Text: withRemedy(err).Error(), Code: 1})
	}
	signals := make(chan syscall.Signal)
	go listen(control, signals)
	ended := make(chan syscall.WaitStatus) // unbuffered: the end is reported before gone is closed
	gone := make(chan struct{})
	go k.reap(ended, gone)
	for {
		select {
		case s := <-signals:
			k.pass(s)
		case status := <-ended:
			// A launcher that has ended needs no report.
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

// sayLeft names, in the rank's errors, the processes that its command has left behind. A reader that has stopped does
// not delay the end.
func sayLeft() {
	text := "what it has started is"
	if canList {
		all := slices.DeleteFunc(descendants(os.Getpid()), func(p entry) bool { return p.zombie })
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
func (k *keeper) start(o order) error {
	if err := bind(o.Processors); err != nil {
		return err
	}
	path, err := exec.LookPath(o.Words[0])
	if err != nil {
		return err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close() //nolint:errcheck // nothing was written
	environment := append(o.Env, env.Keeper+"="+strconv.Itoa(os.Getpid()))
	k.leader, err = syscall.ForkExec(path, o.Words, &syscall.ProcAttr{
		Env:   (&exec.Cmd{Env: environment}).Environ(), // a rank may itself be a launcher, with ranks
		Files: []uintptr{null.Fd(), 1, 2},
		Sys:   attributes(),
	})
	if err != nil {
		return &os.PathError{Op: "fork/exec", Path: path, Err: err}
	}
	return nil
}

// listen sends the signals that the launcher requests and those that this process receives. It sends SIGKILL when the
// launcher has ended.
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

// catchSignals returns the signals that this process receives. They no longer end it.
func catchSignals() <-chan os.Signal {
	received := make(chan os.Signal, 8)
	for _, s := range passedOn {
		if !signal.Ignored(s) { // the rank ignores what this process ignores
			signal.Notify(received, s)
		}
	}
	return received
}

// reap waits for all children of this process, adopted ones included, and then for the rank's group.
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

// end tells the rank to end, and starts the time until it is killed. Stopped processes are continued, so that they can
// react.
func (k *keeper) end(s syscall.Signal) {
	k.lingered = nil
	k.send(s, everyone)
	k.send(syscall.SIGCONT, everyone)
	if !k.told {
		k.told = true
		k.expired = time.After(k.grace)
	}
}

// kill kills all processes of the rank, and repeats that soon: processes may have started others meanwhile.
func (k *keeper) kill() {
	k.told = true
	k.lingered = nil
	k.expired = nil
	k.send(syscall.SIGKILL, everyone)
	k.killing = time.After(killTime)
}

// everyone chooses every process.
func everyone(int, syscall.Signal) bool { return true }

// send sends a signal once to each chosen process of the rank.
func (k *keeper) send(s syscall.Signal, chosen func(pid int, s syscall.Signal) bool) {
	all := descendants(os.Getpid())
	for _, p := range all {
		if chosen(p.pid, s) {
			_ = p.signal(s) // the process may have ended
		}
	}
	// The signal goes to the group where processes cannot be listed.
	listed := slices.ContainsFunc(all, func(p entry) bool { return p.pid == k.leader })
	if !listed && !canList {
		_ = syscall.Kill(-k.leader, s)
	}
}

// newOutcome reads the status of an ended process.
func newOutcome(status syscall.WaitStatus, kills int) outcome {
	o := outcome{Code: status.ExitStatus(), Kills: kills}
	if status.Signaled() {
		o.Signal = status.Signal()
		o.Code = 128 + int(o.Signal)
	}
	return o
}

// err returns nil for success.
func (o outcome) err() error {
	if o == (outcome{Kills: o.Kills}) {
		return nil
	}
	return &exitError{o}
}

// process is the launcher's view of a rank.
type process struct {
	guard   *guard        // which has started the keeper
	keeper  int           // the keeper's process
	control *os.File      // the keeper's standard input, for the order and signals
	report  *os.File      // where the keeper reports how the rank has ended; it ends when nothing of the rank is left
	gone    chan struct{} // closed when nothing of the rank is left
}

// startProcess starts a rank with files for its output and errors.
func startProcess(g *guard, o order, out, errs *os.File) (*process, error) {
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
	pid, err := g.start(input, out, errs, output)
	if err != nil {
		return nil, errors.Join(err, control.Close(), report.Close())
	}
	// A keeper that ends before it has read the order shows that by its end.
	_ = gob.NewEncoder(control).Encode(o)
	p := &process{guard: g, keeper: pid, control: control, report: report, gone: make(chan struct{})}
	go p.watch()
	return p, nil
}

// watch closes control when the rank or the guard has ended. When control closes, the keeper kills its rank.
func (p *process) watch() {
	select {
	case <-p.gone:
	case <-p.guard.gone:
	}
	_ = p.control.Close()
}

// separate gives a process its own group, so that it gets a terminal's signals from the launcher alone.
func separate() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// signal gives the rank a signal.
func (p *process) signal(s syscall.Signal) {
	_, _ = p.control.Write([]byte{byte(s)})
}

// ended waits for the end of the rank's first process, or of its keeper, of which the guard tells.
func (p *process) ended() error {
	var o outcome
	if err := gob.NewDecoder(p.report).Decode(&o); err != nil {
		if !errors.Is(err, io.EOF) {
			return err
		}
		o = outcome{Code: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL} // with the guard
	}
	if o.Signal == syscall.SIGKILL && p.guard.ended() { // keepers kill their ranks then
		o = p.guard.outcome()
	}
	return o.err()
}

// wait waits until nothing of the rank is left.
func (p *process) wait() error {
	p.guard.resume()
	_, err := io.Copy(io.Discard, p.report)
	close(p.gone)
	return errors.Join(err, p.report.Close())
}

// pid returns the process whose descendants are the rank's processes.
func (p *process) pid() int { return p.keeper }
