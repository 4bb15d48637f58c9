package ddp

import (
	"time"

	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/runtime"
)

// step is the step that a [Gradients] makes, from the first Ready until it is committed or rolled back.
// The next one begins with nothing of it.
type step struct {
	begun   bool
	given   []*runtime.Tensor // nil: not ready
	absent  []bool            // given are zeros in the place of what was left out
	folded  []bool            // what was accumulated is in what was given
	arrived []int             // with Rebuild: the gradients of the first step, as they became ready
	next    int               // first bucket that is not launched
	factor  uintptr           // what clips the gradients
	fault   error             // for which Wait rolls it back
	launch  time.Duration
	before  metered.Traffic
}

// bucketStep is a bucket's part of a step.
type bucketStep struct {
	missing int // gradients that are not ready
	result  resultPhase
	failed  error         // of its asynchronous exchange
	took    time.Duration // it
}

// resultPhase is how far the result of a bucket is.
type resultPhase uint8

const (
	pending resultPhase = iota
	complete
	committed
)

// newStep is for the next step.
func (g *Gradients) newStep() {
	s := &g.step
	clear(s.given)
	clear(s.absent)
	clear(s.folded)
	g.step = step{given: s.given, absent: s.absent, folded: s.folded, arrived: s.arrived[:0], before: g.lines.outer.Totals()}
	for _, b := range g.buckets {
		b.step = bucketStep{missing: len(b.params)}
	}
}
