package mpi

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/queue"
)

// tagSpace shares the tags of an MPI communicator out. MPI guarantees 0 to 32767, and libraries have 2^20 to
// 2^31. The lower half belongs to the engine.
type tagSpace struct {
	first    uint64 // the tag of users' messages with tag 0
	narrow   uint64 // number of users' tags that have one of the library's
	envelope uint64 // of envelopes
	data     uint64 // the first of messages that an envelope announces
	last     uint64 // the highest tag that the library has
}

func newTagSpace(maxTag uint64) tagSpace {
	half := (maxTag + 1) / 2
	quarter := half / 2
	return tagSpace{
		first:    half,
		narrow:   quarter,
		envelope: half + quarter,
		data:     half + quarter + 1,
		last:     maxTag,
	}
}

// wideTags are messages of users with tags that the library has no room for. The sender sends an envelope, which has
// the tag, with short data behind it. Longer data follows in a separate message, whose tag of the library is in the
// envelope: the next one in turn. All envelopes between two ranks have one tag, so they come in order. While receives
// of a rank's messages wait, one envelope of it is asked for at a time. Envelopes that none of them waits for are kept.
type wideTags struct {
	wire    *wire           // whose they are; its engine's lock guards all of them
	peers   []widePeer      // by rank
	sends   []wideSend      // envelopes that are being sent, by number
	vacant  []int           // numbers that none has
	arrived []schedule.Done // receives that an envelope has completed, since the last Poll
	failure error           // of an envelope, nil for none
}

// widePeer is what is known of messages from and to a rank.
type widePeer struct {
	announced uint64                   // messages to it whose data does not fit behind the envelope
	buffer    uintptr                  // for an envelope from it, 0 before the first receive
	asked     bool                     // the buffer is MPI's
	unmatched int                      // receives that wait
	receives  queue.Keyed[wideReceive] // which, by tag
	kept      queue.Keyed[letter]      // messages that no receive waits for, by tag
	parked    map[uint64]bool          // tags of the library that their data has; nil for none
}

// envelope precedes the data of a message.
type envelope struct {
	tag   uint64 // the user's
	bytes uint64 // of the data
	data  uint64 // the library's tag of the data, 0 if it is behind the envelope
}

// letter is a message that has come before its receive.
type letter struct {
	envelope
	short []byte // the data behind the envelope
}

// wideReceive is a receive that waits for its envelope.
type wideReceive struct {
	id      int     // of the engine
	address uintptr // of room bytes
	room    int     // bytes
}

// wideSend is an envelope that is being sent.
type wideSend struct {
	id     int     // of the engine's message, none if that ends with its data
	memory uintptr // of envelopeRoom bytes; 0 before the first use
}

// An envelope has room for the head of an engine's message with the short data behind it.
const (
	envelopeBytes = 24
	envelopeRoom  = envelopeBytes + 4<<10
)

func newWideTags(w *wire, size int) *wideTags {
	return &wideTags{wire: w, peers: make([]widePeer, size)}
}

// Requests for envelopes have negative numbers among the engine's: -2, -3, … are those that are sent, and those that
// are received lie below.
const askedBase = -1 << 30

func sendRequest(number int) int { return none - 1 - number }
func askRequest(rank int) int    { return askedBase - rank }

// send sends a message of the engine.
func (t *wideTags) send(id int, m *schedule.Message) {
	number := len(t.sends)
	if last := len(t.vacant) - 1; last >= 0 {
		number = t.vacant[last]
		t.vacant = t.vacant[:last]
	} else {
		t.sends = append(t.sends, wideSend{})
	}
	s := &t.sends[number]
	if s.memory == 0 {
		memory, err := host.Allocate(envelopeRoom)
		if err != nil {
			t.failure = err
			return
		}
		s.memory = memory
	}
	e := envelope{tag: m.Tag, bytes: uint64(m.Bytes)}
	length := envelopeBytes
	s.id = id
	if envelopeBytes+m.Bytes <= envelopeRoom {
		data := hostmem.Slice[byte](m.Address, m.Bytes)
		length += copy(hostmem.Slice[byte](s.memory+envelopeBytes, m.Bytes), data)
	} else {
		p := &t.peers[m.Peer]
		tags := t.wire.tags
		e.data = tags.data + p.announced%(tags.last-tags.data+1)
		p.announced++
		s.id = none
		t.wire.post(id, t.wire.lib.Isend, m.Address, m.Bytes, m.Peer, e.data)
	}
	hostmem.Slice[envelope](s.memory, 1)[0] = e
	t.wire.post(sendRequest(number), t.wire.lib.Isend, s.memory, length, m.Peer, t.wire.tags.envelope)
}

// receive receives a message of the engine.
func (t *wideTags) receive(id int, m *schedule.Message) {
	p := &t.peers[m.Peer]
	r := wideReceive{id, m.Address, m.Bytes}
	if l, ok := p.kept.Pop(m.Tag); ok {
		delete(p.parked, l.data)
		t.match(m.Peer, r, l)
		return
	}
	p.receives.Push(m.Tag, r)
	p.unmatched++
	t.ask(m.Peer)
}

// ask asks for the next envelope of a rank, if receives wait for one.
func (t *wideTags) ask(rank int) {
	p := &t.peers[rank]
	if p.asked || p.unmatched == 0 {
		return
	}
	if p.buffer == 0 {
		buffer, err := host.Allocate(envelopeRoom)
		if err != nil {
			t.failure = err
			return
		}
		p.buffer = buffer
	}
	p.asked = true
	t.wire.post(askRequest(rank), t.wire.lib.Irecv, p.buffer, envelopeRoom, rank, t.wire.tags.envelope)
}

// match gives a message to its receive.
func (t *wideTags) match(rank int, r wideReceive, l letter) {
	switch {
	case l.data == 0:
		copy(hostmem.Slice[byte](r.address, r.room), l.short)
		t.arrived = append(t.arrived, schedule.Done{ID: r.id, Bytes: int(l.bytes)})
	case l.bytes > uint64(r.room):
		t.arrived = append(t.arrived, schedule.Done{ID: r.id, Bytes: int(l.bytes)})
	case t.peers[rank].parked[l.data]:
		const format = "%w: more than %d messages with tags from %d on lie between one of rank %d and its receive"
		tags := t.wire.tags
		t.failure = fmt.Errorf(format, comm.ErrExhausted, tags.last-tags.data, tags.narrow, rank)
	default:
		t.wire.post(r.id, t.wire.lib.Irecv, r.address, r.room, rank, l.data)
	}
}

// poll replaces what is done of the library's by what is done of the engine's. It reports whether the library has
// something new to do.
func (t *wideTags) poll(done []schedule.Done, from int) ([]schedule.Done, error) {
	all := done[from:]
	done = done[:from]
	for _, d := range all {
		switch {
		case d.ID >= 0:
			done = append(done, d)
		case d.Err != nil:
			return done, d.Err
		case d.ID > askedBase:
			number := sendRequest(d.ID) // its own inverse
			if id := t.sends[number].id; id != none {
				done = append(done, schedule.Done{ID: id})
			}
			t.vacant = append(t.vacant, number)
		default:
			if err := t.envelope(askRequest(0)-d.ID, d.Bytes); err != nil {
				return done, err
			}
		}
	}
	return t.takeArrived(done)
}

// takeArrived appends the receives that envelopes have completed.
func (t *wideTags) takeArrived(done []schedule.Done) ([]schedule.Done, error) {
	done = append(done, t.arrived...)
	t.arrived = t.arrived[:0]
	return done, t.failure
}

// envelope takes an envelope that a rank has sent.
func (t *wideTags) envelope(rank, bytes int) error {
	p := &t.peers[rank]
	p.asked = false
	if bytes < envelopeBytes {
		return fmt.Errorf("%w: rank %d sent an envelope of %d bytes", comm.ErrMismatch, rank, bytes)
	}
	l := letter{envelope: hostmem.Slice[envelope](p.buffer, 1)[0]}
	if l.data == 0 {
		l.short = hostmem.Slice[byte](p.buffer+envelopeBytes, bytes-envelopeBytes)
	}
	tags := t.wire.tags
	if l.data == 0 && l.bytes != uint64(len(l.short)) || l.data != 0 && (l.data < tags.data || l.data > tags.last) {
		return fmt.Errorf("%w: rank %d sent an envelope that is none", comm.ErrMismatch, rank)
	}
	if r, ok := p.receives.Pop(l.tag); ok {
		p.unmatched--
		t.match(rank, r, l)
	} else {
		t.keep(p, rank, l)
	}
	t.ask(rank)
	return t.failure
}

// keep keeps a message that no receive waits for.
func (t *wideTags) keep(p *widePeer, rank int, l letter) {
	l.short = append([]byte(nil), l.short...)
	p.kept.Push(l.tag, l)
	if l.data == 0 {
		return
	}
	if p.parked == nil {
		p.parked = map[uint64]bool{}
	}
	if p.parked[l.data] {
		t.failure = fmt.Errorf("%w: more than %d long messages of rank %d wait for receives",
			comm.ErrExhausted, t.wire.tags.last-t.wire.tags.data, rank)
	}
	p.parked[l.data] = true
}

// release gives the memory of envelopes back, when none is in flight.
func (t *wideTags) release() {
	for i := range t.sends {
		_ = host.Deallocate(t.sends[i].memory)
	}
	for i := range t.peers {
		_ = host.Deallocate(t.peers[i].buffer)
	}
}
