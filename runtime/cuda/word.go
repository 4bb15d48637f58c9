package cuda

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// Word is a number in host memory that streams write ([Stream.Write]). It shows the host how far a stream has come,
// without querying the device.
type Word struct {
	rt      *Runtime // its streams write the word
	address *uint64  // of the number, in pinned memory
}

// words are a page of pinned memory, allocated once per runtime: allocating or freeing host memory may wait for
// kernels.
type words struct {
	sync.Mutex
	page []uint64  // nil before the first word; guarded by the mutex
	free []*uint64 // guarded by the mutex
}

const wordsPage = 4096 // bytes

// NewWord returns a word with the value 0. The error is [runtime.ErrUnsupported] if streams cannot write it (drivers
// before CUDA 11.7), or if there are too many words.
func (r *Runtime) NewWord() (*Word, error) {
	unsupported := func(reason string) error {
		return fmt.Errorf("cuda:%d: %w: %s", r.index, runtime.ErrUnsupported, reason)
	}
	if !r.drv.sym.StreamWriteValue.Found() {
		return nil, unsupported("the driver has no cuStreamWriteValue64_v2")
	}
	if !r.gate.enter() {
		return nil, r.usable()
	}
	defer r.gate.leave()
	can, err := r.drv.attribute(r.index, r.device, attrWriteValue64)
	if err != nil {
		return nil, err
	}
	if can == 0 {
		return nil, unsupported("streams of the device write no words of 64 bits")
	}
	w := &r.words
	w.Lock()
	defer w.Unlock()
	if w.page == nil {
		p, err := r.create(r.drv.sym.MemHostAlloc, destructor{fn: r.drv.sym.MemFreeHost}, wordsPage, hostAllocPortable)
		if err != nil {
			return nil, err
		}
		w.page = hostmem.Slice[uint64](p, wordsPage/8)
		for i := range w.page {
			w.free = append(w.free, &w.page[i])
		}
	}
	if len(w.free) == 0 {
		return nil, unsupported("there are too many words")
	}
	address := w.free[len(w.free)-1]
	w.free = w.free[:len(w.free)-1]
	atomic.StoreUint64(address, 0)
	return &Word{r, address}, nil
}

// Load returns the number that was written last, 0 after the runtime is closed.
func (w *Word) Load() uint64 {
	if !w.rt.gate.enter() {
		return 0
	}
	defer w.rt.gate.leave()
	return atomic.LoadUint64(w.address)
}

// Close frees the word, once. No stream may write it any more.
func (w *Word) Close() {
	w.rt.words.Lock()
	defer w.rt.words.Unlock()
	w.rt.words.free = append(w.rt.words.free, w.address)
}

// Write makes the stream write a word once all earlier work is complete. The stream must not be in a capture
// ([Stream.Capturing]).
func (s *Stream) Write(w *Word, value uint64) error {
	stream, err := s.use("stream")
	if err != nil {
		return err
	}
	return s.rt.do(s.rt.drv.sym.StreamWriteValue, stream, hostmem.AddrOf(w.address), uintptr(value), 0)
}
