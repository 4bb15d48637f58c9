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

// marker begins the lines in which a host's launcher reports to its starter. Other lines lie between them. No rank's
// line begins with it.
const marker = "\x00tutti-launch "

// Kinds of reports. A value follows each kind.
const (
	reportStarted = "started" // the version
	reportAlive   = "alive"   // the launcher runs; repeated once it knows what to run
	reportJoined  = "joined"  // the addresses of the job's store and of this host
	reportEnded   = "ended"   // the [End] as JSON, sent after "joined"
)

// assignment tells a host's launcher what to run. It is a line of JSON on the launcher's standard input. It includes
// the secret, because everybody can see the arguments of processes. Each later line is either a sign of life from the
// starter or the name of a signal. Names are sent because systems number signals differently.
type assignment struct {
	Directory   []byte        `json:"directory"`   // bytes of any encoding, as in the next two fields
	Environment [][]byte      `json:"environment"` // variables of the job, as NAME=VALUE
	Program     [][]byte      `json:"program"`     // the program and its arguments, in the user's words
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
	Job         string        `json:"job"`         // the job's name; "" if it has none
	Restarts    int           `json:"restarts"`    // of all ranks, or of each rank in an elastic job; 0: none
	Min         int           `json:"min"`         // members of an elastic job; 0 of another job
	Max         int           `json:"max"`         // likewise
	Wait        time.Duration `json:"wait"`        // limit until all machines have joined
	Grace       time.Duration `json:"grace"`       // between the signal that ends ranks and SIGKILL
	Silence     time.Duration `json:"silence"`     // after which this launcher counts as lost if it sends nothing
	Bind        bool          `json:"bind"`        // each rank gets processors that no other rank has
	NoPrefix    bool          `json:"noPrefix"`    // lines do not begin with the rank
	Color       bool          `json:"color"`       // prefixes have colors
}

// starter is a launcher's knowledge of the launcher that started it.
type starter struct {
	secret  string // of the job
	index   int    // of this host in the list
	through int    // ranks of the hosts up to this one
	total   int    // ranks of all hosts

	localFirst int // local rank that this launcher's ranks begin with
	localSize  int // ranks of this machine, other launchers' included

	joined func(store, host string) // reports the addresses of the store, once it is reached, and of this host
}

// errDetached is the cause with which a host's launcher ends when its standard input has ended or gone silent: it has
// lost the ssh connection, or the launcher that started it.
var errDetached = errors.New("the connection from the launcher that has started the job was lost")

// Attend is [Run] for a launcher that [Spread] has started. It reads the assignment from control, and its ranks end
// when control ends. cfg holds the version and the output. prepare sets this host's own values, such as the program's
// place.
func Attend(ctx context.Context, cfg Config, control io.Reader, prepare func(*Config) error) error {
	report(cfg.Err, reportStarted, cfg.Version)
	report(cfg.Out, reportStarted, cfg.Version) // earlier lines come from a shell
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
	beating, fallSilent := context.WithCancel(context.WithoutCancel(ctx)) // it also beats while ranks end
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
	return &End{Code: end.Code} // the starter prints the reason
}

// report writes a report in one piece.
func report(to io.Writer, kind, value string) { fmt.Fprintf(to, "%s%s %s\n", marker, kind, value) }

// reportEnd reports how the job has ended. The starter may not read now, if nobody reads its own output. It reads on
// after this launcher has ended, and this launcher's exit code gives the same result.
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

// beat sends signs of life until ctx ends.
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

// check returns an error for values that no launcher sends.
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

// configure copies an assignment into a launcher's configuration.
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

// obey ends the job on a named signal, when lines end, or when none has come for the time of silence. The last case is
// needed because a pulled cable ends no connection. User signals are raised in this process. If lines end after a
// signal, the starter no longer waits, so the ranks are killed.
func obey(lines *bufio.Reader, silence time.Duration, cancel context.CancelCauseFunc) {
	told := false
	detached := time.AfterFunc(silence, func() { cancel(errDetached) })
	defer detached.Stop()
	for {
		line, err := lines.ReadString('\n')
		detached.Reset(silence)
		if err != nil && told {
			os.Exit(128 + int(syscall.SIGKILL)) // the ranks die with this process
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

// signalOf returns the signal of a name. ok is false for an unknown name.
func signalOf(name string) (number syscall.Signal, ok bool) {
	for number, known := range signalNames {
		if known == name {
			return number, true
		}
	}
	return 0, false
}
