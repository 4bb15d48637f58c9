// Package caller records the calls of a worker goroutine with the stack of the goroutine that asked for them.
package caller

import (
	"runtime"
	"sync/atomic"
)

// depth is the number of stack frames that are kept.
const depth = 32

// Stack is the stack of a goroutine that asks a worker for calls. The zero value is empty. It must not change while an
// [Origin] refers to it.
type Stack struct {
	frames [depth]uintptr // return addresses, innermost first
	length int            // of frames
}

// Take records the stack of the calling goroutine.
func (s *Stack) Take() { s.length = runtime.Callers(2, s.frames[:]) }

// Recorder is implemented by recorders of calls with an [Origin].
type Recorder interface {
	// Attribute is like [Origin.Attribute].
	Attribute(s *Stack)
}

// Origin is the stack for which a worker currently makes calls. The zero value is none.
type Origin struct {
	stack atomic.Pointer[Stack] // nil while the worker makes none
}

// Attribute attributes calls from now on to a stack, nil for none.
func (o *Origin) Attribute(s *Stack) { o.stack.Store(s) }

// Frames returns the return addresses of the stack, innermost first.
func (o *Origin) Frames() []uintptr {
	s := o.stack.Load()
	if s == nil {
		return nil
	}
	return s.frames[:s.length]
}
