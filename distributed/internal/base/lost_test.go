package base_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/internal/repeats"
)

// TestReportLost: rank 0 says which residuals are lost, ever more rarely, and nothing where no rank is gone.
func TestReportLost(t *testing.T) {
	lines := logtest.Capture(t)
	world, err := local.New(2)
	require.NoError(t, err)
	var log repeats.Log
	for range 5 {
		for _, c := range world {
			base.ReportLost(&log, 2, c, "gradients", []int{1, 3})
			base.ReportLost(&log, 3, c, "gradients", []int{1, 3})
		}
	}
	said := lines.Lines(`gradients="[1 3]" ranks=2 lost=1 rank=0`)
	require.Len(t, said, 3)
	for i, want := range []string{"times=1\n", "times=2\n", "times=4\n"} {
		assert.Contains(t, said[i], want)
	}
	for _, c := range world {
		require.NoError(t, c.Close())
	}
}
