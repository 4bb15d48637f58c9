package elastic

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// wishing makes a status that of a member that is to leave, on which nobody has voted yet.
func wishing(s *status) { s.Wishes = true }

// change changes the knowledge of a member.
type change func(k *knowledge)

func alone(k *knowledge) { k.publication = offline }
func impatient(k *knowledge) {
	k.waited = k.limit + 1
	k.missed = k.patience + 1
}
func all(k *knowledge)      { k.ends = true }
func told(k *knowledge)     { k.self.Wishes = true }
func untold(k *knowledge)   { k.publication = outdated }
func unstored(k *knowledge) { k.publication = pending }
func rested(k *knowledge)   { k.rested = time.Hour }

// missed records that the member has aborted the last epoch because of others.
func missed(names ...string) change {
	return func(k *knowledge) {
		for _, name := range names {
			k.late = append(k.late, person{Name: name, Incarnation: "1"})
		}
	}
}

// isMember makes the decision about a member whose status the store does not have.
func isMember(s status) change { return func(k *knowledge) { k.self = s } }

func withdrew(k *knowledge) { k.withdrawn = 8 }
func full(k *knowledge)     { k.publication, k.refusal = refused, errors.New("no space") }

func roomFor(members int) change  { return func(k *knowledge) { k.max = members } }
func endedAt(world string) change { return func(k *knowledge) { k.final = world } }

// stepOf returns a copy of an epoch with another step.
func stepOf(r *record, step uint64) *record {
	other := *r
	other.Step = step
	return &other
}

// attempted sets the number of failed attempts of the last epoch for a.
func attempted(times int) change {
	return func(k *knowledge) {
		last := *k.record
		last.Failed = []failure{{"a", times}}
		k.record = &last
	}
}

// kind returns the names of the fields of a decision that are set, and of its error.
func (d decision) kind() (list []string) {
	for name, set := range map[string]bool{
		"publish":   d.publish,
		"commit":    d.commit,
		"retry":     d.retry > 0,
		"rejoin":    d.rejoin != nil,
		"enter":     d.enter != nil,
		"propose":   d.propose != nil,
		"left":      errors.Is(d.err, ErrLeft),
		"ended":     errors.Is(d.err, ErrEnded) && !errors.Is(d.err, errComplete),
		"complete":  errors.Is(d.err, errComplete),
		"cut off":   errors.Is(d.err, ErrStore),
		"unreached": d.err != nil && !errors.Is(d.err, ErrLeft) && !errors.Is(d.err, ErrEnded) && !errors.Is(d.err, ErrStore),
		"wait":      d.reason != "",
	} {
		if set {
			list = append(list, name)
		}
	}
	return list
}

// TestBoundary checks the decisions of a member at a boundary. It is the first member that is present.
func TestBoundary(t *testing.T) {
	first, ab, abc := &record{}, epochOf(3, "ab"), epochOf(3, "abc")
	second, without := epochOf(4, "ab"), epochOf(4, "bc")
	epochs := map[string]*record{"": nil}
	for _, r := range []*record{ab, abc, second, without} {
		epochs[r.World] = r
	}
	here := func(r *record, present ...status) view {
		return view{record: r, min: 1, limit: time.Minute, present: present}
	}
	bounded := func(members int, v view) view {
		v.min, v.max = members, members
		return v
	}
	ending := func(r *record, present ...status) view {
		v := here(r, present...)
		v.final = r.World
		return v
	}
	knows := func(v view, changes ...change) knowledge {
		k := knowledge{view: v, publication: stored}
		if len(v.present) > 0 {
			k.self = v.present[0]
		}
		k.entered = epochs[k.self.Entered]
		for _, change := range changes {
			change(&k)
		}
		return k
	}
	for name, c := range map[string]struct {
		k   knowledge
		do  string
		why string
	}{
		"the others do not know that it waits": {
			k:  knows(here(abc, at("a", abc), at("b", abc), at("c", abc)), untold),
			do: "publish",
		},
		"… nor does the store": {
			k:   knows(here(abc, at("a", abc), at("b", abc), at("c", abc)), unstored),
			do:  "wait",
			why: "does not have this member's status yet",
		},
		"… nor does the store, for a moment": {
			k:  knows(here(abc, at("a", abc), at("b", abc), at("c", abc)), unstored, impatient),
			do: "wait",
		},
		"the store refuses to know": {
			k:   knows(here(abc, at("a", abc), at("b", abc), at("c", abc)), full, impatient),
			do:  "cut off",
			why: "does not take this member's status: no space",
		},
		"the store refuses one that is to leave": {
			k:  knows(here(abc, at("a", abc, wishing), at("b", abc), at("c", abc)), full, impatient),
			do: "left",
		},
		"all are there": {
			k:  knows(here(abc, at("a", abc), at("b", abc), at("c", abc))),
			do: "propose",
		},
		"the first of a job": {
			k:  knows(here(first, at("a", nil))),
			do: "propose",
		},
		"one trains": {
			k:   knows(here(abc, at("a", abc), at("b", abc, training), at("c", abc))),
			do:  "wait",
			why: "b is not at the boundary",
		},
		"one does not come for as long as the others have Patience": {
			k:  knows(here(abc, at("a", abc), at("b", abc, training), at("c", abc)), impatient),
			do: "propose",
		},
		"one has hung in the exchange, which this one aborted for it": {
			k:  knows(here(abc, at("a", abc), at("b", abc, training), at("c", abc)), missed("b")),
			do: "propose",
		},
		"… and another one that was there is on its way": {
			k:   knows(here(abc, at("a", abc), at("b", abc, training), at("c", abc, training, awaiting)), missed("b", "c")),
			do:  "wait",
			why: "c is not at the boundary",
		},
		"… but another one is at work": {
			k:   knows(here(abc, at("a", abc), at("b", abc, training), at("c", abc)), missed("c")),
			do:  "wait",
			why: "b is not at the boundary",
		},
		"… and the others would be too few": {
			k:   knows(bounded(3, here(abc, at("a", abc), at("b", abc, training), at("c", abc))), impatient),
			do:  "wait",
			why: "b is not at the boundary",
		},
		"… and has the state alone": {
			k:   knows(here(second, at("a", second, unformed, withoutAny), at("b", second, training)), impatient),
			do:  "wait",
			why: "b is not at the boundary",
		},
		"… and this one joins": {
			k:   knows(here(ab, at("c", nil), at("a", ab, training), at("b", ab)), roomFor(3), impatient),
			do:  "wait",
			why: "a is not at the boundary",
		},
		"too few": {
			k:   knows(bounded(2, here(first, at("a", nil))), impatient),
			do:  "wait",
			why: "1 of at least 2",
		},
		"no room": {
			k:   knows(bounded(2, here(ab, at("c", nil), at("a", ab, training), at("b", ab)))),
			do:  "wait",
			why: "there are 2 members already",
		},
		"room, when one is at the boundary": {
			k:   knows(here(ab, at("c", nil), at("a", ab, training), at("b", ab)), roomFor(3)),
			do:  "wait",
			why: "a is not",
		},

		"the next epoch is decided": {
			k:  knows(here(second, at("a", ab), at("b", ab))),
			do: "enter",
		},
		"… with a step that it has rolled back": {
			k:  knows(here(stepOf(second, 8), at("a", ab), at("b", ab)), withdrew),
			do: "rejoin",
		},
		"… with that step, for which it is prepared again": {
			k:  knows(here(stepOf(second, 8), at("a", ab, withResult), at("b", ab)), withdrew),
			do: "enter",
		},
		"… with a step that nobody can have": { // which is an error
			k:  knows(here(stepOf(second, 9), at("a", ab), at("b", ab)), withdrew),
			do: "enter",
		},
		"it has tried that one": {
			k:   knows(here(second, at("a", second, unformed), at("b", ab))),
			do:  "wait",
			why: "b is not",
		},
		"one that joins is in it": {
			k:  knows(here(second, at("a", nil), at("b", ab))),
			do: "enter",
		},
		"it is not decided in this store": {
			k:   knows(here(ab, at("a", ab), at("b", second))),
			do:  "wait",
			why: "b is not",
		},
		"one that joins, and the others train": {
			k:   knows(here(ab, at("c", nil), at("a", ab), at("b", ab, training))),
			do:  "wait",
			why: "b is not",
		},
		"one that joins is not in the next one": {
			k:   knows(here(second, at("c", nil), at("a", second, training), at("b", second))),
			do:  "wait",
			why: "a is not",
		},
		"the store has an earlier epoch": {
			k:  knows(here(ab, at("a", second), at("b", ab))),
			do: "propose",
		},
		"the store has lost the epoch": {
			k:  knows(here(nil, at("a", second), at("b", second))),
			do: "propose",
		},
		"the store has lost the epoch, and so has one that joins": {
			k:   knows(here(nil, at("c", nil), at("a", second))),
			do:  "wait",
			why: "the store has no epoch",
		},
		"… and the store is out of reach": {
			k:   knows(here(nil, at("a", second)), alone),
			do:  "wait",
			why: "out of reach",
		},
		"the others have gone on": {
			k:  knows(here(without, at("a", abc), at("b", without), at("c", without))),
			do: "rejoin",
		},
		"… after a vote in which it leaves": {
			k:  knows(here(without, at("a", abc, votedOut), at("b", without), at("c", without))),
			do: "left",
		},
		"… and have not formed their epoch yet": {
			k:   knows(here(without, at("a", abc, votedOut), at("b", without, training), at("c", without, unformed, training))),
			do:  "wait",
			why: "b is not",
		},
		"… whose attempt has failed": {
			k:  knows(here(without, at("a", abc, votedOut), at("b", without, unformed), at("c", without, unformed))),
			do: "propose",
		},
		"… which one has not begun": {
			k:   knows(here(without, at("a", abc, votedOut), at("b", without), at("c", abc, training))),
			do:  "wait",
			why: "c is not",
		},
		"… with a member that was to leave later": {
			k:  knows(here(without, at("a", abc, wishing), at("b", without), at("c", without))),
			do: "rejoin",
		},

		"the others had no connection to it": {
			k:  knows(here(without, at("a", abc), at("b", without), at("c", without)), attempted(1)),
			do: "rejoin",
		},
		"… too often": {
			k:  knows(here(without, at("a", abc), at("b", without), at("c", without)), attempted(maxAttempts)),
			do: "unreached",
		},
		"… and it waits": {
			k:   knows(here(without, at("a", without, withoutAny), at("b", without, training), at("c", without)), attempted(2), impatient),
			do:  "wait",
			why: "no connection to it in 2 attempts",
		},
		"… and has waited": {
			k:  knows(here(without, at("a", without, withoutAny), at("b", without, training), at("c", without)), attempted(2), rested),
			do: "retry",
		},
		"… and has said so": {
			k:   knows(here(without, at("a", without, withoutAny, resting(2)), at("b", without, training), at("c", without)), attempted(2), rested),
			do:  "wait",
			why: "b is not at the boundary",
		},
		"… and is to leave": {
			k:  knows(here(without, at("a", without, withoutAny, wishing), at("b", without, training), at("c", without)), attempted(2)),
			do: "left",
		},
		"… who have all gone": {
			k:   knows(here(without, at("a", without, withoutAny)), attempted(2)),
			do:  "wait",
			why: "no member that has the state",
		},
		"without the store": {
			k:   knows(view{}, alone),
			do:  "wait",
			why: "the store is out of reach",
		},
		"without the store, for too long": {
			k:   knows(view{}, alone, impatient),
			do:  "cut off",
			why: "the store is out of reach",
		},
		"nobody of the job": {
			k:   knows(here(nil, at("a", nil))),
			do:  "wait",
			why: "the store has no epoch",
		},
		"nobody of the job for too long": {
			k:   knows(here(nil, at("a", nil)), impatient),
			do:  "cut off",
			why: "the store has no epoch",
		},
		"the state is away": {
			k:   knows(here(abc, at("d", nil)), impatient),
			do:  "wait",
			why: "no member that has the state",
		},
		"the last step is made": {
			k:  knows(ending(abc, at("d", nil))),
			do: "ended",
		},
		"the last step is made, and one has no state": {
			k:  knows(ending(abc, at("d", nil), at("a", abc, withoutAny))),
			do: "ended",
		},
		"the last step is made, but one is here": {
			k:   knows(ending(ab, at("c", nil), at("a", ab, training))),
			do:  "wait",
			why: "a is not",
		},
		"the last step is made, and it is in doubt alone": {
			k:  knows(ending(abc, at("a", abc, withResult))),
			do: "commit",
		},
		"… and the store does not have its status": {
			k:   knows(ending(abc, at("a", abc, withResult)), unstored),
			do:  "wait",
			why: "does not have this member's status yet",
		},
		"… with one that joins": {
			k:  knows(ending(abc, at("a", abc, withResult), at("d", nil))),
			do: "commit",
		},
		"… alone, and is to leave": {
			k:  knows(ending(abc, at("a", abc, withResult, wishing))),
			do: "commit",
		},
		"… and has committed": {
			k:  knows(ending(abc, at("a", abc, ahead))),
			do: "complete",
		},
		"the last step is made, and it was without the result": {
			k:  knows(ending(abc, at("a", abc))),
			do: "complete",
		},
		"… and it has stopped waiting for the others' vote": {
			k:  knows(ending(abc, at("a", abc)), withdrew),
			do: "ended",
		},
		"… and the store has lost its status": {
			k:  knows(ending(abc), isMember(at("a", abc))),
			do: "complete",
		},
		"the last step is made in an epoch without it": {
			k:  knows(ending(without, at("a", abc, withResult))),
			do: "ended",
		},
		"the last step is made, and two are in doubt": {
			k:  knows(ending(abc, at("a", abc, withResult), at("b", abc, withResult))),
			do: "propose",
		},
		"… who are too few": {
			k:  knows(bounded(3, ending(abc, at("a", abc, withResult), at("b", abc, withResult)))),
			do: "commit",
		},
		"… of which one has committed": {
			k:  knows(bounded(3, ending(abc, at("a", abc, withResult), at("b", abc, ahead)))),
			do: "commit",
		},
		"… and it has committed": {
			k:   knows(bounded(3, ending(abc, at("a", abc, ahead), at("b", abc, withResult)))),
			do:  "wait",
			why: "2 of at least 3",
		},
		"… and both have committed": {
			k:  knows(bounded(3, ending(abc, at("a", abc, ahead), at("b", abc, ahead)))),
			do: "complete",
		},
		"… of which one is without the result": {
			k:  knows(bounded(3, ending(abc, at("a", abc, withResult), at("b", abc)))),
			do: "ended",
		},
		"… and it is without the result": {
			k:   knows(bounded(3, ending(abc, at("a", abc), at("b", abc, withResult)))),
			do:  "wait",
			why: "2 of at least 3",
		},
		"… and another one has not come yet": {
			k:   knows(bounded(3, ending(abc, at("a", abc, withResult), at("b", abc, training)))),
			do:  "wait",
			why: "b is not",
		},
		"the last step of an earlier epoch is made": {
			k:  knows(here(abc, at("d", nil)), endedAt("another")),
			do: "wait",
		},

		"told to leave without state": {
			k:  knows(bounded(2, here(first, at("a", nil, wishing)))),
			do: "left",
		},
		"… when others do not know that it waits": {
			k:  knows(bounded(2, here(first, at("a", nil, wishing))), untold),
			do: "left",
		},
		"… for whom there is no room": {
			k:  knows(bounded(2, here(ab, at("c", nil, wishing), at("a", ab), at("b", ab)))),
			do: "left",
		},
		"… without a store": {
			k:  knows(view{present: []status{at("a", nil, wishing)}}, alone),
			do: "left",
		},
		"told to leave with the state, and too few": {
			k:   knows(bounded(2, here(ab, at("a", ab, wishing)))),
			do:  "wait",
			why: "1 of at least 2",
		},
		"… for too long": {
			k:  knows(bounded(2, here(ab, at("a", ab, wishing))), impatient),
			do: "left",
		},
		"… with a store that is lost": {
			k:  knows(view{present: []status{at("a", ab, wishing)}}, alone, impatient),
			do: "left",
		},
		"told to leave alone": {
			k:   knows(here(ab, at("a", ab, wishing))),
			do:  "wait",
			why: "nobody is here who stays",
		},
		"… until another one comes": {
			k:  knows(here(ab, at("a", ab, wishing), at("c", nil))),
			do: "propose",
		},
		"… for too long, as the other one is away": {
			k:  knows(here(ab, at("a", ab, wishing)), impatient),
			do: "left",
		},
		"the vote has it leave": {
			k:  knows(here(ab, at("a", ab, votedOut), at("b", ab))),
			do: "propose",
		},
		"… and the one that stays is away": {
			k:   knows(here(ab, at("a", ab, votedOut))),
			do:  "wait",
			why: "0 of at least 1",
		},
		"… and stays away": {
			k:  knows(here(ab, at("a", ab, votedOut)), impatient),
			do: "left",
		},
		"… and comes when it is impatient": {
			k:  knows(here(ab, at("a", ab, votedOut), at("b", ab)), impatient),
			do: "propose",
		},
		"all leave": {
			k:  knows(here(ab, at("a", ab, votedOut), at("b", ab, votedOut)), all),
			do: "left",
		},
		"all leave, and the others are gone": {
			k:  knows(here(ab, at("a", ab, votedOut)), all),
			do: "left",
		},
		"all leave, and one waits to join": {
			k:  knows(here(ab, at("a", ab, votedOut), at("b", ab, votedOut), at("c", nil)), all),
			do: "propose",
		},
		"all leave, and it waits to join": {
			k:  knows(here(ab, at("c", nil), at("a", ab, votedOut), at("b", ab, votedOut)), all),
			do: "propose",
		},
		"all others leave, and it joins": {
			k:  knows(here(ab, at("c", nil)), all),
			do: "wait",
		},
		"all leave, and its entry is an earlier one": {
			k:  knows(here(ab, at("a", ab), at("b", ab, votedOut)), all, told),
			do: "left",
		},
		"all are told to leave while they wait": {
			k:  knows(bounded(3, here(abc, at("a", abc, wishing), at("b", abc, wishing), at("c", abc, votedOut))), all),
			do: "left",
		},
		"some are told to leave while they wait": {
			k:   knows(bounded(3, here(abc, at("a", abc, wishing), at("b", abc), at("c", abc, votedOut)))),
			do:  "wait",
			why: "2 of at least 3",
		},
		"all are told to leave, and one waits to join": {
			k:  knows(here(ab, at("a", ab, wishing), at("b", ab, votedOut), at("c", nil)), all),
			do: "propose",
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := c.k.decide()
			assert.Equal(t, []string{c.do}, d.kind(), "%+v", d)
			text := d.reason
			if d.err != nil {
				text = d.err.Error()
			}
			assert.Contains(t, text, c.why)
			last := c.k.last()
			for _, r := range []*record{d.rejoin, d.enter} {
				if r != nil {
					assert.Same(t, last, r)
				}
			}
			switch {
			case d.propose == nil:
			case last != c.k.record:
				assert.Same(t, c.k.entered, d.propose, "the one that the store has lost")
			default:
				assert.Equal(t, last.Number+1, d.propose.Number)
			}
		})
	}
}
