package mpi

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/ranks"
)

// oldest returns the collective that has run longest, nil if there is none.
func (e *endpoint) oldest() *op {
	if len(e.running) == 0 {
		return nil
	}
	return e.running[0]
}

// reportStall tells the ranks that this one waits for, or the nearest ones, in which
// collective it waits and what it called before, once for each collective. The caller holds mu.
func (e *endpoint) reportStall() {
	o, h := e.oldest(), &e.history
	if e.interop() || o == nil || e.notes.reported > o.number || e.notes.reports.pending > 0 || !h.knows(o.number) {
		return
	}
	e.notes.reported = o.number + 1
	n := note{kind: report, number: o.number}
	for number := n.first(); number <= o.number; number++ {
		if h.knows(number) {
			n.recent[number-n.first()] = *h.at(number)
		}
	}
	silent, deaf := e.late(o)
	to := append(silent, deaf...)
	if o.library {
		to = e.nearest()
	}
	for _, r := range slices.Compact(slices.Sorted(slices.Values(to))) {
		e.send(&e.notes.reports, r, r, n)
	}
}

// late returns the ranks whose messages o waits for, and of the others those that
// have not received all that o sent them. Whom a collective of the library waits for is not
// known: late returns those of the nearest ranks that have not reported that they wait too.
func (e *endpoint) late(o *op) (silent, deaf []int) {
	const waited, sending = 1, 2
	state := make([]int, e.size)
	if e.board.owner == o {
		for r := range state {
			if !e.board.hasTold(r) {
				state[r] |= waited
			}
		}
	}
	if o.library {
		for _, r := range e.nearest() {
			if n := e.peers[r].report; n == nil || n.number < o.number {
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
			silent = append(silent, r)
		case s&sending != 0:
			deaf = append(deaf, r)
		}
	}
	return silent, deaf
}

// nearest returns the ranks at a distance of 1, 2, 4, …. If ranks have called different
// things, so have two neighbors.
func (e *endpoint) nearest() (ranks []int) {
	for step := 1; step < e.size; step *= 2 {
		ranks = append(ranks, (e.rank+step)%e.size, (e.rank+e.size-step)%e.size)
	}
	return ranks
}

// mostNamed is how many messages the error of a wait names.
const mostNamed = 4

// waitsFor describes what keeps the rank waiting.
func (e *endpoint) waitsFor() string {
	var what []string
	if o := e.oldest(); o != nil {
		what = append(what, e.collectiveState(o))
	}
	open := slices.SortedFunc(slices.Values(e.open), func(a, b *op) int { return cmp.Compare(a.number, b.number) })
	for _, o := range open[:min(len(open), mostNamed)] {
		what = append(what, o.String())
	}
	if len(open) > mostNamed {
		what = append(what, fmt.Sprintf("%d more messages", len(open)-mostNamed))
	}
	if behind := len(e.waiting) + max(len(e.running)-1, 0); behind > 0 {
		what = append(what, fmt.Sprintf("%d operations behind that", behind))
	}
	if len(what) == 0 {
		return "nothing"
	}
	return strings.Join(what, "; ")
}

// collectiveState describes a collective, which ranks it waits for, and where
// these were last.
func (e *endpoint) collectiveState(o *op) string {
	text := o.String()
	if o.number < e.history.calls { // setUp makes others
		text += fmt.Sprintf(" (collective #%d)", o.named)
	}
	silent, deaf := e.late(o)
	if len(silent) > 0 {
		text += ", nothing from " + ranks.Text(silent)
	}
	if len(deaf) > 0 {
		text += ", not received by " + ranks.Text(deaf)
	}
	for _, r := range append(silent, deaf...) {
		if n := e.peers[r].report; n != nil {
			what := n.recent[n.number-n.first()]
			text += fmt.Sprintf(", rank %d waits in %v (collective #%d)", r, what, what.named)
		}
	}
	return text
}

// compare finds the first call in which this rank and one that has sent a report
// differ.
func (e *endpoint) compare(src int) error {
	p, h := &e.peers[src], &e.history
	n := p.report
	if n == nil || p.agreed || !h.knows(n.number) {
		return nil
	}
	first := n.first()
	if h.at(n.number).chain == n.recent[n.number-first].chain {
		p.agreed = true
		return nil
	}
	for number := first; number <= n.number; number++ {
		if theirs := n.recent[number-first]; h.knows(number) && h.at(number).entry != theirs.entry {
			return e.disagreement(src, &theirs, h.at(number))
		}
	}
	return fmt.Errorf("%w: ranks %d and %d called different things before collective #%d",
		comm.ErrMismatch, min(src, e.rank), max(src, e.rank), n.recent[0].named)
}

// needs returns an error if this rank needs one that has left: for a collective
// that the other has not called, or for a message.
func (e *endpoint) needs(src int) error {
	p := &e.peers[src]
	if p.last == nil {
		return nil
	}
	alone := e.history.calls > p.last.calls
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
