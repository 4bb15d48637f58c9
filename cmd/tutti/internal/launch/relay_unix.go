//go:build unix

package launch

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/ranks"
)

// userSignals mean what the ranks' program says. Of a rank, they reach the processes that have a handler for them.
var userSignals = []os.Signal{syscall.SIGUSR1, syscall.SIGUSR2}

// signalNames are the names by which launchers tell each other of signals: systems number user signals differently.
var signalNames = map[syscall.Signal]string{
	syscall.SIGHUP:  "HUP",
	syscall.SIGINT:  "INT",
	syscall.SIGTERM: "TERM",
	syscall.SIGUSR1: "USR1",
	syscall.SIGUSR2: "USR2",
}

// unhandled are the ranks that have no process with a handler for a signal.
func (g *group) unhandled(s syscall.Signal) (all []int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !canList {
		return nil
	}
	handles := func(e entry) bool {
		return catches(e.pid, s)
	}
	listed := listProcesses()
	for _, r := range g.running {
		if !slices.ContainsFunc(r.processes(listed), handles) {
			all = append(all, r.rank)
		}
	}
	slices.Sort(all)
	return all
}

// relay gives user signals of this launcher to the ranks of all machines, from now on until stop is called. It returns
// when it gets them.
func (a *agent) relay(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, userSignals...)
	go func() {
		defer signal.Stop(signals)
		for {
			select {
			case s := <-signals:
				a.pass(s.(syscall.Signal))
			case <-ctx.Done():
				return
			}
		}
	}()
	return cancel
}

// relayKey is where this launcher's last user signal stands.
func (a *agent) relayKey() string { return relayed + strings.TrimPrefix(a.key, machines) }

// pass gives a user signal of this launcher to the ranks that run, and to the other launchers.
func (a *agent) pass(s syscall.Signal) {
	g := a.running.Load()
	if g == nil {
		fmt.Fprintf(a.notes, "tutti: %v reaches no rank: no rank runs now\n", s)
		return
	}
	if missing := g.unhandled(s); len(missing) > 0 {
		fmt.Fprintf(a.notes, "tutti: %v reaches no process of %s: none handles it, or not yet\n", s, ranks.Text(missing))
	}
	g.signal(s)
	select {
	case a.outgoing <- signalNames[s]:
	default: // the store has been out of reach for many signals
	}
}

// exchangeSignals gives user signals of other launchers to the ranks that run, and tells the others of this one's,
// until a session of the store ends. Signals stay in the store: those of earlier sessions are known, and those from
// before there are ranks reach none.
func (a *agent) exchangeSignals(ctx context.Context, kv *store.Client) error {
	before := a.heard.Load()
	_, err := kv.Watch(ctx, relayed, func(e store.Event) {
		if e.Version <= before || e.Key == a.relayKey() || e.Deleted {
			return
		}
		a.heard.Store(max(a.heard.Load(), e.Version)) // what exists at first comes in the order of keys
		s, ok := signalOf(string(e.Value))
		if !ok || !slices.Contains(userSignals, os.Signal(s)) {
			return
		}
		if g := a.running.Load(); g != nil {
			g.signal(s)
		}
	})
	if err != nil {
		return err
	}
	go a.post(kv)
	return nil
}

// post tells the other launchers of this one's user signals until a session of the store ends, after the sessions
// before it. A signal whose post was not answered is posted again, by the next session too: unless the store has it.
func (a *agent) post(kv *store.Client) {
	last := <-a.posts
	defer func() { a.posts <- last }()
	for {
		if last.unanswered == "" {
			select {
			case last.unanswered = <-a.outgoing:
			case <-kv.Done():
				return
			}
		}
		// No other launcher writes the key: where its version is another one, an earlier post was done.
		name := []byte(last.unanswered)
		now, _, err := kv.CompareAndSet(context.Background(), a.relayKey(), last.version, name)
		switch {
		case kv.Err() != nil && err != nil:
			return
		case unexecuted(err):
			select {
			case <-time.After(storeRetry):
			case <-kv.Done():
			}
			continue
		case err != nil:
			fmt.Fprintf(a.notes, "tutti: the other machines are not told of signal %s: %v\n", last.unanswered, err)
		default:
			last.version = now.Version
		}
		last.unanswered = ""
	}
}

// relay gives user signals of this launcher to the first host's, which tells the others, until stop is called.
func (s *spread) relay() (stop func()) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, userSignals...)
	go func() {
		for number := range signals {
			s.signal(s.hosts[:1], number.(syscall.Signal))
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
	}
}

// unread is for user signals that are not relayed yet, which would end this process.
var unread = make(chan os.Signal, 1)

// raise gives this process a user signal, which does not end it. It returns false for another signal.
func raise(s syscall.Signal) bool {
	if !slices.Contains(userSignals, os.Signal(s)) {
		return false
	}
	signal.Notify(unread, s) // it may not be relayed yet
	_ = syscall.Kill(os.Getpid(), s)
	return true
}
