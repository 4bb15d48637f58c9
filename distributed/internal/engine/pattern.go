package engine

import (
	"context"

	"github.com/tutti-go/tutti/runtime/kernel"
)

// selector selects entries of gradient + residual; custom is the one for a [Selector].
type selector interface {
	// capacity is the largest number of entries that selectEntries may return.
	capacity(k int) int
	// selectEntries adds the gradient to the residual, subtracts about k entries of large magnitude from it, and
	// returns them: in dst, or in its beginning if the host knows their number.
	selectEntries(g Input, k int, dst kernel.Entries) kernel.Entries
}

// exchange combines the selected entries of all ranks.
type exchange interface {
	// placeSelected returns memory for the selected entries, up to n. All ranks call it together.
	placeSelected(ctx context.Context, n int) kernel.Entries
	// run makes the result of all ranks' selected entries, and restores entries that are not in it to the residual, or
	// leaves it to the end of the step ([leftover]). The result is there after engine.arrive.
	run(ctx context.Context, selected kernel.Entries) result
}
