package nccl

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// NCCL 2.27 and newer reads and writes the memory of the peers directly if all ranks registered it as a symmetric
// window. Small collectives then bypass NCCL's own buffers.
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html
//
// NCCL looks only at the address that a collective is called with, and assumes equal offsets on all ranks: if a rank's
// buffer has another offset, the result is silently wrong. Memory that a program allocates by other means is therefore
// not registered. AllocateSymmetric makes windows that are equal on all ranks by construction. Each covers one
// mapping, so that no other buffer can lie in it.
//
// On a window NCCL always uses its window kernels, even at sizes at which its rings are faster. Windows are therefore
// registered with a third native communicator, and each call goes to the faster one; see windowRows.

// windows are the symmetric buffers of a communicator. Comm.mu guards all fields except native.
type windows struct {
	native atomic.Pointer[native] // nil before the first buffer
	list   []window               // by address
	rows   []windowRow            // sizes at which windows are faster; nil before the first buffer
}

// window is a symmetric buffer.
type window struct {
	addr   uintptr // as Comm.AllocateSymmetric returned it
	bytes  int     // of the buffer
	handle uintptr // ncclWindow_t, 0 for plain memory
}

// compare orders windows by address.
func (w window) compare(addr uintptr) int { return cmp.Compare(w.addr, addr) }

// windowOps are the collectives for which NCCL has kernels for windows.
var windowOps = []comm.Op{comm.OpAllReduce, comm.OpAllGather, comm.OpReduceScatter}

// windowUse returns the number of bytes that a call reads and writes on each rank, and whether NCCL has a window
// kernel for it. If each rank has a different piece, pieces must be whole packs. Otherwise, in calls that take several
// blocks, some blocks compute distances in packs, and write or read pieces at wrong addresses (2.27 to 2.28.3).
func windowUse(x *comm.Call, ranks int) (sendBytes, recvBytes int, ok bool) {
	if x.Op.Reduces() && (x.Reduce != comm.Sum || !x.DType.IsFloat() || x.DType == dtype.F64) {
		return 0, 0, false
	}
	const pack = 8
	bytes := x.Bytes()
	switch {
	case x.Op == comm.OpAllReduce:
		return bytes, bytes, true
	case bytes%pack != 0:
	case x.Op == comm.OpAllGather:
		return bytes, bytes * ranks, true
	case x.Op == comm.OpReduceScatter:
		return bytes * ranks, bytes, true
	}
	return 0, 0, false
}

// serve reports whether a call uses windows. The answer must be the same on all ranks, so it depends on nothing that
// differs between them, such as the address of a rank's part of a buffer.
func (w *windows) serve(x *comm.Call, ranks int) bool {
	if len(w.list) == 0 {
		return false
	}
	sendBytes, recvBytes, ok := windowUse(x, ranks)
	if !ok || !w.isFaster(x.Op, max(sendBytes, recvBytes)) {
		return false
	}
	return w.cover(x.Send, sendBytes) && w.cover(x.Recv, recvBytes)
}

// cover reports whether memory lies in a window.
func (w *windows) cover(addr uintptr, bytes int) bool {
	i, found := slices.BinarySearchFunc(w.list, addr, window.compare)
	if !found {
		i-- // the last window that begins before addr
	}
	if i < 0 || w.list[i].handle == 0 {
		return false
	}
	end := w.list[i].addr + uintptr(w.list[i].bytes)
	return addr+uintptr(bytes) <= end
}

// add inserts a window in the order of addresses.
func (w *windows) add(x window) {
	i, _ := slices.BinarySearchFunc(w.list, x.addr, window.compare)
	w.list = slices.Insert(w.list, i, x)
}

// remove removes the window that begins at an address.
func (w *windows) remove(addr uintptr) (window, bool) {
	i := slices.IndexFunc(w.list, func(x window) bool { return x.addr == addr })
	if i < 0 {
		return window{}, false
	}
	x := w.list[i]
	w.list = slices.Delete(w.list, i, i+1)
	return x, true
}
