//go:build unix

package launch

import (
	"encoding/gob"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

// guard is the launcher's view of the process that starts its keepers.
type guard struct {
	cmd     *exec.Cmd     // its process
	conn    *net.UnixConn // its standard input, which passes the keepers' files; when it ends, the guard kills all ranks
	answers *gob.Decoder  // of conn
	gone    chan struct{} // closed when cmd has ended
}

// answer is a guard's reply to a request for a keeper.
type answer struct {
	PID  int    // of the keeper
	Text string // why there is no keeper, "" if there is one
}

// newGuard starts a guard. A guard or keeper whose program does not call [Keep] is refused: each one would start the
// next.
func newGuard() (*guard, error) {
	if os.Args[0] == guardName || os.Args[0] == keeperName {
		return nil, errors.New("launch: this program does not call Keep first")
	}
	path, err := self()
	if err != nil {
		return nil, err
	}
	conn, end, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer end.Close() //nolint:errcheck // the guard has it
	g := &guard{
		cmd:     &exec.Cmd{Path: path, Args: []string{guardName}, Stdin: end, Stderr: os.Stderr},
		conn:    conn,
		answers: gob.NewDecoder(conn),
		gone:    make(chan struct{}),
	}
	g.cmd.SysProcAttr = guardAttributes()
	if err := g.cmd.Start(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	go func() {
		_ = g.cmd.Wait() // the keepers report how their ranks end
		_ = conn.Close()
		close(g.gone)
	}()
	return g, nil
}

// socketPair returns the two ends of a connection that passes files.
func socketPair() (conn *net.UnixConn, end *os.File, err error) {
	syscall.ForkLock.RLock()
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(ends[0])
		syscall.CloseOnExec(ends[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	end = os.NewFile(uintptr(ends[1]), "guard")
	conn, err = unixConn(os.NewFile(uintptr(ends[0]), "launcher"))
	if err != nil {
		return nil, nil, errors.Join(err, end.Close())
	}
	return conn, end, nil
}

// unixConn returns the Unix connection behind a file, and closes the file.
func unixConn(file *os.File) (*net.UnixConn, error) {
	defer file.Close() //nolint:errcheck // the connection has a copy
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%s is no Unix socket", file.Name()), conn.Close())
	}
	return unix, nil
}

// ended reports whether the guard's process has ended.
func (g *guard) ended() bool {
	select {
	case <-g.gone:
		return true
	default:
		return false
	}
}

// start has the guard start a keeper with these files as its descriptors 0, 1, …, and returns the keeper's process. The
// guard also keeps the last file, the report, open until nothing of the rank is left.
func (g *guard) start(files ...*os.File) (pid int, err error) {
	var numbers []int
	for _, f := range files {
		numbers = append(numbers, int(f.Fd()))
	}
	g.resume()
	_, _, err = g.conn.WriteMsgUnix([]byte{0}, syscall.UnixRights(numbers...), nil)
	if err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, net.ErrClosed) {
		return 0, err
	}
	var a answer
	if err != nil || g.answers.Decode(&a) != nil {
		<-g.gone // its end alone closes the connection
		return 0, g.outcome().err()
	}
	if a.Text != "" {
		return 0, errors.New(a.Text)
	}
	return a.PID, nil
}

// outcome is how the guard has ended.
func (g *guard) outcome() outcome {
	status, _ := g.cmd.ProcessState.Sys().(syscall.WaitStatus)
	o := newOutcome(status, 0)
	o.Parent = fmt.Sprintf("the guard of all ranks (%s, process %d)", guardName, g.cmd.Process.Pid)
	return o
}

// resume has a guard go on that a user may have stopped.
func (g *guard) resume() { _ = g.cmd.Process.Signal(syscall.SIGCONT) }

// kill makes the guard kill all ranks and their keepers, and then end.
func (g *guard) kill() {
	g.resume()
	_ = g.conn.Close()
}

// wait waits until the guard has ended.
func (g *guard) wait() { <-g.gone }

// watch is the state of a guard's process.
type watch struct {
	keepers  map[int]*os.File // report files of running keepers, by process
	killed   []*os.File       // report files of killed keepers, until nothing of their ranks is left
	deadline time.Time        // after which the guard no longer waits for killed processes
	alone    bool             // the launcher has ended
}

// guardRanks starts the keepers that the launcher requests. When a keeper is killed, it kills the processes that its
// rank has left. When the launcher ends, it kills all ranks. Orphaned processes are this process's children
// ([adoptOrphans]). It leaves a process that it may not kill, or that does not end in time.
func guardRanks(launcher *net.UnixConn) error {
	if err := adoptOrphans(); err != nil {
		return err
	}
	catchSignals()
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	requests := make(chan []*os.File)
	go receiveRequests(launcher, requests)
	answers := gob.NewEncoder(launcher)
	w := &watch{keepers: map[int]*os.File{}}
	for {
		var repeat <-chan time.Time // nil if no process is being killed
		if w.sweep() {
			repeat = time.After(killTime)
		} else if w.alone {
			w.killKeepers()
			return nil
		}
		select {
		case files, ok := <-requests:
			if ok {
				_ = answers.Encode(w.start(files)) // if the launcher has ended, requests closes next
				continue
			}
			requests = nil
			w.alone = true
			w.deadline = time.Now().Add(orphanTime)
		case <-children:
			w.reap()
		case <-repeat:
			w.reap()
		}
	}
}

// receiveRequests receives the files of keepers until the launcher ends.
func receiveRequests(launcher *net.UnixConn, requests chan<- []*os.File) {
	defer close(requests)
	message := make([]byte, 1)
	rights := make([]byte, syscall.CmsgSpace(keeperFiles*4))
	for {
		n, size, _, _, err := launcher.ReadMsgUnix(message, rights)
		if n == 0 || err != nil {
			return
		}
		var files []*os.File
		messages, _ := syscall.ParseSocketControlMessage(rights[:size])
		for _, m := range messages {
			numbers, _ := syscall.ParseUnixRights(&m)
			for _, number := range numbers {
				files = append(files, os.NewFile(uintptr(number), "passed"))
			}
		}
		requests <- files
	}
}

// start starts a keeper, and closes all of its files except the report.
func (w *watch) start(files []*os.File) answer {
	if len(files) != keeperFiles { // for example, this process has too many open files
		closeAll(files)
		const format = "%s has received %d of %d files for a keeper (see ulimit -n)"
		return answer{Text: fmt.Sprintf(format, guardName, len(files), keeperFiles)}
	}
	report := files[keeperFiles-1]
	defer closeAll(files[:keeperFiles-1])
	path, err := self()
	if err != nil {
		return answer{Text: errors.Join(err, report.Close()).Error()}
	}
	var numbers []uintptr
	for _, f := range files {
		numbers = append(numbers, f.Fd())
	}
	pid, err := syscall.ForkExec(path, []string{keeperName}, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: numbers,
		Sys:   &syscall.SysProcAttr{Setsid: true}, // a rank's signal to its session does not reach other ranks
	})
	if err != nil {
		return answer{Text: fmt.Sprintf("a keeper cannot be started: %v", withRemedy(errors.Join(err, report.Close())))}
	}
	w.keepers[pid] = report
	return answer{PID: pid}
}

// closeAll closes files to which nothing is left to write.
func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// reap reaps the children that have ended.
func (w *watch) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case pid <= 0:
			return
		default:
			w.note(pid, status)
		}
	}
}

// note takes note of the end of a child, and reports that of a keeper for which it has come too early. Another one has
// left nothing.
func (w *watch) note(child int, status syscall.WaitStatus) {
	report, isKeeper := w.keepers[child]
	if !isKeeper {
		return
	}
	delete(w.keepers, child)
	if status.ExitStatus() == 0 {
		_ = report.Close()
		return
	}
	o := newOutcome(status, 0)
	o.Parent = fmt.Sprintf("its keeper (%s, process %d)", keeperName, child)
	_ = gob.NewEncoder(report).Encode(o) // of two reports, the launcher reads the first
	w.killed = append(w.killed, report)
	w.deadline = time.Now().Add(orphanTime)
}

// sweep kills the processes that must end. It returns false if none is left that this process may kill, or if the time
// for them is over.
func (w *watch) sweep() (left bool) {
	if len(w.killed) == 0 && !w.alone {
		return false
	}
	if w.killOrphans() && time.Now().Before(w.deadline) {
		return true
	}
	closeAll(w.killed)
	w.killed = nil
	return false
}

// killOrphans kills the descendants of this process that have no keeper, or all of them once the launcher has ended. It
// returns false if the list has none that it may kill. Ended processes count, because the list may show their children
// under them alone.
func (w *watch) killOrphans() (killed bool) {
	if !canList {
		return len(w.keepers) > 0 // keepers kill their ranks themselves
	}
	all := listProcesses()
	for _, child := range all[os.Getpid()] {
		if w.keepers[child.pid] != nil && !w.alone {
			continue
		}
		for _, p := range slices.Insert(all.descend(child.pid), 0, child) {
			if !errors.Is(p.signal(syscall.SIGKILL), syscall.EPERM) {
				killed = true
			}
		}
	}
	return killed
}

// killKeepers kills the remaining keepers, which a user may have stopped.
func (w *watch) killKeepers() {
	for pid := range w.keepers {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}
