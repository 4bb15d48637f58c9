package launch

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// grace is how long ranks that are told to end have until they are killed.
var grace = 10 * time.Second

// restartPause is the least time from one start of a rank to the next.
const restartPause = time.Second

// longestLine is how much of a line is kept until it is written.
const longestLine = 64 << 10

// group is the ranks of this machine in one round.
type group struct {
	succeeded chan struct{} // closed when all have ended, and none failed
	ended     sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	commands []*exec.Cmd // that run
}

// start starts the ranks. failed is called when one fails that was not told to end, and is not started again by itself.
func (a *agent) start(round int, failed func(End)) *group {
	g := &group{succeeded: make(chan struct{})}
	var mu sync.Mutex // of the output
	var good sync.WaitGroup
	good.Add(a.Ranks)
	for local := range a.Ranks {
		rank := a.plan.First[a.key] + local
		g.ended.Go(func() {
			// Where ranks die with their parent, that is the thread.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			for start := round; ; start++ {
				began := time.Now()
				told, err := g.run(a.command(&mu, rank, local, start))
				switch {
				case err == nil || errors.Is(err, exec.ErrWaitDelay):
					good.Done()
					return
				case told:
					return
				}
				host := a.Hosts[local/a.perHost()].Name
				end := End{Text: fmt.Sprintf("rank %d on %s: %v", rank, host, err), Code: code(err), Rank: true}
				if a.Min == 0 || start == a.Restarts {
					if a.Min > 0 {
						fmt.Fprintf(a.Err, "tutti: %s; it is not started again\n", end.Text)
					}
					failed(end)
					return
				}
				fmt.Fprintf(a.Err, "tutti: %s; restart %d of %d\n", end.Text, start+1, a.Restarts)
				time.Sleep(time.Until(began.Add(restartPause)))
			}
		})
	}
	go func() {
		good.Wait()
		close(g.succeeded)
	}()
	return g
}

// command is the process of a rank that was started so often before.
func (a *agent) command(mu *sync.Mutex, rank, local, before int) *exec.Cmd {
	words := slices.Concat(a.Hosts[local/a.perHost()].Enter, a.Command)
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Env = slices.Concat(os.Environ(), a.env, []string{
		"TUTTI_RANK=" + strconv.Itoa(rank),
		"TUTTI_LOCAL_RANK=" + strconv.Itoa(local%a.perHost()),
		"TUTTI_WORLD_SIZE=" + strconv.Itoa(a.plan.Size),
		restartVariable + "=" + strconv.Itoa(before),
	})
	cmd.SysProcAttr = attributes()
	cmd.WaitDelay = time.Second // for what the rank started, and keeps its output open
	if cmd.Stdout, cmd.Stderr = a.Out, a.Err; !a.Plain {
		cmd.Stdout = &lines{
			mu:     mu,
			out:    a.Out,
			prefix: a.prefix(rank),
		}
		cmd.Stderr = &lines{
			mu:     mu,
			out:    a.Err,
			prefix: a.prefix(rank),
		}
	}
	return cmd
}

// run runs a process, unless ranks were told to end, and returns whether they were then.
func (g *group) run(cmd *exec.Cmd) (told bool, err error) {
	g.mu.Lock()
	if g.stopping {
		g.mu.Unlock()
		return true, errTold
	}
	if err = cmd.Start(); err == nil {
		g.commands = append(g.commands, cmd)
	}
	g.mu.Unlock()
	if err == nil {
		err = cmd.Wait()
	}
	g.mu.Lock()
	told = g.stopping
	g.commands = slices.DeleteFunc(g.commands, func(c *exec.Cmd) bool { return c == cmd })
	g.mu.Unlock()
	for _, w := range []io.Writer{cmd.Stdout, cmd.Stderr} {
		if l, ok := w.(*lines); ok {
			l.flush()
		}
	}
	return told, err
}

var errTold = errors.New("told to end before it began")

// stop tells ranks to end by a signal, or SIGTERM, kills those that do not, and waits for all.
func (g *group) stop(with syscall.Signal) {
	send := func(s syscall.Signal) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.stopping = true
		for _, c := range g.commands {
			signal(c.Process, s)
		}
	}
	send(cmp.Or(with, syscall.SIGTERM))
	defer time.AfterFunc(grace, func() { send(syscall.SIGKILL) }).Stop()
	g.ended.Wait()
}

// code is the exit code of a rank, as shells have it.
func code(err error) int {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return 1
	}
	if sig := killedBy(exit.ProcessState); sig != 0 {
		return 128 + int(sig)
	}
	return max(exit.ExitCode(), 1)
}

// prefix is what the lines of a rank begin with.
func (a *agent) prefix(rank int) string {
	text := fmt.Sprintf("[%*d] ", len(strconv.Itoa(a.plan.Size-1)), rank)
	if a.Color {
		return fmt.Sprintf("\x1b[3%dm%s\x1b[0m", 1+rank%6, text)
	}
	return text
}

// lines writes whole lines with a prefix.
type lines struct {
	mu      *sync.Mutex
	out     io.Writer
	prefix  string
	partial []byte
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
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := l.out.Write(text)
	return err
}
