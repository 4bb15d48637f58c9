package elastic

import "fmt"

// standing is where a member stands. Its status has it as text.
//
//	          await            enter           state received
//	fresh ───────────▶ joining ─────────▶ fresh ────────────────▶ stepping ◀─────────┐
//	                    ▲   ▲               │                        │               │
//	                    │   └───────────────┘                        │ await         │ enter
//	                    │     attempt failed                         ▼               │
//	                    └─────────────────────────── boundary, prepared or leaving ──┘
//	                                  rejoin
type standing string

const (
	// fresh: without the state of the job, and not at a boundary: before [Member.Next], or in an epoch that is to give
	// it the state.
	fresh standing = "fresh"
	// joining: at a boundary, without the state.
	joining standing = "joining"
	// stepping: with the state, and not at a boundary: in an epoch, or no longer waiting for one.
	stepping standing = "stepping"
	// boundary: with the state, at the boundary behind an epoch.
	boundary standing = "boundary"
	// prepared: the same, with the result of a step that others may have committed. It can be rolled back.
	prepared standing = "prepared"
	// leaving: the same, after a vote in which it leaves. It is not in the next epoch, unless nobody else has the state.
	leaving standing = "leaving"
)

// waits reports whether a member is at a boundary.
func (s standing) waits() bool { return s == joining || s.leads() }

// leads reports whether a member is at a boundary with the state of the job.
func (s standing) leads() bool {
	return s == boundary || s == prepared || s == leaving
}

// stateless reports whether a member lacks the state of the job.
func (s standing) stateless() bool { return s == fresh || s == joining }

// inside is the standing of a member that leaves a boundary for an epoch, or stops waiting.
func (s standing) inside() standing {
	if s.stateless() {
		return fresh
	}
	return stepping
}

// check returns why a standing is none.
func (s standing) check() error {
	if s.stateless() || s == stepping || s.leads() {
		return nil
	}
	return fmt.Errorf("%.100q is no standing", string(s))
}

// status is what a member says of itself, in an entry that vanishes with its session.
type status struct {
	Name        string   // of the member
	Incarnation string   // random, new on each start of a process and each rejoin
	Session     string   // random, new with each session of the store: an entry of an earlier one vanishes with its lease
	Standing    standing // where it is in its life; the zero value is refused
	Entered     string   // World of the last epoch that it tried to form; "" for a member that joins
	Formed      string   // the World of the last epoch whose communicator it has made, "" before one
	Awaits      string   `json:",omitempty"` // the World of the epoch in an exchange of which it waits for long; or ""
	Step        uint64   // steps that it has committed
	Wishes      bool     // to leave, about which the members vote
	Unreached   []int    `json:",omitempty"` // ranks of the epoch entered that it has tried to connect to in vain
	BackedOff   int      `json:",omitempty"` // failed attempts whose back-off has expired
}

// person is the member as an epoch lists it.
func (s *status) person() person {
	return person{Name: s.Name, Incarnation: s.Incarnation, Fresh: s.Standing.stateless()}
}

// reach is the step up to which the member can go.
func (s *status) reach() uint64 {
	if s.Standing == prepared {
		return s.Step + 1
	}
	return s.Step
}

// returned reports whether the member is at the boundary behind an epoch.
func (s *status) returned(r *record) bool {
	return s.Standing.waits() && s.Entered == r.World
}
