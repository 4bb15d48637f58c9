package commtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reference"
)

var orderingCases = []testCase{
	{name: "rank and size", body: identity},
	{name: "zero counts with nil buffers", body: zeroCounts},
	{name: "operations use earlier results", body: chained},
	{name: "many operations before one sync", body: manySmall},
	{name: "group of collectives and messages", body: mixedGroup},
	{name: "group of many calls", body: largeGroup},
	{name: "group that fails submits nothing", body: failedGroup},
	{name: "barrier holds until the last rank comes", body: barrier, minRanks: 2},
	{name: "barrier implies sync", body: barrierSyncs},
	{name: "progress is told", body: progress, needs: asynchrony},
	{name: "goroutines take turns", body: handOver},
	{name: "goroutines share a communicator", body: concurrent},
	{name: "goroutines with a communicator each", body: concurrentSplits},
	{name: "goroutines that wait for one message", body: concurrentWaits, minRanks: 2},
}

// identity checks that ranks are numbered 0, 1, … .
func identity(p *probe) {
	if p.size < 1 || p.rank < 0 || p.rank >= p.size {
		p.fatalf("rank %d of %d is out of range", p.rank, p.size)
	}
	for r, got := range p.exchange(p.c, []byte{byte(p.rank), byte(p.size)}) {
		if got[0] != byte(r) || got[1] != byte(p.size) {
			p.errorf("place %d is taken by rank %d of %d", r, got[0], got[1])
		}
	}
}

// zeroCounts calls everything with nothing to move.
func zeroCounts(p *probe) {
	zeros := make([]int, p.size)
	for _, dt := range types() {
		for _, call := range everyCollective(operands{dt: dt, counts: zeros, displs: zeros}) {
			if call.Op.Reduces() && !p.reduces(dt, comm.Max) {
				continue
			}
			if err := call.Make(p.c); err != nil {
				p.fatalf("%v with nil buffers: %w", call, err)
			}
		}
	}
	nothing := plain("exchange", "of nothing", 0, dtype.U8)
	b := p.batch(p.c)
	b.call(
		nothing,
		comm.SendCall(0, 0, dtype.U8, p.rank, 1),
		comm.RecvCall(0, 0, dtype.U8, p.rank, 1),
	)
	b.run()
}

// sumType is a type that the backend sums, and which holds small integers.
func (p *probe) sumType() dtype.DType {
	for _, dt := range []dtype.DType{dtype.F32, dtype.I32, dtype.I64, dtype.F64, dtype.U32, dtype.U64} {
		if p.reduces(dt, comm.Sum) {
			return dt
		}
	}
	p.fatalf("the backend sums none of the common types")
	return dtype.Invalid
}

// number encodes a small integer.
func number(dt dtype.DType, x int) []byte { return reference.Encode(dt, float64(x)) }

// numbers is n times the same small integer.
func numbers(dt dtype.DType, n, x int) []byte {
	return reference.Tile(number(dt, x), 0, n*dt.Size())
}

// ranksSum is 0 + 1 + … + size-1.
func (p *probe) ranksSum() int { return p.size * (p.size - 1) / 2 }

// chained lets each operation take what the one before has left, without a
// Sync in between.
func chained(p *probe) {
	const n = 3000
	dt := p.sumType()
	size := dt.Size()
	l := plain("chain", "", n, dt)
	root := p.size - 1
	for range p.rounds(3) {
		b := p.batch(p.c)
		output := func(n, number int) uintptr {
			return b.output(l, n*size, want(numbers(dt, n, number), dt))
		}
		sum := p.ranksSum()
		x := b.buffer(
			l,
			numbers(dt, n, p.rank),
			n*size,
			want(numbers(dt, n, p.size*sum), dt),
			true,
		)
		y := output(n, sum)
		all := output(p.size*n, sum)
		z := output(n, p.size*p.size*sum)
		last := output(n, p.size*p.size*sum)
		next := (p.rank + 1) % p.size
		prev := (p.rank + p.size - 1) % p.size
		for _, call := range []comm.Call{
			comm.ReduceCall(x, y, n, dt, comm.Sum, root), // y at root: Σ
			comm.BroadcastCall(y, n, dt, root),           // y: Σ
			comm.AllGatherCall(y, all, n, dt),            // all: Σ, size times
			comm.AllReduceCall(y, x, n, dt, comm.Sum),    // x: size Σ
			comm.AllReduceCall(x, z, n, dt, comm.Sum),    // z: size² Σ
		} {
			b.call(l, call)
		}
		b.call(
			l,
			comm.RecvCall(last, n, dt, prev, 1),
			comm.SendCall(z, n, dt, next, 1),
		)
		b.run()
	}
}

// rounds is how often a case repeats something.
func (p *probe) rounds(n int) int {
	if p.extended {
		return 10 * n
	}
	return n
}

// manySmall submits a thousand operations of all kinds and waits once.
func manySmall(p *probe) {
	dt := p.sumType()
	l := plain("allreduce", "one of many", 1, dt)
	b := p.batch(p.c)
	for i := range p.rounds(100) {
		send := b.input(l, number(dt, p.rank+i))
		recv := b.output(l, dt.Size(), want(number(dt, p.ranksSum()+p.size*i), dt))
		b.call(l, comm.AllReduceCall(send, recv, 1, dt, comm.Sum))
		addBroadcast(b, label{
			call:  "broadcast",
			count: 2,
			dt:    dt,
			op:    noOp,
			root:  i % p.size,
		})
		addAllGather(b, plain("allgather", "", 1, dt))
		addAllToAll(b, plain("alltoall", "", 1, dt))
	}
	b.run()
}

// mixedGroup starts collectives and messages together.
func mixedGroup(p *probe) {
	const dt = dtype.U8
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	b := p.batch(p.c)
	b.recv(500, dt, prev, 1, 1)
	addAllGather(b, plain("allgather", "", 40, dt))
	addBroadcast(b, label{
		call:  "broadcast",
		count: 700,
		dt:    dt,
		op:    noOp,
		root:  p.size - 1,
	})
	b.send(500, dt, next, 1, 1)
	b.runGroup()
}

// largeGroup starts more collectives, and then more messages, together than 10 bits count.
func largeGroup(p *probe) {
	const dt, calls = dtype.U8, 1<<10 + 10
	b := p.batch(p.c)
	for i := range calls {
		addBroadcast(b, label{
			call:    "broadcast",
			count:   3,
			dt:      dt,
			op:      noOp,
			root:    i % p.size,
			variant: fmt.Sprintf("call %d of a group", i),
		})
	}
	b.runGroup()
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	for i := range calls / 2 {
		b.send(9, dt, next, i, 1)
		b.recv(9, dt, prev, i, 1)
	}
	b.runGroup()
}

// failedGroup lets groups fail; afterwards everything still goes as if they had
// never been.
func failedGroup(p *probe) {
	const dt = dtype.U8
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	b := p.batch(p.c)
	l := plain("group", "that fails", 100, dt)
	bytes := 100 * dt.Size()
	stale := b.input(l, message(100, dt, -1, -1, -1))
	never := b.untouched(l, bytes)
	spare := b.untouched(l, bytes)
	send := comm.SendCall(stale, 100, dt, next, 8)
	recv := comm.RecvCall(never, 100, dt, prev, 8)
	half := uintptr(bytes / 2)
	for misuse, calls := range map[string][]comm.Call{
		"a bad call at its end":   {send, recv, comm.SendCall(stale, -1, dt, next, 8)},
		"a bad call at its start": {comm.SendCall(stale, 100, dt, p.size, 8), send, recv},
		"no call at all":          {send, recv, {Op: comm.OpBarrier}},
		"two receives into one":   {send, recv, comm.RecvCall(never, 100, dt, prev, 8)},
		"receives that overlap":   {send, recv, comm.RecvCall(never+half, 1, dt, prev, 8)},
		"a receive into what it sends": {
			send,
			recv,
			comm.RecvCall(stale+half, 100, dt, prev, 8),
			comm.SendCall(spare, 100, dt, next, 8),
		},
	} {
		if err := p.c.Group(calls...); !errors.Is(err, comm.ErrArgument) {
			p.errorf("group with %s: got %v, want ErrArgument", misuse, err)
		}
	}
	p.must(p.c.Group())
	b.send(100, dt, next, 3, 8)
	b.recv(100, dt, prev, 3, 8)
	b.runGroup()
}

// barrier proves by the order of events that nobody leaves before everybody came: all ranks note when they entered and
// when they left, and the last to enter must not be later than the first to leave. The clock belongs to one host. A
// straggler, a different rank each round, gives a wrong barrier the time to show itself; a right one never fails,
// however slow the machine.
func barrier(p *probe) {
	for round := range p.rounds(3) * p.size {
		late := round % p.size
		p.must(p.c.Sync(p.ctx))
		if p.rank == late {
			time.Sleep(time.Millisecond)
		}
		entered := time.Now().UnixNano()
		p.must(p.c.Barrier(p.ctx))
		left := time.Now().UnixNano()

		var times []byte
		times = binary.LittleEndian.AppendUint64(times, uint64(entered))
		times = binary.LittleEndian.AppendUint64(times, uint64(left))
		for r, got := range p.exchange(p.c, times) {
			if came := int64(binary.LittleEndian.Uint64(got)); left < came {
				p.errorf("round %d: left the barrier %v before rank %d came", round, time.Duration(came-left), r)
			}
		}
	}
}

// barrierSyncs reads results after a Barrier without a Sync.
func barrierSyncs(p *probe) {
	b := p.batch(p.c)
	addAllGather(b, plain("allgather", "", 5000, dtype.U8))
	b.submit()
	p.must(p.c.Barrier(p.ctx))
	b.verify()
}

// progress looks at what a communicator tells of what nobody has waited for, if it does.
func progress(p *probe) {
	c := p.split(0, p.rank)
	teller, ok := comm.As[backend.Progresser](c)
	if ok {
		p.must(c.Barrier(p.ctx))
		p.must(c.AllReduce(0, 0, 0, p.sumType(), comm.Sum))
		ok = teller.Progress() != (backend.Progress{})
		p.must(c.Sync(p.ctx))
	}
	if !ok {
		p.skipped = "the communicator does not tell"
		p.must(c.Close())
		return
	}
	a := p.operands(p.sumType(), 100)
	before := teller.Progress()
	sees := func(situation string, collectives, messages, collectivesDone, messagesDone uint64) {
		got := teller.Progress()
		want := before
		want.Collectives.Submitted += collectives
		want.Collectives.Done += collectivesDone
		want.Messages.Submitted += messages
		want.Messages.Done += messagesDone
		if got != want {
			p.errorf("progress %s: %+v, want %+v", situation, got, want)
		}
	}
	first := a
	first.count = 10
	second := first
	second.recv += uintptr(second.count * second.dt.Size())
	if p.NoLoneSelfReceive {
		for tag := range uint32(2) {
			p.must(c.Group(
				first.receiveFrom(p.rank, tag),
				first.sendTo(p.rank, tag),
			))
		}
	} else {
		p.must(first.receiveFrom(p.rank, 1).Make(c))
		p.must(second.receiveFrom(p.rank, 2).Make(c))
		p.must(second.sendTo(p.rank, 2).Make(c))
		sees("behind a message that nobody has sent", 0, 3, 0, 0)
		p.must(first.sendTo(p.rank, 1).Make(c))
	}
	p.must(c.Sync(p.ctx))
	sees("after all messages", 0, 4, 0, 4)

	reduce := func() {
		p.must(a.allReduce(comm.Sum).Make(c))
	}
	if p.rank == 0 {
		reduce()
		if p.size > 1 {
			sees("in a collective that the others have not called", 1, 4, 0, 4)
		}
	}
	p.must(p.c.Barrier(p.ctx))
	if p.rank != 0 {
		reduce()
	}
	p.must(c.Sync(p.ctx))
	sees("after a collective", 1, 4, 1, 4)
	p.must(c.Barrier(p.ctx))
	child, err := c.Split(p.ctx, 0, p.rank)
	p.must(err)
	sees("after a barrier and a split", 3, 4, 3, 4)
	p.must(child.Close())
	p.must(c.Close())
}

// handOver uses the communicator from a new goroutine each time.
func handOver(p *probe) {
	for range 10 {
		b := p.batch(p.c)
		addAllGather(b, plain("allgather", "from another goroutine", 300, dtype.U8))
		p.awaitCopies()
		for _, s := range b.steps {
			err := make(chan error)
			go func() { err <- s.submit(b.c) }()
			p.must(<-err)
		}
		b.steps = nil
		err := make(chan error)
		go func() { err <- p.c.Sync(p.ctx) }()
		p.must(<-err)
		b.verify()
	}
}

// concurrent lets goroutines call the same collective at the same time. Which
// call of one rank meets which of another is open, so all of them carry the
// same data.
func concurrent(p *probe) {
	const goroutines, rounds, n = 4, 25, 100
	dt := p.sumType()
	l := plain("allreduce", "from several goroutines", n, dt)
	b := p.batch(p.c)
	var wg sync.WaitGroup
	errs := make([]error, goroutines)
	var buffers [goroutines][rounds][2]uintptr
	for g := range buffers {
		for i := range rounds {
			buffers[g][i] = [2]uintptr{
				b.input(l, numbers(dt, n, p.rank)),
				b.output(
					l,
					n*dt.Size(),
					want(numbers(dt, n, p.ranksSum()), dt),
				),
			}
		}
	}
	p.awaitCopies()
	for g := range goroutines {
		wg.Go(func() {
			for _, buf := range buffers[g] {
				err := p.c.AllReduce(buf[0], buf[1], n, dt, comm.Sum)
				if err == nil {
					err = p.c.Sync(p.ctx)
				}
				if err != nil {
					errs[g] = err
					return
				}
			}
		})
	}
	wg.Wait()
	p.must(errors.Join(errs...))
	b.verify()
}

// concurrentSplits gives each of several goroutines its own communicator.
func concurrentSplits(p *probe) {
	const goroutines = 3
	probes := make([]*probe, goroutines)
	for g := range probes {
		c := p.split(0, p.rank)
		probes[g] = newProbe(p.ctx, p.suite, Rank{Comm: c, Runtime: p.rt})
	}
	var wg sync.WaitGroup
	errs := make([]error, goroutines)
	for g, q := range probes {
		wg.Go(func() {
			errs[g] = q.guard(func() {
				for i := range 20 {
					b := q.batch(q.c)
					addAllGather(b, plain(
						"allgather",
						fmt.Sprintf("goroutine %d", g),
						100+10*g+i,
						dtype.U8,
					))
					b.run()
				}
			})
		})
	}
	wg.Wait()
	for g, q := range probes {
		p.adopt(q, errs[g])
		p.must(q.c.Close())
	}
}

// concurrentWaits lets two goroutines of rank 0 wait for the same message.
func concurrentWaits(p *probe) {
	a := p.operands(p.sumType(), 3)
	c := p.split(0, p.rank)
	sender := p.size - 1
	if p.rank == 0 {
		p.must(a.receiveFrom(sender, 1).Make(c))
		waits := make(chan error, 2)
		for range cap(waits) {
			go func() { waits <- c.Sync(p.ctx) }()
		}
		p.must(p.c.Barrier(p.ctx))
		p.must(errors.Join(<-waits, <-waits))
	} else {
		p.must(p.c.Barrier(p.ctx))
		if p.rank == sender {
			p.must(a.sendTo(0, 1).Make(c))
			p.must(c.Sync(p.ctx))
		}
	}
	p.must(c.Barrier(p.ctx))
	p.must(c.Close())
}
