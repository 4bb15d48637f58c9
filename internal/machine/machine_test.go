package machine

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestCount(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-7\n": 8, "0-3,6,8-9": 7, "": 0, "3-1": 0, "x": 0, "0-": 0, "-1": 0} {
		assert.Equal(t, want, count(list), "%q", list)
	}
}

func TestMemory(t *testing.T) {
	total, free := Memory()
	assert.LessOrEqual(t, free, total)
}
