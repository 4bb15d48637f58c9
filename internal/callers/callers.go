// Package callers notes where a call came from, for a few nanoseconds a frame:
// it follows the frame pointers that Go code keeps on amd64 and arm64, as the
// execution tracer of the runtime does, where [runtime.Callers] takes hundreds.
package callers

import "runtime"

// Stack is the innermost return addresses of a goroutine, ended by a 0 if there
// are fewer.
type Stack [32]uintptr

// Fill notes where its caller was called from. What was called from C shows no
// further than to C. It returns a number of the goroutine that no other one has at the
// same time, or 0 if that is not known.
func (s *Stack) Fill() (goroutine uintptr) {
	n, goroutine := fill(s)
	if n < len(s) {
		s[n] = 0
	}
	return goroutine
}

// Frames resolves the stack, innermost first. Where functions were inlined into
// another, it has the innermost of them, and the outermost with the line where it
// begins.
func (s *Stack) Frames() []runtime.Frame {
	var frames []runtime.Frame
	for i := range s {
		if s[i] == 0 {
			break
		}
		f, _ := runtime.CallersFrames(s[i : i+1]).Next()
		if f.PC == 0 {
			continue
		}
		frames = append(frames, f)
		outer := runtime.FuncForPC(f.Entry)
		if outer != nil && outer.Name() != f.Function {
			file, line := outer.FileLine(f.Entry)
			frames = append(frames, runtime.Frame{PC: f.PC, Function: outer.Name(), File: file, Line: line, Entry: f.Entry})
		}
	}
	return frames
}
