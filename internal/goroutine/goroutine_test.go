package goroutine

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestIDTellsLiveGoroutinesApart(t *testing.T) {
	const n = 100
	ids, done := make(chan uintptr), make(chan struct{})
	for range n {
		go func() {
			ids <- ID()
			<-done // stay alive: an ID may come back with a later goroutine
		}()
	}
	seen := map[uintptr]bool{ID(): true}
	for range n {
		seen[<-ids] = true
	}
	close(done)
	assert.Len(t, seen, n+1)
	assert.NotContains(t, seen, uintptr(0))
	assert.True(t, seen[ID()], "the same goroutine has the same ID")
}
