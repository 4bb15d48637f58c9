package reductions_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

func TestParse(t *testing.T) {
	require.Len(t, reductions.All(), 5)
	for _, op := range reductions.All() {
		assert.True(t, op.Valid())
		for _, name := range []string{op.String(), strings.ToUpper(op.String())} {
			got, err := reductions.Parse(name)
			require.NoError(t, err)
			assert.Equal(t, op, got)
		}
	}
	for _, name := range []string{"", "mean", "sum "} {
		_, err := reductions.Parse(name)
		require.Error(t, err)
		for _, op := range reductions.All() {
			assert.ErrorContains(t, err, op.String())
		}
	}
}

func TestReduceOpDefined(t *testing.T) {
	for _, d := range dtype.All() {
		for _, op := range reductions.All() {
			integerAvg := op == reductions.Avg && !d.IsFloat()
			assert.Equal(t, !integerAvg, op.Defined(d), "%v of %v", op, d)
		}
	}
	assert.False(t, reductions.Sum.Defined(dtype.Invalid))
	bad := reductions.Avg + 1
	assert.False(t, bad.Valid())
	assert.False(t, bad.Defined(dtype.F32))
	assert.Equal(t, "ReduceOp(5)", bad.String())
}
