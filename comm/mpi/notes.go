package mpi

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// Ranks write notes to each other, small messages on the internal communicator
// that nobody waits for: they are looked for by who has waited a while, and now
// and then by the progress goroutine. So they cost nothing as long as all goes
// well. With interop there are none, since the other ranks may be other programs.

// note is a message that a rank writes to another one.
type note struct {
	kind   noteKind
	calls  uint64 // collectives that the writer has called,
	passed uint64 // and those up to the last barrier or Split that it has left
	// Messages of users that the writer has sent to the reader, and expects or
	// has received from it.
	sent, received uint64

	number uint64               // of a report: the collective that waits,
	recent [reportCalls]record  // and the calls up to that, the first first
	length uint64               // of a failure:
	text   [noteTextLength]byte // its text
}

// first is the number of the first call that a report tells.
func (n *note) first() uint64 { return n.number - min(n.number, reportCalls-1) }

// noteKind is what a note tells.
type noteKind uint64

const (
	// report: the writer waits for the reader.
	report noteKind = iota
	// farewell: the writer closes the communicator. It writes no other note.
	farewell
	// failure: the writer's communicator is broken; mismatch: because ranks
	// disagree. It writes no other note.
	failure
	mismatch
)

const (
	reportCalls    = 16
	noteTextLength = 472
)

var noteBytes = len(hostmem.Bytes(make([]note, 1)))

// peer is what an endpoint knows of another rank.
type peer struct {
	sent, received uint64 // messages of users to and from it
	report         *note  // its latest
	agreed         bool   // with that
	last           *note  // farewell, failure or mismatch: it writes no more
}

// notebook is an endpoint's end of the exchange of notes.
type notebook struct {
	table    requests // of notes that are being sent
	memory   uintptr  // for a report and a last note to each rank, and one to read
	reports  op       // whose messages the reports are,
	last     op       // and the farewells and failures
	reported uint64   // number of the last collective that was reported, plus one
	left     int      // ranks that have written their last
}

// page returns the memory of a note.
func (b *notebook) page(i int) uintptr { return b.memory + uintptr(i*noteBytes) }

// send starts sending a note, and reports whether MPI has taken it.
func (e *endpoint) send(owner *op, page, dest int, n note) bool {
	b := &e.notes
	if b.memory == 0 {
		var err error
		if b.memory, err = host.Allocate((2*e.size + 1) * noteBytes); err != nil {
			return false
		}
	}
	p := &e.peers[dest]
	n.calls, n.passed, n.sent, n.received = e.history.calls, e.passed, p.sent, p.received
	address := b.page(page)
	hostmem.Slice[note](address, 1)[0] = n
	slot, err := b.table.add(e.lib, owner, dest, sent)
	if err == nil {
		b.table.calls.Add(e.lib.Isend, address, uintptr(noteBytes), e.lib.handles.bytes, uintptr(dest), noteTag, e.inner, slot)
		err = b.table.flush(e.lib)
	}
	return err == nil
}

// tellAll writes the last note to every other rank.
func (e *endpoint) tellAll(n note) {
	if e.interop() {
		return
	}
	e.board.part(lastUnderWay, e.passed)
	for r := range e.size {
		if r != e.rank && !e.send(&e.notes.last, e.size+r, r, n) {
			e.board.part(lastUnsent, e.passed)
		}
	}
}

// tellFailure tells the other ranks why this one cannot go on.
func (e *endpoint) tellFailure(err error) {
	n := note{kind: failure}
	text := err.Error()
	var op *comm.OpError
	if errors.As(err, &op) {
		text = op.Op + ": " + op.Err.Error()
	}
	if errors.Is(err, comm.ErrMismatch) {
		n.kind = mismatch
		if op != nil {
			text = op.Err.Error()
		}
	}
	n.length = uint64(copy(n.text[:], text))
	e.tellAll(n)
}

// told is an error of another rank, which it has told on an endpoint.
type told struct {
	on       *endpoint
	text     string
	sentinel error
}

func (t *told) Error() string { return t.text }
func (t *told) Unwrap() error { return t.sentinel }

// attend reads the notes that have come and returns an error if they show that
// what was submitted cannot be done, also if that was found before. The caller holds mu.
func (e *endpoint) attend() error {
	if e.broken != nil {
		return e.broken
	}
	_ = e.deliverNotes() // a rank that cannot be reached is not told
	if err := e.readNotes(); err != nil {
		return err
	}
	for src := range e.peers {
		if err := e.gaveUp(src); err != nil {
			return err
		}
	}
	for src := range e.peers {
		if how, _ := e.board.parted(src); how == lastUnderWay && e.peers[src].last == nil {
			continue // that note says more
		}
		if err := e.compare(src); err != nil {
			return err
		}
		if err := e.needs(src); err != nil {
			return err
		}
	}
	return nil
}

// readNotes reads the notes that have come.
func (e *endpoint) readNotes() error {
	if e.interop() {
		return nil
	}
	for src := range e.peers {
		for src != e.rank && e.peers[src].last == nil {
			n, err := e.read(src)
			if err != nil {
				return err
			}
			if how, passed := e.board.parted(src); n == nil && how == lastUnsent {
				n = unsent(passed)
			}
			if n == nil {
				break
			}
			e.heed(src, n)
		}
	}
	return nil
}

// unsent stands for the last note of a rank that MPI has not taken. It has called no
// less than it has passed.
func unsent(passed uint64) *note {
	n := &note{kind: failure, calls: passed, passed: passed}
	n.length = uint64(copy(n.text[:], "why could not be sent"))
	return n
}

// deliverNotes lets MPI go on with what is being sent. MPI says once that a note could
// not be.
func (e *endpoint) deliverNotes() error {
	if len(e.notes.table.list) == 0 {
		return nil
	}
	_, err := e.notes.table.test(e.lib, false, 1)
	return err
}

// read returns a note from a rank, nil if there is none.
func (e *endpoint) read(src int) (*note, error) {
	t := &e.notes.table
	t.reserve(1)
	if err := e.lib.reach(e.lib.Iprobe, uintptr(src), noteTag, e.inner, t.flag, t.statuses); err != nil {
		return nil, err
	}
	if hostmem.Slice[int32](t.flag, 1)[0] == 0 {
		return nil, nil
	}
	n := make([]note, 1)
	address := hostmem.Addr(n)
	if err := e.lib.reach(e.lib.Recv, address, uintptr(noteBytes), e.lib.handles.bytes, uintptr(src), noteTag, e.inner, t.statuses); err != nil {
		return nil, err
	}
	return &n[0], nil
}

// heed takes a note.
func (e *endpoint) heed(src int, n *note) {
	p := &e.peers[src]
	if n.kind == report {
		p.report, p.agreed = n, false
		return
	}
	p.last = n
	e.notes.left++
}

// gaveUp returns why a rank has given up, if it has and this one cannot go on because
// of that: what all have come to, a barrier that the other has left, ends well first.
func (e *endpoint) gaveUp(src int) error {
	n := e.peers[src].last
	if n == nil || n.kind == farewell {
		return nil
	}
	if o := e.oldest(); o != nil && !o.op.MovesData() && o.number < n.passed {
		return nil
	}
	text := string(n.text[:min(n.length, noteTextLength)])
	if n.kind == mismatch {
		return &told{e, cmp.Or(text, comm.ErrMismatch.Error()), comm.ErrMismatch}
	}
	return &told{e, fmt.Sprintf("%v: rank %d gave up: %s", comm.ErrPeerFailed, src, text), comm.ErrPeerFailed}
}
