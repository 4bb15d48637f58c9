// Package logtest shows tests the log of a program.
package logtest

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
)

// Log is the captured log of a program.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

// captures are the logs of the tests that run now.
var captures struct {
	turns  sync.Mutex   // held while a capture begins or ends
	before *slog.Logger // the program's own; nil while no test captures it; guarded by turns

	mu   sync.Mutex // not held while the program's log is set, which waits for those that write to it
	logs []*Log     // guarded by mu
}

// Capture redirects the program's log to a Log, until the test ends. Tests that run side by side each have all of it.
func Capture(t *testing.T) *Log {
	l := &Log{}
	captures.turns.Lock()
	defer captures.turns.Unlock()
	if l.add() == 1 {
		captures.before = slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(all{}, nil)))
	}
	t.Cleanup(l.end)
	return l
}

// end ends a capture.
func (l *Log) end() {
	captures.turns.Lock()
	defer captures.turns.Unlock()
	if l.remove() == 0 {
		slog.SetDefault(captures.before)
		captures.before = nil
	}
}

// add lets the log get lines, and returns how many do.
func (l *Log) add() (logs int) {
	captures.mu.Lock()
	defer captures.mu.Unlock()
	captures.logs = append(captures.logs, l)
	return len(captures.logs)
}

// remove undoes add.
func (l *Log) remove() (logs int) {
	captures.mu.Lock()
	defer captures.mu.Unlock()
	i := slices.Index(captures.logs, l)
	captures.logs = slices.Delete(captures.logs, i, i+1)
	return len(captures.logs)
}

// all writes to the logs of all tests.
type all struct{}

// Write implements [io.Writer].
func (all) Write(p []byte) (int, error) {
	captures.mu.Lock()
	defer captures.mu.Unlock()
	for _, l := range captures.logs {
		l.write(p)
	}
	return len(p), nil
}

// write adds to the log.
func (l *Log) write(p []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Write(p)
}

// String returns all of it.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Lines returns the lines with a text.
func (l *Log) Lines(text string) (list []string) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			list = append(list, line)
		}
	}
	return list
}
