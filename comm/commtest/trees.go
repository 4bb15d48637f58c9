package commtest

import (
	"cmp"

	"github.com/tutti-go/tutti/comm/internal/trees"
)

var treeCases = []testCase{
	{name: "split: trees used side by side", body: randomTrees},
}

// usualCommunicators is how many sub-communicators are open at a time, unless the backend bounds them.
const usualCommunicators = 240

// randomTrees makes trees of sub-communicators, four splits deep, uses them from several goroutines, and
// closes them in any order. Where few may be open, a split takes long, and there are fewer of them. An error names the
// seed.
func randomTrees(p *probe) {
	const workers, share = 4, 8
	operations := 3 // for each communicator that may be open
	if p.extended || thorough {
		operations = 12
	}
	open := cmp.Or(p.Communicators, usualCommunicators)
	c := trees.Config{
		Workers:     max(1, min(workers, open/share)),
		Open:        open,
		Operations:  open * operations,
		Sum:         p.sumType(),
		Synchronous: p.Synchronous,
	}
	for round := range p.rounds(1) {
		c.Seed = uint64(round + 1)
		_, err := c.Play(p.ctx, p.c, p.rt)
		p.must(err)
	}
}
