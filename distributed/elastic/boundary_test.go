package elastic

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
)

// wishing is a member that is to leave, about which nobody has voted yet.
func wishing(s *status) { s.Wishes = true }

// TestBoundary: what a member at a boundary does. The first one that is present is that member.
func TestBoundary(t *testing.T) {
	first, ab, abc := &record{}, epochOf(3, "ab"), epochOf(3, "abc")
	second, without := epochOf(4, "ab"), epochOf(4, "bc")
	here := func(r *record, present ...status) view { return view{record: r, min: 1, present: present} }
	bounded := func(most int, v view) view {
		v.min, v.max = most, most
		return v
	}
	ending := func(r *record, present ...status) view {
		v := here(r, present...)
		v.over = r.World
		return v
	}
	alone := func(b *boundary) { b.reached = false }
	impatient := func(b *boundary) { b.impatient = true }
	all := func(b *boundary) { b.ends = true }
	told := func(b *boundary) { b.own.Wishes = true }
	untold := func(b *boundary) { b.told = false }
	attempted := func(times int) func(b *boundary) {
		return func(b *boundary) {
			last := *b.record
			last.Failed = []failure{{"a", times}}
			b.record = &last
		}
	}
	rested := func(b *boundary) { b.backedOff = true }
	unstored := func(b *boundary) { b.stored = false }
	full := func(b *boundary) { b.stored, b.refused, b.refusal = false, true, errors.New("no space") }
	for name, c := range map[string]struct {
		v    view
		with []func(b *boundary)
		do   outcome
		why  string
	}{
		"the others do not know that it waits":     {v: here(abc, at("a", abc), at("b", abc), at("c", abc)), with: []func(*boundary){untold}, do: tell},
		"… nor does the store":                     {v: here(abc, at("a", abc), at("b", abc), at("c", abc)), with: []func(*boundary){unstored}, do: wait, why: "does not have this member's status yet"},
		"… nor does the store, for a moment":       {v: here(abc, at("a", abc), at("b", abc), at("c", abc)), with: []func(*boundary){unstored, impatient}, do: wait},
		"the store refuses to know":                {v: here(abc, at("a", abc), at("b", abc), at("c", abc)), with: []func(*boundary){full, impatient}, do: cutOff, why: "does not take this member's status: no space"},
		"the store refuses one that is to leave":   {v: here(abc, at("a", abc, wishing), at("b", abc), at("c", abc)), with: []func(*boundary){full, impatient}, do: leave},
		"all are there":                            {v: here(abc, at("a", abc), at("b", abc), at("c", abc)), do: propose},
		"the first of a job":                       {v: here(first, at("a", nil)), do: propose},
		"one trains":                               {v: here(abc, at("a", abc), at("b", abc, training), at("c", abc)), do: wait, why: "b is not at the boundary"},
		"one trains, for longer than its patience": {v: here(abc, at("a", abc), at("b", abc, training), at("c", abc)), with: []func(*boundary){impatient}, do: wait},
		"too few":                           {v: bounded(2, here(first, at("a", nil))), with: []func(*boundary){impatient}, do: wait, why: "1 of at least 2"},
		"no room":                           {v: bounded(2, here(ab, at("c", ab), at("a", ab, training), at("b", ab))), do: wait, why: "there are 2 members already"},
		"room, when one is at the boundary": {v: func() view { v := here(ab, at("c", ab), at("a", ab, training), at("b", ab)); v.max = 3; return v }(), do: wait, why: "a is not"},

		"the next epoch is decided":               {v: here(second, at("a", ab), at("b", ab)), do: enter},
		"it has tried that one":                   {v: here(second, at("a", second, unformed), at("b", ab)), do: wait, why: "b is not"},
		"one that joins is in it":                 {v: here(second, at("a", nil), at("b", ab)), do: enter},
		"it is not decided in this store":         {v: here(ab, at("a", ab), at("b", second)), do: accept},
		"one that joins has heard of no epoch":    {v: here(ab, at("c", nil), at("a", ab), at("b", ab, training)), do: accept},
		"one that joins is not in the next one":   {v: here(second, at("c", ab), at("a", second), at("b", second)), do: accept},
		"one of an earlier epoch":                 {v: here(ab, at("a", second), at("b", ab)), do: wait, why: "b is not"},
		"the others have gone on":                 {v: here(without, at("a", abc), at("b", without), at("c", without)), do: rejoin},
		"… after a vote in which it leaves":       {v: here(without, at("a", abc, leaving), at("b", without), at("c", without)), do: leave},
		"… and have not formed their epoch yet":   {v: here(without, at("a", abc, leaving), at("b", without, training), at("c", without, unformed, training)), do: wait, why: "b is not"},
		"… whose attempt has failed":              {v: here(without, at("a", abc, leaving), at("b", without, unformed), at("c", without, unformed)), do: propose},
		"… which one has not begun":               {v: here(without, at("a", abc, leaving), at("b", without), at("c", abc, training)), do: wait, why: "c is not"},
		"… with a member that was to leave later": {v: here(without, at("a", abc, wishing), at("b", without), at("c", without)), do: rejoin},

		"the others had no connection to it":          {v: here(without, at("a", abc), at("b", without), at("c", without)), with: []func(*boundary){attempted(1)}, do: rejoin},
		"… too often":                                 {v: here(without, at("a", abc), at("b", without), at("c", without)), with: []func(*boundary){attempted(maxAttempts)}, do: fail},
		"… and it waits":                              {v: here(without, at("a", without, withoutAny), at("b", without, training), at("c", without)), with: []func(*boundary){attempted(2), impatient}, do: wait, why: "no connection to it in 2 attempts"},
		"… and has waited":                            {v: here(without, at("a", without, withoutAny), at("b", without, training), at("c", without)), with: []func(*boundary){attempted(2), rested}, do: retry},
		"… and has said so":                           {v: here(without, at("a", without, withoutAny, resting(2)), at("b", without, training), at("c", without)), with: []func(*boundary){attempted(2), rested}, do: wait, why: "b is not at the boundary"},
		"… and is to leave":                           {v: here(without, at("a", without, withoutAny, wishing), at("b", without, training), at("c", without)), with: []func(*boundary){attempted(2)}, do: leave},
		"… who have all gone":                         {v: here(without, at("a", without, withoutAny)), with: []func(*boundary){attempted(2)}, do: wait, why: "no member that has the state"},
		"without the store":                           {v: view{}, with: []func(*boundary){alone}, do: wait, why: "the store is out of reach"},
		"without the store, out of patience":          {v: view{}, with: []func(*boundary){alone, impatient}, do: cutOff, why: "the store is out of reach"},
		"nobody of the job":                           {v: here(nil, at("a", nil)), do: wait, why: "the store has no epoch"},
		"nobody of the job for too long":              {v: here(nil, at("a", nil)), with: []func(*boundary){impatient}, do: cutOff, why: "the store has no epoch"},
		"the state is away":                           {v: here(abc, at("d", abc)), with: []func(*boundary){impatient}, do: wait, why: "no member that has the state"},
		"the last step is made":                       {v: ending(abc, at("d", nil)), do: end},
		"the last step is made, and one has no state": {v: ending(abc, at("d", nil), at("a", abc, withoutAny)), do: end},
		"the last step is made, but one is here":      {v: ending(ab, at("c", ab), at("a", ab, training)), do: wait, why: "a is not"},
		"the last step of an earlier epoch is made":   {v: func() view { v := here(abc, at("d", abc)); v.over = "another"; return v }(), do: wait},

		"told to leave without state":                  {v: bounded(2, here(first, at("a", nil, wishing))), do: leave},
		"… when others do not know that it waits":      {v: bounded(2, here(first, at("a", nil, wishing))), with: []func(*boundary){untold}, do: leave},
		"… for whom there is no room":                  {v: bounded(2, here(ab, at("c", ab, withoutAny, wishing), at("a", ab), at("b", ab))), do: leave},
		"… without a store":                            {v: view{present: []status{at("a", nil, wishing)}}, with: []func(*boundary){alone}, do: leave},
		"told to leave with the state, and too few":    {v: bounded(2, here(ab, at("a", ab, wishing))), do: wait, why: "1 of at least 2"},
		"… out of patience":                            {v: bounded(2, here(ab, at("a", ab, wishing))), with: []func(*boundary){impatient}, do: leave},
		"… with a store that is lost":                  {v: view{present: []status{at("a", ab, wishing)}}, with: []func(*boundary){alone, impatient}, do: leave},
		"told to leave alone":                          {v: here(ab, at("a", ab, wishing)), do: wait, why: "nobody is here who stays"},
		"… until another one comes":                    {v: here(ab, at("a", ab, wishing), at("c", ab, withoutAny)), do: propose},
		"… out of patience, as the other one is away":  {v: here(ab, at("a", ab, wishing)), with: []func(*boundary){impatient}, do: leave},
		"the vote has it leave":                        {v: here(ab, at("a", ab, leaving), at("b", ab)), do: propose},
		"… and the one that stays is away":             {v: here(ab, at("a", ab, leaving)), do: wait, why: "0 of at least 1"},
		"… and stays away":                             {v: here(ab, at("a", ab, leaving)), with: []func(*boundary){impatient}, do: leave},
		"… and comes when it is impatient":             {v: here(ab, at("a", ab, leaving), at("b", ab)), with: []func(*boundary){impatient}, do: propose},
		"all leave":                                    {v: here(ab, at("a", ab, leaving), at("b", ab, leaving)), with: []func(*boundary){all}, do: leave},
		"all leave, and the others are gone":           {v: here(ab, at("a", ab, leaving)), with: []func(*boundary){all}, do: leave},
		"all leave, and one waits to join":             {v: here(ab, at("a", ab, leaving), at("b", ab, leaving), at("c", ab, withoutAny)), with: []func(*boundary){all}, do: propose},
		"all leave, and it waits to join":              {v: here(ab, at("c", ab, withoutAny), at("a", ab, leaving), at("b", ab, leaving)), with: []func(*boundary){all}, do: propose},
		"all others leave, and it joins":               {v: here(ab, at("c", ab, withoutAny)), with: []func(*boundary){all}, do: wait},
		"all leave, and its entry is an earlier one":   {v: here(ab, at("a", ab), at("b", ab, leaving)), with: []func(*boundary){all, told}, do: leave},
		"all are told to leave while they wait":        {v: bounded(3, here(abc, at("a", abc, wishing), at("b", abc, wishing), at("c", abc, leaving))), with: []func(*boundary){all}, do: leave},
		"some are told to leave while they wait":       {v: bounded(3, here(abc, at("a", abc, wishing), at("b", abc), at("c", abc, leaving))), do: wait, why: "2 of at least 3"},
		"all are told to leave, and one waits to join": {v: here(ab, at("a", ab, wishing), at("b", ab, leaving), at("c", ab, withoutAny)), with: []func(*boundary){all}, do: propose},
	} {
		t.Run(name, func(t *testing.T) {
			b := boundary{view: c.v, reached: true, stored: true}
			if len(c.v.present) > 0 {
				b.own = c.v.present[0]
			}
			b.told = true
			for _, change := range c.with {
				change(&b)
			}
			do, epoch, why := b.decide()
			assert.Equal(t, c.do, do, why)
			assert.Contains(t, why, c.why)
			switch last, _ := b.last(); do {
			case accept, rejoin, enter, retry, fail:
				assert.Same(t, last, epoch)
			case propose:
				assert.Equal(t, last.Number+1, epoch.Number)
			default:
				assert.Nil(t, epoch)
			}
		})
	}
}
