// Package marks tells backends of GPUs which calls are complete before anybody waits for them ([backend.Progresser]).
package marks

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Marks records the progress of a stream. Once somebody has asked for it, the stream writes the number of calls so far
// to host memory after about every eighth call.
type Marks struct {
	asked   atomic.Bool               // somebody wants marks; never reset
	pending atomic.Int64              // calls since the last mark
	word    atomic.Pointer[cuda.Word] // nil if streams cannot write one, and after Close

	mu   sync.Mutex     // guards done
	done backend.Extent // known to be complete
}

// every is the number of calls for each mark, which takes about a microsecond.
const every = 8

// Init allocates the word that a stream of rt writes. Without it, progress is only known when the stream is idle,
// which is not an error. Close frees the word.
func (m *Marks) Init(rt *cuda.Runtime) {
	if word, err := rt.NewWord(); err == nil {
		m.word.Store(word)
	}
}

// Due counts calls, and reports whether a mark is due.
func (m *Marks) Due(calls int) bool {
	return m.asked.Load() && m.pending.Add(int64(calls)) >= every
}

// Set makes the stream write a mark once it has reached the submitted calls. Nothing is written into a graph, which
// would repeat it. Calls report errors of the stream. Close does not run concurrently.
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

// Reached returns the calls that the stream has completed, without waiting. submitted returns the upper bound; idle
// returns the submitted calls if the stream, and nobody else, has completed all of them. The result counts if sound
// then reports that no abort may have ended the work.
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
		mark := word.Load() // read first
		now = extent(submitted(), mark)
	}
	if sound() {
		m.done = m.done.Max(now)
	}
	return m.done
}

// extent returns the extent of a mark, which has the low halves of its numbers, and is at most e.
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

// Close frees the word, unless the stream may still write it.
func (m *Marks) Close(writes bool) {
	m.mu.Lock() // nobody reads it
	defer m.mu.Unlock()
	if word := m.word.Swap(nil); word != nil && !writes {
		word.Close()
	}
}
