package elastic

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tutti-go/tutti/internal/printable"
)

// person is a member of an epoch.
type person struct {
	Name        string // of the member
	Incarnation string // random: tells a process from an earlier one of its name
	Fresh       bool   `json:",omitempty"` // it has no state
}

// matches reports whether two are the same process.
func (p person) matches(q person) bool {
	return p.Name == q.Name && p.Incarnation == q.Incarnation
}

// record is an epoch as it is in the store.
type record struct {
	Number  uint64   // 1 and up; grows by one with each epoch that is tried
	World   string   // random: tells it from another attempt with this number
	Members []person // by rank
	Lost    []string // members of the last epoch that are in neither, and have not left in order
	Step    uint64   // steps that are committed
	// Failed are members that the last attempts at epochs failed for, and have not been in one since, as each attempt
	// takes the time of all.
	Failed []failure `json:",omitempty"`
}

// rank returns the place of a member, -1 if it is none.
func (r *record) rank(p person) int { return slices.IndexFunc(r.Members, p.matches) }

// begun reports whether a record is an epoch: there is one, and it is not the first text in the store of a job.
func (r *record) begun() bool { return r != nil && r.Number > 0 }

// view is what decides the next epoch: what the store has, and what this member knows beside it.
type view struct {
	record   *record       // in the store, nil if it has none
	entered  *record       // what this member has entered last, nil for one that joins
	present  []status      // of the members in the store, by name
	min, max int           // members of an epoch; max 0 is any number
	limit    time.Duration // of each wait of the member for the store and for an epoch
	orphaned time.Duration // for how long nobody has been here who has the state
	hung     []person      // members of the last epoch that this one takes to hang; nil if there are none
	final    string        // the World of the epoch with the last step of the job, "" before that
}

// has reports whether a member is here.
func (v *view) has(p person) bool {
	return slices.ContainsFunc(v.present, func(s status) bool { return s.person().matches(p) })
}

// held reports whether a member that has the state of the job is here.
func (v *view) held() bool {
	last := v.last()
	return last != nil && slices.ContainsFunc(v.present, func(s status) bool {
		return !s.Standing.stateless() && last.rank(s.person()) >= 0
	})
}

// ending reports whether all members of the last epoch are here, and all who are here are to leave.
func (v *view) ending() bool {
	last := v.last()
	if last == nil {
		return false
	}
	for _, p := range last.Members {
		if !v.has(p) {
			return false
		}
	}
	return !slices.ContainsFunc(v.present, func(s status) bool { return !s.Wishes })
}

// comes reports whether a member waits to join an epoch, and there is room.
func (v *view) comes(r *record) bool {
	if v.max > 0 && len(r.Members) >= v.max {
		return false
	}
	return slices.ContainsFunc(v.present, func(s status) bool {
		return s.Standing.waits() && s.Standing != leaving && r.rank(s.person()) < 0 && v.ready(r, &s)
	})
}

// last returns the latest epoch. The store has it, unless it has lost it.
func (v *view) last() *record {
	if v.entered != nil && (v.record == nil || v.record.Number < v.entered.Number) {
		return v.entered
	}
	return v.record
}

// formed reports whether a member that is here has formed an epoch.
func (v *view) formed(r *record) bool {
	return slices.ContainsFunc(v.present, func(s status) bool { return s.Formed == r.World })
}

// next returns the epoch that comes, without a World, or why there is none yet.
func (v *view) next() (next *record, reason string) {
	last := v.last()
	blocked, needed := v.blocked(last)
	if needed {
		return nil, blocked
	}
	step := v.step(last)
	excluded := v.unreachable(last)
	g := v.group(last, step, excluded)
	if len(g.stay)+len(g.come) < max(v.min, 1) || len(g.stay) == 0 && v.held() { // the others cannot do without them
		excluded = nil
		g = v.group(last, step, nil)
	}
	if len(g.stay) == 0 && blocked != "" {
		return nil, blocked
	}
	next = &record{Number: last.Number + 1, Step: step, Failed: last.failures(v.present, excluded)}
	limit := cmp.Or(v.max, len(v.present))
	if len(g.stay) == 0 && len(g.leave) > 0 && len(g.come) > 0 { // who has the state does not leave before others have it
		g.stay = g.leave[:min(len(g.leave), max(1, limit-len(g.come)))]
		limit = max(limit, 2)
	}
	for i := range g.come {
		g.come[i].Fresh = true // also one that was cut off
	}
	next.Members = append(g.stay, g.come...)
	next.Members = next.Members[:min(limit, len(next.Members))]
	switch {
	case len(next.Members) < max(v.min, 1) && blocked != "":
		return nil, blocked
	case len(next.Members) < max(v.min, 1):
		return nil, fmt.Sprintf("%d of at least %d members are here", len(next.Members), v.min)
	case len(g.stay) == 0 && last.begun() && v.orphaned <= v.limit:
		return nil, "no member that has the state is here"
	case len(g.stay) == 0:
		v.begin(next)
	}
	for _, p := range last.Members {
		if !v.returned(last, p) || !p.Fresh && slices.ContainsFunc(excluded, p.matches) {
			next.Lost = append(next.Lost, p.Name)
		}
	}
	return next, ""
}

// blocked says which member of the last epoch is not at the boundary behind it, "" if all that are here are. The next
// epoch needs that member unless it has no state, and the attempt to give it one has failed, or it hangs.
func (v *view) blocked(last *record) (reason string, needed bool) {
	for i := range v.present {
		s := &v.present[i]
		rank := last.rank(s.person())
		if rank < 0 || s.returned(last) {
			continue
		}
		reason = printable.Text(s.Name) + " is not at the boundary"
		if slices.ContainsFunc(v.hung, s.person().matches) {
			continue
		}
		if v.formed(last) || !last.Members[rank].Fresh || !s.Standing.stateless() {
			return reason, true
		}
	}
	return reason, false
}

// step is the step with which the next epoch begins. All have committed a step that one has, but for one that stopped
// waiting for the others; and all commit what all are prepared for.
func (v *view) step(last *record) uint64 {
	var committed uint64
	reach := uint64(math.MaxUint64) // of all
	for i := range v.present {
		s := &v.present[i]
		if last.rank(s.person()) >= 0 && s.returned(last) && !s.Standing.stateless() {
			committed = max(committed, s.Step)
			reach = min(reach, s.reach())
		}
	}
	if reach == math.MaxUint64 { // nobody has the state
		return committed
	}
	return max(committed, reach)
}

// returned reports whether a member of the last epoch is at the boundary behind it.
func (v *view) returned(last *record, p person) bool {
	return slices.ContainsFunc(v.present, func(s status) bool {
		return s.person().matches(p) && s.returned(last)
	})
}

// begin has an epoch begin whose members all lack the state: from the member that brings most steps along.
func (v *view) begin(next *record) {
	leader := 0
	next.Step = 0
	for i := range v.present {
		s := &v.present[i]
		if rank := next.rank(s.person()); rank >= 0 && s.Step > next.Step {
			leader = rank
			next.Step = s.Step
		}
	}
	next.Members[0], next.Members[leader] = next.Members[leader], next.Members[0]
	next.Members[0].Fresh = false
}

// group are members at the boundary by what becomes of them.
type group struct {
	stay  []person // with the state of the step, by their rank in the last epoch
	leave []person // the same, after a vote in which they leave
	come  []person // without the state
}

// group returns the members at the boundary but for those excluded.
func (v *view) group(last *record, step uint64, excluded []person) (g group) {
	for i := range v.present {
		s := &v.present[i]
		p := s.person()
		current := s.Standing.leads() && last.rank(p) >= 0 && s.reach() >= step
		switch {
		case !s.Standing.waits() || slices.ContainsFunc(excluded, p.matches):
		case s.Standing == leaving && current:
			g.leave = append(g.leave, p)
		case s.Standing == leaving:
		case current:
			g.stay = append(g.stay, p)
		case v.ready(last, s):
			g.come = append(g.come, p)
		}
	}
	if len(g.stay) > 0 {
		g.come = last.admit(g.come)
	}
	byRank := func(a, b person) int {
		return cmp.Compare(last.rank(a), last.rank(b))
	}
	slices.SortFunc(g.stay, byRank)
	slices.SortFunc(g.leave, byRank)
	return g
}
