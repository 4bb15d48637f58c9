package backend_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestExecuteShared does what the conformance of examples/custom-communicator does not
// reach: calls that do not fit leave the buffers alone. That suite tests the rest.
func TestExecuteShared(t *testing.T) {
	rt := cpu.New()
	t.Cleanup(func() { assert.NoError(t, rt.Close()) })
	vector := func(x ...float32) (*runtime.Tensor, uintptr) {
		v, err := runtime.FromSlice(rt, x, len(x))
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, v.Free()) })
		p, err := v.Ptr()
		require.NoError(t, err)
		return v, p
	}
	first, a := vector(1, 2)
	second, b := vector(10, 20)
	holds := func(v *runtime.Tensor, want ...float32) {
		got, err := runtime.ToSlice[float32](v)
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}

	err := backend.ExecuteShared(rt, comm.AllReduceCall(a, a, 2, dtype.F32, comm.Sum), comm.AllReduceCall(b, b, 2, dtype.F32, comm.Max))
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, "rank 0 called allreduce of 2 f32, sum; rank 1 called allreduce of 2 f32, max")
	err = backend.ExecuteShared(rt, comm.SendCall(a, 2, dtype.F32, 5, 7), comm.RecvCall(b, 1, dtype.F32, 3, 7))
	assert.ErrorIs(t, err, comm.ErrMismatch)
	assert.ErrorContains(t, err, "rank 3 called send of 2 f32 to rank 5, tag 7; rank 5 called recv of 1 f32 from rank 3, tag 7")
	holds(first, 1, 2)
	holds(second, 10, 20)

	require.NoError(t, backend.ExecuteShared(rt, comm.AllReduceCall(a, a, 2, dtype.F32, comm.Sum), comm.AllReduceCall(b, b, 2, dtype.F32, comm.Sum)))
	holds(first, 11, 22)
	holds(second, 11, 22)
	require.NoError(t, backend.ExecuteShared(rt, comm.SendCall(a, 1, dtype.F32, 5, 7), comm.RecvCall(b+4, 1, dtype.F32, 3, 7)))
	holds(second, 11, 11)
}
