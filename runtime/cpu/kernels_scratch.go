package cpu

import (
	"sync"

	"github.com/tutti-go/tutti/internal/gaps"
)

// scratch is the working memory of one kernel call.
type scratch struct {
	chunk      [chunk]float32       // elements of another type, as float32
	tile       []float32            // streamTile elements on their way past the caches
	sums       [chunk]float32       // of the tile that union is at; else zeros
	marks      [chunk / 64]uint64   // which of them are in the union; else zeros
	hist       [histBins + 1]uint32 // counts of narrow
	sample     []float32            // elements that guess looked at
	candidates entries              // elements of x that may be selected
	around     entries              // a list without its middle
	compacted  entries              // elements that kth still has to look at, or that go back
	lists      []entries            // what is left to be merged
	gaps       gaps.Gaps            // of a block of indices
	lost       []float32            // what rounding loses of the values of a list
	dst        [1]uintptr           // arguments of a reduction
	src        [2]uintptr           // operands of a reduction
}

// resize gives e the length n. Its content is undefined.
func (e *entries) resize(n int) {
	if cap(e.idx) < n { // what grows little by little does not do so every time
		room := max(n, cap(e.idx)*5/4)
		e.idx = make([]int32, room)
		e.val = make([]float32, room)
	}
	e.idx = e.idx[:n]
	e.val = e.val[:n]
}

var scratches freelist[scratch]

// freelist keeps working memory between calls, as many pieces as were ever in
// use at once, so that in a steady state nothing is allocated. (A sync.Pool
// would be emptied by the garbage collector now and then.) The piece used last
// is used first: its memory is in the cache, and has grown to the sizes asked
// for.
type freelist[T any] struct {
	mu   sync.Mutex // guards free
	free []*T       // guarded by mu
}

func (f *freelist[T]) get() *T {
	f.mu.Lock()
	defer f.mu.Unlock()
	last := len(f.free) - 1
	if last < 0 {
		return new(T)
	}
	piece := f.free[last]
	f.free = f.free[:last]
	return piece
}

func (f *freelist[T]) put(piece *T) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.free = append(f.free, piece)
}
