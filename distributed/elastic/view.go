package elastic

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/internal/printable"
)

// person is a member of an epoch.
type person struct {
	Name        string
	Incarnation string // random: tells a process from an earlier one of its name
	Fresh       bool   `json:",omitempty"` // it has no state
}

// same reports whether two are the same process.
func (p person) same(o person) bool { return p.Name == o.Name && p.Incarnation == o.Incarnation }

// record is an epoch as it is in the store.
type record struct {
	Number  uint64
	World   string   // random: tells it from another attempt with this number
	Members []person // by rank
	Lost    []string // members of the last epoch that are in neither, and have not left in order
	Step    uint64   // steps that are committed
	// Failed are members that the last attempts at epochs failed for, and have not been in one since, as each attempt takes the
	// time of all.
	Failed []failure `json:",omitempty"`
}

// rank returns the place of a member, -1 if it is none.
func (r *record) rank(p person) int { return slices.IndexFunc(r.Members, p.same) }

// status is what a member says of itself, in an entry that vanishes with its session.
type status struct {
	Name        string
	Incarnation string
	Terms       string
	Accepted    *record // the epoch that it has tried to form last, nil for one that joins
	Formed      bool    // with success
	Waiting     bool    // it is at a boundary
	Leaving     bool    // by the last vote: it will not be in the next epoch, unless nobody else has the state
	Wishes      bool    // to leave
	Fresh       bool    // it has no state of the job yet
	Step        uint64  // steps that it has committed
	Prepared    bool    // it has the result of another one, which can be rolled back
	Unreached   []int   `json:",omitempty"` // ranks of Accepted that it has tried to connect to in vain
	BackedOff   int     `json:",omitempty"` // attempts that failed for it, after which it has waited long enough
}

func (s *status) person() person {
	return person{Name: s.Name, Incarnation: s.Incarnation, Fresh: s.Fresh}
}

// precedes reports whether an epoch is a later one than the one that the member has accepted.
func (s *status) precedes(r *record) bool {
	return s.Accepted == nil || r.World != s.Accepted.World && r.Number >= s.Accepted.Number
}

// member reports whether the member is one of the epoch that it has accepted, and not still to join.
func (s *status) member() bool { return s.Accepted != nil && s.Accepted.rank(s.person()) >= 0 }

// reach is the step up to which the member can go.
func (s *status) reach() uint64 {
	if s.Prepared {
		return s.Step + 1
	}
	return s.Step
}

// view is what decides the next epoch.
type view struct {
	record   *record  // in the store, nil if there is none
	present  []status // by name
	min, max int
	over     string // the World of the last epoch, if that has made the last step of the job
	lost     bool   // those who have the state will not come soon
}

// has reports whether a member is here.
func (v *view) has(p person) bool {
	return slices.ContainsFunc(v.present, func(s status) bool { return s.person().same(p) })
}

// ending reports whether all members of the last epoch are here, and all who are here are to leave.
func (v *view) ending() bool {
	last, _ := v.last()
	return last != nil && !slices.ContainsFunc(last.Members, func(p person) bool { return !v.has(p) }) &&
		!slices.ContainsFunc(v.present, func(s status) bool { return !s.Wishes })
}

// last returns the latest epoch that anybody knows of, and whether it was formed.
func (v *view) last() (last *record, formed bool) {
	last = v.record
	for i := range v.present {
		if a := v.present[i].Accepted; a != nil && (last == nil || a.Number > last.Number) {
			last = a
		}
	}
	for i := range v.present {
		a := v.present[i].Accepted
		formed = formed || a != nil && a.World == last.World && v.present[i].Formed
	}
	return last, formed
}

// next returns the epoch that comes, without a World, or why there is none yet.
func (v *view) next() (next *record, why string) {
	last, formed := v.last()
	if last == nil {
		return nil, "the store has no epoch"
	}
	next = &record{Number: last.Number + 1}
	var present []person // of the last epoch, and at the boundary
	reach := ^uint64(0)  // of all
	blocks := ""         // what is to happen before there is an epoch, unless that can do without
	for i := range v.present {
		s := &v.present[i]
		rank := last.rank(s.person())
		if rank < 0 {
			continue
		}
		if !(s.Waiting && s.Accepted != nil && s.Accepted.World == last.World) { // for what follows this epoch
			blocks = printable.Text(s.Name) + " is not at the boundary"
			if formed || !last.Members[rank].Fresh || !s.Fresh {
				return nil, blocks
			}
			continue // it has no state, and the attempt to give it one has failed
		}
		if present = append(present, s.person()); !s.Fresh {
			next.Step, reach = max(next.Step, s.Step), min(reach, s.reach())
		}
	}
	if reach != ^uint64(0) { // what one has committed, all have, but for one that stopped waiting for the others
		next.Step = max(next.Step, reach)
	}
	excluded := v.unreachable(last)
	stay, leave, come := v.groups(last, next.Step, excluded)
	if len(stay)+len(come) < max(v.min, 1) || len(stay) == 0 && v.held() { // the others cannot do without them
		excluded = nil
		stay, leave, come = v.groups(last, next.Step, nil)
	}
	if len(stay) == 0 && blocks != "" {
		return nil, blocks
	}
	next.Failed = last.failures(v.present, excluded)
	byRank := func(a, b person) int { return cmp.Compare(last.rank(a), last.rank(b)) }
	slices.SortFunc(stay, byRank)
	most := cmp.Or(v.max, len(v.present))
	if len(stay) == 0 && len(leave) > 0 && len(come) > 0 { // who has the state does not leave before others have it
		slices.SortFunc(leave, byRank)
		stay = leave[:min(len(leave), max(1, most-len(come)))]
		most = max(most, 2)
	}
	for i := range come {
		come[i].Fresh = true // also one that was cut off
	}
	next.Members = append(stay, come...)
	next.Members = next.Members[:min(most, len(next.Members))]
	if len(next.Members) < v.min || len(next.Members) == 0 {
		return nil, fmt.Sprintf("%d of at least %d members are here", len(next.Members), v.min)
	}
	if len(stay) == 0 && last.Number > 0 && !v.lost {
		return nil, "no member that has the state is here"
	}
	if len(stay) == 0 { // all begin, from the state of the one that has most
		best := 0
		next.Step = 0
		for i := range v.present {
			s := &v.present[i]
			if r := next.rank(s.person()); r >= 0 && s.Step > next.Step {
				best, next.Step = r, s.Step
			}
		}
		next.Members[0], next.Members[best] = next.Members[best], next.Members[0]
		next.Members[0].Fresh = false
	}
	for _, p := range last.Members {
		if !slices.ContainsFunc(present, p.same) || !p.Fresh && slices.ContainsFunc(excluded, p.same) {
			next.Lost = append(next.Lost, p.Name)
		}
	}
	return next, ""
}

// groups are those at the boundary: members that have the state of a step and stay, or leave, and those that come without it.
func (v *view) groups(last *record, step uint64, excluded []person) (stay, leave, come []person) {
	for i := range v.present {
		s := &v.present[i]
		p := s.person()
		has := last.rank(p) >= 0 && !s.Fresh && s.reach() >= step
		switch {
		case !s.Waiting || slices.ContainsFunc(excluded, p.same):
		case s.Leaving && has:
			leave = append(leave, p)
		case s.Leaving:
		case has:
			stay = append(stay, p)
		case v.ready(last, s):
			come = append(come, p)
		}
	}
	if len(stay) > 0 {
		come = last.admit(come)
	}
	return stay, leave, come
}
