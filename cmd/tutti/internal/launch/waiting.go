package launch

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/ranks"
)

// speak prints a message ever less often until ctx ends or text returns "".
func (a *agent) speak(ctx context.Context, first time.Duration, text func() string) {
	for wait := first; ; wait *= 2 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		said := text()
		if said == "" || ctx.Err() != nil {
			return
		}
		fmt.Fprintf(a.notes, "tutti: %s\n", said)
	}
}

// sayWhoIsHere prints which machines have joined while there is no plan.
func (a *agent) sayWhoIsHere(ctx context.Context) {
	if a.starter != nil { // the starter prints it
		return
	}
	began := time.Now()
	a.speak(ctx, firstWord, func() string {
		var names []string
		for _, m := range a.listMachines(ctx) {
			names = append(names, fmt.Sprintf("%s (%s)", m.Host, m.Address))
		}
		total := ""
		if a.first {
			total = fmt.Sprintf(" of %d", a.Machines)
		}
		text := fmt.Sprintf("%d%s machines are here after %v: %s", len(names), total,
			time.Since(began).Round(time.Second), strings.Join(names, ", "))
		switch {
		case a.first && !a.Served:
			const format = "; the others join at %s, within %v (--wait): can they reach that port?"
			return text + fmt.Sprintf(format, a.address, a.Wait)
		case a.first:
			return text + "; the others join at " + a.joined()
		}
		return text + "; the first one waits for more"
	})
}

// sayWhoStays prints which other machines of an elastic job the first one keeps the store for after its ranks have
// ended.
func (a *agent) sayWhoStays(ctx context.Context) {
	a.speak(ctx, firstWord, func() string {
		listed, _ := a.kv.List(ctx, machines)
		var names []string
		for _, entry := range listed {
			var m machine
			if entry.Key != a.key && m.read(entry.Value) == nil {
				names = append(names, fmt.Sprintf("%s (%s)", m.Host, m.Address))
			}
		}
		if len(names) == 0 {
			return ""
		}
		return "the ranks of this machine have ended; it keeps the store until those of the others have: " +
			strings.Join(names, ", ")
	})
}

// hearForeign has the first launcher record which ranks of other machines succeed, until stop is called.
func (a *agent) hearForeign(ctx context.Context, g *group) (stop func()) {
	if !a.first {
		return func() {}
	}
	stop, err := a.kv.Watch(ctx, fault.EndedPrefix, func(e store.Event) {
		rank, ok := fault.EndedRank(e.Key, a.plan.Size)
		if ok && !e.Deleted && a.plan.machine(rank) != a.key {
			g.noteForeign(rank)
		}
	})
	if err != nil {
		return func() {} // if the store is lost, the round ends
	}
	return stop
}

// sayWhoIsLeft prints which ranks of this machine go on after others have succeeded: they may wait for the others.
func (a *agent) sayWhoIsLeft(ctx context.Context, g *group) {
	select {
	case <-g.first:
	case <-ctx.Done():
		return
	}
	a.speak(ctx, lateTime, func() string {
		done, left := g.split()
		if len(left) == 0 {
			return ""
		}
		verb := "have"
		if len(done) == 1 {
			verb = "has"
		}
		if a.Min > 0 {
			return fmt.Sprintf("%s %s ended with success, and the job goes on: %s on %s still running",
				ranks.Text(done), verb, ranks.Text(left), a.host)
		}
		ended := ranks.Text(done)
		if len(done) == 1 {
			ended = a.plan.place(done[0])
		}
		return fmt.Sprintf("%s %s ended with success; %s on %s still running, perhaps waiting for it",
			ended, verb, ranks.Text(left), a.host)
	})
}

// sayWhoIsStopped says of which ranks of this machine a process is stopped, or the keeper, as by a debugger or a user:
// others wait for them, before they are connected without a limit of silence.
func (a *agent) sayWhoIsStopped(ctx context.Context, g *group) {
	tick := time.NewTicker(firstWord)
	defer tick.Stop()
	var before []stoppedRank // found at the last look: shells stop their commands for a moment
	said := map[stoppedRank]bool{}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		g.mu.Lock()
		processes := listProcesses()
		now := append(g.stoppedRanks(processes), g.stoppedKeepers(processes)...)
		g.mu.Unlock()
		maps.DeleteFunc(said, func(s stoppedRank, _ bool) bool { return !slices.Contains(now, s) })
		for _, s := range now {
			if said[s] || !slices.Contains(before, s) {
				continue
			}
			said[s] = true
			const format = "tutti: %s: process %d (%s) is stopped, and others may wait for it; kill -CONT %d resumes it\n"
			fmt.Fprintf(a.notes, format, a.plan.place(s.Rank), s.PID, processName(s.PID), s.PID)
		}
		before = now
	}
}

// split returns the ranks that are known to have succeeded and the running ranks of this machine.
func (g *group) split() (done, left []int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	done = slices.Concat(g.seen.Succeeded, g.foreign)
	for _, r := range g.running {
		if !slices.Contains(done, r.rank) {
			left = append(left, r.rank)
		}
	}
	slices.Sort(done)
	slices.Sort(left)
	return done, left
}
