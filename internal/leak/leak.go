// Package leak logs communicators that were garbage collected without Close: one line for all that are found together.
package leak

import (
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/internal/dump"
)

const (
	// gatherTime is how long a line waits for further communicators, unless a garbage collection comes first: one
	// collection finds many, one by one.
	gatherTime = 100 * time.Millisecond
	// mostPlaces is the number of communicators that a line describes; most are made at one place.
	mostPlaces = 3
	// depth is the number of stack frames that are kept.
	depth = 32
)

// Mark describes a communicator that must be closed.
type Mark struct {
	backend string         // of the communicator
	title   string         // which one, such as "rank 0 of 2"
	frames  [depth]uintptr // return addresses of the call that made it, innermost first
	count   int            // of frames
}

// NewMark describes a communicator that the caller is making.
func NewMark(backend, title string) *Mark {
	m := &Mark{backend: backend, title: title}
	m.count = runtime.Callers(2, m.frames[:])
	return m
}

// Report counts a communicator as lost, and makes a line follow soon. It suits runtime.AddCleanup.
func (m *Mark) Report() {
	if lost.add(m) {
		runtime.AddCleanup(new([64]byte), lost.log, m.backend)
	}
}

// tally counts the communicators of a backend that were lost.
type tally struct {
	total int     // at least 1
	count int     // lost since the last line
	first []*Mark // the first of these, at most mostPlaces
}

// lost are those of this process.
var lost counts

// counts has a tally for each backend. The zero value has counted nothing.
type counts struct {
	mu       sync.Mutex        // taken alone
	backends map[string]*tally // by name; nil before the first; guarded by mu
}

// add counts a communicator, and makes a line follow soon. It reports whether this is the first since the last line.
func (c *counts) add(m *Mark) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.backends == nil {
		c.backends = map[string]*tally{}
	}
	t := c.backends[m.backend]
	if t == nil {
		t = &tally{}
		c.backends[m.backend] = t
	}
	t.total++
	t.count++
	if len(t.first) < mostPlaces {
		t.first = append(t.first, m)
	}
	if t.count == 1 {
		time.AfterFunc(gatherTime, func() { c.log(m.backend) })
	}
	return t.count == 1
}

// log logs how many communicators of a backend were lost since the last line, if any.
func (c *counts) log(backend string) {
	c.mu.Lock()
	t := c.backends[backend]
	last := *t
	t.count = 0
	t.first = nil
	c.mu.Unlock()
	if last.count == 0 {
		return
	}
	var texts []string
	for _, m := range last.first {
		texts = append(texts, m.String())
	}
	slog.Warn(
		"communicators were never closed",
		"backend", backend,
		"count", last.count,
		"first", strings.Join(texts, "; "),
		"total", last.total,
	)
}

// String says which communicator it is, and where the program made it.
func (m *Mark) String() string {
	var stack []dump.Frame
	frames := runtime.CallersFrames(m.frames[:m.count])
	for {
		f, ok := frames.Next()
		if f.PC != 0 && !strings.HasPrefix(f.Function, "runtime.") {
			stack = append(stack, dump.Frame{Name: f.Function, Filename: f.File, Line: f.Line})
		}
		if !ok {
			break
		}
	}
	if len(stack) == 0 {
		return m.title
	}
	place := dump.Caller(stack)
	return fmt.Sprintf("%s, made at %s:%d", m.title, place.Filename, place.Line)
}
