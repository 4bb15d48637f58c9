package mpi

import (
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/queue"
)

// tagSpace shares the tags of an MPI communicator out. MPI guarantees 0 to 32767, and libraries have 2^20 to
// 2^31. The lower half belongs to the engine.
type tagSpace struct {
	head     uint64 // of the heads of users' messages
	data     uint64 // of data that does not travel with its head, of the user's tag 0
	narrow   uint64 // number of users' tags whose data has a tag of the library
	numbered uint64 // the first of data with other tags
	last     uint64 // the highest tag that the library has
}

func newTagSpace(maxTag uint64) tagSpace {
	half := (maxTag + 1) / 2
	quarter := half / 2
	return tagSpace{
		head:     half,
		data:     half + 1,
		narrow:   quarter - 1,
		numbered: half + quarter,
		last:     maxTag,
	}
}

// dataTag returns the library's tag of the data of a message with a user's tag, the n-th with one of the others.
func (s *tagSpace) dataTag(tag, n uint64) uint64 {
	if tag < s.narrow {
		return s.data + tag
	}
	return s.numbered + n%(s.last-s.numbered+1)
}

// matching gives users' messages to their receives. A library searches its lists of messages and receives from the
// front, and has no room for all tags. So all heads between two ranks have one tag of the library: each is the first of
// its list, and they come in order. A head has the user's tag, by which this rank finds the receive. Data that does not
// travel with its head has the user's tag where the library has room for it, and is received at once. Otherwise it has
// a number that both ends count.
type matching struct {
	wire    *wire           // whose messages these are; its engine's lock guards all of them
	peers   []matchPeer     // by rank
	arrived []schedule.Done // receives that a head has completed, since the last Poll
	failure error           // of a head, nil for none
}

// matchPeer is what is known of users' messages from and to a rank.
type matchPeer struct {
	sent    uint64                    // messages to it whose data has a number
	came    uint64                    // heads from it of such messages
	heads   headBuffers               // for heads from it
	waiting int                       // receives without a head
	single  headRecv                  // the only one of them, unless its id is none
	recvs   queue.Keyed[headRecv]     // the others, by the user's tag
	data    queue.Keyed[dataRecv]     // receives of data whose head has not come, by the user's tag
	last    int                       // the engine's number of the last receive of a head
	matched uint64                    // tag of its data, if the head had come before; 0 otherwise
	early   queue.Keyed[earlyMessage] // messages without a receive, by the user's tag
	parked  map[uint64]bool           // tags that the data of early messages has; nil for none
}

// headRecv is a receive that waits for a head.
type headRecv struct {
	tag     uint64  // the user's
	id      int     // of the engine
	address uintptr // of schedule.HeadedBytes bytes
}

// dataRecv is a receive of data that follows a head.
type dataRecv struct {
	id      int     // of the engine
	headID  int     // of the engine, of the head's receive
	address uintptr // of room bytes
	room    int     // bytes
}

// earlyMessage is a head that has come, and the short data behind it.
type earlyMessage struct {
	message []byte // head and data
	dataTag uint64 // of data that follows, 0 for none
}

// headsPosted is how many receives of heads are the library's at once, for each rank: as many as it takes in one look.
const headsPosted = 8

// headBuffers are the library's receives of heads from a rank, in the order of their matching.
type headBuffers struct {
	heads   [headsPosted]postedHead // zero before their first use
	buffers [headsPosted]uintptr    // of schedule.HeadedBytes bytes each; 0 before the first use
	first   uint                    // the oldest that is posted
	posted  int                     // number of them; the receives that wait are at least as many
}

// postedHead is a receive of a head by the library.
type postedHead struct {
	address uintptr // one of the buffers, or memory of a receive that waits alone
	bytes   int     // that have come, absent before
}

const absent = -1

func newMatching(w *wire, size int) *matching {
	return &matching{wire: w, peers: make([]matchPeer, size)}
}

// Receives of heads have negative numbers among the engine's, from headBase on.
const headBase = none - 1

// sendTag returns the library's tag of a message that the engine sends.
func (t *matching) sendTag(m *schedule.Message) uint64 {
	tags := &t.wire.tags
	if m.Headed && m.Tag < tags.narrow {
		return tags.head
	}
	p := &t.peers[m.Peer]
	if !m.Headed {
		return tags.dataTag(m.Tag, p.sent)
	}
	if _, followed, _ := schedule.ReadHead(hostmem.Slice[byte](m.Address, m.Bytes)); followed {
		p.sent++
	}
	return tags.head
}

// receive receives a message of the engine.
func (t *matching) receive(id int, m *schedule.Message) {
	if !m.Headed {
		t.receiveData(id, m)
		return
	}
	p := &t.peers[m.Peer]
	r := headRecv{m.Tag, id, m.Address}
	p.last = id
	p.matched = 0
	if !p.early.Empty() {
		if early, ok := p.early.Pop(m.Tag); ok {
			delete(p.parked, early.dataTag)
			p.matched = early.dataTag
			t.complete(r, early.message)
			return
		}
	}
	p.push(r)
	t.listen(m.Peer)
}

// receiveData receives data of the last message that receive was called for.
func (t *matching) receiveData(id int, m *schedule.Message) {
	p := &t.peers[m.Peer]
	if m.Tag < t.wire.tags.narrow {
		t.wire.post(id, t.wire.lib.Irecv, m.Address, m.Bytes, m.Peer, t.wire.tags.dataTag(m.Tag, 0))
		return
	}
	if p.matched != 0 {
		t.wire.post(id, t.wire.lib.Irecv, m.Address, m.Bytes, m.Peer, p.matched)
		return
	}
	p.data.Push(m.Tag, dataRecv{id, p.last, m.Address, m.Bytes})
}

// push adds a receive that waits for a head.
func (p *matchPeer) push(r headRecv) {
	p.waiting++
	if p.waiting == 1 {
		p.single = r
		return
	}
	if p.waiting == 2 && p.single.id != none {
		p.recvs.Push(p.single.tag, p.single)
		p.single.id = none
	}
	p.recvs.Push(r.tag, r)
}

// alone reports whether a single receive waits for a head, and is the peer's single.
func (p *matchPeer) alone() bool { return p.waiting == 1 && p.single.id != none }

// pop removes the oldest receive that waits for a head with a tag.
func (p *matchPeer) pop(tag uint64) (r headRecv, ok bool) {
	if p.alone() {
		r = p.single
		ok = r.tag == tag
	} else {
		r, ok = p.recvs.Pop(tag)
	}
	if ok {
		p.waiting--
	}
	return r, ok
}

// complete gives a head and the data behind it to a receive.
func (t *matching) complete(r headRecv, message []byte) {
	if r.address != hostmem.Addr(message) {
		copy(hostmem.Slice[byte](r.address, schedule.HeadedBytes), message)
		clear(message) // perhaps memory of a receive that has no head yet
	}
	t.arrived = append(t.arrived, schedule.Done{ID: r.id, Bytes: len(message)})
}

// listen has the library receive heads of a rank, not more than receives wait.
func (t *matching) listen(rank int) {
	p := &t.peers[rank]
	b := &p.heads
	for b.posted < min(p.waiting, headsPosted) {
		i := (b.first + uint(b.posted)) % headsPosted
		address := p.single.address
		// The next head is for this receive if any is. Later it would not be: an earlier head may complete the receive.
		if b.posted > 0 || !p.alone() {
			if b.buffers[i] == 0 {
				buffer, err := host.Allocate(schedule.HeadedBytes)
				if err != nil {
					t.failure = err
					return
				}
				b.buffers[i] = buffer
			}
			address = b.buffers[i]
		}
		b.heads[i] = postedHead{address, absent}
		b.posted++
		id := headBase - rank*headsPosted - int(i)
		t.wire.postHead(id, address, rank)
	}
}

// poll replaces what is done of the library's by what is done of the engine's. heads reports whether heads have come.
func (t *matching) poll(done []schedule.Done, from int) (result []schedule.Done, heads bool, err error) {
	engines := from
	for i := from; i < len(done); i++ {
		d := &done[i]
		if d.ID < 0 {
			if d.Err != nil {
				return done[:from], false, d.Err
			}
			heads = true
			place := uint(headBase - d.ID)
			id, err := t.heard(int(place/headsPosted), place%headsPosted, d.Bytes)
			if err != nil {
				return done[:from], false, err
			}
			if id == none {
				continue
			}
			d.ID = id
		}
		if engines < i {
			done[engines] = *d
		}
		engines++
	}
	done = done[:engines]
	if len(t.arrived) > 0 {
		done = append(done, t.arrived...)
		t.arrived = t.arrived[:0]
	}
	return done, heads, t.failure
}

// heard takes heads of a rank in their order, when one of them has come. It returns the engine's number of the receive
// that this completes, none if it is another one, or there is none.
func (t *matching) heard(rank int, place uint, bytes int) (id int, err error) {
	p := &t.peers[rank]
	b := &p.heads
	h := &b.heads[place]
	if p.alone() && h.address == p.single.address && p.single.tag < t.wire.tags.narrow {
		tag, _, ok := schedule.ReadHead(hostmem.Slice[byte](h.address, bytes))
		if ok && uint64(tag) == p.single.tag { // as in most programs
			p.waiting = 0
			b.posted = 0
			b.first = 0
			return p.single.id, nil
		}
	}
	h.bytes = bytes
	for b.posted > 0 && b.heads[b.first].bytes != absent {
		message := hostmem.Slice[byte](b.heads[b.first].address, b.heads[b.first].bytes)
		b.first = (b.first + 1) % headsPosted
		b.posted--
		if err := t.match(rank, message); err != nil {
			return none, err
		}
	}
	if b.posted == 0 {
		b.first = 0 // a buffer that is in the cache
	}
	t.listen(rank)
	return none, t.failure
}

// match finds the receive of a message.
func (t *matching) match(rank int, message []byte) error {
	p := &t.peers[rank]
	tag, followed, ok := schedule.ReadHead(message)
	if !ok {
		return fmt.Errorf("%w: rank %d sent a head of %d bytes", comm.ErrMismatch, rank, len(message))
	}
	tags := &t.wire.tags
	numbered := followed && uint64(tag) >= tags.narrow
	dataTag := uint64(0)
	if numbered {
		p.came++
		dataTag = tags.dataTag(uint64(tag), p.came)
		if p.parked[dataTag] {
			return fmt.Errorf("%w: more than %d long messages of rank %d with tags from %d on wait for receives",
				comm.ErrExhausted, tags.last-tags.numbered, rank, tags.narrow)
		}
	}
	r, ok := p.pop(uint64(tag))
	if !ok {
		p.keep(uint64(tag), earlyMessage{slices.Clone(message), dataTag})
		clear(message)
		return nil
	}
	t.complete(r, message)
	for !p.data.Empty() {
		d, ok := p.data.First(uint64(tag))
		if !ok || d.headID != r.id {
			return nil
		}
		p.data.Pop(uint64(tag))
		if numbered {
			t.wire.post(d.id, t.wire.lib.Irecv, d.address, d.room, rank, dataTag)
		}
	}
	return nil
}

// keep keeps a message without a receive.
func (p *matchPeer) keep(tag uint64, m earlyMessage) {
	p.early.Push(tag, m)
	if m.dataTag == 0 {
		return
	}
	if p.parked == nil {
		p.parked = map[uint64]bool{}
	}
	p.parked[m.dataTag] = true
}

// release frees the buffers, when no receive is in flight.
func (t *matching) release() {
	for i := range t.peers {
		for _, buffer := range t.peers[i].heads.buffers {
			_ = host.Deallocate(buffer)
		}
	}
}
