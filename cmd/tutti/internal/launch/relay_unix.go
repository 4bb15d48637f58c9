//go:build unix

package launch

import (
	"context"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/tutti-go/tutti/comm/store"
)

// userSignals mean what the ranks' program says. Of a rank, they reach the processes that have a handler for them.
var userSignals = []os.Signal{syscall.SIGUSR1, syscall.SIGUSR2}

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
			g.signal(s.(syscall.Signal))
			if a.Min == 0 {
				_ = a.kv.Set(ctx, name, []byte(strconv.Itoa(int(s.(syscall.Signal)))))
			}
		case <-ctx.Done():
			return
		}
	}
}
