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
// to host memory after each call.
//
// An idle stream tells as well, but a query of it ends a capture that a framework begins at the same time. So the
// stream is only asked about calls that have no mark: those before the first question, or all where streams write no
// words.
type Marks struct {
	asked    atomic.Bool               // somebody wants marks; never reset
	unmarked atomic.Bool               // there are calls that no mark covers, beside captured ones
	word     atomic.Pointer[cuda.Word] // nil if streams cannot write one, and after Close

	mu   sync.Mutex     // guards done
	done backend.Extent // known to be complete
}

// Init allocates the word that a stream of rt writes. Without it, progress is only known when the stream is idle,
// which is not an error. Close frees the word.
func (m *Marks) Init(rt *cuda.Runtime) {
	if word, err := rt.NewWord(); err == nil {
		m.word.Store(word)
	}
}

// Due reports whether the calls that were just submitted get a mark, which takes about a microsecond. They do if
// somebody has asked.
func (m *Marks) Due() bool {
	if m.asked.Load() {
		return true
	}
	m.Miss()
	return false
}

// Miss notes that calls were submitted without a mark.
func (m *Marks) Miss() {
	if !m.unmarked.Load() {
		m.unmarked.Store(true)
	}
}

// Set makes the stream write a mark once it has reached the submitted calls. Nothing is written into a graph, which
// would repeat it: captured calls count with the next mark. Calls report errors of the stream. Close does not run
// concurrently.
func (m *Marks) Set(s *cuda.Stream, submitted backend.Extent) {
	word := m.word.Load()
	if word == nil {
		return
	}
	if capturing, err := s.Capturing(); err != nil || capturing {
		return
	}
	if err := s.Write(word, submitted.Collectives<<32|submitted.Messages&math.MaxUint32); err != nil {
		m.Miss()
		return
	}
	m.unmarked.Store(false)
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
	var now backend.Extent
	all := false
	if m.word.Load() == nil || m.unmarked.Load() {
		now, all = idle()
	}
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
