package sparse_test

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tutti-go/tutti/distributed/sparse"
)

// TestStatsJSON: statistics have JSON whatever the thresholds are.
func TestStatsJSON(t *testing.T) {
	for _, threshold := range []float64{0, 1.25, 1e-40, math.NaN(), math.Inf(1)} {
		want := sparse.Stats{Step: 3, Pattern: "oktopk", K: 7, Threshold: float32(threshold), GlobalThreshold: 0.1, SentBytes: 9, ExchangeTime: 5}
		text, err := json.Marshal(want)
		require.NoError(t, err)
		var got sparse.Stats
		require.NoError(t, json.Unmarshal(text, &got), string(text))
		assert.Equal(t, math.Float32bits(want.Threshold), math.Float32bits(got.Threshold), string(text))
		got.Threshold, want.Threshold = 0, 0
		assert.Equal(t, want, got)
	}
}
