package engine

import (
	"context"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// tiny is the smallest magnitude above zero.
const tiny = math.SmallestNonzeroFloat32

// engine is the common part of selectors and exchanges: one rank's view of the tensor being reduced, the kernels and
// the communicator.
//
// Its first error sticks, as in a bufio.Writer: later methods do nothing and return zeros, so that algorithms read
// without error checks. The caller that runs a step checks err at its end, and rolls the step back.
type engine struct {
	rt      runtime.Runtime   // of the tensor's memory
	kernels kernel.Kernels    // of rt
	c       comm.Communicator // replaced by Rebind
	order   base.Order        // orders c's work and the compute stream
	cfg     Settings          // the program's Config with defaults (config.go)
	codec   kernel.Codec      // codec of sent values, by cfg; CodecNone: they are not encoded
	err     error             // the first one; nil: none yet

	rank, size int     // of c
	n          int     // elements of the tensor
	k          int     // number of entries that a rank should select
	average    float32 // 1/P
	residual   uintptr // n F32; followed by the velocity, if there is one
	origin     uintptr // the same before the step; 0: the step changes them in place
	held       int     // elements of residual and velocity: n, or 2n with momentum
	captured   bool    // steps were captured, so graphs refer to addresses
	fixed      bool    // including the residual's

	before base.Buffer // numbers on the device that later steps need, from before the step
	step               // the current or last step: see phase.go

	flags        uintptr     // P I32: for each list of the result, the number of entries that may not be finite
	skip         uintptr     // address of I32s; if one is not 0, the device rolls the step back
	skips        int         // number of I32 at skip
	hostState    hostState   // state of earlier steps on the host, such as oktopk's threshold
	beforePosted hostState   // the same before the last step that left numbers to be read later
	flat         base.Buffer // a dense result, until the step cannot fail any more

	agreed bool // the ranks of c have compared their terms

	numbers                           // words that steps keep on the device: see numbers.go
	hostCopy    kernel.HostCopy       // copy of the numbers, if the host reads them in the next step
	posted      []kernel.Span         // device memory that hostCopy copies
	list        listBuffer            // the selected entries, unless they are in shared memory
	shared      *comm.Buffer          // lists of all ranks; nil before the first
	sharedBytes int                   // of each rank's list in shared; 0: none
	peerLists   [2]peerLists          // the same, if GPUs write into each other's; an exchange may gather twice
	outgrown    []backend.SharedLists // earlier, smaller ones, to whose addresses captured graphs refer
	listMade    bool                  // this rank's may have been written to the others, but is not gathered yet

	buffers   base.Buffers        // all memory of the engine
	permanent int                 // buffers[:permanent] live until close
	group     []comm.Call         // calls for submit; empty between exchanges
	length    [base.WordSize]byte // memory of word, which reads a number
	copies    []kernel.Copy       // arguments of kernels that copy
}

func newEngine(rt runtime.Runtime, kernels kernel.Kernels, c comm.Communicator, n int, cfg Settings) (*engine, error) {
	e := &engine{
		rt:      rt,
		kernels: kernels,
		cfg:     cfg,
		codec:   cfg.codec(),
		n:       n,
		held:    n,
	}
	if cfg.Momentum > 0 {
		e.held = 2 * n
	}
	e.bind(c)
	return e, e.err
}

// bind sets the communicator. State that depends on the ranks starts over.
func (e *engine) bind(c comm.Communicator) {
	e.c = c
	e.order = base.NewOrder(e.rt, c)
	e.rank = c.Rank()
	e.size = c.WorldSize()
	e.average = 1 / float32(e.size)
	e.agreed = e.size == 1
	e.peerLists = [2]peerLists{}
	e.prepareNumbers()
}

// countResult counts the entries of a step's result (lists of entries, or an array) that are not finite. The result
// is the same on every rank, and so is the count.
func (e *engine) countResult(r result) {
	for i, l := range r.lists {
		e.countList(l, i)
	}
	if r.dense != 0 {
		e.countArray(r.dense, dtype.F32)
	}
}

// countList counts the entries of one list that are not below numFiniteLimit, in the flags at i.
func (e *engine) countList(l kernel.Entries, i int) {
	e.do(func() error {
		return e.kernels.CountAbove(l, e.address(numFiniteLimit), 1, base.At(e.flags, i))
	})
}

// countArray counts one entry if an array has any that is not finite: then its sum of squares is not finite.
func (e *engine) countArray(p uintptr, dt dtype.DType) {
	e.do(func() error {
		return e.kernels.SumSquares(p, dt, e.n, e.address(numSquares))
	})
	e.countSquares(0)
}

// countSquares counts one entry if a sum of squares is not finite. The high word of such an F64,
// read as an F32, is a NaN, while the word of no sum of squares of F32 reaches numFiniteLimit.
func (e *engine) countSquares(i int) {
	e.countList(kernel.Entries{
		Idx: e.address(numSquares),
		Val: e.address(numSquares + 1),
		N:   1,
	}, i)
}

// foundNonFinite makes the host wait for the counts, and reports whether one is not 0.
func (e *engine) foundNonFinite(ctx context.Context) bool {
	e.read(ctx)
	counts := e.host[e.nonFiniteCounts:][:e.size]               // of each list, in the numbers read last
	if e.skip != e.address(e.nonFiniteCounts) && e.err == nil { // the decision covers other tensors
		clear(counts)
		e.check(e.rt.CopyOut(hostmem.Bytes(counts[:1]), e.skip))
	}
	return slices.ContainsFunc(counts, func(n int32) bool { return n != 0 })
}

// close frees all device memory, if the communicator no longer uses it. Its errors do not belong to a step.
func (e *engine) close() error {
	failed := e.err != nil
	e.err = e.order.DrainToFree()
	e.do(func() error { return e.setHostCopy(nil) }) // closes the one that there is
	if e.err != nil {
		return e.err
	}
	e.release(0)
	if e.err != nil {
		return e.err
	}
	ctx, cancel := context.WithTimeout(context.Background(), base.DrainLimit)
	defer cancel()
	e.err = e.freeShared(ctx, failed) // alone if a step has failed, as the other ranks may not come
	return e.err
}

// check records err if it is the first.
func (e *engine) check(err error) {
	if e.err == nil {
		e.err = err
	}
}

// do makes a call unless there was an error.
func (e *engine) do(call func() error) {
	if e.err == nil {
		e.check(call())
	}
}

// failure returns the error of an operation outside of steps, and clears it.
func (e *engine) failure() error {
	err := e.err
	e.err = nil
	return err
}

// array returns an array of n elements at which the indices of lists point. Kernels count indices out of range.
func (e *engine) array(p uintptr) kernel.Array {
	return kernel.Array{
		Ptr:    p,
		N:      e.n,
		Faults: e.address(numIndexFaults),
	}
}

// source returns the residual to select from, which the kernel computes from its origin and a gradient. Selected
// entries are subtracted from it.
func (e *engine) source(g Input) kernel.Source {
	src := kernel.Source{
		X:      e.residual,
		N:      e.n,
		Grad:   g.Ptr,
		DType:  g.DType,
		Factor: g.Factor,
		From:   e.origin,
		Take:   true,
	}
	if e.restores == keeping { // for a rollback, the kernel copies the residual to the origin
		src.From = 0
		src.Keep = e.origin
	}
	return src
}

// adds is do for a kernel that adds the gradient. If the residual must be kept (rollback.go), the origin has it
// afterwards.
func (e *engine) adds(call func() error) {
	e.do(call)
	if e.err == nil && e.restores == keeping {
		e.restores = kept
	}
}

// denseResult returns memory for a dense result. It is the memory of the step's gradient, which has been added to the
// residual by then or is added on the way, unless the step may be rolled back.
func (e *engine) denseResult() uintptr {
	if e.gradient.DType == dtype.F32 && e.cfg.NoUndo {
		return e.gradient.Ptr
	}
	e.allocate(&e.flat, e.n*base.WordSize)
	return e.flat.Ptr
}

// The kernels, with sticky errors.

func (e *engine) fill(p uintptr, n int) {
	if e.err == nil && n > 0 {
		e.check(e.rt.Fill(p, n, dtype.F32, 0))
	}
}

func (e *engine) copy(dst, src uintptr, words int) {
	e.copyBytes(dst, src, words*base.WordSize)
}

func (e *engine) copyBytes(dst, src uintptr, bytes int) {
	if e.err == nil && bytes > 0 && dst != src {
		e.check(e.rt.Copy(dst, src, bytes))
	}
}

func (e *engine) accumulate(g Input) {
	if g.Ptr != 0 {
		e.adds(func() error { return e.kernels.Accumulate(e.source(g)) })
	}
}

// store writes a dense result to the gradient, scaled.
func (e *engine) store(dst uintptr, dt dtype.DType, src uintptr) {
	if e.err == nil && src != 0 && (dst != src || e.result.scale != 1) {
		e.check(e.kernels.Store(dst, dt, src, e.n, e.result.scale, e.residual))
	}
}

func (e *engine) topK(src kernel.Source, k int, dst kernel.Entries, threshold uintptr) {
	e.makes(dst) // sets listMade if dst is a shared list
	e.adds(func() error {
		return e.kernels.TopK(src, k, dst, threshold)
	})
}

func (e *engine) topOf(l kernel.Entries, k int, dst kernel.Entries) {
	e.do(func() error {
		return e.kernels.TopKList(l, k, dst, 0, kernel.Array{})
	})
}

// topOutside selects the largest entries outside of the partition that begins at that bound, as many as there is room
// for. Other entries outside are restored to the residual.
func (e *engine) topOutside(l kernel.Entries, partition number, dst kernel.Entries) {
	e.makes(dst)
	residual := kernel.Array{}
	if !e.cfg.NoErrorFeedback {
		residual = e.array(e.residual)
	}
	e.do(func() error {
		return e.kernels.TopKList(l, dst.N, dst, e.address(partition), residual)
	})
}

func (e *engine) aboveOf(l kernel.Entries, threshold uintptr, dst kernel.Entries) {
	e.makes(dst)
	e.do(func() error {
		return e.kernels.SelectList(l, threshold, dst)
	})
}

// merge adds up lists, and restores to the residual the selected entries that are not in the result: entries of
// left.selected whose indices are not in left.taken.
func (e *engine) merge(dst uintptr, dt dtype.DType, lists []kernel.Entries, scale float32, left leftover) {
	back := kernel.Restoration{}
	if !e.cfg.NoErrorFeedback {
		back = kernel.Restoration{
			Dst:   e.array(e.residual),
			L:     left.selected,
			Taken: left.taken,
		}
	}
	e.do(func() error {
		return e.kernels.Merge(dst, dt, e.n, lists, scale, e.address(numIndexFaults), e.residual, back)
	})
}

func (e *engine) union(dst kernel.Entries, lists []kernel.Entries, scale float32, threshold uintptr) {
	e.makes(dst)
	e.do(func() error {
		return e.kernels.Union(dst, e.n, lists, scale, e.address(numIndexFaults), threshold)
	})
}

func (e *engine) copyPieces(pieces []kernel.Piece) {
	e.do(func() error { return e.kernels.CopyPieces(pieces) })
}

// restoreEntries adds the entries of l to the residual, except those whose index is in taken.
func (e *engine) restoreEntries(l, taken kernel.Entries) {
	if e.err == nil && !e.cfg.NoErrorFeedback && l.N > 0 {
		e.check(e.kernels.Restore(e.array(e.residual), l, taken))
	}
}

// Communication, with sticky errors.

// fence makes communication wait for the kernels submitted so far.
func (e *engine) fence(ctx context.Context) {
	e.do(func() error { return e.order.CommAfterCompute(ctx) })
}

// add adds a call to the group that submit starts.
func (e *engine) add(c comm.Call) {
	e.group = append(e.group, c)
}

// submitAndArrive submits the added calls at once, ordered between earlier and later work of the device.
func (e *engine) submitAndArrive(ctx context.Context) {
	e.submit(ctx)
	e.arrive(ctx)
}

// submit submits the added calls at once, after earlier work of the device. Later work does not wait for them until
// arrive.
func (e *engine) submit(ctx context.Context) {
	e.fence(ctx)
	switch {
	case e.err != nil:
	case len(e.group) == 1:
		e.check(e.group[0].Make(e.c))
	case len(e.group) > 1:
		e.check(e.c.Group(e.group...))
	}
	e.group = e.group[:0]
	e.inFlight = true
}

// arrive makes kernels wait for everything submitted.
func (e *engine) arrive(ctx context.Context) {
	if e.inFlight {
		e.inFlight = false
		e.do(func() error { return e.order.ComputeAfterComm(ctx) })
	}
}

// communicate is submitAndArrive for one call.
func (e *engine) communicate(ctx context.Context, c comm.Call) {
	e.add(c)
	e.submitAndArrive(ctx)
}

// coded reports whether sent lists are encoded.
func (e *engine) coded() bool {
	return e.codec != kernel.CodecNone
}
