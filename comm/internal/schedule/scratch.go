package schedule

import (
	"fmt"

	"github.com/tutti-go/tutti/runtime/cpu"
)

// host is where working memory comes from: outside the Go heap, as
// wires keep addresses while messages are in flight.
var host = cpu.New()

// scratch is a piece of working memory.
type scratch struct {
	address uintptr
	bytes   int
}

// scratchPool keeps the working memory of operations that are done for the
// next ones. It holds at most maxActive pieces.
type scratchPool struct {
	free []scratch
}

// take returns at least the given number of bytes.
func (p *scratchPool) take(bytes int) (scratch, error) {
	var s scratch
	if n := len(p.free); n > 0 {
		s = p.free[n-1]
		p.free = p.free[:n-1]
	}
	if s.bytes >= bytes {
		return s, nil
	}
	_ = host.Deallocate(s.address)
	address, err := host.Allocate(bytes)
	if err != nil {
		return scratch{}, fmt.Errorf("working memory: %w", err)
	}
	return scratch{address, bytes}, nil
}

// give returns a piece to the pool; the zero piece is none.
func (p *scratchPool) give(s scratch) {
	if s.bytes > 0 {
		p.free = append(p.free, s)
	}
}

// release gives all memory back.
func (p *scratchPool) release() {
	for _, s := range p.free {
		_ = host.Deallocate(s.address)
	}
	p.free = nil
}
