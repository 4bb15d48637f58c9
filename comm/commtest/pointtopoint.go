package commtest

import (
	"fmt"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

var messageCases = []testCase{
	{name: "send and receive: ring", body: ring},
	{name: "send and receive: pairs in turn", body: pairs, minRanks: 2},
	{name: "send and receive: everybody with everybody", body: exchangeAll},
	{name: "send and receive: to oneself", body: toOneself},
	{name: "send and receive: one tag keeps its order", body: sameTag},
	{name: "send and receive: tags out of order", body: tagsOutOfOrder, needs: tags},
	{name: "send and receive: all types", body: messageTypes},
}

// send adds a send of n elements whose content tells source, destination and
// serial number.
func (b *batch) send(n int, dt dtype.DType, dest, serial int, tag uint32) {
	l := plain("send", fmt.Sprintf("to %d, tag %d, number %d", dest, tag, serial), n, dt)
	buf := b.input(l, message(n, dt, b.c.Rank(), dest, serial))
	b.call(l, comm.SendCall(buf, n, dt, dest, tag))
}

// recv adds the receive that matches a send with the same serial number.
func (b *batch) recv(n int, dt dtype.DType, src, serial int, tag uint32) {
	l := plain("recv", fmt.Sprintf("from %d, tag %d, number %d", src, tag, serial), n, dt)
	content := message(n, dt, src, b.c.Rank(), serial)
	buf := b.output(l, len(content), want(content, dt))
	b.call(l, comm.RecvCall(buf, n, dt, src, tag))
}

func message(n int, dt dtype.DType, src, dest, serial int) []byte {
	return payload(n, dt, src, dest, serial)
}

// runGroup submits all calls in one group, waits, and verifies.
func (b *batch) runGroup() {
	var group step
	for _, s := range b.steps {
		group.calls = append(group.calls, s.calls...)
	}
	group.label = plain("group", fmt.Sprintf("%d calls", len(group.calls)), 0, dtype.U8)
	b.steps = []step{group}
	b.run()
}

// ring shifts data by every distance, for all counts, as an exchange.
func ring(p *probe) {
	const dt = dtype.U8
	for distance := range p.size {
		for i, n := range p.counts(1, distance%3 == 0) {
			b := p.batch(p.c)
			dest := (p.rank + distance) % p.size
			src := (p.rank + p.size - distance) % p.size
			b.send(n, dt, dest, i, 5)
			b.recv(n, dt, src, i, 5)
			b.runGroup()
		}
	}
}

// pairs sends without a group: the lower rank of every pair sends first, so
// that no two wait for each other even if a send waits for its receive.
func pairs(p *probe) {
	const dt = dtype.U8
	for low := range p.size {
		for high := low + 1; high < p.size; high++ {
			b := p.batch(p.c)
			switch p.rank {
			case low:
				b.send(1000, dt, high, 0, 1)
				b.recv(70, dt, high, 1, 2)
			case high:
				b.recv(1000, dt, low, 0, 1)
				b.send(70, dt, low, 1, 2)
			}
			b.run()
		}
	}
}

// exchangeAll lets everybody send to everybody in one group, the receives
// submitted first on odd ranks.
func exchangeAll(p *probe) {
	const dt = dtype.U8
	for _, n := range []int{1, 1000} {
		b := p.batch(p.c)
		sends := func() {
			for r := range p.size {
				b.send(n+r, dt, r, n, uint32(10+r))
			}
		}
		recvs := func() {
			for r := range p.size {
				b.recv(n+p.rank, dt, r, n, uint32(10+p.rank))
			}
		}
		if p.rank%2 == 0 {
			sends()
			recvs()
		} else {
			recvs()
			sends()
		}
		b.runGroup()
	}
}

// toOneself exchanges several messages with oneself, in both orders.
func toOneself(p *probe) {
	const dt = dtype.U8
	for _, n := range []int{0, 1, 1000} {
		b := p.batch(p.c)
		b.send(n, dt, p.rank, 0, 3)
		b.recv(n, dt, p.rank, 0, 3)
		b.recv(n, dt, p.rank, 1, 4)
		b.send(n, dt, p.rank, 1, 4)
		b.runGroup()
	}
}

// sameTag sends many messages with one tag, which must arrive in order.
func sameTag(p *probe) {
	const messages = 20
	const dt = dtype.U8
	b := p.batch(p.c)
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	for i := range messages {
		b.send(50, dt, next, i, 9)
	}
	for i := range messages {
		b.recv(50, dt, prev, i, 9)
	}
	b.runGroup()
}

// tagsOutOfOrder receives in the reverse order of sending, from the neighbour and from oneself.
// The tags are all that have one bit, and the extremes: a backend that loses a bit of a tag, or
// keeps it in fewer, takes one of them for another. Messages are short, and too long to travel with what announces
// them.
func tagsOutOfOrder(p *probe) {
	const dt = dtype.U8
	tags := []uint32{0, math.MaxUint32, math.MaxUint32 - 1}
	for bit := range 32 {
		tags = append(tags, 1<<bit)
	}
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	for _, n := range []int{30, 5000, 70_000} {
		b := p.batch(p.c)
		for i, tag := range tags {
			b.send(n, dt, next, i, tag)
			b.send(n, dt, p.rank, len(tags)+i, tag)
		}
		for i, tag := range slices.Backward(tags) {
			b.recv(n, dt, prev, i, tag)
			b.recv(n, dt, p.rank, len(tags)+i, tag)
		}
		b.runGroup()
	}
}

// messageTypes sends every type.
func messageTypes(p *probe) {
	b := p.batch(p.c)
	next := (p.rank + 1) % p.size
	prev := (p.rank + p.size - 1) % p.size
	for i, dt := range dtype.All() {
		b.send(33, dt, next, i, 1)
		b.recv(33, dt, prev, i, 1)
	}
	b.runGroup()
}
