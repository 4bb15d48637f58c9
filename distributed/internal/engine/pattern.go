package engine

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
	Gaussiank       = "gaussiank"       // Shi et al., 2019
	GaussiankConcat = "gaussiankconcat" // the same: here every list is one message of indices and values
	GaussiankSA     = "gaussiankSA"     // the same selection, split allreduce
	Oktopk          = "oktopk"          // Li and Hoefler, PPoPP 2022
	Chunked         = "chunked"         // exact top-k of each chunk, allgather
)

// Patterns returns the names of all patterns, dense first.
func Patterns() []string {
	return []string{Dense, TopkA, TopkA2, TopkAopt, Gtopk, TopkSA, Gaussiank, GaussiankConcat, GaussiankSA,
		Oktopk, Chunked}
}

// NeedsHost reports whether a step of a pattern waits for the device, on one that has streams, because the host needs
// lengths to size messages.
func NeedsHost(pattern string) bool {
	switch pattern {
	case TopkSA, GaussiankSA, Oktopk, Auto:
		return true
	}
	return false
}

// Auto, for [Config.Pattern], is the pattern whose steps are the fastest: see [Choice].
const Auto = "auto"
