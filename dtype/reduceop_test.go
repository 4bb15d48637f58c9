package dtype_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
)

func TestParseReduceOp(t *testing.T) {
	require.Len(t, dtype.ReduceOps(), 5)
	for _, op := range dtype.ReduceOps() {
		assert.True(t, op.Valid())
		for _, name := range []string{op.String(), strings.ToUpper(op.String())} {
			got, err := dtype.ParseReduceOp(name)
			require.NoError(t, err)
			assert.Equal(t, op, got)
		}
	}
	for _, name := range []string{"", "mean", "sum "} {
		_, err := dtype.ParseReduceOp(name)
		require.Error(t, err)
		for _, op := range dtype.ReduceOps() {
			assert.ErrorContains(t, err, op.String())
		}
	}
}

func TestReduceOpDefined(t *testing.T) {
	for _, d := range dtype.All() {
		for _, op := range dtype.ReduceOps() {
			integerAvg := op == dtype.Avg && !d.IsFloat()
			assert.Equal(t, !integerAvg, op.Defined(d), "%v of %v", op, d)
		}
	}
	assert.False(t, dtype.Sum.Defined(dtype.Invalid))
	bad := dtype.Avg + 1
	assert.False(t, bad.Valid())
	assert.False(t, bad.Defined(dtype.F32))
	assert.Equal(t, "ReduceOp(5)", bad.String())
}
