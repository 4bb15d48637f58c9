package commtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/reference"
)

var abortCases = []testCase{
	{name: "abort: ends what is in flight", body: abortInFlight, minRanks: 2},
	{name: "abort: tells the others why", body: abortTells, needs: peerFailures, minRanks: 2},
	{name: "abort: leaves relatives alone", body: abortedRelative, minRanks: 2},
	{name: "abort: while calls end", body: abortWhileCallsEnd, needs: peerFailures, minRanks: 2},
}

// errAborted is the cause of the aborts below.
var errAborted = errors.New("the reason of this test")

// abortInFlight lets the last rank abort while it waits for ranks that do not come. The wait ends,
// and the memory of the call is the caller's again, also when the others have come.
func abortInFlight(p *probe) {
	for _, cause := range []error{errAborted, nil} {
		want := cause
		if want == nil {
			want = comm.ErrCanceled
		}
		a := p.operands(p.sumType(), 5)
		c := p.split(0, p.rank)
		if p.rank == p.size-1 {
			waiting := make(chan error)
			go func() { waiting <- allReduceAndSync(p.ctx, c, a) }()
			c.Abort(cause)
			err := <-waiting
			p.wantOneOf("waiting in a communicator that this rank aborts", err, want)
			p.wantOneOf("waiting in a communicator that this rank aborts", err, comm.ErrBroken)
			p.refuses(c, comm.ErrBroken, want)
			if err := c.Err(); !errors.Is(err, comm.ErrBroken) || !errors.Is(err, want) {
				p.errorf("Err of an aborted communicator: %v, want %v", err, want)
			}
		}
		p.must(p.c.Barrier(p.ctx))
		mark := reference.Tile(poisonBlock, 0, a.count*a.dt.Size())
		if p.rank == p.size-1 {
			p.must(p.rt.CopyIn(a.recv, mark))
		} else {
			// It may have sent its part before it aborted, and the others need no more of it.
			ctx, cancel, want := p.leaving()
			if err := allReduceAndSync(ctx, c, a); err != nil {
				p.wantOneOf("another rank has aborted", err, want...)
			}
			cancel()
		}
		p.closeAborted(c)
		if p.rank == p.size-1 {
			if err := diff(p.read(a.recv, len(mark)), mark, a.dt); err != nil {
				p.errorf("memory of an aborted call was written after Abort: %w", err)
			}
		}
	}
}

// abortTells lets a rank that is neither the first nor the last abort, if there is one, and looks at
// what the others are told, those that wait and those that come later.
func abortTells(p *probe) {
	a := p.operands(p.sumType(), 5)
	culprit := p.size / 2
	c := p.split(0, -p.rank) // where the culprit has another rank
	if p.rank == culprit {
		c.Abort(errAborted)
	} else {
		err := allReduceAndSync(p.ctx, c, a)
		p.wantOneOf("another rank aborts", err, comm.ErrPeerFailed)
		p.names(err, errAborted.Error(), fmt.Sprintf("rank %d", p.size-1-culprit))
		p.refuses(c, comm.ErrBroken, comm.ErrPeerFailed)
		p.names(c.Err(), errAborted.Error())
	}
	p.closeAborted(c)
}

// names checks that an error has texts.
func (p *probe) names(err error, texts ...string) {
	for _, text := range texts {
		if err != nil && !strings.Contains(err.Error(), text) {
			p.errorf("error %q does not say %q", err, text)
		}
	}
}

// abortedRelative aborts a communicator whose parent, sibling and child go on.
func abortedRelative(p *probe) {
	c := p.split(0, p.rank)
	sibling := p.split(0, p.rank)
	child, err := c.Split(p.ctx, 0, p.rank)
	p.must(err)
	c.Abort(errAborted)
	p.must(p.c.Barrier(p.ctx))
	p.relative("sub-communicator", child)
	p.relative("sibling", sibling)
	p.relative("parent", p.c)
	p.must(errors.Join(child.Close(), sibling.Close(), c.Close()))
}

// relative sees that one works beside a communicator that was aborted.
func (p *probe) relative(kind string, c comm.Communicator) {
	if err := c.Barrier(p.ctx); err != nil {
		p.fatalf("the %s of an aborted communicator: %w", kind, err)
	}
	p.exercise(c)
}

// abortWhileCallsEnd lets a rank abort from another goroutine while one barrier after the other comes to its end. A
// barrier that is complete on the rank that aborts is complete on the others, which wait in it, and the one that is not
// is the last that they enter. Nothing is written after Abort. The race detector shows accesses of an abort and of an
// ending call that no lock guards.
func abortWhileCallsEnd(p *probe) {
	const dt, n = dtype.U8, 40
	const messages = 11 // before the abort are fewer than this
	rounds := p.rounds(3 * messages)
	if race.Enabled || thorough {
		rounds = p.rounds(60)
	}
	send := p.alloc(reference.Payload(n, p.rank))
	recv := p.alloc(make([]byte, n*p.size))
	mark := reference.Tile(poisonBlock, 0, n*p.size)
	p.awaitCopies()
	for round := range rounds {
		culprit := p.size - 1 - round%p.size
		before := 1 + round/p.size%3
		c := p.split(0, p.rank)
		aborted := make(chan error, 1)
		completed := 0
		var err error
		for err == nil {
			if completed == before && p.rank == culprit {
				go func() {
					var err error
					for range round % messages {
						err = errors.Join(
							err,
							p.c.Group(
								comm.SendCall(0, 0, dt, culprit, 1),
								comm.RecvCall(0, 0, dt, culprit, 1),
							),
							p.c.Sync(p.ctx),
						)
					}
					c.Abort(errAborted)
					aborted <- err
				}()
			}
			if err = c.AllGather(send, recv, n, dt); err == nil {
				err = c.Barrier(p.ctx)
			}
			if err == nil {
				completed++
			}
		}
		if p.rank == culprit {
			p.must(<-aborted)
			p.wantOneOf("this rank aborts", err, errAborted)
			p.must(p.rt.CopyIn(recv, mark))
		} else {
			p.wantOneOf("another rank aborts", err, comm.ErrPeerFailed)
		}
		all := p.exchange(p.c, binary.LittleEndian.AppendUint64(nil, uint64(completed)))
		first := int(binary.LittleEndian.Uint64(all[culprit]))
		if completed < first || completed > first+1 {
			p.errorf("round %d: %d barriers are complete, and on rank %d, which aborted, %d", round, completed, culprit, first)
		}
		if p.rank == culprit && !bytes.Equal(p.read(recv, n*p.size), mark) {
			p.errorf("round %d: memory was written after Abort", round)
		}
		p.must(c.Close())
	}
}
