package backend_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
)

// Addresses are only compared, so any will do: far apart.
const (
	bufA = uintptr(0x10000)
	bufB = uintptr(0x90000)
)

// twoBuffers is a broadcast that no method makes.
func twoBuffers(root int) comm.Call {
	x := comm.BroadcastCall(bufA, 4, dtype.F32, root)
	x.Send = bufB
	return x
}

func TestCheck(t *testing.T) {
	const f32, sum = dtype.F32, comm.Sum
	check := methods(backend.Check{Backend: "b", Rank: 1, WorldSize: 3})
	full, displs := []int{4, 4, 4}, []int{0, 4, 8}
	for _, test := range []struct {
		name string
		err  error
		want error  // nil: the call is right
		text string // part of the message
	}{
		{"allreduce", check.AllReduce(bufA, bufB, 4, f32, sum), nil, ""},
		{"allreduce in place", check.AllReduce(bufA, bufA, 4, f32, sum), nil, ""},
		{"allreduce of nothing", check.AllReduce(0, 0, 0, f32, sum), nil, ""},
		{"allreduce side by side", check.AllReduce(bufA, bufA+16, 4, f32, sum), nil, ""},
		{"allreduce overlapping", check.AllReduce(bufA, bufA+12, 4, f32, sum), comm.ErrArgument, "overlap"},
		{"allreduce overlapping from below", check.AllReduce(bufA+12, bufA, 4, f32, sum), comm.ErrArgument, "overlap"},
		{"allreduce negative", check.AllReduce(bufA, bufB, -1, f32, sum), comm.ErrArgument, "count -1"},
		{"allreduce huge", check.AllReduce(bufA, bufB, math.MaxInt/8+1, f32, sum), comm.ErrArgument, "address space"},
		{"allreduce nil send", check.AllReduce(0, bufB, 4, f32, sum), comm.ErrArgument, "send is nil"},
		{"allreduce nil recv", check.AllReduce(bufA, 0, 4, f32, sum), comm.ErrArgument, "recv is nil"},
		{"allreduce no type", check.AllReduce(bufA, bufB, 4, dtype.Invalid, sum), comm.ErrArgument, "dtype 0"},
		{"allreduce no op", check.AllReduce(bufA, bufB, 4, f32, 99), comm.ErrArgument, "ReduceOp(99)"},
		{"allreduce integer average", check.AllReduce(bufA, bufB, 4, dtype.I32, comm.Avg), comm.ErrUnsupported, "avg of i32"},
		{"broadcast", check.Broadcast(bufA, 4, f32, 2), nil, ""},
		{"broadcast root", check.Broadcast(bufA, 4, f32, 3), comm.ErrArgument, "root 3 is not in [0, 3)"},
		{"broadcast nil", check.Broadcast(0, 4, f32, 2), comm.ErrArgument, "buf is nil for 4 elements"},
		{"broadcast by hand", check.Do(comm.BroadcastCall(bufA, 4, f32, 2)), nil, ""},
		{"broadcast with two buffers", check.Do(twoBuffers(2)), comm.ErrArgument, "not the same buffer"},
		{"broadcast with two buffers at the root", check.Do(twoBuffers(1)), comm.ErrArgument, "not the same buffer"},
		{"reduce at the root", check.Reduce(bufA, 0, 4, f32, sum, 1), comm.ErrArgument, "recv is nil"},
		{"reduce elsewhere", check.Reduce(bufA, 0, 4, f32, sum, 0), nil, ""},
		{"reduce elsewhere without data", check.Reduce(0, 0, 4, f32, sum, 0), comm.ErrArgument, "send is nil"},
		{"allgather", check.AllGather(bufA, bufB, 4, f32), nil, ""},
		{"allgather in place", check.AllGather(bufB+16, bufB, 4, f32), nil, ""},
		{"allgather in the wrong place", check.AllGather(bufB, bufB, 4, f32), comm.ErrArgument, "overlap"},
		{"allgather whole is too large", check.AllGather(bufA, bufB, math.MaxInt/16, f32), comm.ErrArgument, "address space"},
		{"reducescatter in place", check.ReduceScatter(bufB, bufB+16, 4, f32, sum), nil, ""},
		{"reducescatter in the wrong place", check.ReduceScatter(bufB, bufB+32, 4, f32, sum), comm.ErrArgument, "overlap"},
		{"alltoall", check.AllToAll(bufA, bufB, 4, f32), nil, ""},
		{"alltoall in place", check.AllToAll(bufA, bufA, 4, f32), comm.ErrArgument, "overlap"},
		{"gather elsewhere", check.Gather(bufA, 0, 4, f32, 0), nil, ""},
		{"gather at the root", check.Gather(bufA, 0, 4, f32, 1), comm.ErrArgument, "recv is nil"},
		{"gather in place", check.Gather(bufA+16, bufA, 4, f32, 1), nil, ""},
		{"scatter elsewhere", check.Scatter(0, bufB, 4, f32, 0), nil, ""},
		{"scatter at the root", check.Scatter(0, bufB, 4, f32, 1), comm.ErrArgument, "send is nil"},
		{"scatter in place", check.Scatter(bufA, bufA+16, 4, f32, 1), nil, ""},
		{"send to oneself", check.Send(bufA, 4, f32, 1, 0), nil, ""},
		{"send to nobody", check.Send(bufA, 4, f32, -1, 0), comm.ErrArgument, "dest -1"},
		{"recv from nobody", check.Recv(bufA, 4, f32, 3, 0), comm.ErrArgument, "src 3"},
		{"send with the highest tag", check.Send(bufA, 4, f32, 1, math.MaxUint32), nil, ""},
		{"recv nil", check.Recv(0, 4, f32, 0, 0), comm.ErrArgument, "buf is nil"},
		{"allgatherv", check.AllGatherV(bufA, bufB, full, displs, f32), nil, ""},
		{"allgatherv in place", check.AllGatherV(bufB+16, bufB, full, displs, f32), nil, ""},
		{"allgatherv in the wrong place", check.AllGatherV(bufB+20, bufB, full, displs, f32), comm.ErrArgument, "overlap"},
		{"allgatherv sends nothing", check.AllGatherV(0, bufB, []int{4, 0, 4}, displs, f32), nil, ""},
		{"allgatherv receives nothing", check.AllGatherV(0, 0, []int{0, 0, 0}, displs, f32), nil, ""},
		{"allgatherv counts", check.AllGatherV(bufA, bufB, full[1:], displs, f32), comm.ErrArgument, "counts has length 2, want 3"},
		{"allgatherv displs", check.AllGatherV(bufA, bufB, full, nil, f32), comm.ErrArgument, "displs has length 0"},
		{"allgatherv negative count", check.AllGatherV(bufA, bufB, []int{4, 4, -2}, displs, f32), comm.ErrArgument, "counts[2] = -2"},
		{"allgatherv negative displacement", check.AllGatherV(bufA, bufB, full, []int{0, -4, 8}, f32), comm.ErrArgument, "displs[1] = -4"},
		{"allgatherv beyond", check.AllGatherV(bufA, bufB, full, []int{0, 4, math.MaxInt}, f32), comm.ErrArgument, "address space"},
		{"allgatherv in another order", check.AllGatherV(bufA, bufB, full, []int{8, 0, 4}, f32), nil, ""},
		{"allgatherv with regions that overlap", check.AllGatherV(bufA, bufB, full, []int{8, 0, 3}, f32), comm.ErrArgument, "ranks 1 and 2"},
		{"allgatherv with an empty region inside another", check.AllGatherV(bufA, bufB, []int{4, 4, 0}, []int{4, 0, 2}, f32), nil, ""},
		{"alltoallv sends one region twice", check.AllToAllV(bufA, full, []int{0, 0, 0}, bufB, full, displs, f32), nil, ""},
		{"alltoallv receives one region twice", check.AllToAllV(bufA, full, displs, bufB, full, []int{0, 0, 4}, f32), comm.ErrArgument, "ranks 0 and 1"},
		{"alltoallv", check.AllToAllV(bufA, full, displs, bufB, full, displs, f32), nil, ""},
		{"alltoallv in place", check.AllToAllV(bufA, full, displs, bufA, full, displs, f32), comm.ErrArgument, "overlap"},
		{"allgatherv from a gap", check.AllGatherV(bufB+16, bufB, full, []int{0, 8, 12}, f32), nil, ""},
		{"allgatherv from half a gap", check.AllGatherV(bufB+20, bufB, full, []int{0, 8, 12}, f32), comm.ErrArgument, "send[0:4] and recv[8:12] overlap"},
		{"alltoallv with send and recv in turn", check.AllToAllV(bufA, full, []int{0, 8, 16}, bufA+16, full, []int{0, 8, 16}, f32), nil, ""},
		{"alltoallv with recv behind send", check.AllToAllV(bufA, full, displs, bufA, full, []int{12, 16, 20}, f32), nil, ""},
		{"alltoallv with recv in send", check.AllToAllV(bufA, full, displs, bufA, full, []int{20, 16, 11}, f32), comm.ErrArgument, "send[8:12] and recv[11:15] overlap"},
		{"alltoallv to oneself", check.AllToAllV(bufA, full, displs, bufB, []int{4, 3, 4}, displs, f32), comm.ErrArgument, "sends itself 4 elements but receives 3"},
		{"alltoallv recv counts", check.AllToAllV(bufA, full, displs, bufB, nil, displs, f32), comm.ErrArgument, "recvCounts has length 0"},
		{"alltoallv send displs", check.AllToAllV(bufA, full, displs[:2], bufB, full, displs, f32), comm.ErrArgument, "sendDispls has length 2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.want == nil {
				assert.NoError(t, test.err)
				return
			}
			require.ErrorIs(t, test.err, test.want)
			assert.ErrorContains(t, test.err, test.text)
			var e *comm.OpError
			require.ErrorAs(t, test.err, &e)
			assert.Equal(t, "b", e.Backend)
			assert.Equal(t, 1, e.Rank)
		})
	}
}

func TestCheckAsksTheBackendLast(t *testing.T) {
	check := methods(backend.Check{
		Backend: "b", WorldSize: 1,
		Supports: func(dt dtype.DType, op comm.ReduceOp) error {
			return fmt.Errorf("%w: %v of %v here", comm.ErrUnsupported, op, dt)
		},
		SupportsType: func(dt dtype.DType) error {
			if dt == dtype.FP8E4M3 {
				return fmt.Errorf("%w: no %v here", comm.ErrUnsupported, dt)
			}
			return nil
		},
	})
	assert.ErrorContains(t, check.AllReduce(bufA, bufB, 1, dtype.F32, comm.Prod), "prod of f32 here")
	assert.ErrorContains(t, check.Broadcast(bufA, 1, dtype.FP8E4M3, 0), "no fp8e4m3 here")
	assert.NoError(t, check.Broadcast(bufA, 1, dtype.F32, 0))
	assert.ErrorIs(t, check.AllReduce(bufA, bufB, -1, dtype.F32, comm.Prod), comm.ErrArgument)
}

func TestCheckDoesNotAllocate(t *testing.T) {
	check := methods(backend.Check{Backend: "b", Rank: 1, WorldSize: 3})
	counts, displs := []int{4, 4, 4}, []int{0, 4, 8}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if errors.Join(check.AllReduce(bufA, bufB, 4, dtype.F32, comm.Sum),
			check.AllToAllV(bufA, counts, displs, bufB, counts, displs, dtype.F32)) != nil {
			t.Error("calls are right")
		}
	}))
}

// methods turns a check into methods that do nothing else.
func methods(check backend.Check) comm.Methods {
	return comm.Methods{
		Do:       func(c comm.Call) error { return check.Call(&c) },
		Together: check.Group,
	}
}

// Messages of a group conflict exactly if two of them share a byte and one of the
// two is received.
func TestGroupOfOverlappingMessages(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	check := backend.Check{Backend: "b", WorldSize: 3}
	conflicts := 0
	for range 5000 {
		group := make([]comm.Call, 1+rng.IntN(40))
		starts := make([]uintptr, len(group))
		ends := make([]uintptr, len(group))
		reach := 20 + rng.IntN(3000)
		for i := range group {
			buf, n := bufA+uintptr(rng.IntN(reach)), rng.IntN(12)
			starts[i] = buf
			ends[i] = buf + uintptr(n)
			switch rng.IntN(5) {
			case 0:
				group[i] = comm.RecvCall(buf, n, dtype.U8, 1, 0)
			case 1:
				group[i] = comm.BroadcastCall(buf, n, dtype.U8, 1) // no message
			default:
				group[i] = comm.SendCall(buf, n, dtype.U8, 1, 0)
			}
		}
		want := false
		for i, a := range group {
			for j, b := range group[:i] {
				if !a.Op.Message() || !b.Op.Message() || a.Op == comm.OpSend && b.Op == comm.OpSend {
					continue
				}
				want = want || max(starts[i], starts[j]) < min(ends[i], ends[j])
			}
		}
		err := check.Group(group)
		if want {
			conflicts++
			require.ErrorIs(t, err, comm.ErrArgument, "%v", group)
		} else {
			require.NoError(t, err, "%v", group)
		}
	}
	assert.Greater(t, conflicts, 500)
	assert.Less(t, conflicts, 4500)
}

// A group of the size that patterns use is checked without allocating.
func TestGroupCheckDoesNotAllocate(t *testing.T) {
	check := backend.Check{Backend: "b", WorldSize: 3}
	var group []comm.Call
	for i := range 8 {
		group = append(group, comm.SendCall(bufA, 4, dtype.F32, 1, 0), comm.RecvCall(bufB+uintptr(16*i), 4, dtype.F32, 1, 0))
	}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if check.Group(group) != nil {
			t.Error("the group is right")
		}
	}))
}

// A V-collective is refused exactly if two of its regions share a byte, one of them received, unless a rank's part of
// an AllGatherV is in its place.
func TestOverlappingRegions(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	const size, rank = 4, 2
	check := backend.Check{Backend: "b", Rank: rank, WorldSize: size}
	type region struct {
		from, to uintptr // none of its bytes are shared if they are equal
		written  bool
	}
	overlaps := 0
	for range 5000 {
		reach := 12 + rng.IntN(80)
		lists := func() (counts, displs []int) {
			for range size {
				counts = append(counts, rng.IntN(5))
				displs = append(displs, rng.IntN(reach))
			}
			return counts, displs
		}
		sendCounts, sendDispls := lists()
		recvCounts, recvDispls := lists()
		sendCounts[rank] = recvCounts[rank]
		send := bufA + uintptr(2*rng.IntN(reach))
		recv := bufA + uintptr(2*rng.IntN(reach))
		call := comm.AllToAllVCall(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dtype.F16)
		gathers := rng.IntN(2) == 0
		if gathers {
			call = comm.AllGatherVCall(send, recv, recvCounts, recvDispls, dtype.F16)
		}
		var regions []region
		for r := range size {
			start := recv + uintptr(2*recvDispls[r])
			regions = append(regions, region{start, start + uintptr(2*recvCounts[r]), true})
			start = send + uintptr(2*sendDispls[r])
			if !gathers {
				regions = append(regions, region{start, start + uintptr(2*sendCounts[r]), false})
			}
		}
		if gathers && send != recv+uintptr(2*recvDispls[rank]) {
			regions = append(regions, region{send, send + uintptr(2*recvCounts[rank]), false})
		}
		want := false
		for i, a := range regions {
			for _, b := range regions[:i] {
				want = want || (a.written || b.written) && max(a.from, b.from) < min(a.to, b.to)
			}
		}
		err := check.Call(&call)
		if want {
			overlaps++
			require.ErrorIs(t, err, comm.ErrArgument, "%+v", call)
			assert.ErrorContains(t, err, "overlap")
		} else {
			require.NoError(t, err, "%+v", call)
		}
	}
	assert.Greater(t, overlaps, 500)
	assert.Less(t, overlaps, 4500)
}
