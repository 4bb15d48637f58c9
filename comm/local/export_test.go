package local

import (
	"testing"
	"time"
)

// CloseWithin has Close wait for pending work no longer than d in a test.
func CloseWithin(t *testing.T, d time.Duration) {
	before := closeLimit
	closeLimit = d
	t.Cleanup(func() { closeLimit = before })
}
