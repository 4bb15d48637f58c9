package logtest

import (
	"log/slog"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Goroutines of earlier tests may log while captures begin and end.
func TestCaptureWhileOthersLog(t *testing.T) {
	stop := make(chan bool)
	var others sync.WaitGroup
	defer others.Wait()
	defer close(stop)
	for range 2 {
		others.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					slog.Warn("of another one")
				}
			}
		})
	}
	for range 1000 {
		t.Run("", func(t *testing.T) {
			log := Capture(t)
			slog.Warn("of this test")
			assert.Len(t, log.Lines("of this test"), 1)
		})
	}
}
