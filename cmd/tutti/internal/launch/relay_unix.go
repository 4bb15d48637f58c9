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

// deaf are the ranks that have no process with a handler for a signal.
func (g *group) deaf(s syscall.Signal) (all []int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !canList {
		return nil
	}
	handles := func(e entry) bool {
		return catches(e.pid, s)
	}
	for _, r := range g.running {
		if !slices.ContainsFunc(descendants(r.pid()), handles) {
			all = append(all, r.rank)
		}
	}
	slices.Sort(all)
	return all
}

// relay gives user signals of this launcher to the ranks of all machines, in an elastic job to those of this one, from
// now on until stop is called. It returns when it gets them.
func (a *agent) relay(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, userSignals...)
	go func() {
		defer signal.Stop(signals)
		for {
			select {
			case s := <-signals:
				a.pass(ctx, s.(syscall.Signal))
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
func (a *agent) pass(ctx context.Context, s syscall.Signal) {
	g := a.running.Load()
	if g == nil {
		fmt.Fprintf(a.notes, "tutti: %v reaches no rank: no rank runs now\n", s)
		return
	}
	if deaf := g.deaf(s); len(deaf) > 0 {
		fmt.Fprintf(a.notes, "tutti: %v reaches no process of %s: none handles it, or not yet\n", s, ranks.Text(deaf))
	}
	g.signal(s)
	if a.Min == 0 {
		_ = a.kv.Set(ctx, a.relayKey(), []byte(signalNames[s])) // without the store, the job is about to end
	}
}

// hearSignals gives user signals of other launchers to the ranks that run. Called once for a job, as those of earlier
// rounds stay in the store.
func (a *agent) hearSignals(ctx context.Context) error {
	_, err := a.kv.Watch(context.WithoutCancel(ctx), relayed, func(e store.Event) {
		s, ok := signalOf(string(e.Value))
		if !ok || e.Key == a.relayKey() || e.Deleted || !slices.Contains(userSignals, os.Signal(s)) {
			return
		}
		if g := a.running.Load(); g != nil {
			g.signal(s)
		}
	})
	return err
}

// relay gives user signals of this launcher to those that it has started, until stop is called: the first host's tells
// the others, but those of an elastic job.
func (s *spread) relay() (stop func()) {
	hosts := s.hosts[:1]
	if s.Min > 0 {
		hosts = s.hosts
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, userSignals...)
	go func() {
		for number := range signals {
			s.signal(hosts, number.(syscall.Signal))
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
