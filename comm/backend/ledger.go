package backend

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/ranks"
)

// InFlight describes the operations that a rank waits for, in the same words on every backend:
//
//	allreduce of 1024 f32, sum (collective #7), nothing from rank 2; 3 operations behind that
type InFlight struct {
	Collective comm.Call   // the oldest collective in flight
	Number     uint64      // its number, from 1; 0 if none is in flight, or it has none
	Missing    []int       // ranks whose data is missing
	Unreceived []int       // other ranks that have not received everything sent to them
	Reports    []string    // known facts about these ranks
	Messages   []comm.Call // in flight; nil for none
	Behind     int         // other operations in flight
}

// maxNamed is the number of messages that the text of an InFlight names.
const maxNamed = 4

// String returns the text, "nothing" if nothing is in flight.
func (f InFlight) String() string {
	var parts []string
	if f.Number > 0 {
		text := fmt.Sprintf("%v (collective #%d)", f.Collective, f.Number)
		if len(f.Missing) > 0 {
			text += ", nothing from " + ranks.Text(f.Missing)
		}
		if len(f.Unreceived) > 0 {
			text += ", not received by " + ranks.Text(f.Unreceived)
		}
		parts = append(parts, strings.Join(append([]string{text}, f.Reports...), ", "))
	}
	named := min(len(f.Messages), maxNamed)
	for _, m := range f.Messages[:named] {
		parts = append(parts, m.String())
	}
	if unnamed := len(f.Messages) - named; unnamed > 0 {
		parts = append(parts, fmt.Sprintf("%d more messages", unnamed))
	}
	if f.Number == 0 {
		parts = append(parts, f.Reports...)
	}
	switch {
	case f.Behind == 1:
		parts = append(parts, "1 operation behind that")
	case f.Behind > 1:
		parts = append(parts, fmt.Sprintf("%d operations behind that", f.Behind))
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, "; ")
}

// Error returns the error of a wait for these operations that ctx ended.
func (f InFlight) Error(ctx context.Context) error {
	return fmt.Errorf("%w, waiting for %v", comm.ContextError(ctx), f)
}

// Extent counts the first collectives and messages that a rank submitted. Barrier and Split count as collectives.
type Extent struct{ Collectives, Messages uint64 }

// Max returns the further of two.
func (e Extent) Max(f Extent) Extent {
	return Extent{max(e.Collectives, f.Collectives), max(e.Messages, f.Messages)}
}

func (e Extent) calls() uint64 {
	return e.Collectives + e.Messages
}

// Ledger numbers the calls of a rank, and remembers the last ones, for a backend without a list of operations in
// flight. The zero value is ready; any goroutine may use it. It allocates nothing.
type Ledger struct {
	mu     sync.Mutex        // guards the fields below
	begun  Extent            // calls submitted; guarded by mu
	done   Extent            // calls known to be complete, without gaps; guarded by mu
	recent [remembered]entry // call n is in recent[n % remembered]; guarded by mu
}

// remembered is the number of calls that a Ledger can name.
const remembered = 64

// entry is a call without addresses and lists, and its number among its kind.
type entry struct {
	call   comm.Call // without addresses and lists
	number uint64    // among collectives or messages, from 1
}

// Begin records a call that is submitted, and returns the calls up to it. For a Barrier or Split it uses the Op only.
func (l *Ledger) Begin(c *comm.Call) (through Extent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.recent[l.begun.calls()%remembered]
	count := &l.begun.Collectives
	if c.Op.Message() {
		count = &l.begun.Messages
	}
	*count++
	e.number = *count
	e.call.Op = c.Op
	e.call.DType = c.DType
	e.call.Reduce = c.Reduce
	e.call.Tag = c.Tag
	e.call.Peer = c.Peer
	e.call.Count = c.Count
	return l.begun
}

// Last describes the last call that was submitted, "" if there is none.
func (l *Ledger) Last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.begun.calls() == 0 {
		return ""
	}
	last := l.recent[(l.begun.calls()-1)%remembered]
	if last.call.Op.Message() {
		return last.call.String()
	}
	return InFlight{Collective: last.call, Number: last.number}.String()
}

// Begun returns the number of calls submitted.
func (l *Ledger) Begun() Extent {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.begun
}

// Idle reports whether all calls are known to be complete.
func (l *Ledger) Idle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.begun == l.done
}

// Done records that the calls within an extent are complete.
func (l *Ledger) Done(calls Extent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = l.done.Max(calls)
}

// Progress implements [Progresser].
func (l *Ledger) Progress() Progress {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Progress{
		Collectives: Count{Submitted: l.begun.Collectives, Done: l.done.Collectives},
		Messages:    Count{Submitted: l.begun.Messages, Done: l.done.Messages},
	}
}

// InFlight describes the calls not known to be complete: the oldest one that is remembered, and the number of later
// ones.
func (l *Ledger) InFlight() (f InFlight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	begun := l.begun.calls()
	first := max(l.done.calls(), begun-min(begun, remembered))
	if first == begun {
		return InFlight{}
	}
	oldest := l.recent[first%remembered]
	if oldest.call.Op.Message() {
		f.Messages = []comm.Call{oldest.call}
	} else {
		f.Collective = oldest.call
		f.Number = oldest.number
	}
	f.Behind = int(begun - first - 1)
	return f
}
