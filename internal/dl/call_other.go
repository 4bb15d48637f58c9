//go:build !amd64 || (!linux && !darwin)

package dl

import (
	"fmt"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// frame is a call.
type frame struct {
	fn   uintptr             // address of the function
	args [maxIntArgs]uintptr // integers and pointers
}

// callInt calls f through purego.
func callInt(f Func, args []uintptr) int32 {
	if len(args) > maxIntArgs { // the same limit as elsewhere
		panic(fmt.Sprintf("dl: %d arguments, at most %d can be", len(args), maxIntArgs))
	}
	return int32(f.Call(args...))
}

// callEach makes the calls of a sequence, entering C for each.
func callEach(s *Sequence) int32 {
	for i := range s.left {
		c := &s.calls[i]
		for {
			if code := callInt(Func{address: c.fn}, c.args[:]); code != 0 {
				return code
			}
			c.times--
			if c.flag == 0 || c.times == 0 || hostmem.Slice[int32](c.flag, 1)[0] != 0 {
				break
			}
		}
		s.left--
	}
	return 0
}
