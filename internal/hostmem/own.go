//go:build amd64 || arm64

package hostmem

// Own has the processor fetch the cache line at an address for writing, while it goes on:
// a store there need not wait then for the line to come from another processor. The
// address may be anything.
func Own(address uintptr)
