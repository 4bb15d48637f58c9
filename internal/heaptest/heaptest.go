// Package heaptest has the tests that import it collect garbage less often: most of them allocate much and keep little,
// and with the smallest heaps, of 4 MiB, a fifth of their processor time went into collections.
package heaptest

import "os"

// ballastBytes count as in use. A heap is not collected before it has twice as many.
const ballastBytes = 32 << 20

// ballast is never written, so that the system gives it no memory.
//
//lint:ignore U1000 it is there to be counted
var ballast []byte

// With TUTTI_EXTENDED set, collections come as often as in programs.
func init() {
	if os.Getenv("TUTTI_EXTENDED") == "" {
		ballast = make([]byte, ballastBytes)
	}
}
