package schedule

import (
	"testing"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// BenchmarkFingerprint is what it takes to remember a call of 8 bytes and to make the
// tag of its messages.
func BenchmarkFingerprint(b *testing.B) {
	e := &Engine{tagShift: 43}
	c := comm.AllReduceCall(0, 0, 2, dtype.F32, comm.Sum)
	var tag uint64
	for b.Loop() {
		e.log.add(newEntry(&c), nil)
		tag += e.tag(e.log.calls)
	}
	_ = tag
}
