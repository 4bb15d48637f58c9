package ranks

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestText(t *testing.T) {
	for want, ranks := range map[string][]int{
		"rank 3":           {3},
		"ranks 3, 4":       {3, 4},
		"ranks 0-2, 4, 5":  {0, 1, 2, 4, 5},
		"ranks 1, 3-5, 12": {1, 3, 4, 5, 12},
		"ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, … (12 in all)": {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22},
	} {
		assert.Equal(t, want, Text(ranks))
	}
}
