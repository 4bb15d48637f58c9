package elastic

import (
	"fmt"
	"slices"
	"time"
)

// decision is what a member at a boundary does next. At most one of its fields is set; if that is reason, the member
// waits for a change.
type decision struct {
	// publish has the member's status published. The others decide by it, so the member does nothing else before the
	// store has it, or has refused it for the member's limit.
	publish bool
	// retry is the number of failed attempts after which the member has waited long enough, 0 if that is not the decision.
	// Its status says so from now on, and the others take the member into an epoch again.
	retry int
	// rejoin is the epoch with which the others have gone on without the member, or from a step that it has rolled back.
	// It drops its state and joins.
	rejoin *record
	// enter is the epoch in the store, with the member in it and later than any it has entered. It makes the communicator.
	enter *record
	// propose is the epoch that the store is to have next: the one after the last, or the last one where the store has
	// lost it. It is written by compare-and-set: a single one of the members that propose succeeds.
	propose *record
	// commit has the member commit the step that it is prepared for, without an epoch: the job has ended with it.
	commit bool
	// err ends the wait: ErrLeft, ErrEnded, ErrStore, or why the others go on without the member.
	err error
	// reason says what the member waits for, for its log.
	reason string
}

// publication is how far the status of a member has come.
type publication string

const (
	outdated publication = "outdated" // it has changed since the member has published it
	offline  publication = "offline"  // the store is out of reach
	pending  publication = "pending"  // the store does not have it yet
	refused  publication = "refused"  // the store has not taken it within the member's limit
	stored   publication = "stored"   // the store has it
)

// knowledge is all that a member at a boundary decides by.
type knowledge struct {
	view
	self        status        // the member's own
	publication publication   // of self
	refusal     error         // what the store has said last, nil if that was no error
	ends        bool          // all members of the last epoch are to leave
	waited      time.Duration // at this boundary
	missed      time.Duration // for how long the same members of the last epoch have been missing at this boundary
	patience    time.Duration // the member's, after which it takes them to hang
	late        []person      // members for whom it has aborted the last epoch; nil if it has not
	rested      time.Duration // since the member was told of the last attempt that failed for it
	failure     error         // of the last attempt at this member, nil before one and after one that did not fail
	withdrawn   uint64        // the last step that the member was prepared for when it stopped waiting, 0 if none
}

// decide returns what the member does.
//
// A member that is to leave takes along nothing that others lack: it leaves at once if it has no state, if others
// have formed an epoch without it, or if all are to leave. Otherwise it helps the others to an epoch, for five times
// Silence at most.
func (k *knowledge) decide() decision {
	k.hung = k.hanging()
	if k.self.Wishes && k.self.Standing.stateless() {
		return decision{err: ErrLeft}
	}
	switch k.publication {
	case outdated:
		return decision{publish: true}
	case offline:
		return k.unserved(explain("the store is out of reach", k.refusal))
	}
	last := k.last()
	if last.begun() && last.World == k.final && !k.held() {
		return decision{err: k.outcome(last)}
	}
	switch k.publication {
	case pending:
		return decision{reason: explain("the store does not have this member's status yet", k.refusal)}
	case refused:
		return k.unserved(explain("the store does not take this member's status", k.refusal))
	}
	switch {
	case last == nil:
		return k.unserved("the store has no epoch")
	case last != k.record: // the store lost this epoch: members that have not entered it know it only from there
		return decision{propose: last}
	case last.begun() && k.precedes(last):
		if d, ok := k.follow(last); ok {
			return d
		}
	}
	return k.succeed(last)
}

// hanging returns the members that this one, if it is at the boundary behind its epoch, takes to hang: all that are
// missing, if they have been for its patience. If it has aborted the epoch for that, the time is over for those that
// were missing then. The others were in the exchange, and come.
func (k *knowledge) hanging() []person {
	last := k.last()
	if last == nil || last.rank(k.self.person()) < 0 || !k.self.returned(last) {
		return nil
	}
	missing := k.missing(last)
	if k.missed > k.patience {
		return missing
	}
	return slices.DeleteFunc(missing, func(p person) bool {
		return k.waiting(last, p) || !slices.ContainsFunc(k.late, p.matches)
	})
}

// follow is what the member does when the store has a later epoch than it has entered. It is not ok if that leaves
// the member where it is: it is not in the epoch, and waits for the next one.
func (k *knowledge) follow(last *record) (d decision, ok bool) {
	attempts := last.attempts(k.self.Name)
	member := last.rank(k.self.person()) >= 0
	switch {
	case member && k.entered != nil && last.Step == k.withdrawn && last.Step > k.self.reach():
		return decision{rejoin: last}, true
	case member:
		return decision{enter: last}, true
	case k.entered == nil: // it joins
		return decision{}, false
	case k.self.Standing == leaving:
		return decision{err: ErrLeft}, k.formedBy(last)
	case attempts >= maxAttempts:
		err := fmt.Errorf("the others had no connection to it in %d attempts", attempts)
		if k.failure != nil {
			err = fmt.Errorf("%w: %w", err, k.failure)
		}
		return decision{err: err}, true
	}
	return decision{rejoin: last}, true
}

// succeed is what the member does for an epoch that succeeds the last one.
func (k *knowledge) succeed(last *record) decision {
	outside := last.begun() && last.rank(k.self.person()) < 0
	if outside && !k.ready(last, &k.self) {
		attempts := last.attempts(k.self.Name)
		if k.rested >= backoff(attempts, k.limit) {
			return decision{retry: attempts}
		}
		reason := fmt.Sprintf("the others had no connection to it in %d attempts; it tries again later", attempts)
		return decision{reason: explain(reason, k.failure)}
	}
	next, reason := k.next()
	if last.begun() && last.World == k.final && !outside && (next == nil || !k.accompanied(last)) {
		if d, ok := k.conclude(last); ok {
			return d
		}
	}
	switch {
	case k.self.Wishes && k.ends && !k.stays():
		return decision{err: ErrLeft}
	case next != nil && k.self.Wishes && k.alone(next): // a step of it alone would be lost with it
		return k.idle("nobody is here who stays")
	case next != nil:
		return decision{propose: next}
	case outside && k.max > 0 && len(last.Members) >= k.max:
		reason = fmt.Sprintf("there are %d members already", len(last.Members))
	}
	return k.idle(reason)
}

// conclude is what a member of the last epoch does once another one has said that the job ends with it, and there are
// too few for a next one. It is not ok while somebody who is here is not at the boundary, or is still to commit.
func (k *knowledge) conclude(last *record) (d decision, ok bool) {
	if len(k.missing(last)) > len(k.hung) || k.self.Standing.stateless() {
		return decision{}, false
	}
	if k.self.Standing == prepared && k.self.Step < k.step(last) {
		return decision{commit: true}, true
	}
	// One that commits or rolls back because of the others looks at their statuses, so these stay until it has.
	inDoubt := func(s status) bool {
		return s.Standing == prepared && last.rank(s.person()) >= 0
	}
	if k.self.Standing != prepared && slices.ContainsFunc(k.present, inDoubt) {
		return decision{}, false
	}
	return decision{err: k.outcome(last)}, true
}

// outcome returns how the job has ended for this member: with its state if it was in the last epoch, and is not in
// doubt about a step.
func (k *knowledge) outcome(last *record) error {
	complete := k.self.Standing == boundary || k.self.Standing == leaving
	if !complete || last.rank(k.self.person()) < 0 || k.self.Step < max(last.Step, k.withdrawn) {
		return ErrEnded
	}
	return errComplete
}

// accompanied reports whether another member is here that has the state of the last epoch.
func (k *knowledge) accompanied(last *record) bool {
	return slices.ContainsFunc(k.present, func(s status) bool {
		return s.Name != k.self.Name && !s.Standing.stateless() && last.rank(s.person()) >= 0
	})
}

// idle is what a member does that has no epoch to enter or to propose.
func (k *knowledge) idle(reason string) decision {
	if k.self.Wishes && k.waited > k.limit { // as one that is lost: nobody is here who could take over its residual
		return decision{err: ErrLeft}
	}
	return decision{reason: reason}
}

// unserved is what a member does whose store does not serve it.
func (k *knowledge) unserved(reason string) decision {
	d := k.idle(reason)
	if d.err == nil && k.waited > k.limit {
		return decision{err: fmt.Errorf("%w: %s", ErrStore, reason)}
	}
	return d
}

// precedes reports whether an epoch is a later one than the one that the member has entered.
func (k *knowledge) precedes(r *record) bool {
	return k.entered == nil || r.World != k.entered.World && r.Number >= k.entered.Number
}

// formedBy reports whether all members of an epoch that are here have formed it.
func (v *view) formedBy(r *record) bool {
	return !slices.ContainsFunc(v.present, func(s status) bool {
		return r.rank(s.person()) >= 0 && s.Formed != r.World
	})
}

// alone reports whether this member is the only one of an epoch.
func (k *knowledge) alone(r *record) bool {
	return len(r.Members) == 1 && r.rank(k.self.person()) == 0
}

// stays reports whether another member is here that does not wish to leave.
func (k *knowledge) stays() bool {
	return slices.ContainsFunc(k.present, func(s status) bool {
		return !s.Wishes && s.Name != k.self.Name
	})
}
