// Package logtest shows tests the log of a program.
package logtest

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
)

// Log is the captured log of a program.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

// Capture redirects the program's log to a Log, until the test ends.
func Capture(t *testing.T) *Log {
	l := &Log{}
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(l, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return l
}

// Write implements [io.Writer].
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// Lines returns the lines with a text.
func (l *Log) Lines(text string) (list []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, text) {
			list = append(list, line)
		}
	}
	return list
}
