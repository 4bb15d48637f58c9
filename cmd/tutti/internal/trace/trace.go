// Package trace makes a timeline from the flight records of a job, in the Trace Event Format that ui.perfetto.dev and
// chrome://tracing open. It has one process for each rank, all on one clock, with a track for each kind of span that
// the program names, one for its waits, and one for each communicator. See
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
package trace

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/printable"
)

// File is a file in the JSON Object Format of that document.
type File struct {
	Events []Event `json:"traceEvents"`     // never nil
	Unit   string  `json:"displayTimeUnit"` // "ms" or "ns"
	Other  Other   `json:"otherData"`       // data that the format leaves to programs
}

// Other describes the alignment of the clocks.
type Other struct {
	Clocks []Clock `json:"clocks"` // by rank
}

// Event is one event. Times are in microseconds since the first event of the file.
type Event struct {
	Name     string         `json:"name"`           // shown by viewers
	Category string         `json:"cat,omitempty"`  // filtered by viewers
	Phase    string         `json:"ph"`             // X: a slice, i: an instant, s and f: ends of an arrow, M: metadata
	Time     float64        `json:"ts"`             // microseconds since the first event of the file
	Duration *float64       `json:"dur,omitempty"`  // of a slice
	Process  int            `json:"pid"`            // the rank
	Thread   int            `json:"tid"`            // the track
	ID       string         `json:"id,omitempty"`   // of an arrow
	Bind     string         `json:"bp,omitempty"`   // "e": an arrow ends at the slice around it
	Scope    string         `json:"s,omitempty"`    // "p": an instant of the whole process
	Args     map[string]any `json:"args,omitempty"` // shown when the event is selected
}

// The phases.
const (
	slice    = "X"
	instant  = "i"
	outgoing = "s"
	incoming = "f"
	metadata = "M"
)

// span is a part of a track.
type span struct {
	name       string         // of its event
	category   string         // of its event
	begin, end int64          // in nanoseconds since 1970, on the common clock
	args       map[string]any // of its event; nil for none
	message    *message       // the span is one of its ends; nil for none
}

// message identifies a message on both of its ends.
type message struct {
	group    string // communicator's name
	from, to int    // in the group
	tag      uint32 // of the message
	nth      int    // index among messages with the same fields
}

// track is a list of spans that do not overlap.
type track struct {
	name  string // shown by viewers
	spans []span // in order
}

// New makes the timeline of at least one record, sorted by rank.
func New(records []diagnose.Record) *File {
	f := &File{
		Events: []Event{},
		Unit:   "ms",
		Other:  Other{Clocks: clocks(records)},
	}
	b := builder{file: f, ends: map[message]Event{}}
	for i, r := range records {
		b.tracks = append(b.tracks, tracksOf(r, f.Other.Clocks[i].offset()))
	}
	b.first = firstTime(b.tracks)
	for i, r := range records {
		b.addRank(r, b.tracks[i])
		b.addFailures(r, f.Other.Clocks[i].offset())
	}
	return f
}

// Write writes the file.
func (f *File) Write(w io.Writer) error {
	return json.NewEncoder(w).Encode(f)
}

// builder makes the events.
type builder struct {
	file   *File             // receives the events
	tracks [][]track         // by index of the record
	first  int64             // time 0 of the file
	ends   map[message]Event // the first end seen of each message
}

// addRank adds the tracks of a rank.
func (b *builder) addRank(r diagnose.Record, tracks []track) {
	rank := r.Tutti.Rank
	name := fmt.Sprintf("rank %d", rank)
	if r.Tutti.Host != "" {
		name += " on " + printable.Text(r.Tutti.Host)
	}
	b.describe("process_name", rank, 0, map[string]any{"name": name})
	b.describe("process_sort_index", rank, 0, map[string]any{"sort_index": rank})
	for i, t := range tracks {
		b.describe("thread_name", rank, i, map[string]any{"name": t.name})
		b.describe("thread_sort_index", rank, i, map[string]any{"sort_index": i})
		for _, s := range t.spans {
			b.addSpan(rank, i, s)
		}
	}
}

// describe adds metadata.
func (b *builder) describe(kind string, rank, thread int, args map[string]any) {
	b.file.Events = append(b.file.Events, Event{
		Name:    kind,
		Phase:   metadata,
		Process: rank,
		Thread:  thread,
		Args:    args,
	})
}

// addSpan adds a slice, and an arrow if the span is the second end of a message.
func (b *builder) addSpan(rank, thread int, s span) {
	took := micros(s.end - s.begin)
	e := Event{
		Name:     s.name,
		Category: s.category,
		Phase:    slice,
		Time:     micros(s.begin - b.first),
		Duration: &took,
		Process:  rank,
		Thread:   thread,
		Args:     s.args,
	}
	b.file.Events = append(b.file.Events, e)
	if s.message == nil {
		return
	}
	match, seen := b.ends[*s.message]
	if !seen {
		b.ends[*s.message] = e
		return
	}
	from := e
	to := match
	if e.Category == categoryReceive {
		from = match
		to = e
	}
	if from.Category == to.Category {
		return // one of the records is false
	}
	b.addArrow(from, to)
}

// addArrow joins two slices. Viewers drop an arrow that goes back in time, which can happen if a message is faster
// than the clocks are accurate, so the arrow ends at the end of the receiving slice.
func (b *builder) addArrow(from, to Event) {
	id := strconv.Itoa(len(b.file.Events))
	begin := Event{
		Name:     "message",
		Category: "message",
		Phase:    outgoing,
		Time:     from.Time,
		Process:  from.Process,
		Thread:   from.Thread,
		ID:       id,
	}
	end := begin
	end.Phase = incoming
	end.Bind = "e"
	end.Time = max(from.Time, to.Time+*to.Duration)
	end.Process = to.Process
	end.Thread = to.Thread
	b.file.Events = append(b.file.Events, begin, end)
}

// addFailures marks the first failure of a rank in each communicator.
func (b *builder) addFailures(r diagnose.Record, offset int64) {
	for name, m := range r.Tutti.Comms {
		if m.Failure == nil {
			continue
		}
		b.file.Events = append(b.file.Events, Event{
			Name:     "failed",
			Category: "failure",
			Phase:    instant,
			Time:     micros(m.Failure.Time + offset - b.first),
			Process:  r.Tutti.Rank,
			Scope:    "p",
			Args: map[string]any{
				"error":        printable.Text(m.Failure.Error),
				"communicator": printable.Text(name),
			},
		})
	}
}

// micros converts nanoseconds to microseconds.
func micros(ns int64) float64 { return float64(ns) / 1e3 }

// firstTime is the begin of the earliest span.
func firstTime(tracks [][]track) int64 {
	var first int64
	for _, all := range tracks {
		for _, t := range all {
			for _, s := range t.spans {
				if first == 0 || s.begin < first {
					first = s.begin
				}
			}
		}
	}
	return first
}

// Categories of spans.
const (
	categoryProgram    = "program"
	categoryWait       = "wait"
	categoryCollective = "collective"
	categorySend       = "send"
	categoryReceive    = "receive"
)

// tracksOf returns the tracks of a rank with its times moved by offset nanoseconds.
func tracksOf(r diagnose.Record, offset int64) []track {
	var names []string
	spans := map[string][]span{}
	for _, s := range r.Tutti.Spans {
		one := span{
			name:     printable.Text(s.Name),
			category: categoryProgram,
			begin:    s.Started + offset,
			end:      max(s.Started, s.Ended) + offset,
		}
		if s.Wait {
			one.category = categoryWait
		}
		if spans[one.name] == nil {
			names = append(names, one.name)
		}
		spans[one.name] = append(spans[one.name], one)
	}
	slices.SortStableFunc(names, func(a, b string) int { // the program first
		return cmp.Compare(spans[a][0].category, spans[b][0].category)
	})
	var tracks []track
	for _, name := range names {
		tracks = append(tracks, layOut(name, spans[name])...)
	}
	for _, name := range groupsOf(r) {
		title := "communicator " + printable.Text(name)
		if name == worldName {
			title = "world"
		}
		tracks = append(tracks, layOut(title, calls(r, name, offset))...)
	}
	return tracks
}

// worldName is the name of the first communicator in a record.
const worldName = "0"

// groupsOf returns the names of a rank's communicators in the order of their creation.
func groupsOf(r diagnose.Record) []string {
	var names []string
	first := map[string]int{}
	for _, e := range r.Entries {
		name := e.ProcessGroup[0]
		if _, seen := first[name]; !seen {
			first[name] = e.PgID
			names = append(names, name)
		}
	}
	slices.SortStableFunc(names, func(a, b string) int {
		return cmp.Compare(first[a], first[b])
	})
	return names
}

// calls returns a rank's calls of a communicator. A call that is not known to have ended ends with the record.
func calls(r diagnose.Record, group string, offset int64) []span {
	var out []span
	in := r.Tutti.Comms[group]
	whole := true // the record is complete, so the nth message is the same on both ends
	nth := map[message]int{}
	for _, e := range r.Entries {
		if e.ProcessGroup[0] != group || e.Tutti.Left {
			continue
		}
		if len(out) == 0 {
			whole = e.RecordID == 0
		}
		s := span{
			name:     e.Tutti.Op,
			category: categoryCollective,
			begin:    e.Created + offset,
			end:      max(e.Created, e.Completed) + offset,
			args:     argsOf(&e),
		}
		if e.Completed == 0 {
			s.end = max(e.Created, r.Tutti.Time) + offset
			s.args["state"] = "not known to be done"
		}
		if e.P2P {
			m := message{
				group: group,
				from:  in.Rank,
				to:    e.Tutti.Peer,
				tag:   e.Tutti.Tag,
			}
			s.category = categorySend
			if e.Tutti.Op == receiveName {
				m.from, m.to = m.to, m.from
				s.category = categoryReceive
			}
			m.nth = nth[m]
			nth[message{
				group: m.group,
				from:  m.from,
				to:    m.to,
				tag:   m.tag,
			}]++
			if whole {
				s.message = &m
			}
		}
		out = append(out, s)
	}
	return out
}

// argsOf returns the details that viewers show when a slice is selected.
func argsOf(e *dump.Entry) map[string]any {
	args := map[string]any{"call": printable.Text(e.Tutti.Call)}
	if e.P2P {
		args["message"] = e.P2PSeq
	} else {
		args["collective"] = e.CollectiveSeq
	}
	if e.Tutti.Error != "" {
		args["error"] = printable.Text(e.Tutti.Error)
	}
	if len(e.Frames) > 0 {
		f := dump.Caller(e.Frames)
		args["from"] = printable.Text(fmt.Sprintf("%s (%s:%d)", f.Name, f.Filename, f.Line))
	}
	return args
}

// layOut distributes spans over the fewest possible tracks. Viewers take overlapping spans on one track for calls
// within calls.
func layOut(name string, spans []span) []track {
	slices.SortStableFunc(spans, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	var tracks []track
	for _, s := range spans {
		free := slices.IndexFunc(tracks, func(t track) bool {
			return t.spans[len(t.spans)-1].end <= s.begin
		})
		if free < 0 {
			title := name
			if len(tracks) > 0 {
				title = fmt.Sprintf("%s (%d)", name, len(tracks)+1)
			}
			free = len(tracks)
			tracks = append(tracks, track{name: title})
		}
		tracks[free].spans = append(tracks[free].spans, s)
	}
	return tracks
}
