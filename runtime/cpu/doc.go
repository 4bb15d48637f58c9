// Package cpu makes tensors in host memory, and of a program's slices ([Wrap]): it is
// the [runtime.Runtime] of the host.
//
// Memory comes from the operating system, not from the Go heap: the garbage
// collector neither moves, scans nor frees it, so its uintptrs stay valid. A
// pool stands between Allocate and the system:
//
//   - Blocks up to 256 KiB are cut from 2 MiB slabs, one list per size class;
//     the classes waste at most 1/8 of a request. Larger blocks are separate
//     mappings, reused by best fit, on transparent huge pages where Linux has
//     them.
//   - An Allocate and Deallocate that the pool serves takes tens of nanoseconds
//     and no Go memory. Each size class has a lock.
//   - The bookkeeping is not in the blocks, so writing out of bounds or after Deallocate does not corrupt it. Freeing
//     a pointer twice, a foreign one, or one inside a block is an error and has no other effect.
//   - [Runtime.Freeze] keeps the pool from the system, [Runtime.Trim] returns
//     what is unused, and [Runtime.Close] returns everything and reports what
//     was still live.
//
// The kernels of [kernel.Kernels] and [Runtime.Reduce] use vector
// instructions where the processor has them.
package cpu
