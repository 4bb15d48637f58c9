package nccl

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// Windows serve what lies in them, and only where they were faster.
func TestWhichCallsWindowsServe(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	w := &windows{}
	for i := range tunedSizes { // up to 128 KiB, and from 2 MiB on
		w.faster[windowAllReduce][i] = tunedBytes(i) <= 128*kib || tunedBytes(i) >= 2*mib
	}
	w.add(window{addr: 64 * mib, bytes: 4 * mib, handle: 1})
	w.add(window{addr: 16 * mib, bytes: 2 * mib, handle: 2})
	w.add(window{addr: 32 * mib, bytes: 2 * mib}) // plain memory
	w.add(window{addr: 128 * mib, bytes: 64 * mib, handle: 3})
	for _, k := range []struct {
		name       string
		kind       windowKind
		send, recv uintptr
		bytes      int
		want       bool
	}{
		{"small", windowAllReduce, 64 * mib, 16 * mib, 8, true},
		{"in place, in the middle", windowAllReduce, 65 * mib, 65 * mib, 4 * kib, true},
		{"up to the end", windowAllReduce, 66 * mib, 66 * mib, 2 * mib, true},
		{"beyond the end", windowAllReduce, 66*mib + 16, 66*mib + 16, 2 * mib, false},
		{"a rank's own part", windowAllReduce, 65*mib + 4, 65 * mib, 4 * kib, true},
		{"the last faster size", windowAllReduce, 64 * mib, 64 * mib, 128 * kib, true},
		{"between two sizes", windowAllReduce, 64 * mib, 64 * mib, 128*kib + 4, false},
		{"slower", windowAllReduce, 64 * mib, 64 * mib, mib, false},
		{"faster again", windowAllReduce, 64 * mib, 64 * mib, 3 * mib, true},
		{"the largest that was measured", windowAllReduce, 128 * mib, 128 * mib, 32 * mib, true},
		{"larger", windowAllReduce, 128 * mib, 128 * mib, 32*mib + 4, false},
		{"before the first window", windowAllReduce, 8 * mib, 64 * mib, 8, false},
		{"between windows", windowAllReduce, 64 * mib, 20 * mib, 8, false},
		{"plain memory", windowAllReduce, 32 * mib, 32 * mib, 8, false},
		{"another collective", windowAllGather, 64 * mib, 64 * mib, 8, false},
		{"no collective of windows", noWindow, 64 * mib, 64 * mib, 8, false},
	} {
		n := call{kind: k.kind, sendBytes: k.bytes, recvBytes: k.bytes}
		n.args[0], n.args[1] = k.send, k.recv
		assert.Equal(t, k.want, w.serve(&n), k.name)
	}

	x, known := w.remove(16 * mib)
	assert.True(t, known)
	assert.EqualValues(t, 2, x.handle)
	assert.False(t, w.cover(16*mib, 8))
	_, known = w.remove(64*mib + 64)
	assert.False(t, known, "not the address of a window")
}

func TestReductionsOnWindows(t *testing.T) {
	assert.Equal(t, windowReduceScatter, reductionOnWindows(windowReduceScatter, dtype.BF16, comm.Sum))
	for _, k := range []struct {
		dt dtype.DType
		op comm.ReduceOp
	}{{dtype.F32, comm.Avg}, {dtype.F32, comm.Max}, {dtype.F64, comm.Sum}, {dtype.I32, comm.Sum}} {
		assert.Equal(t, noWindow, reductionOnWindows(windowAllReduce, k.dt, k.op), "%v of %v", k.op, k.dt)
	}
}
