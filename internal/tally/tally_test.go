package tally

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTally(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 100 {
		var c Tally
		var open []uint64 // the reference
		for range 500 {
			if len(open) == 0 || random.IntN(2) == 0 {
				open = append(open, c.Begin())
			} else {
				i := random.IntN(len(open))
				c.End(open[i])
				open = slices.Delete(open, i, i+1)
			}
			ended := c.Begun()
			if len(open) > 0 {
				ended = open[0]
			}
			require.Equal(t, ended, c.Ended())
		}
	}
}

func TestTallyDoesNotAllocate(t *testing.T) {
	var c Tally
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		a, b := c.Begin(), c.Begin()
		c.End(b)
		c.End(a)
	}))
}
