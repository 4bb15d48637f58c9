package schedule

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/printable"
)

// Control messages are small messages between ranks on the internal communicator. Nobody waits for them: a rank polls
// them when it has waited for some time, and the progress goroutine does occasionally. They cost nothing while nothing
// fails.

// controlMessage is a control message.
type controlMessage struct {
	kind   controlKind // what it tells
	calls  uint64      // number of collectives that the sender has called
	passed uint64      // the same up to the last barrier or Split that it has left
	// Numbers of users' messages that the sender has sent to the receiver, and that it expects or has received from
	// it.
	sent, received uint64

	number uint64                  // of a status report: the collective that waits
	recent [reportCalls]loggedCall // the calls up to that one, oldest first
	length uint64                  // of a failure: the length of its text
	text   [controlTextLength]byte // of a failure; length bytes of it are set
}

// readControl returns a control message as another rank has sent it, if it is one that ranks send.
func readControl(bytes []byte) (*controlMessage, error) {
	messages := make([]controlMessage, 1)
	copy(hostmem.Bytes(messages), bytes)
	m := &messages[0]
	valid := len(bytes) == ControlBytes && m.passed <= m.calls && m.length <= controlTextLength
	switch m.kind {
	case stallReport:
		valid = valid && m.number < m.calls
	case goodbye, failure, mismatch:
	default:
		valid = false
	}
	if !valid {
		return nil, fmt.Errorf("a control message that is none: kind %d, %d bytes", m.kind, len(bytes))
	}
	return m, nil
}

// reason is the text of a failure.
func (m *controlMessage) reason() string {
	return printable.Text(string(m.text[:m.length]))
}

// first is the number of the first call in a status report.
func (m *controlMessage) first() uint64 {
	return m.number - min(m.number, reportCalls-1)
}

// controlKind is the kind of a control message.
type controlKind uint64

const (
	// stallReport: the sender waits for the receiver.
	stallReport controlKind = iota
	// goodbye: the sender closes the communicator. It is its last control message.
	goodbye
	// failure: the sender's communicator is aborted; mismatch: because ranks disagree. The last control message.
	failure
	mismatch
	// lost replaces the last message of a rank that the wire can no longer reach.
	lost
)

const (
	reportCalls       = 16
	controlTextLength = 472
)

// ControlBytes is the length of a control message: fixed, in the byte order of the host.
var ControlBytes = len(hostmem.Bytes(make([]controlMessage, 1)))

// peer is an engine's knowledge about another rank.
type peer struct {
	sent, received uint64          // messages of users to and from it
	report         *controlMessage // its latest status report
	agreed         bool            // its calls are the same up to that report
	last           *controlMessage // goodbye, failure or mismatch; nothing follows it
}

// tell sends a control message to a rank, and reports whether the wire accepted it.
func (e *Engine) tell(dest int, m controlMessage) bool {
	p := &e.peers[dest]
	m.calls = e.log.calls
	m.passed = e.passed
	m.sent = p.sent
	m.received = p.received
	return e.wire.Tell(dest, m.kind == stallReport, hostmem.Bytes([]controlMessage{m}))
}

// notifyAll sends this rank's last control message to every other rank.
func (e *Engine) notifyAll(m controlMessage) {
	if e.notified {
		return
	}
	e.notified = true
	e.segment.setLast(lastInFlight, e.passed)
	for r := range e.size {
		// A Looker refuses messages only to ranks that are gone, perhaps not reported yet; the others get theirs.
		if r != e.rank && !e.tell(r, m) && e.looker == nil {
			e.segment.setLast(lastUnsent, e.passed)
		}
	}
}

// notifyFailure tells the other ranks why this one aborts.
func (e *Engine) notifyFailure(err error) {
	m := controlMessage{kind: failure}
	text := err.Error()
	var op *comm.OpError
	if errors.As(err, &op) {
		text = op.Op + ": " + op.Err.Error()
	}
	if errors.Is(err, comm.ErrMismatch) {
		m.kind = mismatch
		if op != nil {
			text = op.Err.Error()
		}
	}
	m.say(text)
	e.notifyAll(m)
}

// say sets the text of a failure.
func (m *controlMessage) say(text string) {
	m.length = uint64(copy(m.text[:], text))
}

// peerFailure is an error that another rank has sent.
type peerFailure struct {
	on       *Engine // the engine that got it
	text     string  // of the error of the other rank
	sentinel error   // that it wraps
}

func (f *peerFailure) Error() string { return f.text }
func (f *peerFailure) Unwrap() error { return f.sentinel }

// Attend receives control messages and returns an error if they show, now or earlier, that operations in flight cannot
// complete. The caller must hold no lock.
func (e *Engine) Attend() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.attend()
}

// attend is Attend with mu held.
func (e *Engine) attend() error {
	if err := e.Life.Broken(); err != nil {
		return err
	}
	if err := e.hear(); err != nil {
		return err
	}
	for src := range e.peers {
		if err := e.aborted(src); err != nil {
			return err
		}
	}
	for src := range e.peers {
		if state, _ := e.segment.last(src); state == lastInFlight && e.peers[src].last == nil {
			continue // that message has more information
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

// hear receives the control messages that have come.
func (e *Engine) hear() error {
	for src := range e.peers {
		for src != e.rank && e.peers[src].last == nil {
			m, err := e.hearFrom(src)
			if err != nil {
				return err
			}
			if m == nil {
				break
			}
			e.keep(src, m)
		}
	}
	return nil
}

// hearFrom returns the next control message of a rank, nil if there is none, or the replacement of its last one. It
// allocates nothing for a wait that polls often.
func (e *Engine) hearFrom(src int) (*controlMessage, error) {
	bytes, err := e.wire.Hear(src)
	if err != nil {
		return nil, err
	}
	if bytes != nil {
		m, err := readControl(bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: rank %d sent %w", comm.ErrPeerFailed, src, err)
		}
		return m, nil
	}
	if state, passed := e.segment.last(src); state == lastUnsent {
		return unsent(passed), nil
	}
	gone := e.wire.Gone(src)
	if gone == nil || e.segment.due() { // messages from the rank come first
		return nil, nil
	}
	m := &controlMessage{kind: lost}
	m.say(gone.Error())
	return m, nil
}

// unsent replaces the last message of a rank that MPI has refused. The rank has called at least the collectives that
// it has passed.
func unsent(passed uint64) *controlMessage {
	m := &controlMessage{kind: failure, calls: passed, passed: passed}
	m.say("why could not be sent")
	return m
}

// keep stores a control message.
func (e *Engine) keep(src int, m *controlMessage) {
	p := &e.peers[src]
	if m.kind == stallReport {
		p.report = m
		p.agreed = false
		return
	}
	p.last = m
	e.departed++
}

// aborted returns an error if a rank has aborted. A barrier that the rank has left completes first, because all ranks
// have arrived at it.
func (e *Engine) aborted(src int) error {
	m := e.peers[src].last
	if m == nil || m.kind == goodbye {
		return nil
	}
	if o := e.oldest(); o != nil && !o.op.MovesData() && o.number < m.passed {
		return nil
	}
	text := m.reason()
	switch m.kind {
	case mismatch:
		return &peerFailure{e, cmp.Or(text, comm.ErrMismatch.Error()), comm.ErrMismatch}
	case lost:
		return fmt.Errorf("%w: rank %d is gone: %s", comm.ErrPeerFailed, src, text)
	}
	return &peerFailure{e, fmt.Sprintf("%v: rank %d aborted: %s", comm.ErrPeerFailed, src, text), comm.ErrPeerFailed}
}
