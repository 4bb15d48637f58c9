package schedule

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// oldest returns the collective that has been running longest, nil if none is running.
func (e *Engine) oldest() *Op {
	if len(e.running) == 0 {
		return nil
	}
	return e.running[0]
}

// reportStall sends a status report to the ranks that this one waits for, or to the nearest ones: the collective that
// waits, and the last calls. It does so once for each collective. The caller holds mu.
func (e *Engine) reportStall() {
	log := &e.log
	o := e.oldest()
	if o == nil || e.reported > o.number || !log.knows(o.number) {
		return
	}
	e.reported = o.number + 1
	m := controlMessage{kind: stallReport, number: o.number}
	for number := m.first(); number <= o.number; number++ {
		if log.knows(number) {
			m.recent[number-m.first()] = *log.call(number)
		}
	}
	missing, lagging := e.stragglers(o)
	to := append(missing, lagging...)
	if o.External {
		to = e.nearest()
	}
	for _, r := range slices.Compact(slices.Sorted(slices.Values(to))) {
		e.tell(r, m)
	}
}

// stragglers returns the ranks whose messages o waits for, and of the others those that have not received all messages
// of o. For an external operation the awaited ranks are unknown: missing are the nearest ranks that have not reported
// that they wait as well.
func (e *Engine) stragglers(o *Op) (missing, lagging []int) {
	const waited, sending = 1, 2
	state := make([]int, e.size)
	if e.segment.owner == o {
		for r := range state {
			if !e.segment.hasBegun(r) {
				state[r] |= waited
			}
		}
	}
	if o.External {
		for _, r := range e.nearest() {
			if m := e.peers[r].report; m == nil || m.number < o.number {
				state[r] |= waited
			}
		}
	}
	for i := range e.table {
		switch m := &e.table[i]; {
		case m.owner != o || o.External || m.Peer == e.rank && o.collective():
		case m.Receive:
			state[m.Peer] |= waited
		default:
			state[m.Peer] |= sending
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

// latecomers returns the ranks for which a wait has waited until its deadline, except those that are known to wait
// themselves. The caller holds mu.
func (e *Engine) latecomers(f backend.InFlight) []int {
	waits := func(r int) bool {
		m := e.peers[r].report
		o := e.oldest()
		return m != nil && o != nil && m.number >= o.number
	}
	return slices.DeleteFunc(peers(f, comm.OpRecv, f.Missing), func(r int) bool { return r == e.rank || waits(r) })
}

// nearest returns the ranks at a distance of 1, 2, 4, …. If ranks have made different calls, so have two neighbors.
func (e *Engine) nearest() (ranks []int) {
	for step := 1; step < e.size; step *= 2 {
		ranks = append(ranks, (e.rank+step)%e.size, (e.rank+e.size-step)%e.size)
	}
	return ranks
}

// describe describes the operations in flight.
func (e *Engine) describe() (f backend.InFlight) {
	if o := e.oldest(); o != nil && o.sequence == 0 { // operations of SetUp have no number
		f.Messages = append(f.Messages, o.call())
	} else if o != nil {
		f.Collective = o.call()
		f.Number = o.sequence
		f.Missing, f.Unreceived = e.stragglers(o)
		for _, r := range append(f.Missing, f.Unreceived...) {
			if m := e.peers[r].report; m != nil {
				call := m.recent[m.number-m.first()]
				f.Reports = append(f.Reports, fmt.Sprintf("rank %d waits in %v (collective #%d)", r, call, call.sequence))
			}
		}
	}
	byNumber := func(a, b *Op) int {
		return cmp.Compare(a.number, b.number)
	}
	for _, o := range slices.SortedFunc(slices.Values(e.transfers), byNumber) {
		f.Messages = append(f.Messages, o.call())
	}
	f.Reports = append(f.Reports, e.crowded(f)...)
	f.Behind = len(e.queued.all.All()) + max(len(e.running)-1, 0)
	return f
}

// crowded describes awaited ranks that cannot send, because earlier messages from them lack receives, and messages that
// cannot be sent for the same reason. Collectives have their own words for a late rank.
func (e *Engine) crowded(f backend.InFlight) (reports []string) {
	wire, ok := e.wire.(Bounded)
	if !ok {
		return nil
	}
	for _, r := range peers(f, comm.OpRecv, f.Missing) {
		if bytes := wire.Early(r); bytes > 0 {
			reports = append(reports, fmt.Sprintf("%d bytes of messages have come from rank %d before their receives, "+
				"and no more fit: post receives in the order of the sends, or before them", bytes, r))
		}
	}
	for _, r := range peers(f, comm.OpSend, nil) {
		if bytes := wire.Unread(r); bytes > 0 {
			reports = append(reports, fmt.Sprintf("%d bytes have gone to rank %d without a receive, "+
				"and the others wait until it receives", bytes, r))
		}
	}
	return reports
}

// peers returns the other ranks of messages of one kind, and those in a list, sorted.
func peers(f backend.InFlight, kind comm.Op, list []int) []int {
	all := slices.Clone(list)
	for _, m := range f.Messages {
		if m.Op == kind {
			all = append(all, m.Peer)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// compare finds the first call in which this rank and one that has sent a status report
// differ.
func (e *Engine) compare(src int) error {
	log := &e.log
	p := &e.peers[src]
	m := p.report
	if m == nil || p.agreed || !log.knows(m.number) {
		return nil
	}
	first := m.first()
	if log.call(m.number).fingerprint == m.recent[m.number-first].fingerprint {
		p.agreed = true
		return nil
	}
	for number := first; number <= m.number; number++ {
		if !log.knows(number) {
			continue
		}
		call := log.call(number)
		if peerCall := &m.recent[number-first]; call.entry != peerCall.entry {
			return e.disagreement(src, peerCall, call)
		}
	}
	return fmt.Errorf("%w: ranks %d and %d called different things before collective #%d",
		comm.ErrMismatch, min(src, e.rank), max(src, e.rank), m.recent[0].sequence)
}

// differs returns the error of a rank that needs another for an operation which the other had not called when it left.
func (e *Engine) differs(o *Op, src int) error {
	return fmt.Errorf("%w: rank %d called %v, which rank %d, now gone, did not", comm.ErrMismatch, e.rank, o, src)
}

// needs returns an error if this rank needs one that has closed its communicator: for a collective that the other has
// not called, or for a message. If the other has called as many collectives, and is gone with all its messages for
// them, it has called different ones.
func (e *Engine) needs(src int) error {
	p := &e.peers[src]
	if p.last == nil {
		return nil
	}
	alone := e.log.calls > p.last.calls
	if o := e.segment.owner; o != nil && e.wire.Gone(src) != nil && !alone && !e.segment.hasBegun(src) {
		return e.differs(o, src)
	}
	for i := range e.table {
		switch m := &e.table[i]; {
		case m.owner == nil || m.Peer != src:
		case m.owner.op.Message():
			alone = alone || p.received > p.last.sent || p.sent > p.last.received
		case !alone && e.wire.Gone(src) != nil:
			return e.differs(m.owner, src)
		}
	}
	if alone {
		return fmt.Errorf("%w: rank %d closed its communicator", comm.ErrPeerFailed, src)
	}
	return nil
}
