package elastic

import (
	"cmp"
	"slices"
)

// An attempt at an epoch takes the time of all its members. After one that failed for some of them, the others go on
// without these, which wait ever longer until they ask to be tried again. A record counts the attempts by name, so that
// all members see the same, also of a process that starts again.

// failure counts the attempts that failed for a member.
type failure struct {
	Name  string // of the member
	Times int    // one after the other; 1 and up
}

const (
	maxFailures  = 64 // names of a record
	maxAttempts  = 8  // that fail for a member, which ends then
	maxDoublings = 6  // doublings of the wait between them
)

// attempts returns how many have failed for a member since it was in an epoch.
func (r *record) attempts(name string) int {
	for _, f := range r.Failed {
		if f.Name == name {
			return f.Times
		}
	}
	return 0
}

// sum is how many attempts a list counts.
func sum(list []failure) (total int) {
	for _, f := range list {
		total += f.Times
	}
	return total
}

// failures returns those of the epoch that comes after r, which is formed without the members in excluded. Members that
// are present and have the state were in r.
func (r *record) failures(present []status, excluded []person) []failure {
	list := slices.DeleteFunc(slices.Clone(r.Failed), func(f failure) bool {
		return slices.ContainsFunc(present, func(s status) bool {
			return s.Name == f.Name && !s.Standing.stateless() && r.rank(s.person()) >= 0
		})
	})
	for _, p := range excluded {
		if i := slices.IndexFunc(list, func(f failure) bool { return f.Name == p.Name }); i >= 0 {
			list[i].Times++
		} else {
			list = append(list, failure{p.Name, 1})
		}
	}
	return list[max(0, len(list)-maxFailures):]
}

// ready reports whether a member that is not in an epoch may be in the next one: if no attempt has failed for it, it
// has waited after that, or nobody is here to be held up.
func (v *view) ready(r *record, s *status) bool {
	return s.BackedOff >= r.attempts(s.Name) || !v.held() || r.rank(s.person()) >= 0
}

// admit returns those who join the next epoch: all that no attempt has failed for, or otherwise one.
func (r *record) admit(come []person) []person {
	failed := func(p person) bool { return r.attempts(p.Name) > 0 }
	if good := slices.DeleteFunc(slices.Clone(come), failed); len(good) > 0 || len(come) == 0 {
		return good
	}
	return []person{slices.MinFunc(come, func(a, b person) int {
		return cmp.Or(cmp.Compare(r.attempts(a.Name), r.attempts(b.Name)), cmp.Compare(a.Name, b.Name))
	})}
}

// unreachable returns those members for whom the last attempt at an epoch has failed. Where members say whom they did
// not reach, it is the fewest without whom all reach each other, those that more others miss first. Where nobody knows,
// it is all who came to this epoch and have not got the state that others have. If a member that had the state is gone,
// the attempt failed for that.
func (v *view) unreachable(last *record) (excluded []person) {
	for _, p := range last.Members {
		if !p.Fresh && !v.has(p) {
			return nil
		}
	}
	gaps := newGaps(len(last.Members))
	for i := range v.present {
		s := &v.present[i]
		rank := last.rank(s.person())
		if rank < 0 {
			continue
		}
		gaps.stateless[rank] = last.Members[rank].Fresh && s.Standing.stateless()
		if s.Entered == last.World {
			gaps.add(rank, s.Unreached)
		}
	}
	if gaps.known {
		for _, rank := range gaps.cover() {
			excluded = append(excluded, last.Members[rank])
		}
		return excluded
	}
	if !v.held() {
		return nil
	}
	for rank, p := range last.Members {
		if gaps.stateless[rank] {
			excluded = append(excluded, p)
		}
	}
	return excluded
}

// gaps are pairs of members of which one has not reached the other, by rank.
type gaps struct {
	known     bool     // a member has told of one
	unreached [][]bool // by the member that tells, and the other one
	missing   []int    // in how many pairs a member is
	stateless []bool   // it is here, and has no state
}

func newGaps(size int) *gaps {
	g := &gaps{unreached: make([][]bool, size), missing: make([]int, size), stateless: make([]bool, size)}
	for rank := range g.unreached {
		g.unreached[rank] = make([]bool, size)
	}
	return g
}

// add adds what a member tells, once for each pair. Ranks of no member are ignored.
func (g *gaps) add(rank int, unreached []int) {
	for _, peer := range unreached {
		if peer < 0 || peer >= len(g.missing) || peer == rank || g.unreached[rank][peer] {
			continue
		}
		g.known = true
		g.unreached[rank][peer] = true
		g.missing[rank]++
		g.missing[peer]++
	}
}

// cover returns members without whom there is no gap. It removes their pairs.
func (g *gaps) cover() (ranks []int) {
	for {
		worst := g.worst()
		if g.missing[worst] == 0 {
			return ranks
		}
		ranks = append(ranks, worst)
		g.missing[worst] = 0
		for peer := range g.missing {
			for _, pair := range [][2]int{{worst, peer}, {peer, worst}} {
				if g.unreached[pair[0]][pair[1]] {
					g.unreached[pair[0]][pair[1]] = false
					g.missing[peer]--
				}
			}
		}
	}
}

// worst is the member in most pairs. Among equals, a member without state is no loss; otherwise it is the highest
// rank, so that all members see the same.
func (g *gaps) worst() (worst int) {
	for rank, n := range g.missing {
		equal := n == g.missing[worst] && (g.stateless[rank] || !g.stateless[worst])
		if n > g.missing[worst] || equal {
			worst = rank
		}
	}
	return worst
}
