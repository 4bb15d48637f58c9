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

// userSignals have the meaning that the ranks' program gives them. They reach only the processes of a rank that handle
// them.
var userSignals = []os.Signal{syscall.SIGUSR1, syscall.SIGUSR2}

// signalNames are the names of signals between launchers: systems number user signals differently.
var signalNames = map[syscall.Signal]string{
	syscall.SIGHUP:  "HUP",
	syscall.SIGINT:  "INT",
	syscall.SIGTERM: "TERM",
	syscall.SIGUSR1: "USR1",
	syscall.SIGUSR2: "USR2",
}

// unhandled returns the ranks without a process that handles a signal.
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

// relay passes this launcher's user signals to the ranks of all machines until stop is called. When it returns, it is
// ready to receive them.
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

// relayKey returns the key of this launcher's last user signal.
func (a *agent) relayKey() string { return relayed + strings.TrimPrefix(a.key, machines) }

// pass sends a user signal of this launcher to the running ranks and to the other launchers.
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
	default: // many signals wait for a store that is out of reach
	}
}

// exchangeSignals passes other launchers' user signals to the running ranks, and posts this launcher's for the others,
// until a session of the store ends. Signals stay in the store. Earlier sessions have relayed theirs, and signals from
// before the first ranks reach no rank.
func (a *agent) exchangeSignals(ctx context.Context, kv *store.Client) error {
	before := a.heard.Load()
	_, err := kv.Watch(ctx, relayed, func(e store.Event) {
		if e.Version <= before || e.Key == a.relayKey() || e.Deleted {
			return
		}
		a.heard.Store(max(a.heard.Load(), e.Version)) // existing keys come first, in the order of keys
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

// post posts this launcher's user signals for the others until a session of the store ends. It starts when the earlier
// session's post has returned. A signal whose post was not answered is posted again, if necessary by the next session,
// unless the store has it.
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
		// No other launcher writes the key. If its version differs, an earlier post has succeeded.
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

// relay passes this launcher's user signals to the first host's launcher, which tells the others, until stop is called.
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

// unread receives user signals that are not relayed yet. They would end this process otherwise.
var unread = make(chan os.Signal, 1)

// raise sends this process a user signal, which does not end it. It returns false for any other signal.
func raise(s syscall.Signal) bool {
	if !slices.Contains(userSignals, os.Signal(s)) {
		return false
	}
	signal.Notify(unread, s) // the signal may not be relayed yet
	_ = syscall.Kill(os.Getpid(), s)
	return true
}
