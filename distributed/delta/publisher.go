package delta

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
)

// A Publisher hands the versions of tensors to subscribers. It keeps a copy of the latest version in
// host memory, and the deltas that led to it, as far as they are together smaller than that.
// It is for one goroutine.
type Publisher struct {
	link
	replica *replica
	log     []*Delta
}

// NewPublisher returns a publisher that has no version yet. It sends over c through memory of rt;
// without communicator (nil), [Publisher.WriteSince] alone.
func NewPublisher(rt runtime.Runtime, c comm.Communicator) *Publisher {
	return &Publisher{link: link{rt, c}, replica: &replica{}}
}

// Publish makes the tensors a version, above the one before, and sends it to the subscribers, all of which call
// [Subscriber.Update]. Every rank that trains publishes the tensors that are its own, under the same version;
// names and shapes may differ from those of the version before.
//
// If the tensors cannot be coded, the publisher is at the version before. If sending fails it is at the new
// one, and [Publisher.Send] sends it again.
func (p *Publisher) Publish(ctx context.Context, version uint64, tensors []Tensor) error {
	if err := p.Commit(ctx, version, tensors); err != nil {
		return err
	}
	return p.Send(ctx)
}

// Commit is Publish without sending.
func (p *Publisher) Commit(ctx context.Context, version uint64, tensors []Tensor) error {
	if version <= p.replica.version {
		return fmt.Errorf("delta: version %d is published after %d: %w", version, p.replica.version, comm.ErrArgument)
	}
	next, err := newReplica(version, tensors)
	if err != nil {
		return err
	}
	next.hook = p.replica.hook
	d, err := diff(ctx, p.replica, next, nil)
	if err != nil {
		return err
	}
	a, err := p.replica.apply(ctx, d, func(t Tensor) (Memory, error) { return make(Host, t.elements*t.DType.Size()), nil }, nil)
	if err != nil {
		return err
	}
	a.commit()
	if p.log = append(p.log, d); d.layout != nil {
		p.log = p.log[len(p.log)-1:]
	}
	total := 0
	for i, d := range slices.Backward(p.log) {
		for _, c := range d.tensors {
			for _, b := range c.blocks {
				total += len(b.code)
			}
		}
		if total > p.replica.bytes() && i < len(p.log)-1 {
			p.log = slices.Delete(p.log, 0, i+1)
			break
		}
	}
	return nil
}

// Version returns the latest version, 0 if there is none.
func (p *Publisher) Version() uint64 { return p.replica.version }

// Stat counts what the latest delta holds.
func (p *Publisher) Stat() Stat { return p.log[len(p.log)-1].Stat() }

// WriteSince writes what makes subscribers of that version, from 1 on, those of the latest, to a file or a connection from which
// they [Subscriber.Read]: the versions between, folded, or a full copy if that is smaller, if
// the publisher does not know the version, or if tensors have come, gone or changed their shapes in between.
func (p *Publisher) WriteSince(ctx context.Context, w io.Writer, version uint64) error {
	d, err := p.since(ctx, version, nil)
	if err != nil {
		return err
	}
	_, err = d.WriteTo(w)
	return err
}

// since returns the delta from a version, of which it checks the digest if there is one.
func (p *Publisher) since(ctx context.Context, version uint64, digest *uint32) (*Delta, error) {
	if p.replica.version == 0 {
		return nil, errors.New("delta: nothing is published yet")
	}
	var d *Delta
	for _, next := range p.log {
		var err error
		switch {
		case d != nil && d.layout != nil: // another layout before: a full copy
			d = nil
		case d != nil:
			d, err = fold(ctx, d, next, p.replica)
		case next.Base == version && version != 0 && (digest == nil || *digest == next.digest):
			d = next
		}
		if err != nil {
			return nil, err
		}
	}
	if d != nil && d.Stat().Bytes < uint64(p.replica.bytes()/2) {
		return d, nil
	}
	to := *p.replica
	to.sums = nil
	for _, s := range p.replica.sums {
		to.sums = append(to.sums, slices.Clone(s))
	}
	full, err := diff(ctx, &replica{hook: to.hook}, &to, nil)
	if err != nil || d != nil && d.Stat().Bytes <= full.Stat().Bytes {
		return d, err
	}
	return full, nil
}

// fold returns the delta that does what two do one after the other, the second of which keeps the layout, that of r.
func fold(ctx context.Context, first, then *Delta, r *replica) (*Delta, error) {
	d := *first
	d.Target = then.Target
	d.tensors = nil
	type pair struct {
		block       int
		first, then []byte
	}
	var pairs []pair
	blocks := map[[2]int]int{} // where a tensor's block is in pairs
	sums := map[int]uint32{}
	for i, part := range []*Delta{first, then} {
		for _, c := range part.tensors {
			sums[c.tensor] = c.sum
			for _, b := range c.blocks {
				at, ok := blocks[[2]int{c.tensor, b.at}]
				if !ok {
					at = len(pairs)
					blocks[[2]int{c.tensor, b.at}] = at
					pairs = append(pairs, pair{block: b.at})
				}
				if i == 0 {
					pairs[at].first = b.code
				} else {
					pairs[at].then = b.code
				}
			}
		}
	}
	places := make([][2]int, len(pairs))
	for k, at := range blocks {
		places[at] = k
	}
	err := parallel(ctx, len(pairs), nil, func(c *coder, i int) (err error) {
		x, t := &pairs[i], &r.tensors[places[i][0]]
		if x.first == nil || x.then == nil {
			x.first = append(x.first, x.then...)
			return nil
		}
		from, to := t.bounds(x.block)
		x.first, err = c.fold(x.first, x.then, (to-from)/t.DType.Size(), t.DType)
		return err
	})
	if err != nil {
		return nil, err
	}
	for t := range r.tensors {
		c := change{tensor: t, sum: sums[t]}
		for b := range r.tensors[t].blocks() {
			if at, ok := blocks[[2]int{t, b}]; ok && pairs[at].first != nil {
				c.blocks = append(c.blocks, block{b, pairs[at].first})
			}
		}
		if c.blocks != nil {
			d.tensors = append(d.tensors, c)
		}
	}
	return &d, nil
}

// link is how publishers and subscribers reach each other.
type link struct {
	rt runtime.Runtime
	c  comm.Communicator
}

// Rebind has the communicator replaced, by one over the ranks that are left, or more.
func (l *link) Rebind(c comm.Communicator) { l.c = c }

// peer is what a rank announces.
type peer struct {
	publishes, together bool
	version             uint64   // of a publisher: the latest
	digests             []uint32 // of a subscriber: one a publisher, in their order; of a publisher: of its version
	other               uint64   // of a publisher: the version before; of a subscriber: the one in doubt
	others              []uint32
}

func (p *peer) encode() []byte {
	b := []byte{0}
	if p.publishes {
		b[0] |= 1
	}
	if p.together {
		b[0] |= 2
	}
	for _, half := range []struct {
		version uint64
		digests []uint32
	}{{p.version, p.digests}, {p.other, p.others}} {
		b = binary.AppendUvarint(binary.AppendUvarint(b, half.version), uint64(len(half.digests)))
		for _, d := range half.digests {
			b = binary.LittleEndian.AppendUint32(b, d)
		}
	}
	return b
}

func (p *peer) decode(b []byte) bool {
	src := cursor{rest: b}
	flags := src.byte()
	p.publishes, p.together = flags&1 != 0, flags&2 != 0
	half := func() (version uint64, digests []uint32) {
		version = src.uvarint()
		for n := src.uvarint(); n > 0 && !src.bad; n-- {
			digests = append(digests, src.uint32())
		}
		return version, digests
	}
	p.version, p.digests = half()
	p.other, p.others = half()
	return !src.bad
}

// meeting is what all ranks know of each other.
type meeting struct {
	peers      []peer
	publishers []int
	version    uint64
	together   bool
}

// meet exchanges what ranks announce.
func (l *link) meet(ctx context.Context, mine peer) (*meeting, error) {
	if l.c == nil {
		return nil, fmt.Errorf("delta: without a communicator: %w", comm.ErrArgument)
	}
	all, err := distributed.AllGatherBytes(ctx, l.rt, l.c, mine.encode())
	if err != nil {
		return nil, err
	}
	m := &meeting{peers: make([]peer, len(all))}
	doubt := uint64(0)
	for rank, b := range all {
		p := &m.peers[rank]
		if !p.decode(b) {
			return nil, fmt.Errorf("delta: rank %d runs another version of the library: %w", rank, comm.ErrMismatch)
		}
		m.together = m.together || p.together
		if !p.publishes {
			doubt = max(doubt, p.version)
			continue
		}
		m.publishers = append(m.publishers, rank)
		if m.version == 0 {
			m.version = p.version
		}
		if p.version != m.version || p.version == 0 || len(p.digests) != 1 || len(p.others) != 1 {
			return nil, fmt.Errorf("delta: rank %d publishes version %d, rank %d %d: %w", m.publishers[0], m.version, rank, p.version, comm.ErrMismatch)
		}
	}
	if len(m.publishers) == 0 {
		return nil, fmt.Errorf("delta: no rank publishes: %w", comm.ErrMismatch)
	}
	for rank := range m.peers { // what was in doubt has been committed if any rank has it
		if p := &m.peers[rank]; !p.publishes && p.other != 0 && doubt >= p.other {
			p.version, p.digests = p.other, p.others
		}
	}
	return m, nil
}

// What a rank needs of a publisher.
const (
	nothing = iota
	latest  // the latest delta
	catchUp // another
)

// needs says what a rank needs of the k-th publisher.
func (m *meeting) needs(rank, k int) int {
	p, from := &m.peers[rank], &m.peers[m.publishers[k]]
	if p.publishes {
		return nothing
	}
	has := func(version uint64, digests []uint32) bool {
		return p.version == version && version != 0 && k < len(p.digests) && p.digests[k] == digests[0]
	}
	switch {
	case has(from.version, from.digests):
		return nothing
	case has(from.other, from.others) || p.version == 0 && from.other == 0:
		return latest
	}
	return catchUp
}

// any reports whether some rank needs that of the k-th publisher.
func (m *meeting) any(k, what int) bool {
	for rank := range m.peers {
		if m.needs(rank, k) == what {
			return true
		}
	}
	return false
}

// distribute sends the messages of all publishers, and returns those for this rank. p is nil on ranks that do
// not publish.
func (l *link) distribute(ctx context.Context, m *meeting, p *Publisher, step func() error) (messages [][]byte, err error) {
	defer func() {
		if err != nil { // the ranks are out of step
			l.c.Abort(err)
		}
	}()
	me := l.c.Rank()
	for k, root := range m.publishers {
		var mine []byte
		for _, what := range []int{latest, catchUp} {
			if !m.any(k, what) {
				continue
			}
			if err := step(); err != nil {
				return nil, err
			}
			var got []byte
			if what == latest {
				var b bytes.Buffer
				if me == root {
					_, err = p.log[len(p.log)-1].WriteTo(&b)
				}
				if err == nil {
					got, err = distributed.BroadcastBytes(ctx, l.rt, l.c, b.Bytes(), root)
				}
			} else {
				parts := make([][]byte, len(m.peers))
				if me == root {
					err = p.parts(ctx, m, k, parts)
				}
				if err == nil {
					got, err = distributed.ScatterBytes(ctx, l.rt, l.c, parts, root)
				}
			}
			if err != nil {
				return nil, err
			}
			if m.needs(me, k) == what {
				mine = got
			}
		}
		messages = append(messages, mine)
	}
	return messages, nil
}

// parts sets the messages for the ranks that have missed versions.
func (p *Publisher) parts(ctx context.Context, m *meeting, k int, parts [][]byte) error {
	made := map[uint64][]byte{}
	for rank := range m.peers {
		if m.needs(rank, k) != catchUp {
			continue
		}
		digest := uint32(0)
		if d := m.peers[rank].digests; k < len(d) {
			digest = d[k]
		}
		key := m.peers[rank].version<<32 | uint64(digest)
		if made[key] == nil {
			d, err := p.since(ctx, m.peers[rank].version, &digest)
			if err != nil {
				return err
			}
			var b bytes.Buffer
			if _, err := d.WriteTo(&b); err != nil {
				return err
			}
			made[key] = b.Bytes()
		}
		parts[rank] = made[key]
	}
	return nil
}

// Send sends the latest version to all subscribers that do not have it; they call [Subscriber.Update].
func (p *Publisher) Send(ctx context.Context) error {
	mine := peer{publishes: true, version: p.replica.version, digests: []uint32{p.replica.digest()}, others: []uint32{0}}
	if n := len(p.log); n > 0 {
		mine.other, mine.others[0] = p.log[n-1].Base, p.log[n-1].digest
	}
	if err := p.replica.step(); err != nil {
		return err
	}
	m, err := p.meet(ctx, mine)
	if err != nil {
		return err
	}
	if _, err := p.distribute(ctx, m, p, p.replica.step); err != nil || !m.together {
		return err
	}
	_, err = p.vote(ctx, true)
	return err
}

// vote returns the first rank that says no, -1 if none does.
func (l *link) vote(ctx context.Context, yes bool) (no int, err error) {
	mine := []byte{0}
	if yes {
		mine[0] = 1
	}
	all, err := distributed.AllGatherBytes(ctx, l.rt, l.c, mine)
	if err != nil {
		return 0, err
	}
	return slices.IndexFunc(all, func(b []byte) bool { return len(b) != 1 || b[0] != 1 }), nil
}
