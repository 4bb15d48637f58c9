package distributed

import "context"

// pattern is one cell of the grid: what picks, and what combines the picks.
type pattern struct {
	selector func(e *engine) selector
	exchange func(e *engine) exchange
}

// selector picks entries of the residual (which holds gradient + old
// residual at that time).
type selector interface {
	// capacity is the largest number of entries that pick may return.
	capacity(k int) int
	// pick writes about k entries of large magnitude to dst, ascending by
	// index, and returns them and the threshold they passed.
	pick(k int, dst list) (list, float32)
}

// exchange combines the picks of all ranks.
type exchange interface {
	// run takes the picked entries out of the residual, leaves the average
	// over the ranks in e.work (zero where nothing was picked), and gives back
	// to the residual what did not make it into the average. e.work is all
	// zero before. It returns how many entries the result has.
	run(ctx context.Context, picks list) int
}

// patterns is the grid. The dense pattern has neither selector nor exchange.
var patterns = map[string]pattern{
	Dense:             {},
	"topkA":           {exactSelector, gatherAll},
	"topkA2":          {exactSelector, gatherAgain},
	"topkAopt":        {reusedSelector, gatherSized},
	"gtopk":           {exactSelector, tree},
	"topkSA":          {exactSelector, regionsOrDense},
	"gaussiank":       {gaussianSelector, gatherSized},
	"gaussiankconcat": {gaussianSelector, gatherPacked},
	"gaussiankSA":     {gaussianSelector, regions},
	"oktopk":          {reusedSelector, oktopk},
}

// Patterns returns the ten names for [Config.Pattern], dense first.
//
// The names are those of the published Ok-Topk code
// (https://github.com/Shigangli/Ok-Topk), which compares these methods: topkA
// and topkA2 (exact top-k, allgather), topkAopt (reused threshold), gtopk (Shi
// et al., ICDCS 2019), topkSA (the split allreduce of SparCML, Renggli et al.,
// SC 2019), gaussiank (Shi et al., 2019, "Understanding Top-k Sparsification
// in Distributed Deep Learning") with two variants, and oktopk (Li and
// Hoefler, PPoPP 2022).
func Patterns() []string {
	return []string{Dense, "topkA", "topkA2", "topkAopt", "gtopk", "topkSA",
		"gaussiank", "gaussiankconcat", "gaussiankSA", "oktopk"}
}

// find returns what reduces k of n entries per rank.
//
// oktopk's bound of 6k(P-1)/P elements leaves room for other ways where they
// are better:
//
//   - From k = n/3 on, a dense allreduce of gradient + residual (2n(P-1)/P
//     elements) costs no more and sends everything.
//   - Its lengths, samples and counts cost a fixed number of elements per step.
//     Where k is so small that they would take half of the budget or more,
//     it uses the pattern of lowest volume that sends nothing but entries: for
//     up to three ranks topkA2 (2k(P-1) elements), above that gtopk (4k);
//     neither is more than 6k(P-1)/P.
func find(name string, e *engine, k int) pattern {
	p := patterns[name]
	if name == "oktopk" {
		switch {
		case 3*k >= e.n:
			return pattern{noSelector, sumAll}
		case 2*maxOverhead(e.size) >= budget(k, e.size) && e.size <= 3:
			p = patterns["topkA2"]
		case 2*maxOverhead(e.size) >= budget(k, e.size):
			p = patterns["gtopk"]
		}
	}
	if k == e.n { // there is nothing to choose
		p.selector = exactSelector
	}
	return p
}
