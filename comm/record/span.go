package record

import (
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/dump"
)

// spans are the last spans of a flight, of all its communicators.
type spans struct {
	mu    sync.Mutex // guards ring and count
	ring  []span     // guarded by mu
	count uint64     // recorded so far; span i is in ring[i % len(ring)]; guarded by mu
}

// span is a Span before it is dumped.
type span struct {
	name    string    // as the program has called it
	wait    bool      // the rank waited in it
	started time.Time // when it began
	ended   time.Time // when it was over
}

func newSpans(n int) *spans {
	return &spans{ring: make([]span, n)}
}

func (s *spans) add(one span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ring[s.count%uint64(len(s.ring))] = one
	s.count++
}

// dump returns the spans, the one that ended first at the beginning.
func (s *spans) dump() []dump.Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := min(s.count, uint64(len(s.ring)))
	out := make([]dump.Span, 0, kept)
	for i := s.count - kept; i < s.count; i++ {
		one := s.ring[i%uint64(len(s.ring))]
		out = append(out, dump.Span{
			Name:    one.name,
			Wait:    one.wait,
			Started: unix(one.started),
			Ended:   unix(one.ended),
		})
	}
	return out
}

var _ comm.Tracer = (*Recorder)(nil)

// Span implements [comm.Tracer]. As many spans are kept as calls.
func (r *Recorder) Span(name string, started time.Time) {
	r.spans.add(span{
		name:    name,
		started: started,
		ended:   time.Now(),
	})
}
