package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/tutti-go/tutti/runtime/kernel"
)

// BenchmarkExchange times each kernel of a steady step of oktopk between two ranks on the device's own clock, with
// lists of 1 %: where an exchange's time goes except for messages. Kernels after "Restore" belong to other steps:
// those that cut something, and those that estimate the threshold, of all sums.
func BenchmarkExchange(b *testing.B) {
	fmt.Println("| elements | kernel | us |\n| ---: | --- | ---: |")
	for _, n := range benchmarkSizes(b) {
		g := onGPU(b)
		g.even = true
		rng := rand.New(rand.NewPCG(seed, 0))
		list := func(from, to int) kernel.Entries {
			idx, val := strewn(rng, from, to, 0.01)
			return kernel.Entries{Idx: put(g, idx), Val: put(g, val), N: len(idx)}
		}
		k := n / 100
		picks, own, received := list(0, n), list(0, n/2), list(0, n/2)
		bounds, faults := put(g, []int32{0, int32(n / 2)}), room[int32](g, 1)
		passing := put(g, []float32{1})
		sent, sums, passed, result := g.entries(2*k), g.entries(2*k), g.entries(2*k), g.entries(2*k)
		both, residual := []kernel.Entries{own, received}, kernel.Array{Ptr: room[float32](g, n), N: n, Faults: faults}
		for _, c := range []struct {
			name string
			run  func() error
		}{
			{"TopKList, what is outside", func() error { return g.TopKList(picks, k, sent, bounds, residual) }},
			{"CopyPieces, beside the messages", func() error {
				return g.CopyPieces([]kernel.Piece{{From: picks, Start: bounds, End: bounds + 4, ByIndex: true, To: result}})
			}},
			{"Union, what passes", func() error { return g.Union(passed, n, both, 1, faults, passing) }},
			{"Restore", func() error { return g.Restore(residual, sent, received) }},
			{"TopKList, 9 of 10 outside", func() error { return g.TopKList(picks, picks.N*9/20, sent, bounds, residual) }},
			{"Union", func() error { return g.Union(sums, n, both, 1, faults, 0) }},
			{"SelectList", func() error { return g.SelectList(sums, passing, passed) }},
		} {
			fmt.Printf("| %d | %s | %.1f |\n", n, c.name, graphTime(g, c.run))
		}
	}
}
