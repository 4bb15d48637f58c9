package elastic

import (
	"fmt"
	"slices"
)

// outcome is what a member at a boundary does next.
type outcome string

const (
	wait    outcome = "wait"    // for a change
	tell    outcome = "tell"    // the others its status, by way of the store
	accept  outcome = "accept"  // the latest epoch, and wait for the one after it
	rejoin  outcome = "rejoin"  // without state: the others have gone on
	enter   outcome = "enter"   // the latest epoch: form its communicator
	retry   outcome = "retry"   // after an attempt that failed for it: the others may take it again
	fail    outcome = "fail"    // after too many of these
	propose outcome = "propose" // the next epoch
	leave   outcome = "leave"   // the job
	cutOff  outcome = "cut off" // the store has been out of reach for too long
	end     outcome = "end"     // the others have made the last step
)

// boundary is what a member at a boundary knows.
type boundary struct {
	view
	own       status // the member's
	told      bool   // the others are to know it as it is
	stored    bool   // the store has what they are to know
	refused   bool   // it has not, for Config.Patience
	refusal   error  // why: what the store has said
	reached   bool   // the store is in reach
	ends      bool   // all members of the last epoch are to leave
	impatient bool   // it has waited for Config.Patience
	failed    error  // why the last attempt failed at this member, nil before one and after one that did not
	backedOff bool   // it has waited long enough after an attempt that failed for it
}

// decide returns what the member does, the epoch for that, and why there is none yet.
//
// A member that is to leave takes along nothing that others lack: it leaves at once if it has no state, if others have formed an epoch
// without it, or if all are to leave. Otherwise it helps the others to an epoch, until it is out of patience.
func (b *boundary) decide() (do outcome, epoch *record, why string) {
	last, _ := b.last()
	begun, rank := last != nil && last.Number > 0, -1
	if begun {
		rank = last.rank(b.own.person())
	}
	switch {
	case b.own.Wishes && b.own.Fresh:
		return leave, nil, ""
	case b.reached && begun && last.World == b.over && !b.held():
		return end, nil, ""
	case !b.told:
		return tell, nil, ""
	case !b.reached:
		return b.idle(explain("the store is out of reach", b.refusal), true)
	case !b.stored && !b.refused:
		return wait, nil, explain("the store does not have this member's status yet", b.refusal)
	case !b.stored:
		return b.idle(explain("the store does not take this member's status", b.refusal), true)
	case !begun || !b.own.precedes(last):
	case rank >= 0 && last == b.record:
		return enter, last, ""
	case rank >= 0 || !b.own.member():
		return accept, last, ""
	case !b.own.Leaving && b.attempts() >= maxAttempts:
		return fail, last, ""
	case !b.own.Leaving:
		return rejoin, last, ""
	case b.formedBy(last):
		return leave, nil, ""
	}
	if begun && rank < 0 && !b.ready(last, &b.own) {
		if b.backedOff {
			return retry, last, ""
		}
		return wait, nil, explain(fmt.Sprintf("the others had no connection to it in %d attempts; it tries again later", b.attempts()), b.failed)
	}
	next, why := b.next()
	switch {
	case b.own.Wishes && b.ends && !b.stays():
		return leave, nil, ""
	case next != nil && b.own.Wishes && len(next.Members) == 1 && next.rank(b.own.person()) == 0: // a step of it alone would go with it
		return b.idle("nobody is here who stays", false)
	case next != nil:
		return propose, next, ""
	case rank < 0 && begun && b.max > 0 && len(last.Members) >= b.max:
		why = fmt.Sprintf("there are %d members already", len(last.Members))
	}
	return b.idle(why, last == nil)
}

// idle is what a member does that has no epoch to enter or to propose. cut: the store does not serve it.
func (b *boundary) idle(why string, cut bool) (outcome, *record, string) {
	switch {
	case b.impatient && b.own.Wishes: // as one that is lost: nobody is here who could take over its residual
		return leave, nil, ""
	case b.impatient && cut:
		return cutOff, nil, why
	}
	return wait, nil, why
}

// held reports whether a member that has the state of the job is here.
func (v *view) held() bool {
	last, _ := v.last()
	return last != nil && slices.ContainsFunc(v.present, func(s status) bool { return !s.Fresh && last.rank(s.person()) >= 0 })
}

// formedBy reports whether all members of an epoch that are here have formed it.
func (v *view) formedBy(r *record) bool {
	return !slices.ContainsFunc(v.present, func(s status) bool {
		return r.rank(s.person()) >= 0 && !(s.Formed && s.Accepted != nil && s.Accepted.World == r.World)
	})
}

// stays reports whether another member is here that does not wish to leave.
func (b *boundary) stays() bool {
	return slices.ContainsFunc(b.present, func(s status) bool { return !s.Wishes && s.Name != b.own.Name })
}
