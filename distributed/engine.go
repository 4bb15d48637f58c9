package distributed

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// wordSize is the size of the two things that travel: F32 values and I32
// indices.
const wordSize = 4

// tiny is the smallest magnitude above zero.
const tiny = math.SmallestNonzeroFloat32

// engine is what selectors and exchanges share: one rank's view of the tensor
// being reduced, the kernels and the communicator.
//
// Its first error sticks, as in a bufio.Writer: later methods do nothing and
// return zeros, so that an algorithm reads as what it does. Whoever runs a
// step looks at err at its end.
type engine struct {
	rt      runtime.Runtime
	kernels runtime.Kernels
	c       comm.Communicator
	order   order
	cfg     Config
	err     error

	rank, size int
	n          int
	k          int     // how many entries a rank is to pick
	average    float32 // 1/P

	residual uintptr // n F32: what was not sent yet
	work     uintptr // n F32: all zero, then the result
	stats    StepStats

	buffers   []*buffer
	permanent int     // buffers[:permanent] live until close
	words     buffer  // device side of the exchanges of a few integers
	host      []int32 // host side: what is sent, then what is received
	positions buffer  // of topKOf
}

func newEngine(rt runtime.Runtime, kernels runtime.Kernels, c comm.Communicator, n int, cfg Config) (*engine, error) {
	e := &engine{rt: rt, kernels: kernels, c: c, cfg: cfg, n: n, rank: c.Rank(), size: c.WorldSize()}
	e.average = 1 / float32(e.size)
	e.host = make([]int32, max(sampleCount*(e.size+1), 2*bisectFan, 2*e.size))
	e.allocate(&e.words, len(e.host)*wordSize)
	o, err := newOrder(rt, c)
	e.order = o
	e.check(err)
	return e, e.err
}

// close gives all device memory back, if the communicator is done with it. Its
// errors are not those of a step.
func (e *engine) close() error {
	e.err = e.order.settle()
	if e.err == nil {
		e.release(0)
	}
	return errors.Join(e.err, e.order.close())
}

// release gives buffers[from:] back; they are empty then and grow again.
func (e *engine) release(from int) {
	for _, b := range e.buffers[from:] {
		e.check(e.rt.Deallocate(b.ptr))
		*b = buffer{}
	}
	e.buffers = e.buffers[:from]
}

// check makes err stick if it is the first.
func (e *engine) check(err error) {
	if e.err == nil {
		e.err = err
	}
}

// buffer is device memory that grows when more is needed.
type buffer struct {
	ptr   uintptr
	bytes int
}

// allocate makes b hold at least bytes bytes; its content is lost when it has
// to grow.
func (e *engine) allocate(b *buffer, bytes int) {
	if e.err != nil || bytes <= b.bytes {
		return
	}
	if b.ptr == 0 {
		e.buffers = append(e.buffers, b)
	}
	e.check(e.rt.Deallocate(b.ptr))
	*b = buffer{}
	ptr, err := e.rt.Allocate(bytes)
	e.check(err)
	if err == nil {
		*b = buffer{ptr: ptr, bytes: bytes}
	}
}

// list is a list of entries in device memory: indices (I32) and values (F32).
type list struct {
	idx, val uintptr
	n        int
}

// part returns the entries [from, to).
func (l list) part(from, to int) list {
	return list{idx: at(l.idx, from), val: at(l.val, from), n: to - from}
}

// at returns the address of element i of an array of words.
func at(p uintptr, i int) uintptr { return p + uintptr(i)*wordSize }

// listBuffer is memory for a list.
type listBuffer struct{ buffer }

// list returns b's memory as a list of n entries, growing it if needed (by a
// quarter more, so that sizes that vary from step to step settle). It does not
// move as long as b does not grow.
func (e *engine) list(b *listBuffer, n int) list {
	if need := 2 * n * wordSize; need > b.bytes {
		e.allocate(&b.buffer, 2*(n+n/4)*wordSize)
	}
	if e.err != nil {
		return list{}
	}
	return list{idx: b.ptr, val: b.ptr + uintptr(b.bytes/2), n: n}
}

// The kernels, with sticky errors. Empty lists never reach the device.

func (e *engine) fill(p uintptr, n int) {
	if e.err == nil && n > 0 {
		e.check(e.rt.Fill(p, n, dtype.F32, 0))
	}
}

func (e *engine) copy(dst, src uintptr, words int) {
	if e.err == nil && words > 0 {
		e.check(e.rt.Copy(dst, src, words*wordSize))
	}
}

func (e *engine) copyList(dst, src list) {
	e.copy(dst.idx, src.idx, src.n)
	e.copy(dst.val, src.val, src.n)
}

func (e *engine) scale(p uintptr, n int, s float32) {
	if e.err == nil && n > 0 && s != 1 {
		e.check(e.kernels.Scale(p, n, s))
	}
}

// store writes the result to a gradient of another type than F32.
func (e *engine) store(dst uintptr, dt dtype.DType, src uintptr) {
	if e.err == nil && e.n > 0 {
		e.check(e.kernels.Store(dst, dt, src, e.n, 1))
	}
}

func (e *engine) accumulate(acc, grad uintptr, dt dtype.DType) {
	if e.err == nil && e.n > 0 {
		e.check(e.kernels.Accumulate(acc, grad, e.n, dt))
	}
}

func (e *engine) scatterAdd(dst uintptr, l list) {
	if e.err == nil && l.n > 0 {
		e.check(e.kernels.ScatterAdd(dst, e.n, l.idx, l.val, l.n))
	}
}

func (e *engine) scatterSet(dst uintptr, l list) {
	if e.err == nil && l.n > 0 {
		e.check(e.kernels.ScatterSet(dst, e.n, l.idx, l.val, l.n))
	}
}

// gather reads m elements of src, which has n.
func (e *engine) gather(src uintptr, n int, idx uintptr, m int, val uintptr) {
	if e.err == nil && m > 0 {
		e.check(e.kernels.Gather(src, n, idx, m, val))
	}
}

func (e *engine) zeroAt(dst uintptr, l list) {
	if e.err == nil && l.n > 0 {
		e.check(e.kernels.ZeroAt(dst, e.n, l.idx, l.n))
	}
}

// topK picks the k entries of largest magnitude among n.
func (e *engine) topK(x uintptr, n, k int, dst list) (list, float32) {
	if e.err != nil || n == 0 || k == 0 {
		return dst.part(0, 0), 0
	}
	count, threshold, err := e.kernels.TopK(x, n, k, dst.idx, dst.val)
	e.check(err)
	return dst.part(0, count), threshold
}

// topKOf picks the k entries of largest magnitude of a list; dst may not
// overlap it.
func (e *engine) topKOf(l list, k int, dst list) list {
	e.allocate(&e.positions, k*wordSize)
	top, _ := e.topK(l.val, l.n, k, list{idx: e.positions.ptr, val: dst.val, n: k})
	// Gather moves 4-byte words whatever they mean, so it reads indices as well
	// as values.
	e.gather(l.idx, l.n, e.positions.ptr, top.n, dst.idx)
	return dst.part(0, top.n)
}

// aboveThreshold picks the entries of magnitude >= threshold, at most dst.n of
// them, and returns how many there are in all.
func (e *engine) aboveThreshold(x uintptr, n int, threshold float32, dst list) (list, int) {
	if e.err != nil || n == 0 {
		return dst.part(0, 0), 0
	}
	total, err := e.kernels.Select(x, n, threshold, dst.idx, dst.val, dst.n)
	e.check(err)
	return dst.part(0, min(total, dst.n)), total
}

func (e *engine) countAbove(x uintptr, n int, threshold float32) int {
	if e.err != nil || n == 0 {
		return 0
	}
	count, err := e.kernels.CountAbove(x, n, threshold)
	e.check(err)
	return count
}

// giveBack adds the entries of l to the residual, except those whose index is
// in taken, which is sorted. It needs e.work to be zero at both lists and
// leaves it so; it overwrites l's values.
func (e *engine) giveBack(l, taken list) {
	if e.cfg.NoErrorFeedback {
		return
	}
	e.scatterSet(e.work, l)
	e.zeroAt(e.work, taken)
	e.gather(e.work, e.n, l.idx, l.n, l.val)
	e.zeroAt(e.work, l)
	e.scatterAdd(e.residual, l)
}

// Communication, with sticky errors.

// fence makes communication wait for the kernels submitted so far.
func (e *engine) fence(ctx context.Context) {
	if e.err == nil {
		e.check(e.order.commAfterCompute(ctx))
	}
}

// join makes kernels wait for the communication submitted so far.
func (e *engine) join(ctx context.Context) {
	if e.err == nil {
		e.check(e.order.computeAfterComm(ctx))
	}
}

// small communicates the first in words of e.host: submit sends them from the
// device and receives out words, which follow in e.host.
func (e *engine) small(ctx context.Context, in, out int, submit func(send, recv uintptr) error) []int32 {
	received := e.host[in : in+out]
	if e.err != nil {
		clear(received)
		return received
	}
	send, recv := e.words.ptr, at(e.words.ptr, in)
	e.check(e.rt.CopyIn(send, hostmem.Bytes(e.host[:in])))
	e.fence(ctx)
	if e.err == nil {
		e.check(submit(send, recv))
	}
	e.join(ctx)
	if e.err == nil {
		e.check(e.rt.CopyOut(hostmem.Bytes(received), recv))
	}
	return received
}

// checkWords makes it an error if a word that a rank sent (equally many from
// each) is not in [0, limit]: then the ranks do not reduce the same tensor, and
// nothing may be sized by what they say. The words are zero then, as after any
// error.
func (e *engine) checkWords(words []int32, limit int, what string) {
	for i, w := range words {
		if e.err == nil && (w < 0 || int(w) > limit) {
			e.err = fmt.Errorf("%w: rank %d of %d announces %d as %s, and with a tensor of %d elements it is 0 to %d",
				comm.ErrMismatch, i*e.size/len(words), e.size, w, what, e.n, limit)
			clear(words)
		}
	}
}

// allGatherWords collects the first n words of e.host of every rank.
func (e *engine) allGatherWords(ctx context.Context, n int) []int32 {
	return e.small(ctx, n, n*e.size, func(send, recv uintptr) error {
		return e.c.AllGather(send, recv, n, dtype.I32)
	})
}

// allToAllWords sends word r of e.host to rank r.
func (e *engine) allToAllWords(ctx context.Context) []int32 {
	return e.small(ctx, e.size, e.size, func(send, recv uintptr) error {
		return e.c.AllToAll(send, recv, 1, dtype.I32)
	})
}

// sumWords adds up the first n words of e.host over the ranks.
func (e *engine) sumWords(ctx context.Context, n int) []int32 {
	return e.small(ctx, n, n, func(send, recv uintptr) error {
		return e.c.AllReduce(send, recv, n, dtype.I32, comm.Sum)
	})
}

// layout turns counts into displacements and returns their sum.
func layoutOf(counts, displs []int) int {
	sum := 0
	for r, n := range counts {
		displs[r] = sum
		sum += n
	}
	return sum
}
