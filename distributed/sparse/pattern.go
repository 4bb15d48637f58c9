package sparse

import (
	"context"

	"github.com/tutti-go/tutti/runtime/kernel"
)

// selector selects entries of gradient + residual; custom is one that has a [Selector] do it.
type selector interface {
	// capacity is the largest number of entries that selectEntries may return.
	capacity(k int) int
	// selectEntries adds the gradient to the residual, takes about k entries of large
	// magnitude out of it, and returns them: dst, or its beginning where the number
	// is known to the host.
	selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries
}

// exchange combines the selected entries of all ranks.
type exchange interface {
	// placeSelected returns memory for the selected entries, up to n. All ranks call it together.
	placeSelected(ctx context.Context, n int) kernel.Entries
	// run makes the result of all ranks' selected entries, and gives back to the residual what
	// did not make it into that, or leaves it to the end of the step ([leftover]). The
	// result is there after engine.arrive.
	run(ctx context.Context, selected kernel.Entries) result
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

// Auto, for [Config.Pattern], is the pattern whose steps are the fastest on this communicator, with this runtime's
// kernels, for this length and density. The ranks make some steps on random numbers with up to five of [Patterns],
// and agree on a [Choice], which stays. It is dense where a sparse pattern is faster by less than a twentieth. That
// patterns which send less need more steps for the same accuracy does not count.
//
// The measurement decides how long a step takes, and not what it means. Everything else follows from the
// configuration, as for a sparse pattern, also where the dense one is chosen: NonFinite is [SkipNonFinite] unless
// set, a step that fails is rolled back unless NoUndo is set, there is a residual, an epoch of density 0 sends
// nothing, and results are not there as lists ([Reducer.Entries]).
//
// A [Reducer] chooses in the first step that is not dense by its schedule, for Config.Density; package ddp when it is
// made, once for all buckets of about the same length. It takes about a second where steps with 16,384 elements
// take less than 12 ms, and meanwhile memory of up to eleven times the tensor's size, about twenty with momentum, but
// for no more than 16,777,216 elements.
const Auto = "auto"
