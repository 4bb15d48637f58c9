package spans_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/spans"
)

type span struct{ from, to uintptr }

func (s span) overlaps(t span) bool { return max(s.from, t.from) < min(s.to, t.to) }

// A set finds what a look at each of its ranges finds, whatever was inserted and removed before.
func TestSetFindsWhatAListFinds(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	var set spans.Set[int32]
	list := map[int32]span{} // by place
	random := func(least int) span {
		from := uintptr(rng.IntN(300))
		return span{from, from + uintptr(least+rng.IntN(12))}
	}
	found := 0
	const rounds = 20_000
	for range rounds {
		if rng.IntN(2) == 0 && len(list) < 60 {
			s := random(1)
			next := int32(len(list))
			for _, taken := list[next]; taken || next == 0; _, taken = list[next] {
				next++
			}
			place := set.Insert(s.from, s.to, 0)
			require.NotZero(t, place)
			require.NotContains(t, list, place)
			set.Remove(place)
			require.Equal(t, place, set.Insert(s.from, s.to, place), "a place is used again")
			list[place] = s
		} else {
			for place := range list {
				set.Remove(place)
				delete(list, place)
				break
			}
		}
		query := random(0)
		want := map[int32]bool{}
		for place, s := range list {
			if s.overlaps(query) {
				want[place] = true
			}
		}
		got := map[int32]bool{}
		any := set.Overlaps(query.from, query.to, func(place int32) bool {
			got[place] = true
			return false
		})
		require.False(t, any, "none was accepted")
		require.Equal(t, want, got)
		any = set.Overlaps(query.from, query.to, func(int32) bool { return true })
		require.Equal(t, len(want) > 0, any)
		if any {
			found++
		}
	}
	assert.Greater(t, found, rounds/10)
	assert.Less(t, found, rounds*9/10)
}

// The ranges of many messages in the order of their addresses make no list of the tree.
func TestSetIsBalanced(t *testing.T) {
	const n = 1 << 17
	var set spans.Set[int]
	var places []int32
	for i := range n {
		places = append(places, set.Insert(uintptr(2*i+1), uintptr(2*i+2), i))
	}
	for i := range n { // a list of that length would be walked 2^34 times
		accepted := -1
		require.True(t, set.Overlaps(uintptr(2*i), uintptr(2*i+2), func(value int) bool {
			accepted = value
			return true
		}))
		require.Equal(t, i, accepted)
	}
	for _, place := range places {
		set.Remove(place)
	}
	assert.False(t, set.Overlaps(0, 3*n, func(int) bool { return true }))
}

func TestSetKeepsItsMemory(t *testing.T) {
	var set spans.Set[*int]
	held := set.Insert(1, 5, nil)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		place := set.Insert(3, 9, nil)
		if !set.Overlaps(5, 6, func(*int) bool { return true }) {
			t.Error("the range is there")
		}
		set.Remove(place)
	}))
	set.Remove(held)
}
