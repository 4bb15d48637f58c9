package commtest

import (
	"errors"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

var closingCases = []testCase{
	{name: "close: twice", body: closeTwice},
	{name: "close: later calls fail", body: useAfterClose},
	{name: "close: right after a collective", body: closeAfterCollective},
	{name: "close: finishes what is in flight", body: closePending},
}

// closeTwice closes a communicator again and again.
func closeTwice(p *probe) {
	c := p.split(0, p.rank)
	for i := range 3 {
		if err := c.Close(); err != nil {
			p.errorf("Close number %d: %v", i+1, err)
		}
	}
	p.exercise(p.c)
}

// useAfterClose calls everything on a closed communicator.
func useAfterClose(p *probe) {
	c := p.split(0, p.rank)
	p.must(c.Barrier(p.ctx))
	p.must(c.Close())
	p.refuses(c, comm.ErrClosed)
	if c.Rank() != p.rank || c.WorldSize() != p.size {
		p.errorf("closed communicator says rank %d of %d", c.Rank(), c.WorldSize())
	}
	p.exercise(p.c)
}

// refuses checks that every method of c fails with all of the given errors.
func (p *probe) refuses(c comm.Communicator, want ...error) {
	for name, method := range p.everyMethod(c, p.operands(p.sumType(), 3)) {
		err := method()
		for _, w := range want {
			if !errors.Is(err, w) {
				p.errorf("%s afterwards: got %v, want %v", name, err, w)
			}
		}
		var e *comm.OpError
		if err != nil && !errors.As(err, &e) {
			p.errorf("%s afterwards: error %q is no *comm.OpError", name, err)
		}
	}
}

// closeAfterCollective closes as soon as a collective is complete on this rank. The others, where it
// may not be, do not need the rank any more.
func closeAfterCollective(p *probe) {
	a := p.operands(p.sumType(), 3)
	for round := range p.rounds(30) {
		c := p.split(0, p.rank)
		var err error
		if round%2 == 0 {
			err = c.Barrier(p.ctx)
		} else {
			err = allReduceAndSync(p.ctx, c, a)
		}
		if err != nil {
			p.errorf("another rank closes after the collective: %w", err)
		}
		p.must(c.Close())
	}
	p.exercise(p.c)
}

// closePending closes a communicator without waiting for its operations. Every
// rank has submitted them, so there is nothing that could keep them.
func closePending(p *probe) {
	c := p.split(0, p.rank)
	b := p.batch(c)
	addAllGather(b, plain("allgather", "in flight when closed", 2000, dtype.U8))
	b.submit()
	p.must(p.c.Barrier(p.ctx))
	p.must(c.Close())
	b.verify()
}
