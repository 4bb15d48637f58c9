package elastic

import (
	"cmp"
	"slices"
	"time"
)

// An attempt at an epoch takes the time of all its members. After one that failed for some of them, the others go on
// without these, which wait ever longer until they ask to be tried again. A record counts the attempts by name, so that
// all members see the same, also of a process that starts again.

// failure counts the attempts that failed for a member.
type failure struct {
	Name  string
	Times int
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

// attempts returns how many have failed for this member.
func (b *boundary) attempts() int {
	last, _ := b.last()
	if last == nil {
		return 0
	}
	return last.attempts(b.own.Name)
}

// failures is the sum of a list.
func failures(list []failure) (sum int) {
	for _, f := range list {
		sum += f.Times
	}
	return sum
}

// failures returns those of the epoch that comes after r, which is formed without the members in excluded. Who is
// present and has the state was in r.
func (r *record) failures(present []status, excluded []person) []failure {
	list := slices.DeleteFunc(slices.Clone(r.Failed), func(f failure) bool {
		return slices.ContainsFunc(present, func(s status) bool {
			return s.Name == f.Name && !s.Fresh && r.rank(s.person()) >= 0
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
	size := len(last.Members)
	missed := make([]int, size)     // by how many others, and how many others
	reports := make([][]bool, size) // by the rank of who has not reached the others
	for rank, p := range last.Members {
		reports[rank] = make([]bool, size)
		if !p.Fresh && !v.has(p) {
			return nil
		}
	}
	known := false
	fresh := make([]bool, size) // present, and without the state
	for i := range v.present {
		s := &v.present[i]
		rank := last.rank(s.person())
		if rank < 0 {
			continue
		}
		fresh[rank] = last.Members[rank].Fresh && s.Fresh
		if s.Accepted == nil || s.Accepted.World != last.World {
			continue
		}
		for _, other := range s.Unreached {
			if other < 0 || other >= size || other == rank || reports[rank][other] {
				continue
			}
			known = true
			reports[rank][other] = true
			missed[rank]++
			missed[other]++
		}
	}
	if !known && !v.held() {
		return nil
	}
	if !known {
		for rank, p := range last.Members {
			if fresh[rank] {
				excluded = append(excluded, p)
			}
		}
		return excluded
	}
	for {
		worst := 0
		for rank := range last.Members {
			// Who has no state loses none. A tie is broken by the rank, so that all members see the same.
			if missed[rank] > missed[worst] || missed[rank] == missed[worst] && (fresh[rank] || !fresh[worst]) {
				worst = rank
			}
		}
		if missed[worst] == 0 {
			return excluded
		}
		excluded = append(excluded, last.Members[worst])
		missed[worst] = 0
		for other := range last.Members {
			for _, pair := range [][2]int{{worst, other}, {other, worst}} {
				if reports[pair[0]][pair[1]] {
					reports[pair[0]][pair[1]] = false
					missed[other]--
				}
			}
		}
	}
}

// holdoff is a member's wait after attempts that failed for it.
type holdoff struct {
	attempts int
	since    time.Time // when it was told of the last one
}

// over reports whether the wait after so many attempts is over.
func (h *holdoff) over(attempts int, patience time.Duration) bool {
	if attempts != h.attempts {
		h.attempts = attempts
		h.since = time.Now()
	}
	return attempts > 0 && time.Since(h.since) >= backoff(attempts, patience)
}

// backoff is how long a member waits after attempts that failed for it: twice as long after each.
func backoff(attempts int, patience time.Duration) time.Duration {
	return patience << min(attempts, maxDoublings)
}
