package staged

import "testing"

// SmallWindows has calls of any length go through a small window, in pieces of this many bytes.
func SmallWindows(t *testing.T, bytes int) {
	lower(t, &windowBytes, 4<<20)
	lower(t, &windowCall, 1)
	lower(t, &shortPiece, bytes)
}

// ShortChunks has calls of this many bytes done in chunks.
func ShortChunks(t *testing.T, bytes int) { lower(t, &longCall, bytes) }

// lower sets a bound until the test ends.
func lower(t *testing.T, bound *int, bytes int) {
	before := *bound
	*bound = bytes
	t.Cleanup(func() { *bound = before })
}
