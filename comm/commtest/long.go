package commtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/reference"
)

// Some faults come with the length of a buffer, and some with the number of calls.
var longCases = []testCase{
	{name: "long buffers", body: longBuffers},
	{name: "many collectives", body: manyCollectives, once: true},
	{name: "many messages", body: manyMessages, once: true},
	{name: "many messages in another order", body: manyInAnotherOrder, once: true, needs: tags},
}

// longBuffers makes a call of each kind with some more than 1 MiB from each rank to each.
func longBuffers(p *probe) {
	const bytes = 1<<20 + 5
	root := p.size - 1
	for _, m := range movements {
		l := plain(m.name, "", bytes, dtype.U8)
		if m.rooted {
			l.root = root
		}
		b := p.batch(p.c)
		m.addLong(b, l)
		b.run()
	}
	dt := p.sumType()
	for _, r := range allReductions {
		l := label{
			call:  r.name,
			dt:    dt,
			op:    comm.Sum,
			count: bytes/dt.Size() + 1,
			root:  noRoot,
		}
		if r.rooted {
			l.root = root
		}
		b := p.batch(p.c)
		r.add(b, l)
		b.run()
	}
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	b := p.batch(p.c)
	b.send(bytes, dtype.U8, next, 0, 1)
	b.recv(bytes, dtype.U8, prev, 0, 1)
	b.runGroup()
}

// manyCalls is how many calls a communicator gets in a row: more than 16 bits count, so that a
// number which wraps around meets its double. callsInFlight of them are submitted before each
// Sync, as a call costs a fraction of a wait.
const (
	callsInFlight = 512
	manyCalls     = 1<<16 + 2*callsInFlight
)

// calls is how many a case makes. The race detector looks at kinds of accesses, not at their number.
func (p *probe) calls() int {
	switch {
	case p.Calls > 0:
		return p.Calls
	case race.Enabled:
		return manyCalls / 64
	case p.extended || thorough:
		return manyCalls
	}
	return manyCalls / 16
}

// manyCollectives makes allgathers and allreduces of 8 bytes, in turn of as many as are in flight.
// Each carries its number, so a rank that has lost one, or has one twice, sees another number.
func manyCollectives(p *probe) {
	sums := p.sumType()
	series := []series{
		{
			call:  "allgather",
			dt:    dtype.U64,
			parts: p.size,
			submit: func(send, recv uintptr) error {
				return p.c.AllGather(send, recv, 1, dtype.U64)
			},
			sends: func(n int) []byte { return serial(n, p.rank) },
			gets:  serial,
		},
		{
			call:  "allreduce",
			dt:    sums,
			parts: 1,
			submit: func(send, recv uintptr) error {
				return p.c.AllReduce(send, recv, 1, sums, comm.Sum)
			},
			sends: func(n int) []byte { return number(sums, n%1000+p.rank) },
			gets: func(n, _ int) []byte {
				return number(sums, n%1000*p.size+p.ranksSum())
			},
		},
	}
	total := p.calls()
	for first := 0; first < total; first += callsInFlight {
		p.inFlight(series[first/callsInFlight%len(series)], first, total)
	}
}

// manyMessages sends messages of one tag around the ring.
func manyMessages(p *probe) {
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	messages := series{
		call:  "message",
		dt:    dtype.U64,
		parts: 1,
		submit: func(send, recv uintptr) error {
			return p.c.Group(
				comm.SendCall(send, 1, dtype.U64, next, 1),
				comm.RecvCall(recv, 1, dtype.U64, prev, 1),
			)
		},
		sends: func(n int) []byte { return serial(n, p.rank) },
		gets:  func(n, _ int) []byte { return serial(n, prev) },
	}
	total := p.calls() / 5 // more than 10,000 of them all
	for first := 0; first < total; first += callsInFlight {
		p.inFlight(messages, first, total)
	}
}

// manyInAnotherOrder has each rank receive from the one before it, and from itself, in another order than
// sending: backwards, and in leaps. A backend whose cost for each message grows with the number of those that wait is
// not done before the suite's deadline.
func manyInAnotherOrder(p *probe) {
	const leap = 7919 // a prime, which divides no count
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	n := p.calls() / 2 // from each
	var out []byte
	for i := range n {
		out = append(out, serial(i, p.rank)...)
	}
	send := p.alloc(out)
	recv := p.alloc(make([]byte, 2*len(out)))
	element := func(buffer uintptr, i int) uintptr {
		return buffer + uintptr(8*i)
	}
	for _, order := range []func(i int) int{
		func(i int) int { return n - 1 - i },
		func(i int) int { return i * leap % n },
	} {
		var group []comm.Call
		for i := range n {
			tag := uint32(i)
			group = append(group,
				comm.SendCall(element(send, i), 1, dtype.U64, next, tag),
				comm.SendCall(element(send, i), 1, dtype.U64, p.rank, tag+uint32(n)))
		}
		for i := range n {
			i = order(i)
			tag := uint32(i)
			group = append(group,
				comm.RecvCall(element(recv, i), 1, dtype.U64, prev, tag),
				comm.RecvCall(element(recv, n+i), 1, dtype.U64, p.rank, tag+uint32(n)))
		}
		p.awaitCopies()
		p.must(p.c.Group(group...))
		p.must(p.c.Sync(p.ctx))
		got := p.read(recv, 2*len(out))
		for i := range n {
			for k, src := range []int{prev, p.rank} {
				start := 8 * (k*n + i)
				if want := serial(i, src); !bytes.Equal(got[start:start+8], want) {
					p.fatalf("message %d of %d from rank %d: got %x, want %x", i, n, src, got[start:start+8], want)
				}
			}
		}
	}
	p.free(send)
	p.free(recv)
}

// series is a call that is repeated with other data.
type series struct {
	call   string
	dt     dtype.DType
	parts  int // elements that it gets
	submit func(send, recv uintptr) error
	sends  func(number int) []byte
	gets   func(number, part int) []byte
}

// serial is the number of a call and a rank in 8 bytes.
func serial(number, rank int) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(number+1)<<16|uint64(rank))
}

// inFlight makes the next calls of a series, from number first on, and waits once. After a wrong one
// it ends the case on this rank, which may be out of step with the others.
func (p *probe) inFlight(s series, first, total int) {
	var out []byte
	for i := range callsInFlight {
		out = append(out, s.sends(first+i)...)
	}
	size := s.dt.Size()
	send := p.alloc(out)
	recv := p.alloc(make([]byte, len(out)*s.parts))
	p.awaitCopies()
	for i := range callsInFlight {
		if err := s.submit(send+uintptr(i*size), recv+uintptr(i*s.parts*size)); err != nil {
			p.fatalf("%s number %d of %d: %w", s.call, first+i, total, err)
		}
	}
	err := p.c.Sync(p.ctx)
	if err != nil {
		err = fmt.Errorf("%ss number %d to %d of %d: %w", s.call, first, first+callsInFlight-1, total, err)
	}
	got := p.read(recv, callsInFlight*s.parts*size)
	before := len(p.found)
	for i := range callsInFlight {
		for part := range s.parts {
			wrong := s.check(got[:size], first+i, part)
			// Calls that have not ended have no result, but those before may tell why.
			if wrong != nil && (err == nil || errors.Is(wrong, errOutOfStep)) {
				p.errorf("%s number %d of %d: part %d: %w", s.call, first+i, total, part, wrong)
			}
			got = got[size:]
		}
	}
	p.must(err)
	if len(p.found) > before {
		panic(stop{})
	}
	p.free(send)
	p.free(recv)
}

var errOutOfStep = errors.New("a call was lost, or came twice")

// check compares an element with the result of a call, and finds out whether it is the result of one nearby.
func (s series) check(got []byte, number, part int) error {
	_, err := reference.Differences(got, s.gets(number, part), len(got))
	if err == nil {
		return nil
	}
	for neighbor := max(0, number-callsInFlight); neighbor <= number+callsInFlight; neighbor++ {
		if bytes.Equal(got, s.gets(neighbor, part)) {
			return fmt.Errorf("it belongs to number %d: %w", neighbor, errOutOfStep)
		}
	}
	return err
}
