package launch

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Inside is the hidden command of this program that [Spread] runs on each host.
const Inside = "launch-inside"

// marker begins the lines by which such a launcher reports to the one that has started it, among what else it writes.
// No rank's line begins with it.
const marker = "\x00tutti-launch "

// Reports, which a value follows.
const (
	reportStarted = "started" // the version
	reportAlive   = "alive"   // the launcher runs; again and again once it knows what to run
	reportJoined  = "joined"  // the addresses of the job's store, and of this host
	reportEnded   = "ended"   // the [End] as JSON, after "joined"
)

// assignment is what a host's launcher is told by a line of JSON on its standard input, the secret included: arguments
// of processes are for everybody to see. Each later line is the name of a signal, whose number is another elsewhere, or
// says that the launcher that has started this one runs.
type assignment struct {
	Directory   []byte        `json:"directory"`   // this and the next two in any encoding, which JSON's strings are not
	Environment [][]byte      `json:"environment"` // variables of the job, as NAME=VALUE
	Program     [][]byte      `json:"program"`     // with its arguments, in the user's words
	Secret      string        `json:"secret"`      // of the job
	Ranks       int           `json:"ranks"`       // on this host, 1 and up
	Through     int           `json:"through"`     // ranks of the hosts up to this one
	Total       int           `json:"total"`       // ranks of all hosts
	Index       int           `json:"index"`       // of this host in the list
	Machines    int           `json:"machines"`    // launchers that the job waits for
	LocalFirst  int           `json:"localFirst"`  // local rank that this launcher's ranks begin with
	LocalSize   int           `json:"localSize"`   // ranks of this machine, other launchers' included
	Listen      string        `json:"listen"`      // of the first host
	Join        []string      `json:"join"`        // of the other hosts
	Job         string        `json:"job"`         // its name; "" is a job without one
	Restarts    int           `json:"restarts"`    // of all ranks, or in an elastic job of each; 0 is none
	Min         int           `json:"min"`         // members of an elastic job; 0 of another job
	Max         int           `json:"max"`         // likewise
	Wait        time.Duration `json:"wait"`        // until all machines have come
	Grace       time.Duration `json:"grace"`       // between the signal that ends ranks and SIGKILL
	Silence     time.Duration `json:"silence"`     // after which this launcher is lost if nothing comes from it
	Bind        bool          `json:"bind"`        // each rank has processors that no other has
	NoPrefix    bool          `json:"noPrefix"`    // lines do not begin with the rank
	Color       bool          `json:"color"`       // prefixes have colors
}

// starter is what a launcher knows of the one that has started it.
type starter struct {
	secret  string // of the job
	index   int    // of this host in the list
	through int    // ranks of the hosts up to this one
	total   int    // ranks of all hosts

	localFirst int // local rank that this launcher's ranks begin with
	localSize  int // ranks of this machine, other launchers' included

	joined func(store, host string) // tells the starter the addresses of the store, which is reached, and of this host
}

// errDetached is the cause of the end of a host's launcher whose standard input has ended: the ssh connection, or the
// launcher that has started it, is gone.
var errDetached = errors.New("the connection from the launcher that has started the job was lost")

// Attend is [Run] for a launcher that [Spread] has started: it reads what to run from control, and its ranks end with
// control. cfg has the version and the output. prepare sets what this host has to say, such as where the program is.
func Attend(ctx context.Context, cfg Config, control io.Reader, prepare func(*Config) error) error {
	report(cfg.Err, reportStarted, cfg.Version)
	report(cfg.Out, reportStarted, cfg.Version) // a shell wrote what came before
	lines := bufio.NewReader(control)
	text, err := lines.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("%s is started by tutti launch --hosts: %w", Inside, err)
	}
	var told assignment
	if err := json.Unmarshal(text, &told); err != nil {
		return fmt.Errorf("%s: %w", Inside, err)
	}
	if err := told.check(); err != nil {
		return err
	}
	beating, fallSilent := context.WithCancel(context.WithoutCancel(ctx)) // also while ranks end
	defer fallSilent()
	go beat(beating, cfg.Err, told.Silence/beats)
	if err := told.enter(cfg.Err); err != nil {
		return err
	}
	told.configure(&cfg)
	if err := prepare(&cfg); err != nil {
		return err
	}
	joined := false
	cfg.starter = &starter{
		secret:  told.Secret,
		index:   told.Index,
		through: told.Through,
		total:   told.Total,

		localFirst: told.LocalFirst,
		localSize:  told.LocalSize,

		joined: func(store, host string) {
			joined = true
			report(cfg.Err, reportJoined, store+" "+host)
		},
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go obey(lines, detachSilences*told.Silence, cancel)
	err = Run(ctx, cfg)
	if !joined {
		return err
	}
	end := &End{}
	if err != nil && !errors.As(err, &end) {
		end = &End{Text: strings.TrimPrefix(err.Error(), "launch: "), Code: 1}
	}
	text, _ = json.Marshal(end)
	reportEnd(cfg.Err, string(text))
	if err == nil {
		return nil
	}
	return &End{Code: end.Code} // the launcher that has started this one says why
}

// report writes a report, in one piece.
func report(to io.Writer, kind, value string) { fmt.Fprintf(to, "%s%s %s\n", marker, kind, value) }

// reportEnd reports how the job has ended. The launcher that has started this one may not read now, as nobody reads its
// own output; it reads on when this one has ended, whose exit code says as much.
func reportEnd(to io.Writer, end string) {
	reported := make(chan struct{})
	go func() {
		report(to, reportEnded, end)
		close(reported)
	}()
	select {
	case <-reported:
	case <-time.After(lastWord):
	}
}

// beat says again and again that this launcher runs.
func beat(ctx context.Context, to io.Writer, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for ctx.Err() == nil {
		report(to, reportAlive, "")
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// check returns an error for what no launcher says.
func (t assignment) check() error {
	if t.Ranks < 1 || t.Ranks > MaxRanks || t.Through < t.Ranks || t.Total < t.Through || len(t.Program) == 0 {
		return fmt.Errorf("%w: %s is told to run %d ranks of %d", comm.ErrArgument, Inside, t.Ranks, t.Total)
	}
	if t.Silence < beats {
		return fmt.Errorf("%w: %s is told to be silent for %v at most", comm.ErrArgument, Inside, t.Silence)
	}
	return nil
}

// enter changes to the directory of the job and sets its environment.
func (t assignment) enter(notes io.Writer) error {
	if err := os.Chdir(string(t.Directory)); err != nil {
		home, _ := os.Getwd()
		fmt.Fprintf(notes, "tutti: %v: the ranks of this host run in %s\n", err, home)
	}
	for _, setting := range t.Environment {
		name, value, _ := strings.Cut(string(setting), "=")
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}

// configure sets what a launcher is told.
func (t assignment) configure(cfg *Config) {
	cfg.Typed = nil
	for _, word := range t.Program {
		cfg.Typed = append(cfg.Typed, string(word))
	}
	cfg.Ranks = t.Ranks
	cfg.Machines = t.Machines
	cfg.Listen = t.Listen
	cfg.Join = t.Join
	cfg.Job = t.Job
	cfg.Restarts = t.Restarts
	cfg.Min = t.Min
	cfg.Max = t.Max
	cfg.Wait = t.Wait
	cfg.Grace = t.Grace
	cfg.Bind = t.Bind
	cfg.NoPrefix = t.NoPrefix
	cfg.Color = t.Color
}

// obey ends a job by the signals that lines have the names of, and when they end or none has come for a time: a cable
// that is pulled ends nothing. User signals are this process's. Processes that were told to end already are killed when
// lines end: the launcher that has started this one waits no longer.
func obey(lines *bufio.Reader, silence time.Duration, cancel context.CancelCauseFunc) {
	told := false
	detached := time.AfterFunc(silence, func() { cancel(errDetached) })
	defer detached.Stop()
	for {
		line, err := lines.ReadString('\n')
		detached.Reset(silence)
		if err != nil && told {
			os.Exit(128 + int(syscall.SIGKILL)) // with which the ranks die
		}
		if err != nil {
			cancel(errDetached)
			return
		}
		number, ok := signalOf(strings.TrimSpace(line))
		if !ok || raise(number) {
			continue
		}
		told = true
		cancel(Signaled(number))
	}
}

// signalOf is the signal of a name. ok is false for a name that is unknown here.
func signalOf(name string) (number syscall.Signal, ok bool) {
	for number, known := range signalNames {
		if known == name {
			return number, true
		}
	}
	return 0, false
}
