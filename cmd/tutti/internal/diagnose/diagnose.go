package diagnose

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// The kinds of findings.
const (
	NoDump     = "no_dump"    // there is no dump of these ranks
	Mismatch   = "mismatch"   // ranks disagree about a call
	NotCalled  = "not_called" // these ranks have not called what others wait for
	Unfinished = "unfinished" // all have called it, and some still wait
	Message    = "message"    // a message has no partner
)

// Report is what the dumps say together.
type Report struct {
	Ranks    int       `json:"ranks"`
	Findings []Finding `json:"findings"`
	States   []State   `json:"states"`
}

// Finding is one thing that explains a hang.
type Finding struct {
	Kind         string `json:"kind"`
	Communicator string `json:"communicator,omitempty"`
	Number       uint64 `json:"number,omitempty"` // of the collective
	Ranks        []int  `json:"ranks"`            // whom it is about
	Waiting      []int  `json:"waiting,omitempty"`
	Text         string `json:"text"`
}

// State is what one rank was at.
type State struct {
	Rank  int    `json:"rank"`
	Last  string `json:"last_call"`
	Done  bool   `json:"done"`
	Waits string `json:"waits,omitempty"` // where, in a Sync
	Error string `json:"error,omitempty"`
}

// group is a communicator of which there are dumps.
type group struct {
	name    string
	size    int
	members []member // by rank in it
}

type member struct {
	rank        int // of the world
	inGroup     int
	sync        *comm.DumpSync
	collectives map[uint64]*comm.DumpEntry
	last        uint64 // the highest number of a collective
	messages    []*comm.DumpEntry
	whole       bool // nothing was forgotten
}

// Diagnose looks at the dumps of one job, sorted by rank, at least one.
func Diagnose(records []Record) Report {
	r := Report{Ranks: records[0].Tutti.Size, Findings: []Finding{}}
	there := map[int]bool{}
	groups := map[string]*group{}
	for _, d := range records {
		there[d.Tutti.Rank] = true
		r.States = append(r.States, state(d))
		for name, m := range d.Tutti.Comms {
			if groups[name] == nil {
				groups[name] = &group{name: name, size: m.Size}
			}
			groups[name].members = append(groups[name].members, newMember(d, name, m))
		}
	}
	var missing []int
	for rank := range r.Ranks {
		if !there[rank] {
			missing = append(missing, rank)
		}
	}
	if len(missing) > 0 {
		r.Findings = append(r.Findings, Finding{Kind: NoDump, Ranks: missing,
			Text: fmt.Sprintf("there is no dump of %s, which may be what the others wait for", ranksText(missing))})
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		g := groups[name]
		slices.SortFunc(g.members, func(a, b member) int { return a.inGroup - b.inGroup })
		r.Findings = append(r.Findings, g.collectives()...)
		r.Findings = append(r.Findings, g.unmatched()...)
	}
	return r
}

func newMember(d Record, name string, m comm.DumpMember) member {
	out := member{rank: d.Tutti.Rank, inGroup: m.Rank, sync: m.Sync, collectives: map[uint64]*comm.DumpEntry{}, whole: true}
	first := true
	for i := range d.Entries {
		e := &d.Entries[i]
		if e.ProcessGroup[0] != name {
			continue
		}
		if first {
			out.whole, first = e.RecordID == 0, false
		}
		switch {
		case e.Tutti.Left:
		case e.P2P:
			out.messages = append(out.messages, e)
		default:
			out.collectives[e.CollectiveSeq] = e
			out.last = max(out.last, e.CollectiveSeq)
		}
	}
	return out
}

// in names a communicator that is not the first one.
func (g *group) in() string {
	if g.name == "0" {
		return ""
	}
	return fmt.Sprintf(" of communicator %s", g.name)
}

// collectives compares what the ranks have called.
func (g *group) collectives() []Finding {
	var out []Finding
	least, most := g.members[0].last, uint64(0)
	numbers := map[uint64]bool{}
	for _, m := range g.members {
		least, most = min(least, m.last), max(most, m.last)
		for n := range m.collectives {
			numbers[n] = true
		}
	}
	for _, n := range slices.Sorted(maps.Keys(numbers)) {
		if f, ok := g.mismatch(n); ok {
			out = append(out, f) // what comes later is out of step
			break
		}
	}
	if least < most {
		return append(out, g.notCalled(least+1))
	}
	if f, ok := g.unfinished(most); ok && len(out) == 0 {
		out = append(out, f)
	}
	return out
}

// mismatch tells who called what if ranks disagree about collective n.
func (g *group) mismatch(n uint64) (Finding, bool) {
	var kinds []string
	ranks, example := map[string][]int{}, map[string]*comm.DumpEntry{}
	for _, m := range g.members {
		e := m.collectives[n]
		if e == nil {
			continue
		}
		kind := e.Tutti.Call
		if e.Tutti.Op == comm.OpAllGatherV.String() { // whose lengths are the same on all ranks
			kind = fmt.Sprintf("%s of %d in all", kind, e.Tutti.Received)
		}
		if example[kind] == nil {
			kinds, example[kind] = append(kinds, kind), e
		}
		ranks[kind] = append(ranks[kind], m.rank)
	}
	if len(kinds) < 2 {
		return Finding{}, false
	}
	f := Finding{Kind: Mismatch, Communicator: g.name, Number: n}
	var parts []string
	for _, kind := range kinds {
		f.Ranks = append(f.Ranks, ranks[kind]...)
		parts = append(parts, fmt.Sprintf("%s called %s", ranksText(ranks[kind]), call(example[kind], false)))
	}
	slices.Sort(f.Ranks)
	f.Text = fmt.Sprintf("ranks disagree about collective #%d%s: %s", n, g.in(), strings.Join(parts, "; "))
	return f, true
}

// notCalled tells who has not called collective n, which others have.
func (g *group) notCalled(n uint64) Finding {
	f := Finding{Kind: NotCalled, Communicator: g.name, Number: n}
	what := fmt.Sprintf("collective #%d", n)
	var lasts []string
	for _, m := range g.members {
		e := m.collectives[n]
		switch {
		case m.last < n:
			f.Ranks = append(f.Ranks, m.rank)
			last := "it has called none"
			if e := m.collectives[m.last]; e != nil {
				last = "its last was " + call(e, true) + done(e)
			}
			lasts = append(lasts, last)
		case e != nil:
			what = call(e, true)
			if e.Completed == 0 {
				f.Waiting = append(f.Waiting, m.rank)
			}
		}
	}
	slices.Sort(lasts)
	if lasts = slices.Compact(lasts); len(lasts) > 1 || len(f.Ranks) > 1 {
		for i := range lasts {
			lasts[i] = strings.NewReplacer("its last was", "their last was", "it has called", "they have called").Replace(lasts[i])
		}
	}
	f.Text = fmt.Sprintf("%s not called %s%s; %s", have(f.Ranks), what, g.in(), strings.Join(lasts, "; "))
	if len(f.Waiting) > 0 {
		f.Text += fmt.Sprintf("; %s", waitText(f.Waiting))
	}
	return f
}

// unfinished tells whether ranks wait for collective n, which all have called.
func (g *group) unfinished(n uint64) (Finding, bool) {
	f := Finding{Kind: Unfinished, Communicator: g.name, Number: n}
	var last *comm.DumpEntry
	for _, m := range g.members {
		e := m.collectives[n]
		if e == nil || e.Completed != 0 {
			continue
		}
		synced := m.sync != nil && m.sync.Created >= e.Created && (m.sync.Pending || m.sync.Error != "")
		if synced || e.Tutti.Error != "" || e.Tutti.Op == comm.OpBarrier.String() || e.Tutti.Op == comm.OpSplit.String() {
			f.Waiting, last = append(f.Waiting, m.rank), e
		}
	}
	if last == nil {
		return f, false
	}
	for _, m := range g.members {
		f.Ranks = append(f.Ranks, m.rank)
	}
	who := "all ranks have"
	if len(g.members) < g.size {
		who = have(f.Ranks)
	}
	f.Text = fmt.Sprintf("%s called %s%s; %s", who, call(last, true), g.in(), waitText(f.Waiting))
	return f, true
}

// channel is where messages match in order, by ranks in the communicator.
type channel struct {
	from, to int
	tag      uint32
}

// unmatched pairs sends and receives of ranks whose dumps have all of them.
func (g *group) unmatched() []Finding {
	sends, receives := map[channel][]*comm.DumpEntry{}, map[channel][]*comm.DumpEntry{}
	rank, channels := map[int]int{}, map[channel]bool{}
	for _, m := range g.members {
		if !m.whole {
			continue
		}
		rank[m.inGroup] = m.rank
		for _, e := range m.messages {
			c, list := channel{m.inGroup, e.Tutti.Peer, e.Tutti.Tag}, sends
			if e.Tutti.Op == comm.OpRecv.String() {
				c, list = channel{e.Tutti.Peer, m.inGroup, e.Tutti.Tag}, receives
			}
			list[c], channels[c] = append(list[c], e), true
		}
	}
	order := slices.SortedFunc(maps.Keys(channels), func(a, b channel) int {
		return cmp.Or(a.from-b.from, a.to-b.to, cmp.Compare(a.tag, b.tag))
	})
	var out []Finding
	for _, c := range order {
		from, sender := rank[c.from]
		to, receiver := rank[c.to]
		if !sender || !receiver {
			continue
		}
		s, r := sends[c], receives[c]
		add := func(kind string, waiting int, format string, args ...any) {
			out = append(out, Finding{Kind: kind, Communicator: g.name, Ranks: []int{from, to}, Waiting: []int{waiting}, Text: fmt.Sprintf(format, args...) + g.in()})
		}
		for i := range min(len(s), len(r)) {
			if s[i].Tutti.Count != r[i].Tutti.Count || s[i].Tutti.DType != r[i].Tutti.DType {
				add(Mismatch, to, "ranks disagree about message %d: rank %d called %s; rank %d called %s", i+1, from, call(s[i], false), to, call(r[i], false))
				break
			}
		}
		switch n := min(len(s), len(r)); {
		case len(r) > n && r[n].Completed == 0:
			add(Message, to, "rank %d waits in %s, and rank %d has not sent it", to, call(r[n], false), from)
		case len(s) > n && s[n].Completed == 0:
			add(Message, from, "rank %d waits in %s, and rank %d has not received it", from, call(s[n], false), to)
		}
	}
	return out
}

// state is what a rank was at.
func state(d Record) State {
	s := State{Rank: d.Tutti.Rank, Last: "none"}
	if n := len(d.Entries); n > 0 {
		e := &d.Entries[n-1]
		s.Last, s.Done, s.Error = call(e, !e.Tutti.Left), e.Completed != 0, e.Tutti.Error
	}
	for _, name := range slices.Sorted(maps.Keys(d.Tutti.Comms)) {
		sync := d.Tutti.Comms[name].Sync
		if sync == nil || !sync.Pending && sync.Error == "" {
			continue
		}
		s.Waits, s.Error = "sync at "+line(sync.Frames), cmp.Or(sync.Error, s.Error)
	}
	return s
}

// call describes a call, as in "allreduce #7 (64 MiB f32 sum, ddp.go:88)".
func call(e *comm.DumpEntry, numbered bool) string {
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

func done(e *comm.DumpEntry) string {
	if e.Completed != 0 {
		return ", which is done"
	}
	return ""
}

// line is the place of a call: the innermost line outside of this module's
// libraries, or the innermost one.
func line(frames []comm.DumpFrame) string {
	if len(frames) == 0 {
		return "unknown line"
	}
	i := slices.IndexFunc(frames, func(f comm.DumpFrame) bool {
		return !strings.HasPrefix(f.Name, "github.com/tutti-go/tutti/distributed.") && !strings.HasPrefix(f.Name, "github.com/tutti-go/tutti/comm/")
	})
	f := frames[max(i, 0)]
	return fmt.Sprintf("%s:%d", path.Base(f.Filename), f.Line)
}

// bytesText is the length of n elements, exact in units of 1024.
func bytesText(n, size int) string {
	value, unit := float64(n)*float64(size), 0
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	return fmt.Sprintf("%.4g %s", value, units[unit])
}

func ranksText(ranks []int) string {
	text := strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
	if len(ranks) == 1 {
		return "rank " + text
	}
	return "ranks " + text
}

func have(ranks []int) string {
	if len(ranks) == 1 {
		return ranksText(ranks) + " has"
	}
	return ranksText(ranks) + " have"
}

func waitText(ranks []int) string {
	if len(ranks) == 1 {
		return ranksText(ranks) + " waits"
	}
	return ranksText(ranks) + " wait"
}
