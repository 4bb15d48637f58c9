package model

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// mutant is a change to a protocol. It is wrong, and found in one of its settings, or harmless,
// and why says why.
type mutant struct {
	name     string
	settings []setting
	harmless string
}

var (
	two      = setting{ranks: 2, words: 2, families: of(3, sentinel), first: 1}
	three    = setting{ranks: 3, words: 2, families: of(3, sentinel), first: 1, together: true}
	shifted  = setting{ranks: 3, words: 1, families: of(4, sentinel), first: 1, shift: true}
	tags     = setting{ranks: 2, words: 2, families: of(3, tagged), first: 1}
	tagsWrap = setting{ranks: 2, words: 1, families: of(4, tagged), first: 1<<32 - 1}
	tags3    = setting{ranks: 3, words: 1, families: of(4, tagged), first: 1, shift: true}
	twice3   = setting{ranks: 3, words: 1, families: of(3, twice), first: 1}
	line1    = setting{ranks: 2, words: 2, families: of(3, moveRing), first: 1, rounds: 1}
	line2    = setting{ranks: 2, words: 2, families: of(1, moveRing), first: 1, rounds: 2}
	deep     = setting{ranks: 2, words: 2, families: of(1, moveRing), first: 1, rounds: 6, split: true}
	deepTwo  = setting{ranks: 2, words: 2, families: of(1, ring), first: 1, rounds: 6, split: true}
	line3    = setting{ranks: 3, words: 2, families: of(1, moveRing), first: 1, rounds: 1}
	stages   = setting{ranks: 2, words: 1, families: of(1, ring), first: 1, rounds: 2}
	listed   = setting{ranks: 2, words: 2, families: of(3, lists), first: 1}
	listed3  = setting{ranks: 3, words: 1, families: of(4, lists), first: 1, shift: true}
	mixed    = setting{ranks: 2, words: 2, families: of(3, moveRing, sentinel), first: 1, rounds: 1}
)

func alone(s setting) setting { s.ptxOnly = true; return s }

var mutants = []mutant{
	// Sentinels and their two places.
	{"no clear", []setting{two, three}, ""},
	{"clears before the words arrive", []setting{two}, ""},
	{"clears at the start of the next kernel", []setting{two}, ""},
	{"no clear of the second stage", []setting{twice3}, ""},
	{"a second stage in the place of the first", []setting{twice3}, ""},
	{"one place", []setting{two}, ""},
	{"three places", []setting{two, three}, "a place that is used less often is safe as well; it takes memory"},
	{"the first word tells for all", []setting{two, three}, ""},
	{"a payload like the sentinel", []setting{two}, ""},
	{"a rank that sends nothing does not say so", []setting{three}, ""},
	{"weak puts", []setting{two}, ""},
	{"weak looks", []setting{two}, ""},
	{"puts of one GPU", []setting{two}, ""},
	{"looks of one GPU", []setting{two}, ""},
	{"weak clears", []setting{two, three}, "the grid boundary orders a clear before the peer's next put there, and program order before the own look: nobody races with it"},
	{"clears of one GPU", []setting{two, three}, "as weak clears"},

	// Lists.
	{"counts without an epoch", []setting{listed}, ""},
	{"the count tells of the entries", []setting{listed}, ""},
	{"the count tells of the note", []setting{listed}, ""},
	{"a list put before the last one is received", []setting{listed, listed3}, ""},

	// The order of a rank's kernels.
	{"kernels of two streams", []setting{two}, ""},
	{"a push before griddepcontrol.wait", []setting{two}, ""},
	{"the end of a grid does not acquire", []setting{two, shifted}, ""},
	{"the start of a grid does not release", []setting{two, shifted}, ""},
	{"a fence before the push only", []setting{alone(two)}, ""},
	{"a fence after the looks only", []setting{alone(two)}, ""},
	{"fences instead of the boundary", []setting{alone(two), alone(three), alone(shifted)}, "a fence.acq_rel.sys on each side is what the boundary is taken for; it costs both latencies in every small operation"},

	// Tags and wrap-around.
	{"tags without an epoch", []setting{tags}, ""},
	{"the tag zero", []setting{tagsWrap}, ""},
	{"a skip by one", []setting{tagsWrap}, ""},

	// Rings.
	{"flags told relaxed", []setting{line1}, ""},
	{"flags heard relaxed", []setting{line1}, ""},
	{"flags told to one GPU", []setting{line1}, ""},
	{"flags heard from one GPU", []setting{line1}, ""},
	{"a fence before flags told relaxed", []setting{line1, line2, deep}, "fence.acq_rel and a relaxed store are a release pattern"},
	{"no warp barrier before the flags", []setting{line1}, ""},
	{"no warp barrier after the flags", []setting{line1}, ""},
	{"only the first lane hears", []setting{line3}, ""},
	{"two slots", []setting{deep}, ""},
	{"three slots", []setting{deep, deepTwo}, "a line that fills round k has heard of k-2, whose teller was through with k-3; the fourth slot is room for a peer that is late"},
	{"flags told before the reads", []setting{deep, deepTwo}, "the teller of k-2 is through with k-4 then: the fourth slot is what this needs"},
	{"three slots and flags told before the reads", []setting{deep}, ""},
	{"flags without an epoch", []setting{line1}, ""},
	{"flags heard when equal", []setting{line2, stages}, ""},
	{"one flag for all peers", []setting{line3}, ""},
	{"one flag for both stages", []setting{stages}, ""},
	{"relaxed chunks", []setting{line1, line2, deep}, "stronger than needed"},
	{"weak reads of chunks", []setting{line1, line2, deep}, "flags order them; loads are relaxed so that they pass the first-level cache"},
}

// One place is one for every wire, and so on: the same names in other settings.
var elsewhere = []mutant{
	{"one place", []setting{tags}, ""},
	{"one place", []setting{line1}, ""},
	{"the first word tells for all", []setting{tags}, ""},
	{"a rank that sends nothing does not say so", []setting{tags3}, ""},
	{"kernels of two streams", []setting{line1}, ""},
	{"kernels of two streams", []setting{tags}, ""},
	{"a push before griddepcontrol.wait", []setting{tags}, ""},
	{"no clear", []setting{listed}, ""},
	{"one place", []setting{listed}, ""},
	{"puts of one GPU", []setting{listed}, ""},
	{"kernels of two streams", []setting{listed}, ""},
	{"the end of a grid does not acquire", []setting{listed, listed3}, ""},
}

var ofEpochs = []mutant{
	{"no barrier before the epoch is counted up", nil, ""},
	{"a barrier that does not order memory", nil, ""},
	{"the epoch read before griddepcontrol.wait", nil, ""},
	{"one word for all blocks", nil, ""},
	{"the first block counts up for all", nil, ""},
	{"a block counts up its own word only", nil, ""},
	{"epochs stored weak", nil, "kernels of a stream follow each other, and a block's threads meet between the load and the store"},
	{"epochs stored for the block only", nil, "as stored weak"},
	{"the boundary as well", nil, "stronger than needed: PTX's synchronization of a stream's kernels is enough"},
}

var ofAborts = []mutant{
	{"told without a fence", nil, ""},
	{"told before the fields", nil, ""},
	{"told read relaxed", nil, ""},
	{"no compare-and-swap", nil, ""},
	{"kernels that do not look at broken", nil, ""},
	{"a rank that aborts does not tell its peer", nil, ""},
	{"a rank that aborts breaks its peer", nil, ""},
	{"a rank tells of the next operation", nil, ""},
	{"a rank that was told does not tell its host", nil, ""},
}

// Every mutant that is wrong is found, and no other is.
func TestMutants(t *testing.T) {
	found, harmless := 0, 0
	judge := func(name, why string, models ...*model) {
		t.Run(name, func(t *testing.T) {
			bad, used := "", false
			for _, m := range models {
				x := m.check(maxLeaves)
				used = used || m.used
				require.False(t, x.over)
				if x.bad != nil {
					bad = x.bad.what
					break
				}
			}
			require.True(t, used, "no model has this mutant")
			if why == "" {
				found++
				require.NotEmpty(t, bad, "is not found")
				t.Log(bad)
			} else {
				harmless++
				require.Empty(t, bad, "was taken for harmless: %s", why)
			}
		})
	}
	for _, u := range append(mutants, elsewhere...) {
		var models []*model
		for _, s := range u.settings {
			s.mutant = u.name
			models = append(models, sequence(s))
		}
		judge(u.name, u.harmless, models...)
	}
	for _, u := range ofEpochs {
		var models []*model
		for _, blocks := range [][]int{{2, 1, 2}, {1, 2, 1}, {3, 2, 3}} {
			models = append(models, epochs(setting{first: 5, mutant: u.name}, blocks...))
		}
		judge(u.name, u.harmless, models...)
	}
	for _, u := range ofAborts {
		judge(u.name, u.harmless, aborts(setting{ranks: 2, words: 1, first: 1, mutant: u.name}),
			aborts(setting{ranks: 2, words: 2, first: 1, operations: 1, mutant: u.name}))
	}
	t.Logf("%d mutants found, %d harmless", found, harmless)
	require.GreaterOrEqual(t, found, 30)
}

// PTX's axioms do not promise, without the grid boundary, that a clear, or a late word of another peer, does not
// overtake the next put there.
func TestBoundaryIsNeeded(t *testing.T) {
	for _, s := range []setting{two, three, shifted, tags3, twice3, mixed} {
		require.Nil(t, sequence(s).check(maxLeaves).bad, "%v", s)
		x := sequence(alone(s)).check(maxLeaves)
		require.NotNil(t, x.bad, "%v", s)
		t.Logf("%v: %s", s, x.bad.what)
	}
}
