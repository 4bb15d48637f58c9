package distributedtest

import (
	"math"
	"math/rand/v2"
	"slices"
)

// family is gradients of a sort.
type family struct {
	name string
	// fill writes one rank's gradient of one step; rng is seeded for both.
	fill func(g []float32, rng *rand.Rand, rank, size, step int)
}

// families are the gradients that patterns are tested with: ordinary ones, and
// what has broken or could break a selection, a balance of partitions, a reused
// threshold or the bookkeeping of residuals.
var families = []family{
	{"normal", func(g []float32, rng *rand.Rand, _, _, _ int) { normal(g, rng, 1) }},
	{"clustered", func(g []float32, rng *rand.Rand, _, _, _ int) {
		normal(g, rng, 1e-3)
		normal(window(g, 0.6, 0.05), rng, 1)
	}},
	{"own cluster", func(g []float32, rng *rand.Rand, rank, size, _ int) {
		normal(g, rng, 1e-3)
		normal(window(g, float64(rank)/float64(size), 0.02), rng, 1)
	}},
	{"moving cluster", func(g []float32, rng *rand.Rand, _, _, step int) {
		normal(g, rng, 1e-3)
		normal(window(g, float64(step%7)/7, 0.03), rng, 1)
	}},
	{"heavy tails", func(g []float32, rng *rand.Rand, _, _, _ int) {
		for i := range g {
			g[i] = float32(math.Pow(1-rng.Float64(), -1.5)) * sign(rng)
		}
	}},
	{"drifting scale", func(g []float32, rng *rand.Rand, _, _, step int) {
		normal(g, rng, math.Pow(100, float64(step%4-2)))
	}},
	{"constant", func(g []float32, _ *rand.Rand, _, _, _ int) { set(g, 0.5) }},
	{"zero", func(g []float32, _ *rand.Rand, _, _, _ int) { clear(g) }},
	{"one rank only", func(g []float32, rng *rand.Rand, rank, size, _ int) {
		clear(g)
		if rank == size-1 {
			normal(g, rng, 1)
		}
	}},
	{"few entries", func(g []float32, rng *rand.Rand, rank, _, _ int) {
		clear(g)
		for range min(len(g), 3+rank) {
			g[rng.IntN(len(g))] = float32(rng.NormFloat64())
		}
	}},
	{"ties", func(g []float32, rng *rand.Rand, _, _, _ int) {
		for i := range g {
			g[i] = float32(rng.IntN(3) - 1)
		}
	}},
	{"canceling", func(g []float32, _ *rand.Rand, rank, _, step int) {
		// The same magnitudes everywhere, with opposite signs on odd ranks.
		normal(g, rand.New(rand.NewPCG(uint64(step), 7)), 1)
		if rank%2 == 1 {
			for i := range g {
				g[i] = -g[i]
			}
		}
	}},
	{"one sign", func(g []float32, rng *rand.Rand, rank, _, _ int) {
		for i := range g {
			g[i] = float32(math.Abs(rng.NormFloat64())) * float32(1-2*((i/64+rank)%2))
		}
	}},
	{"subnormal", func(g []float32, rng *rand.Rand, _, _, _ int) { normal(g, rng, 1e-42) }},
	{"huge", func(g []float32, rng *rand.Rand, _, _, _ int) { normal(g, rng, 1e30) }},
}

// gradientOf is what a gradient is made from.
type gradientOf struct {
	family              string
	n, rank, size, step int
}

// gradient returns one rank's gradient of one step. Gradients of the patterns' cases are made once.
func (s *suite) gradient(k family, n, rank, size, step int) []float32 {
	key := gradientOf{k.name, n, rank, size, step}
	if g, ok := s.made.Load(key); ok {
		return slices.Clone(g.([]float32))
	}
	g := make([]float32, n)
	if n > 0 {
		rng := rand.New(rand.NewPCG(seed, uint64(rank)<<32|uint64(step)))
		k.fill(g, rng, rank, size, step)
	}
	if step < 7 && (n <= 3000 || n == s.large()) {
		s.made.Store(key, slices.Clone(g))
	}
	return g
}

func normal(g []float32, rng *rand.Rand, scale float64) {
	for i := range g {
		g[i] = float32(rng.NormFloat64() * scale)
	}
}

func set(g []float32, v float32) {
	for i := range g {
		g[i] = v
	}
}

func sign(rng *rand.Rand) float32 {
	return float32(rng.IntN(2)*2 - 1)
}

// window returns the share of g that starts at a share of its length.
func window(g []float32, start, share float64) []float32 {
	from := int(start * float64(len(g)))
	return g[from:min(len(g), from+max(1, int(share*float64(len(g)))))]
}
