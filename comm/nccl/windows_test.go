package nccl

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/link"
	"github.com/tutti-go/tutti/dtype"
)

// Windows serve what lies in them, and only at sizes of a row.
func TestWhichCallsWindowsServe(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	w := &windows{rows: []windowRow{
		{comm.OpAllReduce, 2, 1, 128 * kib},
		{comm.OpAllReduce, 2, 2 * mib, 32 * mib},
	}}
	w.add(window{addr: 64 * mib, bytes: 4 * mib, handle: 1})
	w.add(window{addr: 16 * mib, bytes: 2 * mib, handle: 2})
	w.add(window{addr: 32 * mib, bytes: 2 * mib}) // plain memory
	w.add(window{addr: 128 * mib, bytes: 64 * mib, handle: 3})
	for _, k := range []struct {
		name       string
		op         comm.Op
		send, recv uintptr
		bytes      int
		want       bool
	}{
		{"small", comm.OpAllReduce, 64 * mib, 16 * mib, 8, true},
		{"in place, in the middle", comm.OpAllReduce, 65 * mib, 65 * mib, 4 * kib, true},
		{"up to the end", comm.OpAllReduce, 66 * mib, 66 * mib, 2 * mib, true},
		{"beyond the end", comm.OpAllReduce, 66*mib + 16, 66*mib + 16, 2 * mib, false},
		{"a rank's own part", comm.OpAllReduce, 65*mib + 4, 65 * mib, 4 * kib, true},
		{"the last faster size", comm.OpAllReduce, 64 * mib, 64 * mib, 128 * kib, true},
		{"larger than that", comm.OpAllReduce, 64 * mib, 64 * mib, 128*kib + 4, false},
		{"slower", comm.OpAllReduce, 64 * mib, 64 * mib, mib, false},
		{"faster again", comm.OpAllReduce, 64 * mib, 64 * mib, 3 * mib, true},
		{"the largest", comm.OpAllReduce, 128 * mib, 128 * mib, 32 * mib, true},
		{"larger", comm.OpAllReduce, 128 * mib, 128 * mib, 32*mib + 4, false},
		{"before the first window", comm.OpAllReduce, 8 * mib, 64 * mib, 8, false},
		{"between windows", comm.OpAllReduce, 64 * mib, 20 * mib, 8, false},
		{"plain memory", comm.OpAllReduce, 32 * mib, 32 * mib, 8, false},
		{"another collective", comm.OpAllGather, 64 * mib, 64 * mib, 8, false},
		{"nothing", comm.OpAllReduce, 64 * mib, 64 * mib, 0, false},
		{"no collective of windows", comm.OpReduce, 64 * mib, 64 * mib, 8, false},
	} {
		x := comm.Call{Op: k.op, DType: dtype.F32, Reduce: comm.Sum, Count: k.bytes / 4, Send: k.send, Recv: k.recv}
		assert.Equal(t, k.want, w.serve(&x, 2), k.name)
	}

	x, known := w.remove(16 * mib)
	assert.True(t, known)
	assert.EqualValues(t, 2, x.handle)
	assert.False(t, w.cover(16*mib, 8))
	_, known = w.remove(64*mib + 64)
	assert.False(t, known, "not the address of a window")
}

// The sizes at which windows are used, written down by hand beside the table.
func TestWindowRows(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	type span struct{ first, last int }
	small := span{1, 32 * kib}
	wide := map[comm.Op][]span{comm.OpAllReduce: {small}, comm.OpAllGather: {small}, comm.OpReduceScatter: {small}}
	four := map[comm.Op][]span{
		comm.OpAllReduce: {{1, 64 * kib}, {2 * mib, 8 * mib}}, comm.OpAllGather: {small}, comm.OpReduceScatter: {small},
	}
	two := map[comm.Op][]span{
		comm.OpAllReduce: {small, {2 * mib, 32 * mib}}, comm.OpAllGather: {{1, 64 * mib}},
		comm.OpReduceScatter: {{1, 256 * kib}, {4 * mib, 16 * mib}},
	}
	worlds := []map[comm.Op][]span{2: two, 3: four, 4: four, 5: wide, 8: wide, 9: nil, 64: nil}
	sizes := []int{
		0, 1, 8, 32 * kib, 32*kib + 1, 64 * kib, 64*kib + 1, 256 * kib, 256*kib + 1, mib,
		2*mib - 1, 2 * mib, 4*mib - 1, 4 * mib, 8 * mib, 8*mib + 1, 16 * mib, 16*mib + 1, 32 * mib, 32*mib + 1,
		64 * mib, 64*mib + 1, 1 << 40,
	}
	ops := []comm.Op{comm.OpAllReduce, comm.OpAllGather, comm.OpReduceScatter, comm.OpReduce, comm.OpBroadcast}
	for kind := link.Unknown; kind <= link.SameGPU; kind++ {
		for _, ranks := range []int{2, 3, 4, 5, 8, 9, 64} {
			w := windows{rows: windowRowsFor(kind, ranks)}
			for _, op := range ops {
				for _, bytes := range sizes {
					want := false
					for _, s := range worlds[ranks][op] {
						want = want || bytes >= s.first && bytes <= s.last
					}
					want = want && (kind == link.NVLink || kind == link.SameGPU)
					assert.Equal(t, want, w.isFaster(op, bytes), "%v, %d ranks, %v of %d bytes", kind, ranks, op, bytes)
				}
			}
		}
	}
}

// The ranges that windows have to cover, and NCCL's reductions on them.
func TestWindowUse(t *testing.T) {
	const n, ranks = 12, 3
	for _, k := range []struct {
		x          comm.Call
		send, recv int // bytes; 0: none
	}{
		{comm.AllReduceCall(0, 0, n, dtype.F32, comm.Sum), 48, 48},
		{comm.ReduceScatterCall(0, 0, n, dtype.BF16, comm.Sum), 72, 24},
		{comm.AllGatherCall(0, 0, n, dtype.I64), 96, 288},
		{comm.AllReduceCall(0, 0, n+1, dtype.F32, comm.Sum), 52, 52},
		{comm.AllGatherCall(0, 0, n+1, dtype.F32), 0, 0},
		{comm.ReduceScatterCall(0, 0, n+1, dtype.F32, comm.Sum), 0, 0},
		{comm.AllReduceCall(0, 0, n, dtype.F32, comm.Avg), 0, 0},
		{comm.AllReduceCall(0, 0, n, dtype.F32, comm.Max), 0, 0},
		{comm.AllReduceCall(0, 0, n, dtype.F64, comm.Sum), 0, 0},
		{comm.ReduceScatterCall(0, 0, n, dtype.I32, comm.Sum), 0, 0},
		{comm.ReduceCall(0, 0, n, dtype.F32, comm.Sum, 0), 0, 0},
		{comm.BroadcastCall(0, n, dtype.F32, 0), 0, 0},
	} {
		send, recv, ok := windowUse(&k.x, ranks)
		assert.Equal(t, k.send > 0, ok, "%v", k.x)
		assert.Equal(t, [2]int{k.send, k.recv}, [2]int{send, recv}, "%v", k.x)
	}
}
