package comm_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// TestParts compares where parts lie, in bytes from the beginning of the buffers,
// with the table of package comm's contract, for rank 1 of 3 and 2 elements of
// four bytes, root 1.
func TestParts(t *testing.T) {
	const send, recv, no = 1000, 5000, -1
	counts, displs := []int{3, 1, 2}, []int{0, 4, 7}
	for _, tc := range []struct {
		call              comm.Call
		sendAt, sendBytes [3]int // by the rank that gets it; no: nothing
		recvAt, recvBytes [3]int
	}{
		{call: comm.AllReduceCall(send, recv, 2, dtype.F32, comm.Sum), sendBytes: [3]int{8, 8, 8}, recvBytes: [3]int{8, 8, 8}},
		{call: comm.ReduceScatterCall(send, recv, 2, dtype.F32, comm.Sum), sendAt: [3]int{0, 8, 16}, sendBytes: [3]int{8, 8, 8}, recvBytes: [3]int{8, 8, 8}},
		{call: comm.AllGatherCall(send, recv, 2, dtype.F32), sendBytes: [3]int{8, 8, 8}, recvAt: [3]int{0, 8, 16}, recvBytes: [3]int{8, 8, 8}},
		{call: comm.AllToAllCall(send, recv, 2, dtype.F32), sendAt: [3]int{0, 8, 16}, sendBytes: [3]int{8, 8, 8}, recvAt: [3]int{0, 8, 16}, recvBytes: [3]int{8, 8, 8}},
		{call: comm.AllGatherVCall(send, recv, counts, displs, dtype.F32), sendBytes: [3]int{4, 4, 4}, recvAt: [3]int{0, 16, 28}, recvBytes: [3]int{12, 4, 8}},
		{
			call:   comm.AllToAllVCall(send, counts, displs, recv, []int{1, 1, 5}, []int{5, 0, 9}, dtype.F32),
			sendAt: [3]int{0, 16, 28}, sendBytes: [3]int{12, 4, 8}, recvAt: [3]int{20, 0, 36}, recvBytes: [3]int{4, 4, 20},
		},
		{call: comm.BroadcastCall(send, 2, dtype.F32, 1), sendBytes: [3]int{8, 8, 8}, recvAt: [3]int{no, send - recv, no}, recvBytes: [3]int{no, 8, no}},
		{call: comm.ReduceCall(send, recv, 2, dtype.F32, comm.Sum, 1), sendAt: [3]int{no, 0, no}, sendBytes: [3]int{no, 8, no}, recvBytes: [3]int{8, 8, 8}},
		{call: comm.GatherCall(send, recv, 2, dtype.F32, 1), sendAt: [3]int{no, 0, no}, sendBytes: [3]int{no, 8, no}, recvAt: [3]int{0, 8, 16}, recvBytes: [3]int{8, 8, 8}},
		{call: comm.ScatterCall(send, recv, 2, dtype.F32, 1), sendAt: [3]int{0, 8, 16}, sendBytes: [3]int{8, 8, 8}, recvAt: [3]int{no, 0, no}, recvBytes: [3]int{no, 8, no}},
		{call: comm.SendCall(send, 2, dtype.F32, 2, 7), sendAt: [3]int{no, no, 0}, sendBytes: [3]int{no, no, 8}, recvBytes: [3]int{no, no, no}},
		{call: comm.RecvCall(recv, 2, dtype.F32, 0, 7), sendBytes: [3]int{no, no, no}, recvBytes: [3]int{8, no, no}},
	} {
		for r := range 3 {
			at, bytes, ok := tc.call.SendPart(1, r)
			require.Equal(t, tc.sendBytes[r] != no, ok, "%v sends rank %d something", tc.call, r)
			if ok {
				assert.Equal(t, []int{send + tc.sendAt[r], tc.sendBytes[r]}, []int{int(at), bytes}, "%v sends rank %d", tc.call, r)
			}
			at, bytes, ok = tc.call.RecvPart(1, r)
			require.Equal(t, tc.recvBytes[r] != no, ok, "%v receives something from rank %d", tc.call, r)
			if ok {
				assert.Equal(t, []int{recv + tc.recvAt[r], tc.recvBytes[r]}, []int{int(at), bytes}, "%v receives from rank %d", tc.call, r)
			}
		}
		if !tc.call.Op.HasRoot() {
			continue
		}
		// A rank that is not the root has to do with the root alone.
		for _, r := range []int{0, 2} {
			_, _, sends := tc.call.SendPart(0, r)
			_, _, receives := tc.call.RecvPart(0, r)
			assert.False(t, sends || receives, "%v of rank 0, with rank %d", tc.call, r)
		}
	}
}
