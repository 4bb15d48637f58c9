package launch

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/fault"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/ranks"
)

// evidence is a launcher's knowledge of its ranks after a rank of the job has failed and before it ends the others.
type evidence struct {
	Failed    []failure     `json:"failed,omitempty"`    // in the order of their ends
	Succeeded []int         `json:"succeeded,omitempty"` // ranks that have succeeded, in the order of their ends
	Stopped   []stoppedRank `json:"stopped,omitempty"`   // ranks that a signal has stopped
}

// failure is a rank that has failed without being told to end.
type failure struct {
	Rank int    `json:"rank"` // its number in the job
	Text string `json:"text"` // how it ended
	Code int    `json:"code"` // exit code; 128 plus the signal if one killed the rank
}

// stoppedRank is a rank with a process that is stopped, for example by SIGSTOP.
type stoppedRank struct {
	Rank int `json:"rank"` // its number in the job
	PID  int `json:"pid"`  // the stopped process
}

// fatal lists signals that come from outside a program or from its processor. A victim ends by other signals, such as
// SIGABRT or SIGPIPE.
var fatal = []syscall.Signal{syscall.SIGKILL, syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGILL, syscall.SIGFPE}

// killed reports whether a fatal signal has ended a rank, or its shell's command.
func (f failure) killed() bool {
	return slices.Contains(fatal, syscall.Signal(f.Code-128))
}

// gather collects the evidence of this machine.
func (g *group) gather() evidence {
	g.mu.Lock()
	defer g.mu.Unlock()
	e := g.seen
	e.Stopped = g.stoppedRanks(listProcesses())
	return e
}

// stoppedRanks are those of which a process is stopped. The caller holds mu.
func (g *group) stoppedRanks(processes family) (all []stoppedRank) {
	for _, r := range g.running {
		list := r.processes(processes)
		if i := slices.IndexFunc(list, func(p entry) bool { return p.stopped }); i >= 0 {
			all = append(all, stoppedRank{Rank: r.rank, PID: list[i].pid})
		}
	}
	return all
}

// stoppedKeepers are those that are stopped, whose ranks go on: how these end is not known. The caller holds mu.
func (g *group) stoppedKeepers(processes family) (all []stoppedRank) {
	for _, r := range g.running {
		if processes.stopped(r.pid()) {
			all = append(all, stoppedRank{Rank: r.rank, PID: r.pid()})
		}
	}
	return all
}

// evidenceKey is where the evidence of a machine stands.
func (a *agent) evidenceKey(machine string, round int) string {
	return a.doneKey("evidence", machine, round)
}

// testify sends the evidence of this machine to the other launchers.
func (a *agent) testify(ctx context.Context, g *group, round int) {
	text, _ := json.Marshal(g.gather())
	_ = a.kv.Set(ctx, a.evidenceKey(a.key, round), text) // without it, the others report that this machine does not answer
}

// judge names the culprit after a rank has failed.
func (a *agent) judge(ctx context.Context, round int, end End) End {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	_ = a.all(ctx, "evidence", round) // machines that do not answer in time are left out
	lasting, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
	defer cancel()
	c := court{plan: a.plan, all: map[string]evidence{}, present: map[string]bool{}}
	listed, err := a.kv.List(lasting, a.evidenceKey("", round))
	if err != nil {
		return a.alone(end)
	}
	a.noteSilent(listed, round)
	for _, entry := range listed {
		c.add(strings.TrimPrefix(entry.Key, a.evidenceKey("", round)), entry.Value)
	}
	if listed, err = a.kv.List(lasting, fault.Prefix); err != nil {
		return a.alone(end)
	}
	slices.SortFunc(listed, func(a, b store.Entry) int {
		return cmp.Compare(a.Version, b.Version)
	})
	for _, entry := range listed {
		if r, ok := fault.Read(entry.Value, a.plan.Size); ok {
			c.reports = append(c.reports, r)
		}
	}
	if listed, err = a.kv.List(lasting, machines); err != nil {
		return a.alone(end)
	}
	for _, entry := range listed {
		c.present[entry.Key] = true
	}
	text, _ := json.Marshal(c.verdict(end))
	now, _, err := a.kv.CompareAndSet(lasting, fmt.Sprintf("%sverdict/%d", keys, round), 0, text)
	if err != nil {
		return a.alone(end)
	}
	agreed, err := readEnd(now.Value)
	if err != nil {
		return a.alone(end)
	}
	return agreed
}

// noteSilent records the machines whose evidence of a round is not listed.
func (a *agent) noteSilent(listed []store.Entry, round int) {
	a.silent = nil
	for machine := range a.plan.First {
		isOf := func(e store.Entry) bool { return e.Key == a.evidenceKey(machine, round) }
		if !slices.ContainsFunc(listed, isOf) {
			a.silent = append(a.silent, machine)
		}
	}
}

// court holds all that is known about a failed round.
type court struct {
	plan    plan                // plan of the failed round
	all     map[string]evidence // by machine; machines that do not answer are missing
	present map[string]bool     // machines whose launchers have a session of the store
	reports []fault.Report      // the ranks' reports about each other, in the order of their posts
}

// add reads a machine's evidence, and drops its claims about other machines' ranks.
func (c *court) add(key string, text []byte) {
	var e evidence
	m, ok := c.plan.Machines[key]
	if !ok || json.Unmarshal(text, &e) != nil {
		return
	}
	first := c.plan.First[key]
	foreign := func(rank int) bool {
		return rank < first || rank >= first+m.Ranks
	}
	e.Failed = slices.DeleteFunc(e.Failed, func(f failure) bool { return foreign(f.Rank) })
	for i := range e.Failed {
		e.Failed[i].Text = printable.Text(e.Failed[i].Text)
	}
	e.Stopped = slices.DeleteFunc(e.Stopped, func(s stoppedRank) bool { return foreign(s.Rank) })
	e.Succeeded = slices.DeleteFunc(e.Succeeded, foreign)
	c.all[key] = e
}

// verdict returns the end with the rank to blame. The candidates come in this order: a rank that was killed or is
// stopped; two ranks that have lost each other; a rank that others have lost and that has not ended; a rank that others
// have waited for in vain; a failed rank that others have lost and that has lost no failed rank. Without a candidate,
// the first failure stays to blame.
func (c *court) verdict(end End) End {
	failed := c.failed()
	if i := slices.IndexFunc(failed, func(f failure) bool { return c.began(f, end) }); i > 0 {
		first := failed[i]
		failed = slices.Insert(slices.Delete(failed, i, i+1), 0, first)
	}
	for _, f := range failed {
		if f.killed() && (c.began(f, end) || !c.victim(f.Rank)) {
			return c.blame(f)
		}
	}
	if text := c.stopped(); text != "" {
		end.Text = text
		return end
	}
	if text := c.severed(); text != "" {
		end.Text = text
		return end
	}
	if suspect, text := c.silent(); suspect >= 0 {
		end.Text = text
		_, answers := c.all[c.plan.machine(suspect)]
		end.Rank = answers // no restart helps if a machine is lost
		return end
	}
	if text := c.straggler(); text != "" {
		end.Text = text
		return end
	}
	for _, f := range failed {
		if len(c.accusers(f.Rank)) > 0 && !c.victim(f.Rank) {
			return c.blame(f)
		}
	}
	if done := c.succeeded(); len(done) > 0 {
		end.Text = fmt.Sprintf("%s; %s had ended with success before", end.Text, ranks.Text(done))
	}
	return end
}

// blame returns the end of a job because of a failed rank.
func (c *court) blame(f failure) End {
	return End{Text: fmt.Sprintf("%s: %s", c.plan.place(f.Rank), f.Text), Code: f.Code, Rank: true}
}

// began reports whether a rank has ended the round: its failure was the first that the launchers heard of.
func (c *court) began(f failure, end End) bool { return c.blame(f).Text == end.Text }

// victim reports whether a rank has lost a failed rank.
func (c *court) victim(rank int) bool {
	return slices.ContainsFunc(c.failed(), func(f failure) bool {
		return slices.Contains(c.accusers(f.Rank), rank)
	})
}

// failed returns the failed ranks, of each machine in the order of their ends.
func (c *court) failed() (all []failure) {
	for _, key := range c.plan.keys() {
		all = append(all, c.all[key].Failed...)
	}
	return all
}

// succeeded returns the ranks that have succeeded.
func (c *court) succeeded() (all []int) {
	for _, key := range c.plan.keys() {
		all = append(all, c.all[key].Succeeded...)
	}
	slices.Sort(all)
	return all
}

// stopped names a stopped rank.
func (c *court) stopped() string {
	for _, key := range c.plan.keys() {
		for _, s := range c.all[key].Stopped {
			return fmt.Sprintf("%s: process %d is stopped%s; %s has others wait longer for it",
				c.plan.place(s.Rank), s.PID, c.said(s.Rank), c.patience(s.Rank))
		}
	}
	return ""
}

// near reports whether two ranks are on one machine.
func (c *court) near(a, b int) bool { return c.plan.machine(a) == c.plan.machine(b) }

// severed names two ranks on different machines that have lost each other, or of which one has never reached the other,
// although both launchers answer.
func (c *court) severed() string {
	const remedy = "does a firewall let the machines reach each other?"
	if caller, callee, reason := c.blocked(); reason != "" {
		return fmt.Sprintf("%s reports that %s %s; %s", c.plan.place(caller), c.plan.place(callee), reason, remedy)
	}
	for _, r := range c.reports {
		reverse := func(back fault.Report) bool {
			return back.Kind == r.Kind && back.By == r.About && back.About == r.By
		}
		if r.Kind == fault.Late || c.near(r.By, r.About) || !slices.ContainsFunc(c.reports, reverse) {
			continue
		}
		verb := "has lost"
		if r.Kind == fault.Unreached {
			verb = "does not reach"
		}
		return fmt.Sprintf("%s %s %s, and the other way round: %s; %s",
			c.plan.place(r.By), verb, c.plan.place(r.About), r.Reason, remedy)
	}
	return ""
}

// blocked returns a rank that has tried in vain to connect to a rank of another machine, and the reason, "" if there is
// none. The launchers of both answer. The called rank has waited as well, or has not ended.
func (c *court) blocked() (caller, callee int, reason string) {
	ended := c.ended()
	for _, r := range c.reports {
		switch {
		case r.Kind != fault.Tried && r.Kind != fault.Heard || c.near(r.By, r.About):
		case c.absence(r.By) != "" || c.absence(r.About) != "":
		case r.Kind == fault.Heard:
			return r.About, r.By, r.Reason
		case !ended[r.About] || c.waits(r.About):
			return r.By, r.About, r.Reason
		}
	}
	return -1, -1, ""
}

// waits reports whether a rank has waited for another rank until a deadline.
func (c *court) waits(rank int) bool {
	return slices.ContainsFunc(c.reports, func(r fault.Report) bool {
		return r.Kind != fault.Lost && (r.By == rank || r.Kind == fault.Heard && r.About == rank)
	})
}

// ended returns the ranks that have failed or succeeded.
func (c *court) ended() map[int]bool {
	ended := map[int]bool{}
	for _, f := range c.failed() {
		ended[f.Rank] = true
	}
	for _, rank := range c.succeeded() {
		ended[rank] = true
	}
	return ended
}

// accused returns the rank that most of the counted reports are about, -1 if no report counts.
func (c *court) accused(counts func(fault.Report) bool) int {
	reports := map[int]int{} // by the rank that they are about
	for _, r := range c.reports {
		if counts(r) {
			reports[r.About]++
		}
	}
	suspect := -1
	for rank := range c.plan.Size {
		if reports[rank] > 0 && (suspect < 0 || reports[rank] > reports[suspect]) {
			suspect = rank
		}
	}
	return suspect
}

// straggler names a rank that ended ranks timed out waiting for. It has not ended, and it waits for nobody.
func (c *court) straggler() string {
	ended := c.ended()
	suspect := c.accused(func(r fault.Report) bool {
		return r.Kind != fault.Lost && ended[r.By] && !ended[r.About] && !c.waits(r.About)
	})
	if suspect < 0 {
		return ""
	}
	if text := c.absence(suspect); text != "" {
		return c.plan.place(suspect) + c.said(suspect) + text
	}
	remedy := "with TUTTI_RECORD=1000, 'tutti diagnose .' says what it does instead"
	afar := func(r fault.Report) bool {
		return (r.Kind == fault.Unreached || r.Kind == fault.Tried) && r.About == suspect && !c.near(r.By, suspect)
	}
	if slices.ContainsFunc(c.reports, afar) {
		remedy = "does a firewall let the machines reach each other, and has its program come so far?"
	}
	return fmt.Sprintf("%s%s; its process is there: %s", c.plan.place(suspect), c.said(suspect), remedy)
}

// absence tells why a rank's launcher does not answer, "" if it does.
func (c *court) absence(rank int) string {
	key := c.plan.machine(rank)
	if !c.present[key] {
		return "; its launcher has ended, or its machine cannot be reached"
	}
	if _, answers := c.all[key]; !answers {
		return "; its launcher does not answer: is the machine down, or the network to it cut?"
	}
	return ""
}

// silent names a rank that others have lost and that has not ended.
func (c *court) silent() (suspect int, text string) {
	ended := c.ended()
	suspect = c.accused(func(r fault.Report) bool { return r.Kind == fault.Lost && !ended[r.About] && c.credible(r) })
	if suspect < 0 {
		return suspect, ""
	}
	text = c.plan.place(suspect) + c.said(suspect)
	if absence := c.absence(suspect); absence != "" {
		return suspect, text + absence
	}
	for _, by := range c.accusers(suspect) {
		if !c.near(by, suspect) {
			return suspect, text + "; its process is there: does a firewall let the machines reach each other?"
		}
	}
	return suspect, text + "; its process is there, but does not run"
}

// said returns another rank's report about a rank, "" if there is none.
func (c *court) said(rank int) string {
	for _, r := range c.reports {
		if r.About == rank && r.Kind != fault.Heard {
			return fmt.Sprintf(": %s, says %s", r.Reason, c.plan.place(r.By))
		}
	}
	return ""
}

// patience returns the setting that bounds how long others wait for a rank that does nothing.
func (c *court) patience(rank int) string {
	for _, r := range c.reports {
		if r.About == rank && (r.Kind == fault.Unreached || r.Kind == fault.Tried) {
			return env.ConnectTimeout
		}
	}
	return "--tcp-silence"
}

// credible reports whether a report came before others had lost the rank that made it. A frozen rank takes others for
// lost when it resumes, and a lost rank loses its own connections.
func (c *court) credible(r fault.Report) bool {
	for _, before := range c.reports {
		if before == r {
			return true
		}
		if before.Kind == fault.Lost && before.About == r.By {
			return false
		}
	}
	return true
}

// accusers returns the ranks that reported a rank as lost before others had lost them.
func (c *court) accusers(rank int) (all []int) {
	for _, r := range c.reports {
		if r.About == rank && r.Kind == fault.Lost && c.credible(r) {
			all = append(all, r.By)
		}
	}
	return all
}

// keys returns the keys of the machines, in the order of their ranks.
func (p *plan) keys() []string {
	var all []string
	for key := range p.First {
		all = append(all, key)
	}
	slices.SortFunc(all, func(a, b string) int {
		return cmp.Compare(p.First[a], p.First[b])
	})
	return all
}

// machine returns the key of a rank's machine.
func (p *plan) machine(rank int) string {
	found := ""
	for _, key := range p.keys() {
		if p.First[key] <= rank {
			found = key
		}
	}
	return found
}

// place names a rank and its host, and the host's address if there are several machines.
func (p *plan) place(rank int) string {
	m := p.Machines[p.machine(rank)]
	host := m.host(rank - p.First[p.machine(rank)])
	if len(p.First) < 2 || m.Address == "" {
		return fmt.Sprintf("rank %d on %s", rank, host)
	}
	return fmt.Sprintf("rank %d on %s (%s)", rank, host, m.Address)
}
