package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// number is the place of a word among the numbers of an engine.
type number int

// The numbers of every engine, as offsets in words; those that exist for every rank follow. Numbers that steps leave
// to later ones begin at numKept: they are rolled back with a step, and saved. All others are recomputed in each step,
// and late data of a step that was rolled back may overwrite them at any time.
const (
	numSquares     number = 0 // F64: the squared norm of the gradient
	numFactor      number = 2 // F32: what clipping scales it by
	numUsed        number = 3 // F32: the threshold that was used
	numFiniteLimit number = 4 // F32: magnitudes from this one on may not stay finite when P are added
	numTiny        number = 5 // F32: the smallest magnitude above zero; follows numFiniteLimit
	numNorm        number = 6 // the high word of an F64, the square of numFiniteLimit, as an F32; follows numTiny
	numNaN         number = 7 // NaN, as F32 and as two F16 or BF16; follows numNorm
	numCount       number = 8 // entries of a decoded message
	numFan         number = 9
	numFanCounts          = numFan + bisectFan
	numKept               = numFanCounts + bisectFan
	numState              = numKept     // threshold (F32) of the selector, and its age or margin
	numBracket            = numKept + 2 // of the search for oktopk's threshold: low, high
	numIndexFaults        = numKept + 4 // indices that were out of range
	numBounds             = numKept + 5 // P+1: where partitions start
)

// keptWords returns the number of kept words.
func keptWords(size int) int {
	return int(numBounds-numKept) + size + 1
}

// numbers are the few numbers of a step on the device, where kernels and communication access them, and the host's
// copy. Patterns that do not need them on the host never wait for the device.
type numbers struct {
	words base.Buffer // all of them; the constants and the numbers below are offsets in it
	host  []int32     // as read last

	// Offsets of numbers for every rank.
	lengths         number // P: lengths of the parts of this rank's list; from P-1 bounds on
	positions       number // P+1: where partitions start in a list
	received        number // P: lengths that the ranks sent
	samples         number // samples of a rank, of all ranks, and these sorted
	nonFiniteCounts number // P: for each list of the result, entries not below numFiniteLimit
	matrix          number // P·P: entries of each rank for each partition; with streams
	skippedLast     number // not 0: the device has rolled back the last step
	longest         number // the minimum length of long messages; see okExchange.countLong
	announcement    number // announcedWords: the announcement of this rank
	announcements   number // announcedWords·P: all announcements; last, since it may be posted from elsewhere
}

// layOut places the numbers for a world of this size, and returns the number of words.
func (n *numbers) layOut(size int, streams bool) int {
	next := numKept + number(keptWords(size))
	matrix := 0
	if streams {
		matrix = size * size
	}
	for _, place := range []struct {
		number *number
		words  int
	}{
		{&n.lengths, size}, {&n.positions, size + 1}, {&n.received, size}, {&n.samples, sampleCount * (2*size + 1)},
		{&n.nonFiniteCounts, size}, {&n.matrix, matrix}, {&n.skippedLast, 1}, {&n.longest, 1},
		{&n.announcement, announcedWords}, {&n.announcements, announcedWords * size},
	} {
		*place.number = next
		next += number(place.words)
	}
	return int(next)
}

// prepareNumbers allocates the numbers.
func (e *engine) prepareNumbers() {
	e.check(e.setHostCopy(nil))
	e.host = make([]int32, e.layOut(e.size, e.order.Streams != nil))
	e.allocate(&e.words, len(e.host)*base.WordSize)
	e.allocate(&e.before, keptWords(e.size)*base.WordSize)
	e.flags = e.address(e.nonFiniteCounts)
	e.skip = e.address(e.nonFiniteCounts)
	e.skips = e.size
	e.resetNumbers()
}

// resetNumbers sets the numbers to their state before the first step.
func (e *engine) resetNumbers() {
	clear(e.host)
	e.hostState = hostState{}
	e.fill(e.words.Ptr, len(e.host))
	limit := math.MaxFloat32 / float32(e.size)
	if e.coded() { // rounding up changes less than that
		limit /= 2
	}
	norm := math.Float64bits(float64(limit)*float64(limit)) >> 32
	e.set(numFiniteLimit, int32(math.Float32bits(limit)), int32(math.Float32bits(tiny)), int32(norm), 0x7fc07fc0)
}

// address returns where a number is on the device.
func (e *engine) address(x number) uintptr {
	return base.At(e.words.Ptr, int(x))
}

// read makes the host wait for the device and copies all numbers. It is the only place where a step waits for its own
// results.
func (e *engine) read(ctx context.Context) {
	e.readSome(ctx, e.host, 0)
}

func (e *engine) readSome(ctx context.Context, words []int32, x number) {
	e.do(func() error { return e.order.HostAfterAll(ctx) })
	e.do(func() error {
		return e.rt.CopyOut(hostmem.Bytes(words), e.address(x))
	})
	e.hostWaited = true
	e.checkRead()
}

// checkRead evaluates the kernels' counts after the numbers are read.
func (e *engine) checkRead() {
	if e.err != nil {
		clear(e.host)
		return
	}
	if faults := e.host[numIndexFaults]; faults != 0 {
		e.err = fmt.Errorf("%w: %d indices of other ranks are not those of a tensor of %d elements",
			comm.ErrMismatch, faults, e.n)
	}
}

// late reports whether the host can read numbers of this step in the next one, for which they are posted. A frozen
// runtime may be in a capture, which excludes host copies.
func (e *engine) late() bool {
	return e.hostCopy != nil && e.cfg.NonFinite != FailNonFinite && !e.rt.Stats().Frozen
}

// setHostCopy replaces the copy of the numbers by n. The old one stays if it cannot be closed, since it may still read
// the numbers.
func (e *engine) setHostCopy(n kernel.HostCopy) error {
	if e.hostCopy != nil {
		if err := e.hostCopy.Close(); err != nil {
			return err
		}
	}
	e.hostCopy = n
	return nil
}

// makeHostCopy makes a host copy, if the runtime supports it. (The numbers do not move.)
func (e *engine) makeHostCopy() {
	if copier, ok := e.rt.(kernel.AsyncCopier); ok && e.order.Streams != nil && e.hostCopy == nil && e.err == nil {
		n, err := copier.NewHostCopy(len(e.host) * base.WordSize)
		e.check(err)
		e.check(e.setHostCopy(n))
	}
}

// post copies the numbers to the host, after earlier work of the device.
func (e *engine) post() {
	e.do(func() error { return e.hostCopy.Post(e.posted) })
}

// receive is read for posted numbers. It does not wait for later work of the device.
func (e *engine) receive(ctx context.Context) {
	if !e.late() { // fails during a capture
		e.read(ctx)
	}
	if e.err == nil {
		ready, err := e.hostCopy.Ready()
		if err == nil && !ready {
			err = e.c.Sync(ctx) // this wait ends when a peer has failed
		}
		e.check(err)
	}
	if e.err == nil {
		words, err := e.hostCopy.Read(ctx)
		if err != nil && ctx.Err() != nil {
			err = comm.ContextError(ctx)
		}
		e.check(err)
		copy(hostmem.Bytes(e.host), words)
	}
	e.checkRead()
}

// forget replaces the host's state for the next steps.
func (e *engine) forget(s hostState) {
	if e.hostState.pending && e.words.Ptr != 0 {
		e.setInt(e.skippedLast, 0)
	}
	e.hostState = s
}

// set stores words in device memory and in the host's copy.
func (e *engine) set(x number, words ...int32) {
	copy(e.host[x:], words)
	e.do(func() error {
		return e.rt.CopyIn(e.address(x), hostmem.Bytes(e.host[x:int(x)+len(words)]))
	})
}

// setInt is set for one word, after earlier work of the device, for which it does not wait.
func (e *engine) setInt(x number, v int32) {
	e.do(func() error {
		return e.rt.Fill(e.address(x), 1, dtype.I32, float64(v))
	})
	if e.err == nil { // otherwise it would never be set
		e.host[x] = v
	}
}

// float reads a number as F32.
func (e *engine) float(x number) float32 {
	return math.Float32frombits(uint32(e.host[x]))
}

// lengthOf makes the host wait for the length of a list.
func (e *engine) lengthOf(l kernel.Entries) (int, error) {
	if l.Len == 0 {
		return l.N, nil
	}
	var word [base.WordSize]byte
	err := e.rt.CopyOut(word[:], l.Len)
	return min(max(int(int32(binary.LittleEndian.Uint32(word[:]))), 0), l.N), err
}

// checkWords checks words that the ranks sent, equally many from each, in host words from x on. A word outside of
// [0, limit(i)] is an error: the ranks do not reduce the same tensor. No size may depend on the words then, so they are
// set to zero, as after any error.
func (e *engine) checkWords(x number, count int, limit func(i int) int, meaning string) []int32 {
	words := e.host[x:][:count]
	for i, w := range words {
		if bound := limit(i); e.err == nil && (w < 0 || int(w) > bound) {
			e.err = fmt.Errorf("%w: rank %d of %d announces %d as %s, and with a tensor of %d elements it is 0 to %d",
				comm.ErrMismatch, i*e.size/count, e.size, w, meaning, e.n, bound)
		}
	}
	if e.err != nil {
		clear(words)
	}
	return words
}

// Numbers that a rank announces to all others, before its message if they are sent with it.
const (
	announcedPassed = iota // number of sums that reached the threshold; as the message's length, at most its room
	announcedLarge         // number of selected entries that may not stay finite
	announcedLong          // number of messages that were nearly too long
	announcedWords
)
