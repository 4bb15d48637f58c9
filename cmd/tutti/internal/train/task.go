package train

import (
	"math/rand/v2"
	"slices"

	"github.com/tutti-go/tutti/examples/digits"
)

// noise is the standard deviation of what [turn] adds to pixels, which are in
// [0, 1].
const noise = 0.15

// turn makes the task harder: it turns and mirrors every image of a copy of the
// set in one of the eight ways that a square has, at random, and adds noise.
func turn(set digits.Set, rng *rand.Rand) digits.Set {
	const side = 8
	turned := digits.Set{Inputs: slices.Clone(set.Inputs), Labels: set.Labels}
	for i := range set.Len() {
		from, to := set.Image(i), turned.Image(i)
		way := rng.IntN(8)
		for y := range side {
			for x := range side {
				u, v := x, y
				if way&1 != 0 {
					u = side - 1 - u
				}
				if way&2 != 0 {
					v = side - 1 - v
				}
				if way&4 != 0 {
					u, v = v, u
				}
				to[y*side+x] = from[v*side+u] + float32(noise*rng.NormFloat64())
			}
		}
	}
	return turned
}
