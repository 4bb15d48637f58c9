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

// longestLine is how much of a line is kept until it is written.
const longestLine = 64 << 10

// group is the ranks of this machine in one round.
type group struct {
	succeeded chan struct{}  // closed when all have ended, and none failed
	ended     sync.WaitGroup // which ends when nothing of the ranks is left
	stopped   chan struct{}  // closed when the ranks are told to end
	first     chan struct{}  // closed when one has ended with success, here or, where that is said, on another machine
	grace     time.Duration  // from the signal until a rank is killed; never changed

	mu       sync.Mutex // taken alone
	stopping bool       // guarded by mu
	running  []*running // guarded by mu
	guard    *guard     // of the ranks; nil before the first one; guarded by mu
	seen     evidence   // how ranks have ended that were not told to; guarded by mu
	foreign  []int      // ranks of other machines that have ended with success, as far as it is said; guarded by mu
}

// start starts the ranks. failed is called when one fails that was not told to end, and is not started again by itself.
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

// rank runs a rank until it succeeds, and returns true, or until it fails, or is told to end.
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
			a.kv.Post(fault.EndedKey(rank), nil) // others may wait for it
		}
		end := a.failure(rank, err)
		last := a.Min == 0 || start == a.Restarts
		if err != nil && !told && a.Min == 0 {
			failed(end) // before the wait for what it has started
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

// pause is the least time from one start to the next of what was started again so often.
func pause(restarts int) time.Duration {
	return min(firstPause<<min(restarts, 10), longestPause)
}

// after says how long it takes until a restart.
func after(wait time.Duration) string {
	if wait < firstPause {
		return ""
	}
	return " in " + wait.Round(time.Second).String()
}

// failure is the end of a job because of a rank.
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

// order is what is started as a rank.
type order struct {
	Words      []string      // of the command
	Env        []string      // variables, as NAME=VALUE
	Grace      time.Duration // from the first signal until the rank is killed
	Processors []int         // that it runs on; nil for all
}

// process starts a rank that was started so often before.
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
	if a.Min == 0 { // records of an elastic job are apart by its epochs
		o.Env = append(o.Env, fmt.Sprintf("%s=%s-%d", env.Run, a.plan.Run, before))
	}
	// Of variables that come again, as those of a.env do, the last one counts.
	o.Env = (&exec.Cmd{Env: o.Env}).Environ()
	if a.Plain {
		return plain(g, o, rank, a.Out, a.Err)
	}
	prefix := a.prefix(rank)
	return capture(g, o, rank, &lines{out: a.out, prefix: prefix}, &lines{out: a.err, prefix: prefix})
}

// running is a rank, with what reads its output.
type running struct {
	*process
	rank   int            // its number in the job
	copied sync.WaitGroup // which ends when nothing has the rank's output open
}

// plain starts a rank that writes to files itself. What it writes to others is copied.
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

// capture starts a rank, and copies what it writes.
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

// processes are the rank's, of all that this machine has.
func (r *running) processes(all family) []entry { return all.descend(r.pid()) }

// copyOutput copies output until all who write have closed their end.
func copyOutput(to io.Writer, from *os.File) {
	_, _ = io.Copy(to, from)
	if l, ok := to.(*lines); ok {
		l.flush()
	}
	_ = from.Close()
}

// run starts a rank, unless the ranks were told to end.
func (g *group) run(start func(*guard) (*running, error)) (*running, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopping {
		return nil, errTold
	}
	if g.guard == nil || g.guard.ended() {
		var err error
		if g.guard, err = newGuard(); err != nil {
			return nil, err
		}
	}
	r, err := start(g.guard)
	if err != nil {
		return nil, err
	}
	g.running = append(g.running, r)
	return r, nil
}

// errTold is the error of a rank that need not start any more.
var errTold = errors.New("told to end before it began")

// note notes how a rank has ended, unless the ranks were told to end, and returns whether they were.
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

// noteForeign notes that a rank of another machine has ended with success.
func (g *group) noteForeign(rank int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.seen.Succeeded)+len(g.foreign) == 0 {
		close(g.first)
	}
	g.foreign = append(g.foreign, rank)
}

// wait waits until nothing of a rank is left, and its output is read: where the launcher's own output has a reader.
func (g *group) wait(r *running) {
	_ = r.wait() // how it ended is known
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

// stop tells ranks to end by a signal, or SIGTERM. Ranks that do not are killed after their grace, and nothing is left
// when it returns.
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

// lastGuard is the guard of the ranks, nil if none was started. It is the last one when the ranks are told to end.
func (g *group) lastGuard() *guard {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.guard
}

// signal gives the ranks a signal.
func (g *group) signal(s syscall.Signal) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.running {
		r.signal(s)
	}
}

// outcome is how the first process of a rank ended.
type outcome struct {
	Text   string         // why it could not be started, "" if it was
	Code   int            // of its exit
	Signal syscall.Signal // that ended it, 0 if none did
	Kills  int            // of processes by the kernel, for want of memory, since it began
}

// entry is a line of the system's list of processes.
type entry struct {
	pid     int  // of the process
	parent  int  // number of the process that has started it, or has taken it over
	group   int  // of processes
	stopped bool // by a signal, as by SIGSTOP
	zombie  bool // ended, at least its first thread; others of its threads may still have its children
}

// family has the children of processes, by the number of the parent.
type family map[int][]entry

// descend lists the descendants of a process.
func (f family) descend(root int) []entry {
	all := slices.Clone(f[root])
	for i := 0; i < len(all); i++ {
		all = append(all, f[all[i].pid]...)
	}
	return all
}

// exitError is the error of a rank whose first process has failed.
type exitError struct{ outcome }

// Error says how it ended, in the words of package os.
func (e *exitError) Error() string {
	text := fmt.Sprintf("exit status %d", e.Code)
	switch {
	case e.Text != "":
		return e.Text
	case e.Signal != 0:
		text = fmt.Sprintf("signal: %v", e.Signal)
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

// code is the exit code of a rank, as shells have it.
func code(err error) int {
	var exit *exitError
	if !errors.As(err, &exit) {
		return 1
	}
	return max(exit.Code, 1)
}

// prefix is what the lines of a rank begin with.
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
	out     io.Writer // where whole lines go
	prefix  string    // of each; "" for none
	partial []byte    // the line that has not ended
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

// flush writes what is left.
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
