package callers

import (
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

//go:noinline
func (s *Stack) fillLine() bool { s.Fill(); return true }

// both notes a stack, and what the runtime says of the same line.
//
//go:noinline
func both(s *Stack) []uintptr {
	pcs := make([]uintptr, 64)
	n, _ := runtime.Callers(1, pcs), s.fillLine()
	return pcs[:n]
}

//go:noinline
func deep(n int, s *Stack) []uintptr {
	if n == 0 {
		return both(s)
	}
	return deep(n-1, s)
}

type place struct {
	function string
	line     int
}

func TestStackIsThatOfTheRuntime(t *testing.T) {
	for depth := range 40 {
		var s Stack
		done := make(chan []uintptr)
		go func() { done <- deep(depth, &s) }()
		var want []place
		for frames, more := runtime.CallersFrames(<-done), true; more; {
			var f runtime.Frame
			f, more = frames.Next()
			if f.Function != "runtime.goexit" { // below the first function
				want = append(want, place{f.Function, f.Line})
			}
		}
		var got []place
		for _, f := range s.Frames() {
			if f.Function != "runtime.goexit" && !strings.Contains(f.Function, "(*Stack)") {
				got = append(got, place{f.Function, f.Line})
			}
		}
		require.GreaterOrEqual(t, len(got), min(len(want), len(s)-4), "depth %d", depth)
		require.LessOrEqual(t, len(got), len(want))
		assert.Equal(t, want[:len(got)], got, "depth %d", depth)
	}
}

// inlined has its caller's frame.
func inlined(s *Stack) { s.fillLine() }

//go:noinline
func inlines(s *Stack) { inlined(s) }

func TestFramesOfInlinedFunctions(t *testing.T) {
	var s Stack
	inlines(&s)
	var functions []string
	for _, f := range s.Frames() {
		functions = append(functions, f.Function)
	}
	assert.Contains(t, functions, "github.com/tutti-go/tutti/internal/callers.inlines")
	assert.Contains(t, functions, "github.com/tutti-go/tutti/internal/callers.TestFramesOfInlinedFunctions")
}

func TestFillDoesNotAllocate(t *testing.T) {
	var s Stack
	assert.Zero(t, testing.AllocsPerRun(100, func() { s.Fill() }))
}

func BenchmarkFill(b *testing.B) {
	var s Stack
	for b.Loop() {
		s.Fill()
	}
}
