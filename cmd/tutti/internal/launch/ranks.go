package launch

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/fault"
)

// longestLine bounds how many bytes of a line are kept until they are written.
const longestLine = 64 << 10

// group is the set of this machine's ranks in one round.
type group struct {
	succeeded chan struct{}  // closed when all ranks have succeeded
	ended     sync.WaitGroup // done when nothing of the ranks is left
	stopped   chan struct{}  // closed when the ranks are told to end
	first     chan struct{}  // closed when a rank has succeeded, here or on another machine that reports it
	grace     time.Duration  // between the signal and the kill; never changed

	mu       sync.Mutex // taken alone
	stopping bool       // guarded by mu
	running  []*running // guarded by mu
	guard    *guard     // parent of the ranks' keepers; nil before the first rank; guarded by mu
	seen     evidence   // ends of ranks that were not told to end; guarded by mu
	foreign  []int      // ranks of other machines that report success; guarded by mu
}

// start starts the ranks. It calls failed when a rank fails that was not told to end and is not restarted alone.
func (a *agent) start(round int, failed func(End)) *group {
	g := &group{succeeded: make(chan struct{}), stopped: make(chan struct{}), first: make(chan struct{}), grace: a.Grace}
	var good sync.WaitGroup
	good.Add(a.Ranks)
	for local := range a.Ranks {
		g.ended.Go(func() {
			if a.rank(g, local, round, failed) {
				good.Done()
			}
		})
	}
	go func() {
		good.Wait()
		close(g.succeeded)
	}()
	return g
}

// rank runs a rank until it succeeds, fails for good, or is told to end. It returns true for success.
func (a *agent) rank(g *group, local, round int, failed func(End)) bool {
	rank := a.plan.First[a.key] + local
	for start := round; ; start++ {
		began := time.Now()
		p, err := g.run(func(guard *guard) (*running, error) {
			return a.process(guard, rank, local, start)
		})
		if err == nil {
			err = p.ended()
		}
		told := g.note(rank, err)
		if err == nil && !told && a.Min == 0 {
			a.kv.Post(fault.EndedKey(rank), nil) // other ranks may wait for this one
		}
		end := a.failure(rank, err)
		last := a.Min == 0 || start == a.Restarts
		if err != nil && !told && a.Min == 0 {
			failed(end) // before the wait for processes that the rank has started
		}
		if p != nil {
			g.wait(p)
		}
		switch {
		case err == nil:
			return true
		case told, last && a.Min == 0:
			return false
		case last:
			fmt.Fprintf(a.notes, "tutti: %s; it is not started again\n", end.Text)
			failed(end)
			return false
		}
		wait := time.Until(began.Add(pause(start - round)))
		fmt.Fprintf(a.notes, "tutti: %s; restart %d of %d%s\n", end.Text, start+1, a.Restarts, after(wait))
		select {
		case <-time.After(wait):
		case <-g.stopped:
			return false
		}
	}
}

// pause returns the least time between two starts after this many restarts.
func pause(restarts int) time.Duration {
	return min(firstPause<<min(restarts, 10), longestPause)
}

// after returns the text for the time until a restart.
func after(wait time.Duration) string {
	if wait < firstPause {
		return ""
	}
	return " in " + wait.Round(time.Second).String()
}

// failure returns the end of a job because of a rank.
func (a *agent) failure(rank int, err error) End {
	if err == nil {
		return End{}
	}
	return End{
		Text: fmt.Sprintf("%s: %v", a.plan.place(rank), err),
		Code: code(err),
		Rank: true,
	}
}

// order describes the process to start as a rank.
type order struct {
	Words      []string      // the command and its arguments
	Env        []string      // variables, as NAME=VALUE
	Grace      time.Duration // between the first signal and the kill
	Processors []int         // processors to run on; nil for all
}

// process starts a rank. before is the number of its earlier starts.
func (a *agent) process(g *guard, rank, local, before int) (*running, error) {
	first := 0
	if a.starter != nil {
		first = a.starter.localFirst
	}
	o := order{
		Words:      slices.Concat(a.Hosts[local/a.perHost()].Enter, a.Command),
		Grace:      a.Grace,
		Processors: a.share(local),
	}
	o.Env = slices.Concat(os.Environ(), a.env, threads(o.Processors), []string{
		"TUTTI_RANK=" + strconv.Itoa(rank),
		"TUTTI_LOCAL_RANK=" + strconv.Itoa(first+local%a.perHost()),
		"TUTTI_WORLD_SIZE=" + strconv.Itoa(a.plan.Size),
		restartVariable + "=" + strconv.Itoa(before),
	})
	if a.Min == 0 { // records of an elastic job are separated by its epochs
		o.Env = append(o.Env, fmt.Sprintf("%s=%s-%d", env.Run, a.plan.Run, before))
	}
	// Of a repeated variable, such as those of a.env, the last value counts.
	o.Env = (&exec.Cmd{Env: o.Env}).Environ()
	if a.Plain {
		return plain(g, o, rank, a.Out, a.Err)
	}
	prefix := a.prefix(rank)
	return capture(g, o, rank, &lines{out: a.out, prefix: prefix}, &lines{out: a.err, prefix: prefix})
}

// running is a rank, with the goroutines that read its output.
type running struct {
	*process
	rank   int            // its number in the job
	copied sync.WaitGroup // done when no process has the rank's output open
}

// plain starts a rank that writes directly to out and errs if both are files. Output to other writers is copied.
func plain(g *guard, o order, rank int, out, errs io.Writer) (*running, error) {
	outFile, isFile := out.(*os.File)
	errFile, isErrFile := errs.(*os.File)
	if !isFile || !isErrFile {
		return capture(g, o, rank, out, errs)
	}
	p, err := startProcess(g, o, outFile, errFile)
	if err != nil {
		return nil, err
	}
	return &running{process: p, rank: rank}, nil
}

// capture starts a rank and copies its output.
func capture(g *guard, o order, rank int, out, errs io.Writer) (*running, error) {
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer outWrite.Close() //nolint:errcheck // the rank has it
	errRead, errWrite, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, outRead.Close())
	}
	defer errWrite.Close() //nolint:errcheck // the rank has it
	p, err := startProcess(g, o, outWrite, errWrite)
	if err != nil {
		return nil, errors.Join(err, outRead.Close(), errRead.Close())
	}
	r := &running{process: p, rank: rank}
	r.copied.Go(func() { copyOutput(out, outRead) })
	r.copied.Go(func() { copyOutput(errs, errRead) })
	return r, nil
}

// processes returns the rank's processes among all processes of this machine.
func (r *running) processes(all family) []entry { return all.descend(r.pid()) }

// copyOutput copies output until all writers have closed their end.
func copyOutput(to io.Writer, from *os.File) {
	_, _ = io.Copy(to, from)
	if l, ok := to.(*lines); ok {
		l.flush()
	}
	_ = from.Close()
}

// run starts a rank unless the ranks were told to end.
func (g *group) run(start func(*guard) (*running, error)) (*running, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopping {
		return nil, errTold
	}
	if g.guard == nil || g.guard.ended() {
		var err error
		if g.guard, err = newGuard(); err != nil {
			return nil, withRemedy(err)
		}
	}
	r, err := start(g.guard)
	if err != nil {
		return nil, withRemedy(err)
	}
	g.running = append(g.running, r)
	return r, nil
}

// errTold is the error of a rank that need not start any more.
var errTold = errors.New("told to end before it began")

// note records how a rank has ended unless the ranks were told to end. It returns whether they were.
func (g *group) note(rank int, err error) (told bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.stopping:
	case err == nil:
		if len(g.seen.Succeeded)+len(g.foreign) == 0 {
			close(g.first)
		}
		g.seen.Succeeded = append(g.seen.Succeeded, rank)
	default:
		g.seen.Failed = append(g.seen.Failed, failure{Rank: rank, Text: err.Error(), Code: code(err)})
	}
	return g.stopping
}

// noteForeign records that a rank of another machine has succeeded.
func (g *group) noteForeign(rank int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.seen.Succeeded)+len(g.foreign) == 0 {
		close(g.first)
	}
	g.foreign = append(g.foreign, rank)
}

// wait waits until nothing of a rank is left and its output is read. The wait for the output is bounded by linger,
// because the launcher's own output may have no reader.
func (g *group) wait(r *running) {
	_ = r.wait() // its end is known
	g.mu.Lock()
	g.running = slices.DeleteFunc(g.running, func(listed *running) bool { return listed == r })
	g.mu.Unlock()
	copied := make(chan struct{})
	go func() {
		r.copied.Wait()
		close(copied)
	}()
	select {
	case <-copied:
	case <-time.After(linger):
	}
}

// stop tells ranks to end by a signal, SIGTERM by default. It kills ranks that do not end within their grace, and
// returns when nothing of the ranks is left.
func (g *group) stop(with syscall.Signal) {
	g.mu.Lock()
	if !g.stopping {
		g.stopping = true
		close(g.stopped)
	}
	g.mu.Unlock()
	g.signal(cmp.Or(with, syscall.SIGTERM))
	guard := g.lastGuard()
	if guard != nil {
		defer guard.wait()
		defer guard.kill()
		defer time.AfterFunc(g.grace+patience, guard.kill).Stop() // a user may have stopped a keeper
	}
	g.ended.Wait()
}

// lastGuard returns the ranks' guard, nil if none was started. Once the ranks are told to end, no other guard is
// started.
func (g *group) lastGuard() *guard {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.guard
}

// signal sends the ranks a signal.
func (g *group) signal(s syscall.Signal) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.running {
		r.signal(s)
	}
}

// outcome describes how a rank's first process ended.
type outcome struct {
	Text   string         // why it could not be started, "" if it was
	Code   int            // of its exit
	Signal syscall.Signal // that ended it, 0 if none did
	Kills  int            // of processes by the kernel, for want of memory, since it began
	Parent string         // the keeper or the guard that has ended so, and the rank with it; "" if the rank has
}

// entry is a line of the system's list of processes.
type entry struct {
	pid     int  // of the process
	parent  int  // number of the process that has started or adopted it
	group   int  // process group
	stopped bool // by a signal such as SIGSTOP
	zombie  bool // its first thread has ended; other threads may still have its children
	start   int  // time of its start; tells it from later processes of its number
}

// family maps a parent's number to its children.
type family map[int][]entry

// descend lists the descendants of a process.
func (f family) descend(root int) []entry {
	all := slices.Clone(f[root])
	for i := 0; i < len(all); i++ {
		all = append(all, f[all[i].pid]...)
	}
	return all
}

// crashed is the exit code of a program of Go that its runtime ends, as when it may start no more threads.
const crashed = 2

// processBound is what may keep processes and threads from being started.
const processBound = " (too many processes? see ulimit -u)"

// withRemedy adds where the bound is that an error tells of.
func withRemedy(err error) error {
	switch {
	case errors.Is(err, syscall.EMFILE):
		return fmt.Errorf("%w (see ulimit -n)", err)
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Errorf("%w%s", err, processBound)
	}
	return err
}

// stopped reports whether a process is stopped.
func (f family) stopped(pid int) bool {
	for _, children := range f {
		if slices.ContainsFunc(children, func(e entry) bool { return e.pid == pid && e.stopped }) {
			return true
		}
	}
	return false
}

// exitError is the error of a rank whose first process has failed.
type exitError struct{ outcome }

// crashedParent reports whether the rank's keeper or guard has crashed.
func (e *exitError) crashedParent() bool { return e.Parent != "" && e.Code == crashed }

// Error describes the end in the words of package os.
func (e *exitError) Error() string {
	text := fmt.Sprintf("exit status %d", e.Code)
	switch {
	case e.Text != "":
		return e.Text
	case e.Signal != 0:
		text = fmt.Sprintf("signal: %v", e.Signal)
	}
	if e.crashedParent() {
		return fmt.Sprintf("%s, not its program, has crashed: %s%s", e.Parent, text, processBound)
	}
	if e.Parent != "" {
		text = e.Parent + " has ended: " + text
	}
	// A shell says it in this way of what it has run.
	if e.Code != 128+int(syscall.SIGKILL) {
		return text
	}
	if e.Kills > 0 {
		noun := "processes"
		if e.Kills == 1 {
			noun = "process"
		}
		const format = "%s (out of memory? the kernel has killed %d %s for that meanwhile: see dmesg)"
		return fmt.Sprintf(format, text, e.Kills, noun)
	}
	return text + " (out of memory? see dmesg)"
}

// code returns a rank's exit code in the shells' convention. That of a crashed keeper is no code of the rank's program,
// and would mean wrong usage.
func code(err error) int {
	var exit *exitError
	if !errors.As(err, &exit) || exit.crashedParent() {
		return 1
	}
	return max(exit.Code, 1)
}

// prefix returns the beginning of a rank's lines.
func (a *agent) prefix(rank int) string {
	if a.NoPrefix {
		return ""
	}
	text := fmt.Sprintf("[%*d] ", len(strconv.Itoa(a.plan.Size-1)), rank)
	if a.Color {
		return fmt.Sprintf("\x1b[3%dm%s\x1b[0m", 1+rank%6, text)
	}
	return text
}

// lines writes whole lines with a prefix.
type lines struct {
	out     io.Writer // destination of whole lines
	prefix  string    // of each line; "" for none
	partial []byte    // the unfinished line
}

// Write implements [io.Writer].
func (l *lines) Write(p []byte) (int, error) {
	l.partial = append(l.partial, p...)
	for {
		i := bytes.IndexByte(l.partial, '\n')
		if i < 0 && len(l.partial) < longestLine {
			return len(p), nil
		}
		if i < 0 || i >= longestLine {
			i = longestLine - 1
		}
		if err := l.line(l.partial[:i+1]); err != nil {
			return 0, err
		}
		l.partial = l.partial[i+1:]
	}
}

// flush writes the unfinished line.
func (l *lines) flush() {
	if len(l.partial) > 0 {
		_ = l.line(l.partial)
		l.partial = nil
	}
}

func (l *lines) line(text []byte) error {
	text = append([]byte(l.prefix), text...)
	if text[len(text)-1] != '\n' {
		text = append(text, '\n')
	}
	_, err := l.out.Write(text)
	return err
}
