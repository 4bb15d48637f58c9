package engine

import "github.com/tutti-go/tutti/internal/sparsity"

// patterns is the grid. The dense pattern has neither selector nor exchange.
var patterns = map[string]pattern{
	sparsity.Dense:           {},
	sparsity.TopkA:           {exactSelector, allgatherEqual},
	sparsity.TopkA2:          {exactSelector, allgatherAgain},
	sparsity.TopkAopt:        {reusedSelector, allgatherSized},
	sparsity.Gtopk:           {exactSelector, tree},
	sparsity.TopkSA:          {nonzeroSelector, partitionsOrDense},
	sparsity.Gaussiank:       {gaussianSelector, allgatherSized},
	sparsity.GaussiankConcat: {gaussianSelector, allgatherSized},
	sparsity.GaussiankSA:     {gaussianSelector, partitions},
	sparsity.Oktopk:          {reusedSelector, oktopk},
	sparsity.Chunked:         {chunkedSelector, allgatherEqual},
}

// find returns the pattern that reduces k of n entries per rank, and its name.
//
// oktopk's bound of 6k(P-1)/P elements leaves room for other patterns where they are better:
//
//   - From k = n/3 on, a dense allreduce of gradient + residual (2n(P-1)/P elements) costs no more and sends
//     everything.
//   - Its lengths, samples and counts cost a fixed number of elements per step. If k is so small that they would take
//     half of the budget or more, or leave room for fewer than k entries in a result, it uses the pattern of lowest
//     volume that sends nothing but entries: for up to three ranks topkA2 (2k(P-1) elements), above that gtopk (4k);
//     neither exceeds 6k(P-1)/P.
func find(cfg *Settings, k, n, size int) (string, pattern) {
	name := cfg.Pattern
	if name == sparsity.Oktopk {
		switch {
		case 3*k >= n:
			return sparsity.Dense, pattern{noSelector, sumAll}
		case unitOf(cfg.codec(), k, n, size).roomy(k, size):
		case size <= 3:
			name = sparsity.TopkA2
		default:
			name = sparsity.Gtopk
		}
	}
	return name, patterns[name]
}

// pattern is one cell of the grid: a selector of entries, and an exchange that combines those of all ranks.
type pattern struct {
	selector func(e *engine) selector // makes it, for each k
	exchange func(e *engine) exchange // the same
}
