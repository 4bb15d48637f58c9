//go:build simulated

package simulation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/sim"
)

// step is a call of all ranks, their next action, and the different call of one rank.
type step struct {
	op      comm.Op
	count   int
	reduce  comm.ReduceOp
	peer    int // the root; for messages, the distance to the receiver
	tag     uint32
	counts  [][]int // of V-collectives, by rank and rank
	inPlace bool
	grouped bool
	mixed   bool    // several calls in a group, with a message that the next rank waits for first
	colors  []int   // of a Split, by rank
	then    comm.Op // Sync, Barrier or none
}

// fault is the fault of one rank.
type fault struct {
	kind  string // "" for nothing
	rank  int
	at    int // step
	wait  time.Duration
	aside bool // another goroutine aborts, some time during the step
	root  bool // another root instead of another length
}

// program is the program of a world's ranks.
type program struct {
	size    int
	steps   []step
	fault   fault
	timeout time.Duration // of waits, 0 for none
	hasty   bool          // ranks close without waiting for their last submissions
	pause   time.Duration // how long a process is stopped
	crowd   int           // goroutines of a rank that wait beside it: on odd ranks, or on all if it is more than 1
	idles   atomic.Int32
	below   atomic.Bool // a sub-communicator has failed; its errors have other rank numbers
}

// idleTime is how long an idle rank is busy elsewhere before it waits.
const idleTime = 700 * time.Millisecond

const message = comm.OpSend

var collectives = []comm.Op{comm.OpAllReduce, comm.OpBroadcast, comm.OpReduce, comm.OpAllGather, comm.OpAllGatherV, comm.OpReduceScatter,
	comm.OpAllToAll, comm.OpAllToAllV, comm.OpGather, comm.OpScatter, message, message, comm.OpAllReduce, comm.OpSplit}

// newProgram chooses a program.
func (p *play) newProgram(size int, longest int, faults ...string) *program {
	g := &program{size: size}
	lengths := []int{0, 1, 1, 3, 7, 16, 17, 100, 600, 1500, 9000, 40_000, 200_000, 1_200_000}
	for n, limit := range lengths {
		if limit > longest {
			lengths = lengths[:n]
			break
		}
	}
	short, steps := p.Chance(3), 1+p.IntN(12)
	if short {
		steps += 20
	}
	for range steps {
		s := step{op: collectives[p.IntN(len(collectives))], count: lengths[p.IntN(len(lengths))], peer: p.IntN(size), tag: uint32(p.IntN(3)),
			reduce: []comm.ReduceOp{comm.Sum, comm.Min, comm.Max, comm.Prod}[p.IntN(4)], inPlace: p.Chance(3), grouped: !p.Chance(3),
			then: []comm.Op{comm.OpSync, comm.OpSync, comm.OpBarrier, 0, 0}[p.IntN(5)]}
		if s.count > 2000 && !p.Chance(5) {
			s.count /= 200
		}
		if short { // small ones, one after the other
			s.op, s.count, s.then = []comm.Op{comm.OpAllReduce, comm.OpAllReduce, comm.OpBroadcast, message}[p.IntN(4)], p.IntN(5), []comm.Op{comm.OpSync, comm.OpBarrier, 0}[p.IntN(3)]
		}
		if s.op != comm.OpAllReduce && s.op != message && s.op != comm.OpBroadcast {
			s.count = min(s.count, 40_000/size)
		}
		s.mixed = s.op == comm.OpAllReduce && size > 1 && p.subject != "checked" && p.Chance(4)
		for range size {
			s.colors = append(s.colors, p.IntN(3)-1)
			row := make([]int, size)
			for i := range row {
				row[i] = p.IntN(min(s.count, 3000) + 1)
			}
			s.counts = append(s.counts, row)
		}
		g.steps = append(g.steps, s)
	}
	if len(faults) > 0 && !p.Chance(3) {
		g.fault = fault{kind: faults[p.IntN(len(faults))], rank: p.IntN(size), at: p.IntN(len(g.steps)), wait: p.Between(time.Microsecond, 4*time.Second)}
		if p.Chance(2) {
			g.fault.wait >>= 10
		}
	}
	if s := &g.steps[g.fault.at]; g.fault.kind == "idle" && longest >= 40_000 && p.Chance(2) { // long enough to be divided among goroutines
		s.op, s.count, s.mixed, s.then = comm.OpAllReduce, 40_000, false, comm.OpSync
		if p.Chance(2) {
			if s.op = message; p.subject == "local" { // over a link, such a message takes as long as the rank computes
				s.count = min(longest, 200_000)
			}
		}
	}
	if g.fault.kind == "stall" && p.Chance(2) {
		g.timeout = p.Between(time.Millisecond, time.Second)
	}
	if f := &g.fault; f.kind == "abort" && p.Chance(2) { // while ranks leave a barrier, or long messages are in flight
		f.aside = !p.hears
		if f.at > 0 && p.Chance(2) {
			g.steps[f.at-1].op, g.steps[f.at-1].then = message, comm.OpBarrier
		}
		if s := &g.steps[f.at]; f.aside && p.Chance(3) {
			s.op, s.mixed, f.wait = comm.OpSplit, false, f.wait%(300*time.Microsecond)
		} else if f.aside && longest >= 200_000 {
			s.op, s.count, s.mixed, s.then = message, longest, false, comm.OpSync
		}
	}
	if f := &g.fault; f.kind == "mismatch" && p.Chance(3) {
		s := &g.steps[f.at]
		f.root, s.op, s.mixed = size > 1, comm.OpBroadcast, false
	}
	g.hasty = p.Chance(4)
	if g.crowd = 1; p.subject == "local" && p.Seed%4 == 0 {
		g.crowd = 3
	}
	return g
}

// value returns an element of a rank's input.
func value(seed uint64, step, rank, i int) int32 {
	return int32(sim.Mix(seed, uint64(step)<<40|uint64(rank)<<32|uint64(i))>>40&0xff) - 100
}

const untouched = -777_777

// call is one step of a rank: its submission, the memory, and the expected contents.
type call struct {
	calls        []comm.Call
	memory, want [][]int32
}

// call makes the call of a step. extra is the number of surplus elements, the rank's mistake.
func (g *program) call(seed uint64, number, rank, extra int) (k call) {
	s := &g.steps[number]
	n, size := s.count, g.size
	from := func(rank, first, count int) []int32 {
		v := make([]int32, count+extra)
		for i := range v {
			v[i] = value(seed, number, rank, first+i)
		}
		return v
	}
	empty := func(count int) []int32 { return slices.Repeat([]int32{untouched}, count+extra) }
	reduced := func(first, count int) []int32 {
		result := from(0, first, count)
		for r := 1; r < size; r++ {
			for i, v := range from(r, first, count) {
				switch s.reduce {
				case comm.Sum:
					result[i] += v
				case comm.Prod:
					result[i] *= v
				case comm.Min:
					result[i] = min(result[i], v)
				case comm.Max:
					result[i] = max(result[i], v)
				}
			}
		}
		return result
	}
	add := func(memory, want []int32) uintptr {
		memory = append(memory, untouched) // a guard word and an address
		k.memory, k.want = append(k.memory, memory), append(k.want, append(slices.Clone(want), untouched))
		return hostmem.Addr(memory)
	}
	keep := func(memory []int32) uintptr { return add(memory, memory) }
	offsets := func(counts []int) (at []int, all int) {
		for _, c := range counts {
			at, all = append(at, all), all+c
		}
		return at, all
	}
	const dt = dtype.I32
	switch s.op {
	case comm.OpAllReduce:
		if s.inPlace {
			a := add(from(rank, 0, n), reduced(0, n))
			k.calls = append(k.calls, comm.AllReduceCall(a, a, n+extra, dt, s.reduce))
		} else {
			k.calls = append(k.calls, comm.AllReduceCall(keep(from(rank, 0, n)), add(empty(n), reduced(0, n)), n+extra, dt, s.reduce))
		}
	case comm.OpBroadcast:
		mine := empty(n)
		if rank == s.peer {
			mine = from(rank, 0, n)
		}
		k.calls = append(k.calls, comm.BroadcastCall(add(mine, from(s.peer, 0, n)), n+extra, dt, s.peer))
	case comm.OpReduce:
		want := empty(n)
		if rank == s.peer {
			want = reduced(0, n)
		}
		k.calls = append(k.calls, comm.ReduceCall(keep(from(rank, 0, n)), add(empty(n), want), n+extra, dt, s.reduce, s.peer))
	case comm.OpReduceScatter:
		n += extra
		extra = 0
		k.calls = append(k.calls, comm.ReduceScatterCall(keep(from(rank, 0, n*size)), add(empty(n), reduced(rank*n, n)), n, dt, s.reduce))
	case comm.OpAllGather, comm.OpGather:
		n += extra
		extra = 0
		want := empty(n * size)
		if s.op == comm.OpAllGather || rank == s.peer {
			want = nil
			for r := range size {
				want = append(want, from(r, 0, n)...)
			}
		}
		send, recv := keep(from(rank, 0, n)), add(empty(n*size), want)
		if s.op == comm.OpGather {
			k.calls = append(k.calls, comm.GatherCall(send, recv, n, dt, s.peer))
		} else {
			k.calls = append(k.calls, comm.AllGatherCall(send, recv, n, dt))
		}
	case comm.OpScatter:
		n += extra
		extra = 0
		k.calls = append(k.calls, comm.ScatterCall(keep(from(s.peer, 0, n*size)), add(empty(n), from(s.peer, rank*n, n)), n, dt, s.peer))
	case comm.OpAllToAll:
		n += extra
		extra = 0
		var want []int32
		for r := range size {
			want = append(want, from(r, rank*n, n)...)
		}
		k.calls = append(k.calls, comm.AllToAllCall(keep(from(rank, 0, n*size)), add(empty(n*size), want), n, dt))
	case comm.OpAllGatherV:
		counts := slices.Clone(s.counts[0])
		counts[0] += extra
		extra = 0
		displs, all := offsets(counts)
		var want []int32
		for r, c := range counts {
			want = append(want, from(r, 0, c)...)
		}
		k.calls = append(k.calls, comm.AllGatherVCall(keep(from(rank, 0, counts[rank])), add(empty(all), want), counts, displs, dt))
	case comm.OpAllToAllV:
		sends, recvs := slices.Clone(s.counts[rank]), []int(nil)
		sends[size-1] += extra // its part is the last
		for r := range size {
			recvs = append(recvs, s.counts[r][rank])
		}
		if rank == size-1 {
			recvs[rank] += extra
		}
		extra = 0
		at, all := offsets(sends)
		to, room := offsets(recvs)
		var want []int32
		for r := range size {
			first, _ := offsets(s.counts[r])
			want = append(want, from(r, first[rank], recvs[r])...)
		}
		k.calls = append(k.calls, comm.AllToAllVCall(keep(from(rank, 0, all)), sends, at, add(empty(room), want), recvs, to, dt))
	case message:
		to, src := (rank+s.peer)%size, (rank+size-s.peer)%size
		k.calls = append(k.calls, comm.SendCall(keep(from(rank, 0, n)), n+extra, dt, to, s.tag),
			comm.RecvCall(add(empty(n), from(src, 0, n)), n+extra, dt, src, s.tag))
	}
	return k
}

// outcome is the result of one rank.
type outcome struct {
	err   error
	step  int
	calls []call // calls that may be in flight
	was   [][]int32
	all   []comm.Communicator
}

// play runs a rank's part of the program.
func (g *program) play(p *play, ctx context.Context, c comm.Communicator, rank int) (o outcome) {
	o.all = []comm.Communicator{c}
	var verify []int
	var early chan error // from a goroutine that has waited since before the step
	wait := func(w comm.Op) error {
		if w == 0 {
			return nil
		}
		limited, cancel := ctx, context.CancelFunc(func() {})
		if g.timeout > 0 {
			limited, cancel = context.WithTimeout(ctx, g.timeout)
		}
		defer cancel()
		others, another := 0, early
		if early != nil {
			others, early = 1, nil
		} else if rank%2 == 1 && g.size%2 == 1 || g.crowd > 1 {
			others, another = g.crowd, make(chan error, g.crowd)
			for range others {
				sim.Go(func() { another <- c.Sync(limited) })
			}
		}
		_, err := comm.Wait{Op: w}.Make(limited, c)
		for range others {
			if other := <-another; err == nil {
				err = other
			}
		}
		sim.Point()
		if err != nil {
			return err
		}
		for i, k := range o.calls {
			for j := range k.memory {
				if !slices.Equal(k.memory[j], k.want[j]) {
					at := slices.IndexFunc(k.memory[j], func(v int32) bool { return v != k.want[j][slices.Index(k.memory[j], v)] })
					p.fail("rank %d, step %d (%v): buffer %d has wrong elements, around %d", rank, verify[i], g.steps[verify[i]].op, j, at)
				}
			}
		}
		o.calls, verify = nil, nil
		return nil
	}
	err := func() error {
		for number, s := range g.steps {
			o.step = number
			extra := 0
			if f := g.fault; f.rank == rank && f.at == number {
				switch f.kind {
				case "stall":
					sim.Sleep(f.wait)
				case "abort":
					abort := func() { p.Event("aborts"); c.Abort(errors.New("a rank has had enough")) }
					if f.aside {
						sim.AfterFunc(f.wait%(5*time.Millisecond), abort)
					} else {
						abort()
					}
				case "idle":
					if p.Seed%2 == 0 { // the others are waiting already
						sim.Sleep(f.wait % (5 * time.Millisecond))
					}
				case "leave":
					p.Event("leaves")
					return errLeaves
				case "mismatch":
					if extra = 1; f.root {
						extra = 0
					}
				}
			} else if next := (f.rank + 1) % g.size; f.kind == "mismatch" && f.at == number+1 && rank == next && p.Seed%2 == 0 {
				sim.Sleep(3 * time.Second) // the others have found that all calls agree up to here
			} else if f.kind == "abort" && f.at == number && p.hears {
				if sim.Sleep(time.Second); c.Err() == nil {
					p.fail("rank %d has not heard in a second that rank %d has aborted", rank, f.rank)
				}
			}
			p.Event("step %d: %v of %d", number, s.op, s.count)
			if s.op == comm.OpSplit {
				sub, err := c.Split(ctx, s.colors[rank], 0)
				if err != nil {
					return err
				}
				if sub == nil {
					continue
				}
				o.all = append(o.all, sub)
				sum := []int32{1}
				err = sub.AllReduce(hostmem.Addr(sum), hostmem.Addr(sum), 1, dtype.I32, comm.Sum)
				if err == nil {
					err = sub.Sync(ctx)
				}
				if err != nil {
					g.below.Store(true)
					return err
				}
				if sum[0] != int32(sub.WorldSize()) {
					p.fail("rank %d: %d ranks of a sub-communicator of %d", rank, sum[0], sub.WorldSize())
				}
				if s.inPlace {
					if err := sub.Close(); err != nil {
						return fmt.Errorf("close of a sub-communicator: %w", err)
					}
				}
				continue
			}
			if early == nil && g.timeout == 0 && rank%2 == 1 && g.size%2 == 0 && s.then == comm.OpSync { // waits while the rank submits
				early = make(chan error, 1)
				to := early
				sim.Go(func() { to <- c.Sync(ctx) })
			}
			k := g.call(p.Seed, number, rank, extra)
			if f := g.fault; f.root && f.rank == rank && f.at == number {
				k.calls[0].Peer = (s.peer + 1) % g.size
			}
			o.calls, verify = append(o.calls, k), append(verify, number)
			if next := (s.peer + 1) % g.size; s.mixed {
				for range 6 {
					more := g.call(p.Seed, number, rank, extra)
					k.calls, k.memory, k.want = append(k.calls, more.calls...), append(k.memory, more.memory...), append(k.want, more.want...)
				}
				word := []int32{7, untouched}
				switch at := hostmem.Addr(word); rank {
				case s.peer:
					k.calls = append(k.calls, comm.SendCall(at, 1, dtype.I32, next, 9))
				case next:
					word[0] = untouched
					if err := c.Recv(at, 1, dtype.I32, s.peer, 9); err != nil {
						return err
					}
					if _, err := (comm.Wait{Op: comm.OpSync}).Make(ctx, c); err != nil {
						return err
					}
				}
				if word[0] != 7 {
					p.fail("rank %d received %d in step %d", rank, word[0], number)
				}
				k.memory, k.want = append(k.memory, word), append(k.want, []int32{7, untouched})
				o.calls[len(o.calls)-1] = k
			}
			if s.grouped || s.mixed {
				if err := c.Group(k.calls...); err != nil {
					return err
				}
			} else {
				for _, one := range k.calls {
					if err := one.Make(c); err != nil {
						return err
					}
				}
			}
			f, began := g.fault, time.Now()
			idle := f.kind == "idle" && f.at == number
			if idle && f.rank == rank {
				if g.idles.Add(1); s.then == comm.OpSync {
					sim.Sleep(idleTime)
				}
			}
			if err := wait(s.then); err != nil {
				return err
			}
			if took := time.Since(began); idle && f.rank != rank && s.then == comm.OpSync && g.idles.Load() > 0 && took > idleTime*3/4 {
				p.fail("rank %d waited %v in step %d for a rank that had submitted everything", rank, took, number)
			}
		}
		if g.hasty {
			return nil
		}
		return wait(comm.OpSync)
	}()
	o.err = err
	p.Event("ends in step %d: %v", o.step, err)
	return o
}

// errLeaves is the error of a rank that closes its communicator early.
var errLeaves = errors.New("this rank leaves")

// finish closes a rank's communicators and records its memory: nothing may write there afterwards.
func (o *outcome) finish(p *play, g *program, rank int, broken bool) {
	note := func() {
		if o.was == nil {
			o.was = [][]int32{}
			for _, k := range o.calls {
				for _, m := range k.memory {
					o.was = append(o.was, slices.Clone(m))
				}
			}
		}
	}
	if o.err != nil && !errors.Is(o.err, errLeaves) {
		note()
	}
	var cause error
	if o.err != nil && !errors.Is(o.err, errLeaves) {
		cause = o.err
	}
	for _, c := range slices.Backward(o.all) {
		if cause != nil && rank%2 == 0 { // Close does the same
			c.Abort(cause)
		}
		bound := 25 * time.Second
		if g.fault.kind == "" && !broken {
			bound = 2*time.Second + g.pause // all ranks close
		}
		p.within(bound, fmt.Sprintf("rank %d: Close", rank), func() {
			if rank%2 == 1 { // two goroutines at once
				second := make(chan struct{})
				var first error // of the other goroutine, if it closes first
				sim.Go(func() {
					defer close(second)
					first = c.Close()
					if !errors.Is(c.Err(), comm.ErrClosed) {
						p.fail("rank %d: closed, and %v", rank, c.Err())
					}
				})
				defer func() {
					if <-second; o.err == nil && first != nil {
						o.err = fmt.Errorf("close: %w", first)
					}
					sim.Point()
				}()
			}
			if err := c.Close(); err != nil && o.err == nil {
				o.err = fmt.Errorf("close: %w", err)
			}
		})
	}
	told := g.fault.kind == "mismatch" || g.fault.kind == "abort" && g.fault.rank == rank // Close returns nil
	for _, k := range o.calls {
		for i, m := range k.memory {
			if o.err == nil && !told && !slices.Equal(m, k.want[i]) {
				p.fail("rank %d: Close returns nil, and what it waited for is not done", rank)
			}
		}
	}
	note()
	p.Event("closed: %v", o.err)
}

// checkMemory fails if memory has changed after the rank learned that nothing touches it any more.
func (o *outcome) checkMemory(p *play, rank int) {
	i := 0
	for _, k := range o.calls {
		for _, m := range k.memory {
			if !slices.Equal(m, o.was[i]) {
				p.fail("rank %d: memory was written after its communicator was closed", rank)
			}
			i++
		}
	}
}

// judge compares the results of the ranks with the fault. named are ranks that an error may blame; nil for any.
func (g *program) judge(p *play, outcomes []outcome, broken bool, named []int) {
	for rank, o := range outcomes {
		for b := o.step; g.fault.kind == "abort" && slices.Contains([]string{"schedule", "segment", "tcp"}, p.subject) && o.err != nil && b < g.fault.at; b++ {
			if g.steps[b].op != comm.OpSplit && g.steps[b].then == comm.OpBarrier {
				p.fail("rank %d failed in step %d, and rank %d aborted behind the barrier of step %d: %v", rank, o.step, g.fault.rank, b, o.err)
			}
		}
		if f := g.fault; f.kind == "leave" && !broken && g.size == 2 && rank != f.rank && o.err != nil && o.step < f.at {
			p.fail("rank %d failed in step %d, and rank %d left behind it: %v", rank, o.step, f.rank, o.err)
		}
		switch kind := g.fault.kind; {
		case errors.Is(o.err, errLeaves) || o.err == nil:
		case (kind == "" || kind == "idle") && !broken, kind == "stall" && g.timeout == 0 && !broken:
			p.fail("rank %d failed, though nothing went wrong: %v", rank, o.err)
		case kind == "abort" && rank == g.fault.rank && strings.Contains(o.err.Error(), "has had enough"): // its own error text
		case !slices.ContainsFunc([]error{comm.ErrPeerFailed, comm.ErrTimeout, comm.ErrMismatch, comm.ErrBroken, comm.ErrCanceled}, func(s error) bool { return errors.Is(o.err, s) }):
			p.fail("rank %d: an error of another kind: %v", rank, o.err)
		case broken && named != nil && kind == "" && errors.Is(o.err, comm.ErrTimeout):
			p.fail("rank %d: nothing but the deadline has ended the wait: %v", rank, o.err)
		case broken && named != nil && kind == "" && !g.below.Load():
			if !slices.ContainsFunc(named, func(r int) bool { return names(o.err, r) }) {
				p.fail("rank %d: the error does not name any of %v: %v", rank, named, o.err)
			}
		case broken:
		case kind == "abort" && !(g.fault.aside && g.below.Load()):
			if !strings.Contains(o.err.Error(), "has had enough") {
				p.fail("rank %d: the error is not that of rank %d, which aborted: %v", rank, g.fault.rank, o.err)
			}
		case kind == "leave" && !g.below.Load():
			if !names(o.err, g.fault.rank) || !strings.Contains(o.err.Error(), "closed its communicator") {
				p.fail("rank %d: the error does not say that rank %d has left: %v", rank, g.fault.rank, o.err)
			}
		case kind == "mismatch":
			if !errors.Is(o.err, comm.ErrMismatch) && !strings.Contains(o.err.Error(), comm.ErrMismatch.Error()) {
				p.fail("rank %d: no mismatch: %v", rank, o.err)
			}
		case kind == "stall":
			if !errors.Is(o.err, comm.ErrTimeout) && !strings.Contains(o.err.Error(), comm.ErrTimeout.Error()) {
				p.fail("rank %d: no timeout: %v", rank, o.err)
			}
		}
	}
	// A mistake is noticed unless the rank calls nothing.
	if g.fault.kind == "mismatch" && !broken && g.size > 1 && g.steps[g.fault.at].op != comm.OpSplit && g.noticed() && !slices.ContainsFunc(outcomes, func(o outcome) bool { return o.err != nil }) {
		p.fail("nobody has noticed that rank %d called step %d with another length", g.fault.rank, g.fault.at)
	}
}

// noticed reports whether ranks compare the length that differs in a step.
func (g *program) noticed() bool {
	s := g.steps[g.fault.at]
	return s.op != message && (s.op != comm.OpAllToAllV || g.fault.rank < g.size-1) || s.op == message && s.peer != 0
}

// names reports whether an error names a rank.
func names(err error, rank int) bool {
	for _, piece := range strings.SplitAfter(err.Error(), "rank")[1:] {
		piece, _, _ = strings.Cut(piece, ":")
		for _, word := range strings.FieldsFunc(piece, func(r rune) bool { return r < '0' || r > '9' }) {
			if word == fmt.Sprint(rank) {
				return true
			}
		}
	}
	return false
}
