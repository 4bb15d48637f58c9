//go:build unix

package launch

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/ranks"
)

// userSignals mean what the ranks' program says. Of a rank, they reach the processes that have a handler for them.
var userSignals = []os.Signal{syscall.SIGUSR1, syscall.SIGUSR2}

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

// relay gives user signals of this launcher to the ranks of all machines, in an elastic job to those of this one, until
// ctx ends.
func (a *agent) relay(ctx context.Context, g *group) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, userSignals...)
	defer signal.Stop(signals)
	name := relayed + strings.TrimPrefix(a.key, machines)
	if a.Min == 0 {
		stop, err := a.kv.Watch(ctx, relayed, func(e store.Event) {
			number, err := strconv.Atoi(string(e.Value))
			s := syscall.Signal(number)
			if err == nil && e.Key != name && !e.Deleted && slices.Contains(userSignals, os.Signal(s)) {
				g.signal(s)
			}
		})
		if err == nil { // without the store, the job is about to end
			defer stop()
		}
	}
	for {
		select {
		case s := <-signals:
			if deaf := g.deaf(s.(syscall.Signal)); len(deaf) > 0 {
				fmt.Fprintf(a.notes, "tutti: %v reaches no process of %s: none handles it, or not yet\n", s, ranks.Text(deaf))
			}
			g.signal(s.(syscall.Signal))
			if a.Min == 0 {
				_ = a.kv.Set(ctx, name, []byte(strconv.Itoa(int(s.(syscall.Signal)))))
			}
		case <-ctx.Done():
			return
		}
	}
}
