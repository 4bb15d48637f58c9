package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/runtime"
)

// BenchmarkExchange times each kernel of a steady step of oktopk between two ranks on the
// device's own clock, with lists of 1 %: where an exchange's time goes but for messages.
// AboveOf is what comes in a step that estimates the threshold, behind a Union of all sums.
func BenchmarkExchange(b *testing.B) {
	fmt.Println("| elements | kernel | us |\n| ---: | --- | ---: |")
	for _, n := range benchmarkSizes(b) {
		g := onGPU(b)
		g.even = true
		rng := rand.New(rand.NewPCG(seed, 0))
		list := func(from, to int) runtime.Entries {
			idx, val := strewn(rng, from, to, 0.01)
			return runtime.Entries{Idx: put(g, idx), Val: put(g, val), N: len(idx)}
		}
		k := n / 100
		picks, own, rest, received := list(0, n), list(0, n/2), list(n/2, n), list(0, n/2)
		bounds := put(g, []int32{0, int32(n / 2), int32(n)})
		positions, faults := room[int32](g, 3), room[int32](g, 1)
		most, passing := put(g, []float32{0}), put(g, []float32{1})
		one, other, sums, passed, result := g.entries(2*k), g.entries(2*k), g.entries(2*k), g.entries(2*k), g.entries(2*k)
		require.NoError(b, g.Union(sums, n, []runtime.Entries{own, received}, 1, faults, 0))
		residual := runtime.Array{Ptr: room[float32](g, n), N: n, Faults: faults}
		start, end := positions+4, positions+8
		for _, c := range []struct {
			name string
			run  func() error
		}{
			{"LowerBounds", func() error { return g.LowerBounds(picks, bounds, 3, positions, 0) }},
			{"CopyPieces", func() error {
				return g.CopyPieces([]runtime.Piece{{From: picks, End: start, To: one}, {From: picks, Start: start, End: end, To: other}})
			}},
			{"CopyPieces by index", func() error {
				return g.CopyPieces([]runtime.Piece{{From: picks, End: bounds + 4, ByIndex: true, To: one},
					{From: picks, End: bounds, ByIndex: true, To: other}, {From: picks, Start: bounds + 4, ByIndex: true, To: other}})
			}},
			{"TopOf, all", func() error { return g.TopOf(rest, rest.N, one) }},
			{"TopOf, 9 of 10", func() error { return g.TopOf(rest, rest.N*9/10, one) }},
			{"GiveBack, all sent", func() error { return g.GiveBack(residual, rest, rest) }},
			{"Union", func() error { return g.Union(sums, n, []runtime.Entries{own, received}, 1, faults, 0) }},
			{"Union, what passes", func() error { return g.Union(passed, n, []runtime.Entries{own, received}, 1, faults, passing) }},
			{"Union by tiles of the array", func() error { return g.Union(sums, n, []runtime.Entries{own, received, {}}, 1, faults, 0) }},
			{"AboveOf, all", func() error { return g.AboveOf(sums, most, passed) }},
			{"AboveOf, some", func() error { return g.AboveOf(sums, passing, passed) }},
			{"TopOf of the sums", func() error { return g.TopOf(passed, k, result) }},
			{"GiveBack", func() error { return g.GiveBack(residual, own, received) }},
		} {
			fmt.Printf("| %d | %s | %.1f |\n", n, c.name, graphTime(g, c.run))
		}
	}
}
