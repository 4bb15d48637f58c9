package fixedpoint

import (
	"math"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/convert"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/hostops"
)

// Sum is one rank's part of a sum of arrays: its terms, and the destination of the result.
type Sum struct {
	N       int         // elements, the same on all ranks
	Bits    int         // the precision of terms: 1 to 30, the same on all ranks
	Divisor int         // of results, at least 1, the same on all ranks
	DType   dtype.DType // of the result: F32, F16 or BF16, the same on all ranks
	Terms   []Term      // of this rank; possibly none
	// Result is the address of N elements, which may be a term. 0, on all ranks, stores Sums and Exponents instead.
	Result uintptr
	// Sums is the address of N I32, Exponents of an I8 for each block.
	Sums, Exponents uintptr
}

// Term is an array that is summed.
type Term struct {
	Ptr   uintptr     // address of its elements
	DType dtype.DType // F32, F16 or BF16
}

// Agrees reports whether two ranks describe the same sum.
func (s *Sum) Agrees(o *Sum) bool {
	sameTerms := s.N == o.N && s.Bits == o.Bits
	return sameTerms && s.Divisor == o.Divisor && s.DType == o.DType && (s.Result == 0) == (o.Result == 0)
}

// Reducer is implemented by communicators in which one rank can read the terms and write the results of all ranks. It
// is optional: an AllReduce of exponents and one of integers give the same bits.
type Reducer interface {
	// AllReduceFixed submits, as AllReduce does, sums of the terms of all ranks. The list belongs to the communicator
	// until the next Sync. comm.ErrUnsupported is returned on all ranks, before anything is sent, if there is no such
	// operation.
	AllReduceFixed(sums []Sum) error
	// Reduced reports, after a Sync, whether the last submitted AllReduceFixed is complete. It may be complete
	// although Sync has failed: then all ranks have the results.
	Reduced() bool
}

// chunk is the number of elements that are reduced at once. Terms, integers and results fit the first-level cache,
// together with the terms of the next two chunks, which are prefetched.
const chunk = 8 * Block

// Worker is the scratch memory of a reduction. The zero Worker is ready.
type Worker struct {
	terms     []Term    // of the sum
	sources   []uintptr // a chunk of each term, as F32
	wide      []float32 // of terms of other types, a chunk of each
	targets   []uintptr // of a chunk of results, as F32
	means     []float32 // a chunk of results of another type
	sums      []int32   // of a chunk
	exponents []byte    // of a chunk
}

// Reduce stores elements [from, to) of a sum, of which each rank has a part. from is the first one of a block.
// streaming asks for integers to bypass the caches.
func (w *Worker) Reduce(ranks []*Sum, from, to int, streaming bool) {
	if w.sums == nil {
		w.sums = make([]int32, chunk)
		w.exponents = make([]byte, chunk/Block)
		w.means = make([]float32, chunk)
	}
	w.terms = w.terms[:0]
	for _, r := range ranks {
		w.terms = append(w.terms, r.Terms...)
	}
	for ; from < to; from += chunk {
		n := min(chunk, to-from)
		w.locate(from, n)
		exponents := w.exponents[:(n+Block-1)/Block]
		raiseTerms(exponents, w.sources, n)
		if ranks[0].Result != 0 {
			w.storeResults(ranks, from, n)
			continue
		}
		sums := w.sums[:n]
		sumTerms(sums, exponents, w.sources, 0, ranks[0].Bits)
		for _, r := range ranks {
			hostops.Copy(r.Sums+uintptr(4*from), hostmem.Addr(sums), 4*n, streaming)
			copy(hostmem.Slice[byte](r.Exponents+uintptr(from/Block), len(exponents)), exponents)
		}
	}
}

// locate sets the sources to n elements of the terms, as F32.
func (w *Worker) locate(from, n int) {
	w.sources = w.sources[:0]
	for i, t := range w.terms {
		ptr := t.Ptr + uintptr(from*t.DType.Size())
		if t.DType != dtype.F32 {
			if need := chunk * len(w.terms); len(w.wide) < need {
				w.wide = make([]float32, need)
			}
			wide := w.wide[i*chunk:][:n]
			widen(wide, ptr, t.DType)
			ptr = hostmem.Addr(wide)
		}
		w.sources = append(w.sources, ptr)
	}
}

// storeResults stores the means of n elements as all ranks' results.
func (w *Worker) storeResults(ranks []*Sum, from, n int) {
	dt := ranks[0].DType
	offset := uintptr(from * dt.Size())
	w.targets = w.targets[:0]
	if dt == dtype.F32 {
		for _, r := range ranks {
			w.targets = append(w.targets, r.Result+offset)
		}
	} else {
		w.targets = append(w.targets, hostmem.Addr(w.means))
	}
	w.storeMeans(n, ranks[0].Bits, 1/float64(ranks[0].Divisor), Largest(dt))
	if dt == dtype.F32 {
		return
	}
	narrow(ranks[0].Result+offset, dt, w.means[:n])
	bytes := n * dt.Size()
	for _, r := range ranks[1:] {
		hostops.Copy(r.Result+offset, ranks[0].Result+offset, bytes, false)
	}
}

// storeMeans stores multiples of the sums of n elements as F32.
func (w *Worker) storeMeans(n, precision int, multiple, limit float64) {
	exponents := w.exponents[:(n+Block-1)/Block]
	for from := 0; from < n; {
		whole := exponents[from/Block : n/Block]
		from += meanBlocks(w.targets, whole, w.sources, from, precision, multiple, limit)
		if from == n {
			return
		}
		end := min(from+Block, n) // the block needs separate treatment
		sums := w.sums[from:end]
		sumTerms(sums, exponents, w.sources, from, precision)
		first := hostmem.Slice[float32](w.targets[0], n)[from:end]
		Load(first, sums, exponents[from/Block:], 0, precision, multiple, limit)
		for _, target := range w.targets[1:] {
			copy(hostmem.Slice[float32](target, n)[from:], first)
		}
		from = end
	}
}

// raiseTerms stores the exponents of n elements of terms.
func raiseTerms(exponents []byte, terms []uintptr, n int) {
	done := exponentBlocks(exponents[:n/Block], terms, 0)
	for i := done / Block; i < len(exponents); i++ {
		exponents[i] = sign
	}
	for _, t := range terms {
		RaiseExponents(exponents[done/Block:], hostmem.Slice[float32](t, n)[done:], 0)
	}
}

// sumTerms stores the sums of elements of terms, from an element on that is the first one of a block.
func sumTerms(sums []int32, exponents []byte, terms []uintptr, from, precision int) {
	n := from + len(sums)
	for done := 0; done < len(sums); {
		begin := from + done
		done += sumBlocks(sums[done:], exponents[begin/Block:n/Block], terms, begin, precision)
		if done == len(sums) {
			return
		}
		begin = from + done
		end := begin + Block
		for end < n && exponent(exponents[end/Block]).field() < precision {
			end += Block // a run of regular blocks
		}
		end = min(end, n)
		clear(sums[done : end-from])
		for _, t := range terms {
			x := hostmem.Slice[float32](t, end)[begin:]
			Store(sums[done:end-from], exponents[begin/Block:], x, 0, precision, true)
		}
		done = end - from
	}
}

// widen stores elements of type dt, from an address on, as float32.
func widen(dst []float32, ptr uintptr, dt dtype.DType) {
	src := hostmem.Slice[uint16](ptr, len(dst))
	if dt == dtype.F16 {
		convert.F16ToF32(dst, src)
	} else {
		convert.BF16ToF32(dst, src)
	}
}

// narrow stores elements with type dt, beginning at an address. Elements of F32 are already stored.
func narrow(ptr uintptr, dt dtype.DType, src []float32) {
	switch dt {
	case dtype.F16:
		convert.F32ToF16(hostmem.Slice[uint16](ptr, len(src)), src)
	case dtype.BF16:
		convert.F32ToBF16(hostmem.Slice[uint16](ptr, len(src)), src)
	}
}

// Largest returns the largest number of F32, F16 or BF16.
func Largest(dt dtype.DType) float64 {
	switch dt {
	case dtype.F16:
		return 65504
	case dtype.BF16:
		return 0xff * 1 << 120
	}
	return math.MaxFloat32
}
