package staged

import "testing"

// SmallWindows has calls of any length go through a window, in pieces of this many bytes.
func SmallWindows(t *testing.T, bytes int) {
	call := windowCall
	piece := shortPiece
	windowCall = 1
	shortPiece = bytes
	t.Cleanup(func() {
		windowCall = call
		shortPiece = piece
	})
}
