package repeats

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// Events of one class are logged ever less often.
func TestRepeatedEventsDoNotFillTheLog(t *testing.T) {
	var log Log
	var logged []int
	for range 300 {
		if times, due := log.Count("class"); due {
			logged = append(logged, times)
		}
	}
	assert.Equal(t, []int{1, 2, 4, 8, 16, 32, 64, 128, 256}, logged)
	times, due := log.Count("another class")
	assert.True(t, due)
	assert.Equal(t, 1, times)
}
