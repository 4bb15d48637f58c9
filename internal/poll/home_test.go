package poll

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// began is when the tests of homes begin.
var began = time.Unix(1e9, 0)

// TestReturn: a wait returns home at the third slow yield within a millisecond, from wherever it is.
func TestReturn(t *testing.T) {
	for here := range 4 {
		for rank := range 4 {
			h := NewHome(rank, 4)
			want := rank
			if here == rank {
				want = stay
			}
			assert.Equal(t, stay, h.choose(sharedYield, began, here, 4))
			assert.Equal(t, stay, h.choose(sharedYield, began.Add(sharedTime/2), here, 4))
			assert.Equal(t, want, h.choose(sharedYield, began.Add(sharedTime), here, 4), "rank %d on %d", rank, here)
		}
	}
	h := NewHome(1, 4)
	for i := range 100 {
		now := began.Add(time.Duration(i) * sharedTime * 2 / 3)
		assert.Equal(t, stay, h.choose(takenYield-1, now, 0, 4), "yields that are far apart are interrupts")
	}
}

// TestFewRanks: the kernel alone places ranks that it has room for, and those for which there is none.
func TestFewRanks(t *testing.T) {
	for usable := 1; usable <= 16; usable++ {
		for ranks := 1; ranks <= 32; ranks++ {
			h := NewHome(0, ranks)
			moved := false
			for range 5 {
				moved = moved || h.choose(sharedYield, began, usable-1, usable) != stay
			}
			moves := ranks <= usable && 2*ranks > usable && usable > 1
			assert.Equal(t, moves, moved, "%d ranks, %d processors", ranks, usable)
			moved = h.choose(takenYield, began, 0, usable) != stay
			assert.Equal(t, ranks <= usable && 2*ranks > usable, moved, "%d ranks, %d processors", ranks, usable)
		}
	}
}

// TestTaken: a rank leaves a processor on which somebody computes, and comes back ever later.
func TestTaken(t *testing.T) {
	h := NewHome(3, 4)
	now := began
	for _, absence := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 100, 100} {
		absence *= shortAbsence
		require.Equal(t, 0, h.choose(takenYield, now, 3, 4), "the next processor")
		for range 2 * manyShared {
			require.Equal(t, stay, h.choose(sharedYield, now.Add(absence-1), 0, 4), "away for %v", absence)
		}
		require.Equal(t, 1, h.choose(takenYield, now.Add(absence-1), 0, 4), "that one is taken as well")
		now = now.Add(absence)
		for range manyShared - 1 {
			require.Equal(t, stay, h.choose(sharedYield, now, 0, 4))
		}
		require.Equal(t, 3, h.choose(sharedYield, now, 0, 4), "back after %v", absence)
		now = now.Add(time.Millisecond)
	}
	now = now.Add(2*longAbsence - time.Millisecond)
	h.choose(takenYield, now, 3, 4)
	assert.Equal(t, shortAbsence, h.absence, "after a long time at home")
}

// TestRanksFindTheirProcessors plays ranks that wait for each other on as many processors, on some of which
// somebody computes. Without others no two share one soon. Beside others next to no time is spent where these
// are. The kernel moves a rank now and then.
func TestRanksFindTheirProcessors(t *testing.T) {
	const processors = 16
	seed := rand.Uint64()
	for others := range 5 {
		t.Run(fmt.Sprint(others), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, uint64(others)))
			t.Log("seed", seed)
			var homes [processors]*Home
			var at [processors]int
			for rank := range homes {
				homes[rank] = NewHome(rank, processors)
				at[rank] = random.IntN(processors)
			}
			now := began
			shared, beside := 0, 0 // steps in which ranks share a processor, and in which one is where somebody computes
			const steps = 100_000
			for range steps {
				var there [processors]int
				for _, p := range at {
					there[p]++
				}
				length := time.Microsecond
				for rank, p := range at {
					slow := time.Duration(0)
					switch {
					case p < others:
						slow = 3 * time.Millisecond
					case there[p] > 1:
						slow = 2 * sharedYield
					}
					length = max(length, slow)
					if slow == 0 {
						continue
					}
					if to := homes[rank].choose(slow, now.Add(slow), p, processors); to != stay {
						at[rank] = to
					}
				}
				now = now.Add(length)
				switch {
				case length >= takenYield:
					beside++
				case length >= sharedYield:
					shared++
				}
				if random.IntN(1000) == 0 {
					at[random.IntN(processors)] = random.IntN(processors)
				}
			}
			assert.Less(t, beside, steps/200)
			if others == 0 {
				assert.Zero(t, beside)
				assert.Less(t, shared, steps/100)
			}
		})
	}
}
