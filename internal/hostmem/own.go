//go:build amd64 || arm64

package hostmem

// Own makes the processor fetch the cache line at an address for writing, in the background: a later store there
// need not wait for the line to come from another processor. The address may be anything.
func Own(address uintptr)
