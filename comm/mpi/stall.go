package mpi

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// oldest returns the collective that has run longest, nil if none runs.
func (e *endpoint) oldest() *op {
	if len(e.running) == 0 {
		return nil
	}
	return e.running[0]
}

// reportStall sends the ranks that this one waits for, or the nearest ones, a status report:
// in which collective it waits, and its last calls. It does so once for each collective. The
// caller holds mu.
func (e *endpoint) reportStall() {
	o, log := e.oldest(), &e.log
	if e.interop() || o == nil || e.control.reported > o.number || e.control.reports.inFlight > 0 || !log.knows(o.number) {
		return
	}
	e.control.reported = o.number + 1
	m := controlMessage{kind: stallReport, number: o.number}
	for number := m.first(); number <= o.number; number++ {
		if log.knows(number) {
			m.recent[number-m.first()] = *log.at(number)
		}
	}
	missing, lagging := e.stragglers(o)
	to := append(missing, lagging...)
	if o.external {
		to = e.nearest()
	}
	for _, r := range slices.Compact(slices.Sorted(slices.Values(to))) {
		e.send(&e.control.reports, r, r, m)
	}
}

// stragglers returns the ranks whose messages o waits for, and of the others those that have
// not received all messages of o. Whom a collective of the library waits for is not known:
// missing are those of the nearest ranks that have not reported that they wait as well.
func (e *endpoint) stragglers(o *op) (missing, lagging []int) {
	const waited, sending = 1, 2
	state := make([]int, e.size)
	if e.segment.owner == o {
		for r := range state {
			if !e.segment.hasBegun(r) {
				state[r] |= waited
			}
		}
	}
	if o.external {
		for _, r := range e.nearest() {
			if m := e.peers[r].report; m == nil || m.number < o.number {
				state[r] |= waited
			}
		}
	}
	for _, q := range e.table.list {
		switch {
		case q.owner != o || q.rank < 0 || int(q.rank) == e.rank && o.collective():
		case q.expected == sent:
			state[q.rank] |= sending
		default:
			state[q.rank] |= waited
		}
	}
	for r, s := range state {
		switch {
		case s&waited != 0:
			missing = append(missing, r)
		case s&sending != 0:
			lagging = append(lagging, r)
		}
	}
	return missing, lagging
}

// nearest returns the ranks at a distance of 1, 2, 4, …. If ranks have called different
// things, so have two neighbors.
func (e *endpoint) nearest() (ranks []int) {
	for step := 1; step < e.size; step *= 2 {
		ranks = append(ranks, (e.rank+step)%e.size, (e.rank+e.size-step)%e.size)
	}
	return ranks
}

// describe describes the operations in flight.
func (e *endpoint) describe() (f backend.InFlight) {
	if o := e.oldest(); o != nil && o.sequence == 0 { // of setUp, which has no number
		f.Messages = append(f.Messages, o.call())
	} else if o != nil {
		f.Collective, f.Number = o.call(), o.sequence
		f.Missing, f.Unreceived = e.stragglers(o)
		for _, r := range append(f.Missing, f.Unreceived...) {
			if m := e.peers[r].report; m != nil {
				call := m.recent[m.number-m.first()]
				f.Reports = append(f.Reports, fmt.Sprintf("rank %d waits in %v (collective #%d)", r, call, call.sequence))
			}
		}
	}
	for _, o := range slices.SortedFunc(slices.Values(e.transfers), func(a, b *op) int { return cmp.Compare(a.number, b.number) }) {
		f.Messages = append(f.Messages, o.call())
	}
	f.Behind = len(e.queued) + max(len(e.running)-1, 0)
	return f
}

// compare finds the first call in which this rank and one that has sent a status report
// differ.
func (e *endpoint) compare(src int) error {
	p, log := &e.peers[src], &e.log
	m := p.report
	if m == nil || p.agreed || !log.knows(m.number) {
		return nil
	}
	first := m.first()
	if log.at(m.number).fingerprint == m.recent[m.number-first].fingerprint {
		p.agreed = true
		return nil
	}
	for number := first; number <= m.number; number++ {
		if theirs := m.recent[number-first]; log.knows(number) && log.at(number).entry != theirs.entry {
			return e.disagreement(src, &theirs, log.at(number))
		}
	}
	return fmt.Errorf("%w: ranks %d and %d called different things before collective #%d",
		comm.ErrMismatch, min(src, e.rank), max(src, e.rank), m.recent[0].sequence)
}

// needs returns an error if this rank needs one that has closed its communicator: for a
// collective that the other has not called, or for a message.
func (e *endpoint) needs(src int) error {
	p := &e.peers[src]
	if p.last == nil {
		return nil
	}
	alone := e.log.calls > p.last.calls
	for _, q := range e.table.list {
		if int(q.rank) == src && q.owner.op.Message() {
			alone = alone || p.received > p.last.sent || p.sent > p.last.received
		}
	}
	if alone {
		return fmt.Errorf("%w: rank %d closed its communicator", comm.ErrPeerFailed, src)
	}
	return nil
}
