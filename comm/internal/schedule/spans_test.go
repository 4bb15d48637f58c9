package schedule

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSpans compares with a list of all spans.
func TestSpans(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 50 {
		var tree spans
		var list []*spanNode
		draw := func() Span { return SpanOf(uintptr(random.IntN(400)), random.IntN(6)) }
		for range 500 {
			if len(list) > 0 && random.IntN(5) < 2 {
				i := random.IntN(len(list))
				tree.remove(list[i])
				list[i] = list[len(list)-1]
				list = list[:len(list)-1]
			} else {
				n := new(spanNode)
				tree.add(n, draw())
				list = append(list, n)
			}
			s, want := draw(), false
			for _, n := range list {
				want = want || n.Overlaps(s)
			}
			require.Equal(t, want, tree.overlap(s), "%v", s)
		}
	}
}
