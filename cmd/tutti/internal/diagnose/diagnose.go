package diagnose

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/ranks"
)

// The kinds of findings.
const (
	NoDump        = "no_dump"       // there is no dump of these ranks
	Failed        = "failed"        // these ranks aborted on their own errors
	Contradiction = "contradiction" // the records of these ranks cannot all be true, or are from different times
	Mismatch      = "mismatch"      // ranks made different calls
	NotCalled     = "not_called"    // these ranks have not made the call that others wait for
	Late          = "late"          // these ranks made the call, or continued, after others had aborted
	Unfinished    = "unfinished"    // all have made the call, and some still wait
	Message       = "message"       // a message has no partner
	Unconnected   = "unconnected"   // a rank waits for others and has no communicator yet
)

// Report is the combined result of all dumps.
type Report struct {
	Ranks    int       `json:"ranks"`    // of the world
	Findings []Finding `json:"findings"` // aborts first; nil if nothing explains a hang
	States   []State   `json:"states"`   // by rank, of those with a dump
}

// Finding is one explanation of a hang.
type Finding struct {
	Kind         string `json:"kind"`                   // one of the constants
	Communicator string `json:"communicator,omitempty"` // its name in the dumps, "" where there is none
	Number       uint64 `json:"number,omitempty"`       // of the collective
	Ranks        []int  `json:"ranks"`                  // the subject of the finding
	Waiting      []int  `json:"waiting,omitempty"`      // ranks that wait for the subject
	Text         string `json:"text"`                   // for people
}

// State is the state of one rank.
type State struct {
	Rank  int    `json:"rank"`            // of the world
	Name  string `json:"name,omitempty"`  // of an elastic member, "" for another rank
	Last  string `json:"last_call"`       // last call of the rank
	Done  bool   `json:"done"`            // that call has ended
	Waits string `json:"waits,omitempty"` // place of a wait in Sync
	Error string `json:"error,omitempty"` // reason of its abort, "" if it did not abort
}

// group is a communicator that has dumps.
type group struct {
	name    string   // in the dumps
	size    int      // number of ranks
	members []member // by rank in it
}

type member struct {
	rank        int                    // of the world
	inGroup     int                    // its rank in the group
	size        int                    // of the group, according to this dump
	time        int64                  // of the dump
	sync        *dump.Sync             // the wait in progress; nil for none
	failure     *dump.Failure          // reason of its abort; nil if it did not abort
	collectives map[uint64]*dump.Entry // by number
	twice       uint64                 // a number that two collectives have, 0 if there is none
	last        uint64                 // the highest number of a collective
	messages    []*dump.Entry          // in the order of calls
	whole       bool                   // the dump has all calls
}

// Diagnose examines the dumps of one job, at least one, sorted by rank.
func Diagnose(records []Record) Report {
	r := Report{Ranks: records[0].Tutti.Size, Findings: failed(records)}
	dumped := map[int]bool{}
	groups := map[string]*group{}
	for _, d := range records {
		dumped[d.Tutti.Rank] = true
		r.States = append(r.States, state(d))
		for name, m := range d.Tutti.Comms {
			if groups[name] == nil {
				groups[name] = &group{name: name, size: m.Size}
			}
			groups[name].members = append(groups[name].members, newMember(d, name, m))
		}
	}
	r.Findings = append(r.Findings, unconnected(records)...)
	var missing []int
	for rank := range r.Ranks {
		if !dumped[rank] {
			missing = append(missing, rank)
		}
	}
	if len(missing) > 0 {
		r.Findings = append(r.Findings, Finding{
			Kind:  NoDump,
			Ranks: missing,
			Text:  fmt.Sprintf("there is no dump of %s, which may be what the others wait for", ranks.Text(missing)),
		})
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		g := groups[name]
		slices.SortStableFunc(g.members, func(a, b member) int { return a.inGroup - b.inGroup })
		if contradictions := g.contradictions(); len(contradictions) > 0 {
			r.Findings = append(r.Findings, contradictions...)
			continue // the rest of a false record is not credible
		}
		r.Findings = append(r.Findings, g.collectives()...)
		r.Findings = append(r.Findings, g.unmatched()...)
	}
	for i := range r.Findings {
		r.Findings[i].Text = printable.Text(r.Findings[i].Text + r.names(r.Findings[i].Ranks))
	}
	for i := range r.States {
		for _, text := range []*string{&r.States[i].Name, &r.States[i].Last, &r.States[i].Waits, &r.States[i].Error} {
			*text = printable.Text(*text)
		}
	}
	return r
}

// longestNames is the number of members that a finding names. The states name all.
const longestNames = 4

// names lists the elastic members behind some ranks, "" if ranks have no names.
func (r *Report) names(ranks []int) string {
	var list []string
	for _, s := range r.States {
		if s.Name != "" && slices.Contains(ranks, s.Rank) {
			list = append(list, fmt.Sprintf("rank %d is member %q", s.Rank, s.Name))
		}
	}
	if len(list) == 0 || len(list) > longestNames {
		return ""
	}
	return " (" + strings.Join(list, ", ") + ")"
}

// unconnected reports ranks that wait for others before they have a communicator.
func unconnected(records []Record) (list []Finding) {
	for _, d := range records {
		if len(d.Tutti.Waiting) == 0 {
			continue
		}
		list = append(list, Finding{
			Kind:  Unconnected,
			Ranks: []int{d.Tutti.Rank},
			Text:  fmt.Sprintf("rank %d has no communicator yet: %s", d.Tutti.Rank, strings.Join(d.Tutti.Waiting, "; ")),
		})
	}
	return list
}

// failed reports the ranks that aborted on their own errors, the first one first.
func failed(records []Record) []Finding {
	type failure struct {
		*dump.Failure
		rank int // of the world
	}
	var failures []failure
	for _, d := range records {
		first := failure{rank: d.Tutti.Rank}
		for _, m := range d.Tutti.Comms {
			if f := m.Failure; f != nil && !f.Wait && !f.Peer && !followsAWait(d, f) &&
				(first.Failure == nil || f.Time < first.Time) {
				first.Failure = f
			}
		}
		if first.Failure != nil {
			failures = append(failures, first)
		}
	}
	if len(failures) == 0 {
		return []Finding{}
	}
	slices.SortStableFunc(failures, func(a, b failure) int {
		return cmp.Compare(a.Time, b.Time)
	})
	first := failures[0]
	f := Finding{
		Kind:  Failed,
		Ranks: []int{first.rank},
		Text:  fmt.Sprintf("rank %d aborted because of an error of its own: %s", first.rank, first.Error),
	}
	var followers []int
	for _, o := range failures[1:] {
		followers = append(followers, o.rank)
	}
	if len(followers) > 0 {
		slices.Sort(followers)
		f.Ranks = append(f.Ranks, followers...)
		f.Text += fmt.Sprintf("; later %s did as well", ranks.Text(followers))
	}
	return []Finding{f}
}

// followsAWait reports whether a failure has the error of a wait in another communicator of the same rank.
func followsAWait(d Record, f *dump.Failure) bool {
	for _, m := range d.Tutti.Comms {
		if m.Failure != nil && m.Failure.Wait && strings.Contains(f.Error, m.Failure.Error) {
			return true
		}
	}
	return false
}

func newMember(d Record, name string, m dump.Member) member {
	out := member{
		rank:        d.Tutti.Rank,
		inGroup:     m.Rank,
		size:        m.Size,
		time:        d.Tutti.Time,
		sync:        m.Sync,
		failure:     m.Failure,
		collectives: map[uint64]*dump.Entry{},
		whole:       true,
	}
	first := true
	for i := range d.Entries {
		e := &d.Entries[i]
		if e.ProcessGroup[0] != name {
			continue
		}
		if first {
			out.whole = e.RecordID == 0
			first = false
		}
		switch {
		case e.Tutti.Left:
		case e.P2P:
			out.messages = append(out.messages, e)
			out.last = max(out.last, e.CollectiveSeq) // of the collective before it
		default:
			if out.collectives[e.CollectiveSeq] != nil {
				out.twice = e.CollectiveSeq
			}
			out.collectives[e.CollectiveSeq] = e
			out.last = max(out.last, e.CollectiveSeq)
		}
	}
	return out
}

// meets reports whether a collective ends on a rank only after all ranks have called it.
func meets(e *dump.Entry) bool {
	switch e.Tutti.Op {
	case comm.OpBarrier.String(), comm.OpSplit.String():
		return true
	case comm.OpAllReduce.String(), comm.OpAllGather.String(), comm.OpReduceScatter.String(), comm.OpAllToAll.String():
		return e.Tutti.Count > 0
	}
	return false
}

// contradictions reports records that cannot be true together, such as records of different times or jobs.
func (g *group) contradictions() []Finding {
	var out []Finding
	add := func(n uint64, ranks []int, format string, args ...any) {
		out = append(out, Finding{
			Kind:         Contradiction,
			Communicator: g.name,
			Number:       n,
			Ranks:        ranks,
			Text:         "the records contradict each other: " + fmt.Sprintf(format, args...) + g.in(),
		})
	}
	for i, m := range g.members {
		switch {
		case m.size != g.size:
			add(0, []int{g.members[0].rank, m.rank}, "rank %d is one of %d ranks, and rank %d of %d",
				g.members[0].rank, g.size, m.rank, m.size)
		case i > 0 && m.inGroup == g.members[i-1].inGroup:
			add(0, []int{g.members[i-1].rank, m.rank}, "both rank %d and rank %d are number %d",
				g.members[i-1].rank, m.rank, m.inGroup)
		case m.twice > 0:
			add(m.twice, []int{m.rank}, "rank %d made two calls as collective #%d", m.rank, m.twice)
		}
	}
	// A collective that has ended on one rank was called on all ranks.
	var by *member
	var proof *dump.Entry
	for i := range g.members {
		for _, e := range g.members[i].collectives {
			if e.Completed != 0 && meets(e) && (proof == nil || e.CollectiveSeq > proof.CollectiveSeq) {
				by = &g.members[i]
				proof = e
			}
		}
	}
	if proof == nil {
		return out
	}
	var laggards []int
	interval := int64(0)
	earlier := true // all records of ranks behind are older than the proof
	for _, m := range g.members {
		if m.last < proof.CollectiveSeq {
			laggards = append(laggards, m.rank)
			interval = max(interval, by.time-m.time)
			earlier = earlier && m.time < by.time
		}
	}
	if len(laggards) == 0 {
		return out
	}
	done := fmt.Sprintf("%s is done on rank %d", call(proof, true), by.rank)
	if !earlier {
		add(proof.CollectiveSeq, laggards, "%s, and %s not called it", done, have(laggards))
		return out
	}
	// Ranks of a job that continues write their records one after the other.
	return append(out, Finding{
		Kind:         Contradiction,
		Communicator: g.name,
		Number:       proof.CollectiveSeq,
		Ranks:        laggards,
		Text: fmt.Sprintf("the records were taken at different times, up to %s apart: %s, and %s not called it before%s",
			duration(interval), done, had(laggards), g.in()),
	})
}

// in names a communicator other than the first one.
func (g *group) in() string {
	if g.name == "0" {
		return ""
	}
	return fmt.Sprintf(" of communicator %s", g.name)
}

// collectives compares the calls of the ranks.
func (g *group) collectives() []Finding {
	var out []Finding
	first := g.firstToAbort()
	lowest := ^uint64(0)
	highest := uint64(0)
	numbers := map[uint64]bool{}
	for _, m := range g.members {
		lowest = min(lowest, m.lastBefore(first))
		highest = max(highest, m.lastBefore(first))
		for n := range m.collectives {
			numbers[n] = true
		}
	}
	for _, n := range slices.Sorted(maps.Keys(numbers)) {
		if f, ok := g.mismatch(n); ok {
			out = append(out, f) // later calls are out of step
			break
		}
	}
	if lowest < highest {
		if f, ok := g.wentOnAlone(lowest + 1); ok && first == nil {
			return append(out, f)
		}
		return append(out, g.notCalled(lowest+1, first))
	}
	if f, ok := g.unfinished(highest, first); ok && len(out) == 0 {
		out = append(out, f)
	}
	return out
}

// firstToAbort returns the member whose wait failed first, for a reason other than a peer's abort. It returns nil if
// there is none.
func (g *group) firstToAbort() *member {
	var first *member
	for i := range g.members {
		m := &g.members[i]
		if f := m.failure; f != nil && f.Wait && !f.Peer && (first == nil || f.Time < first.failure.Time) {
			first = m
		}
	}
	return first
}

// after returns the nanoseconds between this member's failure and a later time; 0 if the time was earlier.
func (m *member) after(time int64) int64 {
	if m == nil {
		return 0
	}
	return max(time-m.failure.Time, 0)
}

// lastBefore returns the highest number of a collective that was called before the first member aborted. That member
// did not wait for any later call.
func (m *member) lastBefore(first *member) uint64 {
	last := m.last
	for last > 0 && m.collectives[last] != nil && first.after(m.collectives[last].Created) > 0 {
		last--
	}
	return last
}

// mismatch reports which rank called what if ranks disagree about collective n.
func (g *group) mismatch(n uint64) (Finding, bool) {
	var kinds []string
	callers := map[string][]int{}
	example := map[string]*dump.Entry{}
	for _, m := range g.members {
		e := m.collectives[n]
		if e == nil {
			continue
		}
		kind := e.Tutti.Call
		if e.Tutti.Op == comm.OpAllGatherV.String() { // its lengths are the same on all ranks
			kind = fmt.Sprintf("%s of %d in all", kind, e.Tutti.Received)
		}
		if example[kind] == nil {
			kinds = append(kinds, kind)
			example[kind] = e
		}
		callers[kind] = append(callers[kind], m.rank)
	}
	if len(kinds) < 2 {
		return Finding{}, false
	}
	f := Finding{
		Kind:         Mismatch,
		Communicator: g.name,
		Number:       n,
	}
	var parts []string
	for _, kind := range kinds {
		f.Ranks = append(f.Ranks, callers[kind]...)
		parts = append(parts, fmt.Sprintf("%s called %s", ranks.Text(callers[kind]), call(example[kind], false)))
	}
	slices.Sort(f.Ranks)
	f.Text = fmt.Sprintf("ranks disagree about collective #%d%s: %s", n, g.in(), list(parts))
	return f, true
}

// wentOnAlone reports the ranks that have called collective n if the other ranks aborted first because they had lost
// a rank. The lost rank was stopped and went on after they were gone, or has no dump.
func (g *group) wentOnAlone(n uint64) (Finding, bool) {
	f := Finding{
		Kind:         Late,
		Communicator: g.name,
		Number:       n,
	}
	var victims []int
	var earliest *member
	subject := fmt.Sprintf("collective #%d", n)
	for i := range g.members {
		m := &g.members[i]
		if m.failure != nil && (earliest == nil || m.failure.Time < earliest.failure.Time) {
			earliest = m
		}
		switch {
		case m.last >= n:
			f.Ranks = append(f.Ranks, m.rank)
			if e := m.collectives[n]; e != nil {
				subject = call(e, true)
			}
		case m.failure == nil || !m.failure.Peer:
			return f, false
		default:
			victims = append(victims, m.rank)
		}
	}
	if earliest == nil || earliest.last >= n {
		return f, false
	}
	f.Text = fmt.Sprintf("%s aborted before %s%s, which %s called: %s",
		ranks.Text(victims), subject, g.in(), have(f.Ranks), earliest.failure.Error)
	return f, true
}

// notCalled reports the ranks that have not called collective n although others have, or had not when the first
// member aborted.
func (g *group) notCalled(n uint64, first *member) Finding {
	f := Finding{
		Kind:         NotCalled,
		Communicator: g.name,
		Number:       n,
	}
	subject := fmt.Sprintf("collective #%d", n)
	var lasts, dated []string
	for i := range g.members {
		m := &g.members[i]
		e := m.collectives[n]
		last := m.lastBefore(first)
		switch {
		case last < n:
			f.Ranks = append(f.Ranks, m.rank)
			text := "it has called none"
			if e := m.collectives[last]; e != nil {
				text = "its last was " + call(e, true) + done(e)
			}
			lasts = append(lasts, text)
			if e != nil {
				dated = append(dated, fmt.Sprintf("rank %d called it %s after that", m.rank, duration(first.after(e.Created))))
			}
		case e != nil:
			subject = call(e, true)
			if e.Completed == 0 {
				f.Waiting = append(f.Waiting, m.rank)
			}
		}
	}
	slices.Sort(lasts)
	lasts = slices.Compact(lasts)
	if len(lasts) > 1 || len(f.Ranks) > 1 {
		for i := range lasts {
			lasts[i] = strings.NewReplacer("its last was", "their last was", "it has called",
				"they have called").Replace(lasts[i])
		}
	}
	if len(dated) > 0 {
		f.Kind = Late
		f.Text = fmt.Sprintf("%s had not called %s%s when rank %d aborted; %s",
			ranks.Text(f.Ranks), subject, g.in(), first.rank, list(dated))
	} else {
		f.Text = fmt.Sprintf("%s not called %s%s", have(f.Ranks), subject, g.in())
	}
	f.Text += "; " + list(lasts)
	if len(f.Waiting) > 0 {
		f.Text += fmt.Sprintf("; %s", waitText(f.Waiting))
	}
	return f
}

// noticeable is the number of nanoseconds without a sign of life after which a member was stopped or busy. Members
// that wait hear of another member's abort sooner.
const noticeable = int64(time.Second)

// wentOn returns the nanoseconds from the first member's abort to the next sign of life in this member's record; 0 if
// there is none.
func (m *member) wentOn(first *member) (after int64) {
	sign := func(time int64) {
		if a := first.after(time); a > 0 && (after == 0 || a < after) {
			after = a
		}
	}
	if m.failure != nil {
		sign(m.failure.Time)
	}
	if m.sync != nil {
		sign(m.sync.Created)
	}
	for _, e := range m.collectives {
		sign(e.Created)
		sign(e.Completed)
	}
	return after
}

// unfinished reports whether ranks wait for collective n although all have called it, and which ranks continued only
// after another rank had aborted.
func (g *group) unfinished(n uint64, first *member) (Finding, bool) {
	f := Finding{
		Kind:         Unfinished,
		Communicator: g.name,
		Number:       n,
	}
	var last *dump.Entry
	var stopped []int
	longest := int64(0)
	for i := range g.members {
		m := &g.members[i]
		e := m.collectives[n]
		if paused := m.wentOn(first); paused >= noticeable && e != nil {
			stopped = append(stopped, m.rank)
			longest = max(longest, paused)
			last = e
			continue
		}
		if e == nil || e.Completed != 0 {
			continue
		}
		synced := m.sync != nil && m.sync.Created >= e.Created && (m.sync.Pending || m.sync.Error != "")
		if synced || e.Tutti.Error != "" || e.Tutti.Op == comm.OpBarrier.String() ||
			e.Tutti.Op == comm.OpSplit.String() {
			f.Waiting = append(f.Waiting, m.rank)
			last = e
		}
	}
	if last == nil {
		return f, false
	}
	for _, m := range g.members {
		f.Ranks = append(f.Ranks, m.rank)
	}
	subject := "all ranks have"
	if len(g.members) < g.size {
		subject = have(f.Ranks)
	}
	f.Text = fmt.Sprintf("%s called %s%s", subject, call(last, true), g.in())
	if len(f.Waiting) > 0 {
		f.Text += "; " + waitText(f.Waiting)
	}
	if len(stopped) > 0 {
		f.Kind = Late
		f.Ranks = stopped
		f.Text += fmt.Sprintf("; %s went on only %s after rank %d had aborted: stopped, or busy with something else",
			ranks.Text(stopped), duration(longest), first.rank)
	}
	return f, true
}

// channel is a queue in which messages match in order. Ranks are those of the communicator.
type channel struct {
	from, to int    // sending and receiving rank
	tag      uint32 // of the messages
}

// unmatched pairs sends and receives of the ranks whose dumps have all of them.
func (g *group) unmatched() []Finding {
	sends := map[channel][]*dump.Entry{}
	receives := map[channel][]*dump.Entry{}
	rank := map[int]int{}
	channels := map[channel]bool{}
	for _, m := range g.members {
		if !m.whole {
			continue
		}
		rank[m.inGroup] = m.rank
		for _, e := range m.messages {
			c := channel{m.inGroup, e.Tutti.Peer, e.Tutti.Tag}
			list := sends
			if e.Tutti.Op == comm.OpRecv.String() {
				c = channel{e.Tutti.Peer, m.inGroup, e.Tutti.Tag}
				list = receives
			}
			list[c], channels[c] = append(list[c], e), true
		}
	}
	order := slices.SortedFunc(maps.Keys(channels), func(a, b channel) int {
		return cmp.Or(
			a.from-b.from,
			a.to-b.to,
			cmp.Compare(a.tag, b.tag),
		)
	})
	var out []Finding
	for _, c := range order {
		from, sender := rank[c.from]
		to, receiver := rank[c.to]
		if !sender || !receiver {
			continue
		}
		s := sends[c]
		r := receives[c]
		add := func(kind string, waiting int, format string, args ...any) {
			out = append(out, Finding{
				Kind:         kind,
				Communicator: g.name,
				Ranks:        []int{from, to},
				Waiting:      []int{waiting},
				Text:         fmt.Sprintf(format, args...) + g.in(),
			})
		}
		for i := range min(len(s), len(r)) {
			if s[i].Tutti.Count != r[i].Tutti.Count || s[i].Tutti.DType != r[i].Tutti.DType {
				add(Mismatch, to, "ranks disagree about message %d: rank %d called %s; rank %d called %s",
					i+1, from, call(s[i], false), to, call(r[i], false))
				break
			}
		}
		switch n := min(len(s), len(r)); {
		case len(r) > n && r[n].Completed != 0:
			add(Contradiction, to, "the records contradict each other: %s is done on rank %d, and rank %d has not sent it",
				call(r[n], false), to, from)
			out[len(out)-1].Waiting = nil
		case len(r) > n:
			add(Message, to, "rank %d waits in %s, and rank %d has not sent it", to, call(r[n], false), from)
		case len(s) > n && s[n].Completed == 0:
			add(Message, from, "rank %d waits in %s, and rank %d has not received it", from, call(s[n], false), to)
		}
	}
	return out
}

// state returns the state of a rank.
func state(d Record) State {
	s := State{Rank: d.Tutti.Rank, Name: d.Tutti.Name, Last: "none"}
	if n := len(d.Entries); n > 0 {
		e := &d.Entries[n-1]
		s.Last = call(e, !e.Tutti.Left)
		s.Done = e.Completed != 0
		s.Error = e.Tutti.Error
	}
	failure := ""
	for _, name := range slices.Sorted(maps.Keys(d.Tutti.Comms)) {
		m := d.Tutti.Comms[name]
		if m.Sync != nil && (m.Sync.Pending || m.Sync.Error != "") {
			s.Waits, s.Error = "sync at "+line(m.Sync.Frames), cmp.Or(m.Sync.Error, s.Error)
		}
		if m.Failure != nil {
			failure = cmp.Or(failure, m.Failure.Error)
		}
	}
	s.Error = cmp.Or(s.Error, failure)
	return s
}

// call describes a call, such as "allreduce #7 (64 MiB f32 sum, ddp.go:88)".
func call(e *dump.Entry, numbered bool) string {
	t := e.Tutti
	name := t.Op
	if numbered && !e.P2P {
		name = fmt.Sprintf("%s #%d", t.Op, e.CollectiveSeq)
	}
	var about []string
	if d, err := dtype.Parse(t.DType); err == nil {
		text := fmt.Sprintf("%s %s %s", bytesText(max(t.Count, t.Received), d.Size()), d, t.Reduce)
		about = append(about, strings.TrimSpace(text))
	}
	switch t.Op {
	case comm.OpSend.String():
		about = append(about, fmt.Sprintf("to rank %d, tag %d", t.Peer, t.Tag))
	case comm.OpRecv.String():
		about = append(about, fmt.Sprintf("from rank %d, tag %d", t.Peer, t.Tag))
	case comm.OpBroadcast.String(), comm.OpReduce.String(), comm.OpGather.String(), comm.OpScatter.String():
		about = append(about, fmt.Sprintf("root %d", t.Peer))
	}
	about = append(about, line(e.Frames))
	return fmt.Sprintf("%s (%s)", name, strings.Join(about, ", "))
}

func done(e *dump.Entry) string {
	if e.Completed != 0 {
		return ", which is done"
	}
	return ""
}

// line is the source line of a call, see [dump.Caller].
func line(frames []dump.Frame) string {
	if len(frames) == 0 {
		return "unknown line"
	}
	f := dump.Caller(frames)
	return fmt.Sprintf("%s:%d", path.Base(f.Filename), f.Line)
}

// bytesText is the size of n elements, exact, in a unit of 1024.
func bytesText(n, size int) string {
	value := float64(n) * float64(size)
	unit := 0
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for value >= 1024 && unit < len(units)-1 {
		value = value / 1024
		unit = unit + 1
	}
	return fmt.Sprintf("%.4g %s", value, units[unit])
}

// duration formats a number of nanoseconds, such as "12.3s".
func duration(ns int64) string {
	d := time.Duration(ns)
	switch {
	case d >= time.Second:
		d = d.Round(100 * time.Millisecond)
	case d >= time.Millisecond:
		d = d.Round(time.Millisecond)
	}
	return d.String()
}

// mostParts bounds the number of parts that list writes.
const mostParts = 10

// list joins texts, at most mostParts of them.
func list(texts []string) string {
	if n := len(texts); n > mostParts {
		texts = append(slices.Clone(texts[:mostParts]), fmt.Sprintf("… (%d in all)", n))
	}
	return strings.Join(texts, "; ")
}

// have begins a sentence, such as "rank 3 has" or "ranks 0-3 have".
func have(numbers []int) string {
	return subject(numbers, "has", "have")
}

func had(numbers []int) string {
	return subject(numbers, "had", "had")
}

func waitText(numbers []int) string {
	return subject(numbers, "waits", "wait")
}

func subject(numbers []int, one, plural string) string {
	if len(numbers) == 1 {
		plural = one
	}
	return ranks.Text(numbers) + " " + plural
}
