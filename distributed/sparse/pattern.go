package sparse

import (
	"context"

	"github.com/tutti-go/tutti/runtime"
)

// pattern is one cell of the grid: what selects entries, and what combines those of all ranks.
type pattern struct {
	selector func(e *engine) selector
	exchange func(e *engine) exchange
}

// selector selects entries of gradient + residual; custom is one that has a [Selector] do it.
type selector interface {
	// capacity is the largest number of entries that selectEntries may return.
	capacity(k int) int
	// selectEntries adds the gradient to the residual, takes about k entries of large
	// magnitude out of it, and returns them: dst, or its beginning where the number
	// is known to the host.
	selectEntries(g Input, k int, dst runtime.Entries) runtime.Entries
}

// exchange combines the selected entries of all ranks.
type exchange interface {
	// placeSelected returns memory for the selected entries, up to n. All ranks call it together.
	placeSelected(ctx context.Context, n int) runtime.Entries
	// run makes the result of all ranks' selected entries, and gives back to the residual what
	// did not make it into that, or leaves it to the end of the step ([leftover]). The
	// result is there after engine.arrive.
	run(ctx context.Context, selected runtime.Entries) result
}

// result is what an exchange makes, the same on every rank: the sum of lists,
// scaled, or a dense array of F32.
type result struct {
	lists []runtime.Entries
	scale float32
	dense uintptr // n F32, if not 0, to be scaled as well
	left  leftover
	// messages, if there are any, are what the lists are to be made of when it is there.
	messages []uintptr
}

// leftover are selected entries that may not have made it into the result, and what they are in if
// they have. They go back to the residual when the result is written.
type leftover struct{ selected, taken runtime.Entries }

// patterns is the grid. The dense pattern has neither selector nor exchange.
var patterns = map[string]pattern{
	Dense:           {},
	TopkA:           {exactSelector, allgatherEqual},
	TopkA2:          {exactSelector, allgatherAgain},
	TopkAopt:        {reusedSelector, allgatherSized},
	Gtopk:           {exactSelector, tree},
	TopkSA:          {nonzeroSelector, partitionsOrDense},
	Gaussiank:       {gaussianSelector, allgatherSized},
	GaussiankConcat: {gaussianSelector, allgatherSized},
	GaussiankSA:     {gaussianSelector, partitions},
	Oktopk:          {reusedSelector, oktopk},
	Chunked:         {chunkedSelector, allgatherEqual},
}

// The patterns, for [Config.Pattern]. All names but the last are those of the published Ok-Topk
// code (https://github.com/Shigangli/Ok-Topk), which compares these methods.
const (
	Dense           = "dense"           // sends everything
	TopkA           = "topkA"           // exact top-k, allgather
	TopkA2          = "topkA2"          // the same, and the top k of the sum
	TopkAopt        = "topkAopt"        // reused threshold, allgather
	Gtopk           = "gtopk"           // Shi et al., ICDCS 2019
	TopkSA          = "topkSA"          // the split allreduce of SparCML, Renggli et al., SC 2019
	Gaussiank       = "gaussiank"       // Shi et al., 2019, "Understanding Top-k Sparsification in Distributed Deep Learning"
	GaussiankConcat = "gaussiankconcat" // the same: here every list is one message of indices and values
	GaussiankSA     = "gaussiankSA"     // the same selection, split allreduce
	Oktopk          = "oktopk"          // Li and Hoefler, PPoPP 2022
	Chunked         = "chunked"         // exact top-k of each chunk, allgather: DeMo (Peng et al., 2024), SparseLoCo (Sarfi et al., 2025)
)

// Patterns returns the names of all patterns, dense first.
func Patterns() []string {
	return []string{Dense, TopkA, TopkA2, TopkAopt, Gtopk, TopkSA, Gaussiank, GaussiankConcat, GaussiankSA, Oktopk, Chunked}
}

// NeedsHost reports whether a step of a pattern waits for the device, on one that
// has streams, because the host needs lengths to size messages. The others only
// submit work, and can be captured in a graph, but with [FailNonFinite]. [Auto] may
// be any of them. Of [Oktopk] not all steps wait, but what the host reads of one leads
// the next, so none can be captured.
func NeedsHost(pattern string) bool {
	switch pattern {
	case TopkSA, GaussiankSA, Oktopk, Auto:
		return true
	}
	return false
}

// find returns what reduces k of n entries per rank.
//
// oktopk's bound of 6k(P-1)/P elements leaves room for other ways where they
// are better:
//
//   - From k = n/3 on, a dense allreduce of gradient + residual (2n(P-1)/P
//     elements) costs no more and sends everything.
//   - Its lengths, samples and counts cost a fixed number of elements per step.
//     Where k is so small that they would take half of the budget or more, or
//     leave room for fewer than k entries in a result,
//     it uses the pattern of lowest volume that sends nothing but entries: for
//     up to three ranks topkA2 (2k(P-1) elements), above that gtopk (4k);
//     neither is more than 6k(P-1)/P.
//
// The name is that of the pattern that is used.
func find(cfg *Config, k, n, size int) (string, pattern) {
	name := cfg.Pattern
	if name == Oktopk {
		switch {
		case 3*k >= n:
			return Dense, pattern{noSelector, sumAll}
		case unitOf(cfg.codec(), k, n, size).roomy(k, size):
		case size <= 3:
			name = TopkA2
		default:
			name = Gtopk
		}
	}
	return name, patterns[name]
}
