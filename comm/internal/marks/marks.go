// Package marks is how backends of GPUs know how far calls have come before anybody
// waits for them ([backend.Progresser]).
package marks

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Marks are how far a stream says that it has come. As soon as somebody has asked, it
// writes behind every eighth call or so how many there were into memory of the host.
type Marks struct {
	asked   atomic.Bool               // somebody wants marks; never false again
	pending atomic.Int64              // calls since the last mark
	word    atomic.Pointer[cuda.Word] // nil if streams cannot write one, and after Close

	mu   sync.Mutex     // guards done
	done backend.Extent // as far as is known
}

// every is how many calls a mark is for, which takes about a microsecond.
const every = 8

// Init makes what a stream of rt writes. Without, it can be asked whether it is idle,
// and nothing more: that is worth no error. Close gives it back.
func (m *Marks) Init(rt *cuda.Runtime) {
	if word, err := rt.NewWord(); err == nil {
		m.word.Store(word)
	}
}

// Due counts more calls, and reports whether it is time for a mark.
func (m *Marks) Due(calls int) bool {
	return m.asked.Load() && m.pending.Add(int64(calls)) >= every
}

// Set has the stream say that it has come to what was submitted, and is there, so far. In a graph it would say so again
// and again, so nothing is written into one. Calls report errors of the stream. Close does not come beside it.
func (m *Marks) Set(s *cuda.Stream, submitted backend.Extent) {
	word := m.word.Load()
	if word == nil {
		return
	}
	if capturing, err := s.Capturing(); err != nil || capturing {
		return
	}
	m.pending.Store(0)
	_ = s.Write(word, submitted.Collectives<<32|submitted.Messages&math.MaxUint32)
}

// Reached returns how far the stream has come, without waiting. submitted returns how far calls go at most; idle
// returns what the stream, and nobody else, had to do if all that is done. The result counts if sound then says that no
// abort may have ended it.
func (m *Marks) Reached(
	submitted func() backend.Extent,
	idle func() (backend.Extent, bool),
	sound func() bool,
) backend.Extent {
	m.asked.Store(true)
	now, all := idle()
	m.mu.Lock()
	defer m.mu.Unlock()
	if word := m.word.Load(); !all && word != nil {
		mark := word.Load() // first
		now = extent(submitted(), mark)
	}
	if sound() {
		m.done = m.done.Max(now)
	}
	return m.done
}

// extent returns the extent of a mark, which has the low halves of its numbers, and is no
// further than e.
func extent(e backend.Extent, mark uint64) backend.Extent {
	return backend.Extent{
		Collectives: upTo(e.Collectives, uint32(mark>>32)),
		Messages:    upTo(e.Messages, uint32(mark)),
	}
}

// upTo returns the number with this low half that is less than 1<<31 below n, or n if
// there is none.
func upTo(n uint64, low uint32) uint64 {
	return n - uint64(max(0, int32(uint32(n)-low)))
}

// Close frees the memory that the stream wrote, unless it may still do so.
func (m *Marks) Close(writes bool) {
	m.mu.Lock() // nobody loads it
	defer m.mu.Unlock()
	if word := m.word.Swap(nil); word != nil && !writes {
		word.Close()
	}
}
