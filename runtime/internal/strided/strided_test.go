package strided_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/internal/strided"
)

type axis = strided.Axis

func TestAxes(t *testing.T) {
	for name, c := range map[string]struct {
		dst, src, shape []int
		want            []axis
		count           int
	}{
		"scalar":        {nil, nil, nil, nil, 1},
		"ones are left": {[]int{0, 7, 1}, []int{9, 0, 2}, []int{1, 1, 5}, []axis{{5, 1, 2}}, 5},
		"empty":         {[]int{0, 1}, []int{3, 1}, []int{0, 3}, []axis{{3, 1, 1}}, 0},
		"broadcast":     {[]int{3, 1}, []int{0, -1}, []int{2, 3}, []axis{{2, 3, 0}, {3, 1, -1}}, 6},
	} {
		axes, count, err := strided.Axes(nil, c.dst, c.src, c.shape, 4)
		require.NoError(t, err, name)
		assert.Equal(t, c.want, axes, name)
		assert.Equal(t, c.count, count, name)
	}
}

func TestAxesRefuses(t *testing.T) {
	one, two, far := []int{1}, []int{2}, []int{math.MaxInt / 8}
	for name, c := range map[string]struct {
		dst, src, shape []int
		elemSize        int
		want            error
	}{
		"few strides":                 {nil, one, one, 4, runtime.ErrShape},
		"many strides":                {one, []int{1, 1}, one, 4, runtime.ErrShape},
		"negative size":               {one, one, []int{-1}, 4, runtime.ErrShape},
		"negative beside empty":       {[]int{1, 1}, []int{1, 1}, []int{0, -1}, 4, runtime.ErrShape},
		"element size 0":              {one, one, one, 0, runtime.ErrArgument},
		"element size -4":             {one, one, one, -4, runtime.ErrArgument},
		"huge elements":               {one, one, one, math.MaxInt, runtime.ErrArgument},
		"destination stride 0":        {[]int{0}, one, two, 4, runtime.ErrArgument},
		"far destination":             {far, one, two, 8, runtime.ErrArgument},
		"far source":                  {one, far, two, 8, runtime.ErrArgument},
		"lowest stride":               {one, []int{math.MinInt}, two, 4, runtime.ErrArgument},
		"long":                        {one, one, []int{math.MaxInt}, 1, runtime.ErrArgument},
		"sum of reaches":              {[]int{1 << 61, 1 << 61}, []int{1, 1}, []int{2, 2}, 1, runtime.ErrArgument},
		"more elements than reached":  {[]int{1, 1}, []int{1, 1}, []int{1 << 40, 1 << 40}, 1, runtime.ErrArgument},
		"far beside an empty one":     {[]int{math.MaxInt, 1}, []int{1, 1}, []int{2, 0}, 4, runtime.ErrArgument},
		"wraps to a small reach":      {[]int{math.MinInt}, one, []int{3}, 1, runtime.ErrArgument},
		"wraps with the element size": {[]int{1 << 61}, one, two, 8, runtime.ErrArgument},
	} {
		_, _, err := strided.Axes(nil, c.dst, c.src, c.shape, c.elemSize)
		assert.ErrorIs(t, err, c.want, name)
	}
}

func TestJoin(t *testing.T) {
	for name, c := range map[string]struct{ in, want []axis }{
		"nothing":            {nil, []axis{}},
		"contiguous":         {[]axis{{2, 12, 12}, {3, 4, 4}, {4, 1, 1}}, []axis{{24, 1, 1}}},
		"contiguous, turned": {[]axis{{4, 1, 1}, {2, 12, 12}, {3, 4, 4}}, []axis{{24, 1, 1}}},
		"rows with gaps":     {[]axis{{3, 4, 10}, {4, 1, 1}}, []axis{{3, 4, 10}, {4, 1, 1}}},
		"reversed whole":     {[]axis{{3, -4, 4}, {4, -1, 1}}, []axis{{12, -1, 1}}},
		"broadcast rows":     {[]axis{{3, 4, 0}, {4, 1, 1}}, []axis{{3, 4, 0}, {4, 1, 1}}},
		"transpose":          {[]axis{{3, 4, 1}, {4, 1, 3}}, []axis{{3, 4, 1}, {4, 1, 3}}},
		"by destination":     {[]axis{{4, 1, 3}, {3, 4, 1}}, []axis{{3, 4, 1}, {4, 1, 3}}},
	} {
		assert.Equal(t, c.want, strided.Join(append([]axis{}, c.in...)), name)
	}
}

// TestJoinKeepsThePairs: whatever the layouts, the joined axes visit the same
// pairs of places.
func TestJoinKeepsThePairs(t *testing.T) {
	const seed = 41
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		in := make([]axis, rng.IntN(5))
		for i := range in {
			in[i] = axis{Size: 2 + rng.IntN(3), Dst: rng.IntN(25) - 12, Src: rng.IntN(25) - 12}
			if i > 0 && rng.IntN(2) == 0 { // one that can be joined
				in[i].Dst, in[i].Src = in[i-1].Dst*in[i-1].Size, in[i-1].Src*in[i-1].Size
			}
		}
		out := strided.Join(slices.Clone(in))
		require.Equal(t, pairs(in), pairs(out), "seed %d: %v became %v", seed, in, out)
	}
}

// pairs counts how often each pair of places is visited.
func pairs(axes []axis) map[[2]int]int {
	visited := map[[2]int]int{{0, 0}: 1}
	for _, x := range axes {
		next := make(map[[2]int]int)
		for at, times := range visited {
			for i := range x.Size {
				next[[2]int{at[0] + i*x.Dst, at[1] + i*x.Src}] += times
			}
		}
		visited = next
	}
	return visited
}
