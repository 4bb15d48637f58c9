// Package caller has calls that a worker makes in its own goroutine recorded with the stack of the goroutine that has
// asked for them.
package caller

import (
	"runtime"
	"sync/atomic"
)

// depth is how many frames of a stack are kept.
const depth = 32

// Stack is where a goroutine asks a worker for calls. The zero value is empty. It must not change while an [Origin]
// has it.
type Stack struct {
	frames [depth]uintptr // return addresses, innermost first
	length int            // of frames
}

// Take takes the stack of the goroutine that calls it.
func (s *Stack) Take() { s.length = runtime.Callers(2, s.frames[:]) }

// Recorder is what records calls with an [Origin].
type Recorder interface {
	// Attribute is as [Origin.Attribute].
	Attribute(s *Stack)
}

// Origin is the stack for which a worker makes calls now. The zero value is none.
type Origin struct {
	stack atomic.Pointer[Stack] // nil while the worker makes none
}

// Attribute has the calls from now on be those for which a stack asks, nil for none.
func (o *Origin) Attribute(s *Stack) { o.stack.Store(s) }

// Frames are the return addresses of the stack, innermost first.
func (o *Origin) Frames() []uintptr {
	s := o.stack.Load()
	if s == nil {
		return nil
	}
	return s.frames[:s.length]
}
