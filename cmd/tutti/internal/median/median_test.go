package median_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/cmd/tutti/internal/median"
)

func TestOf(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{7}, 7}, {[]float64{2, 1}, 1.5}, {[]float64{9, 1, 2}, 2}, {[]float64{9, 1, 2, 4}, 3}} {
		assert.InDelta(t, c.want, median.Of(c.values), 0)
	}
	values := []float64{3, 1, 2}
	median.Of(values)
	assert.Equal(t, []float64{3, 1, 2}, values, "the caller's order stays")
}
