package mpi

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// Control messages are small messages between ranks on the internal communicator. Nobody
// waits for them: a rank looks for them when it has waited a while, and the progress
// goroutine does now and then. So they cost nothing while all goes well. With interop there
// are none, as other ranks may be other programs.

// controlMessage is one of them.
type controlMessage struct {
	kind   controlKind
	calls  uint64 // collectives that the sender has called
	passed uint64 // and those up to the last barrier or Split that it has left
	// Messages of users that the sender has sent to the receiver, and those that it expects
	// or has received from it.
	sent, received uint64

	number uint64                  // of a status report: the collective that waits
	recent [reportCalls]loggedCall // and the calls up to that, oldest first
	length uint64                  // of a failure: the length of its text
	text   [controlTextLength]byte
}

// first is the number of the first call in a status report.
func (m *controlMessage) first() uint64 { return m.number - min(m.number, reportCalls-1) }

// controlKind is the kind of a control message.
type controlKind uint64

const (
	// stallReport: the sender waits for the receiver.
	stallReport controlKind = iota
	// goodbye: the sender closes the communicator. It is its last control message.
	goodbye
	// failure: the sender's communicator is aborted; mismatch: because ranks disagree. It
	// is its last control message.
	failure
	mismatch
)

const (
	reportCalls       = 16
	controlTextLength = 472
)

var controlBytes = len(hostmem.Bytes(make([]controlMessage, 1)))

// peer is what an endpoint knows of another rank.
type peer struct {
	sent, received uint64          // messages of users to and from it
	report         *controlMessage // its latest status report
	agreed         bool            // its calls are the same up to that
	last           *controlMessage // goodbye, failure or mismatch: it sends no more
}

// controls is what an endpoint keeps of the exchange of control messages.
type controls struct {
	table    requests // of those that are being sent
	memory   uintptr  // for a status report and a last message to each rank
	reports  op       // owns the status reports
	last     op       // and the last messages
	reported uint64   // number of the last collective that was reported, plus one
	departed int      // ranks whose last message has come
}

// buffer returns the memory of a control message.
func (c *controls) buffer(i int) uintptr { return c.memory + uintptr(i*controlBytes) }

// send starts sending a control message from a buffer, and reports whether MPI has taken it.
func (e *endpoint) send(owner *op, buffer, dest int, m controlMessage) bool {
	c := &e.control
	if c.memory == 0 {
		var err error
		if c.memory, err = host.Allocate(2 * e.size * controlBytes); err != nil {
			return false
		}
	}
	p := &e.peers[dest]
	m.calls, m.passed, m.sent, m.received = e.log.calls, e.passed, p.sent, p.received
	address := c.buffer(buffer)
	hostmem.Slice[controlMessage](address, 1)[0] = m
	slot, err := c.table.add(e.lib, owner, dest, sent)
	if err == nil {
		c.table.calls.Add(e.lib.Isend, address, uintptr(controlBytes), e.lib.handles.bytes, uintptr(dest), controlTag, e.inner, slot)
		err = c.table.flush(e.lib)
	}
	return err == nil
}

// notifyAll sends this rank's last control message to every other rank.
func (e *endpoint) notifyAll(m controlMessage) {
	if e.notified || e.interop() {
		return
	}
	e.notified = true
	e.segment.setLast(lastInFlight, e.passed)
	for r := range e.size {
		if r != e.rank && !e.send(&e.control.last, e.size+r, r, m) {
			e.segment.setLast(lastUnsent, e.passed)
		}
	}
}

// notifyFailure tells the other ranks why this one aborts.
func (e *endpoint) notifyFailure(err error) {
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
	m.length = uint64(copy(m.text[:], text))
	e.notifyAll(m)
}

// peerFailure is an error that another rank has sent on an endpoint.
type peerFailure struct {
	on       *endpoint
	text     string
	sentinel error
}

func (f *peerFailure) Error() string { return f.text }
func (f *peerFailure) Unwrap() error { return f.sentinel }

// attend receives control messages and returns an error if they show that operations in
// flight cannot complete, also if that was found before. The caller holds mu.
func (e *endpoint) attend() error {
	if err := e.life.Broken(); err != nil {
		return err
	}
	_ = e.progressControl() // some ranks may be out of reach
	if err := e.receiveControl(); err != nil {
		return err
	}
	for src := range e.peers {
		if err := e.aborted(src); err != nil {
			return err
		}
	}
	for src := range e.peers {
		if state, _ := e.segment.last(src); state == lastInFlight && e.peers[src].last == nil {
			continue // that message says more
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

// receiveControl receives the control messages that have come.
func (e *endpoint) receiveControl() error {
	if e.interop() {
		return nil
	}
	for src := range e.peers {
		for src != e.rank && e.peers[src].last == nil {
			m, err := e.receive(src)
			if err != nil {
				return err
			}
			if state, passed := e.segment.last(src); m == nil && state == lastUnsent {
				m = unsent(passed)
			}
			if m == nil {
				break
			}
			e.keep(src, m)
		}
	}
	return nil
}

// unsent stands for the last message of a rank that MPI has refused. The rank has called at
// least what it has passed.
func unsent(passed uint64) *controlMessage {
	m := &controlMessage{kind: failure, calls: passed, passed: passed}
	m.length = uint64(copy(m.text[:], "why could not be sent"))
	return m
}

// progressControl lets MPI progress the control messages that are being sent. It returns
// the failure of one of them once.
func (e *endpoint) progressControl() error {
	if len(e.control.table.list) == 0 {
		return nil
	}
	_, err := e.control.table.test(e.lib, false, 1)
	return err
}

// receive returns a control message from a rank, nil if none has come.
func (e *endpoint) receive(src int) (*controlMessage, error) {
	t := &e.control.table
	t.reserve(1)
	if err := e.lib.reach(e.lib.Iprobe, uintptr(src), controlTag, e.inner, t.flag, t.statuses); err != nil {
		return nil, err
	}
	if hostmem.Slice[int32](t.flag, 1)[0] == 0 {
		return nil, nil
	}
	m := make([]controlMessage, 1)
	address := hostmem.Addr(m)
	if err := e.lib.reach(e.lib.Recv, address, uintptr(controlBytes), e.lib.handles.bytes, uintptr(src), controlTag, e.inner, t.statuses); err != nil {
		return nil, err
	}
	return &m[0], nil
}

// keep remembers a control message.
func (e *endpoint) keep(src int, m *controlMessage) {
	p := &e.peers[src]
	if m.kind == stallReport {
		p.report, p.agreed = m, false
		return
	}
	p.last = m
	e.control.departed++
}

// aborted returns an error if a rank has aborted. A barrier that the rank has left completes
// first, as all ranks have come to it.
func (e *endpoint) aborted(src int) error {
	m := e.peers[src].last
	if m == nil || m.kind == goodbye {
		return nil
	}
	if o := e.oldest(); o != nil && !o.op.MovesData() && o.number < m.passed {
		return nil
	}
	text := string(m.text[:min(m.length, controlTextLength)])
	if m.kind == mismatch {
		return &peerFailure{e, cmp.Or(text, comm.ErrMismatch.Error()), comm.ErrMismatch}
	}
	return &peerFailure{e, fmt.Sprintf("%v: rank %d aborted: %s", comm.ErrPeerFailed, src, text), comm.ErrPeerFailed}
}
