package delta

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/runtime"
)

// A Publisher sends versions of tensors to subscribers. It keeps a copy of the latest version in the tensors' kind of
// memory, and recent deltas that are together smaller than that copy. One goroutine may use it at a time.
type Publisher struct {
	link
	replica *replica // copy of the latest version; version 0 before the first
	log     []*Delta // the latest deltas, oldest first; nil before the second version
}

// NewPublisher returns a publisher without a version. It sends over c through memory of rt. Without a communicator
// (nil), it sends versions only through [Publisher.WriteSince].
func NewPublisher(rt runtime.Runtime, c comm.Communicator) *Publisher {
	return &Publisher{link: link{rt, c}, replica: &replica{}}
}

// Publish makes the tensors a new version with a higher number, and sends it to the subscribers, all of which must
// call [Subscriber.Update]. Every rank that trains publishes its own tensors under the same version. Names and shapes
// may differ from those of the version before.
//
// If the tensors cannot be coded, the publisher stays at the previous version. If the memory of its copy fails, it has
// no version, and the next one is a full copy. If sending fails, the publisher is at the new version, and
// [Publisher.Send] sends it again.
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
	d, err := diff(ctx, p.replica, next, false, math.MaxInt, nil)
	if err != nil {
		return err
	}
	u, err := p.replica.prepare(d, next, func(t Tensor) (Memory, error) {
		return next.tensors[find(next.tensors, &t)].sameMemory()
	})
	if err != nil {
		return err
	}
	if err := u.apply(ctx, nil); err != nil {
		return err
	}
	u.commit()
	p.log = append(p.log, d)
	if d.layout != nil {
		p.log = p.log[len(p.log)-1:]
	}
	total := 0
	for i, d := range slices.Backward(p.log) {
		total += int(d.Stat().Bytes)
		if total > p.replica.bytes() && i < len(p.log)-1 {
			p.log = slices.Delete(p.log, 0, i+1)
			break
		}
	}
	return nil
}

// Close frees the publisher's copy of the latest version, unless that is in Go memory.
func (p *Publisher) Close() {
	p.replica.free()
	p.replica = &replica{}
	p.log = nil
}

// Version returns the latest version, 0 if there is none.
func (p *Publisher) Version() uint64 { return p.replica.version }

// Stat returns the statistics of the latest delta, and zeros before the first version.
func (p *Publisher) Stat() Stat {
	if len(p.log) == 0 {
		return Stat{}
	}
	return p.log[len(p.log)-1].Stat()
}

// WriteSince writes the delta from the given version, at least 1, to the latest, for a file or a connection from which
// subscribers [Subscriber.Read]. It folds the versions between. It writes a full copy if that is smaller, if the
// publisher does not know the version, or if tensors were added, removed or reshaped in between. If the version is the
// latest, the delta has no changes. Like [Diff], it makes shorter deltas than Publish.
func (p *Publisher) WriteSince(ctx context.Context, w io.Writer, version uint64) error {
	d, err := p.deltaFrom(ctx, version, nil, true)
	if err != nil {
		return err
	}
	_, err = d.WriteTo(w)
	return err
}

// deltaFrom returns the delta from a version, and checks the version's digest if there is one. The delta is either
// small or made fast.
func (p *Publisher) deltaFrom(ctx context.Context, version uint64, digest *uint32, small bool) (*Delta, error) {
	if p.replica.version == 0 {
		return nil, errors.New("delta: nothing is published yet")
	}
	if version == p.replica.version && digest == nil {
		return &Delta{
			Base:    version,
			Target:  version,
			digest:  p.replica.digest(),
			weights: p.log[len(p.log)-1].weights,
		}, nil
	}
	from := slices.IndexFunc(p.log, func(d *Delta) bool {
		return d.Base == version && (digest == nil || d.Base == 0 || *digest == d.digest)
	})
	if from >= 0 && from == len(p.log)-1 && (!small || p.log[from].layout != nil) {
		return p.log[from], nil
	}
	var folded *Delta
	limit := math.MaxInt
	if from >= 0 {
		var err error
		if folded, err = p.fold(ctx, from, small); err != nil {
			return nil, err
		}
		if folded != nil {
			limit = int(folded.Stat().Bytes)
		}
	}
	to, _ := p.replica.copied(false)
	full, err := diff(ctx, &replica{hook: to.hook}, to, false, limit, nil)
	if errors.Is(err, errTooLong) || err == nil && folded != nil && folded.Stat().Bytes <= full.Stat().Bytes {
		return folded, nil
	}
	return full, err
}

// fold returns the delta from the version before the log's to the latest, nil if the layout has changed since. It
// subtracts the differences from a copy of the latest version.
func (p *Publisher) fold(ctx context.Context, from int, small bool) (*Delta, error) {
	old, err := p.replica.copied(true)
	if err != nil {
		return nil, err
	}
	for _, d := range slices.Backward(p.log[from:]) {
		if d.layout != nil {
			return nil, nil
		}
		err := parallel(ctx, d.blocks(), nil, func(c *coder, i, j int) error {
			b := d.tensors[i].blocks[j]
			tensor := d.tensors[i].tensor
			place, _, err := old.load(tensor, b.index, &c.new)
			if err != nil {
				return err
			}
			t := &old.tensors[tensor]
			sum := &old.sums[tensor][b.index]
			*sum, err = c.apply(b.code, place, t.DType, t.length(b.index)/t.DType.Size(), *sum, true)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	old.version = p.log[from].Base
	to, _ := p.replica.copied(false)
	d, err := diff(ctx, old, to, small, math.MaxInt, nil)
	if err == nil {
		d.digest = p.log[from].digest
	}
	return d, err
}

// link connects publishers and subscribers.
type link struct {
	rt runtime.Runtime   // c can access its memory
	c  comm.Communicator // communicator of publishers and subscribers
}

// Rebind replaces the communicator, with fewer or more ranks.
func (l *link) Rebind(c comm.Communicator) { l.c = c }

// peer is a rank's announcement.
type peer struct {
	Format              int      // version of the format of deltas
	Publishes, Together bool     // the rank is a publisher; Together: a subscriber that votes
	Version             uint64   // of a publisher the latest, of a subscriber its current one; 0 for none
	Digests             []uint32 // of a subscriber: one for each publisher, in order; of a publisher: of its version
	Other               uint64   // of a publisher: the previous version; of a subscriber: the one in doubt
	Others              []uint32 // the digests of Other, like Digests
}

// meeting is the announcements of all ranks.
type meeting struct {
	peers      []peer // by rank
	publishers []int  // their ranks, ascending
	version    uint64 // the latest, which all publishers have
	voting     bool   // all subscribers vote, because one of them asks for it
}

// meet exchanges the ranks' announcements.
func (l *link) meet(ctx context.Context, announced peer) (*meeting, error) {
	if l.c == nil {
		return nil, fmt.Errorf("delta: without a communicator: %w", comm.ErrArgument)
	}
	announced.Format = version
	text, err := json.Marshal(announced)
	if err != nil {
		return nil, err
	}
	all, err := distributed.AllGatherBytes(ctx, l.rt, l.c, text)
	if err != nil {
		return nil, err
	}
	m := &meeting{peers: make([]peer, len(all))}
	doubt := uint64(0)
	for rank, b := range all {
		p := &m.peers[rank]
		if json.Unmarshal(b, p) != nil {
			return nil, fmt.Errorf("delta: rank %d runs another version of the library: %w", rank, comm.ErrMismatch)
		}
		if p.Format != version {
			err := fmt.Errorf("delta: rank %d speaks version %d of deltas, rank %d version %d: "+
				"publishers and subscribers use one version of the library: %w",
				rank, p.Format, l.c.Rank(), version, comm.ErrMismatch)
			l.c.Abort(err) // a rank that does not compare versions would continue otherwise
			return nil, err
		}
		m.voting = m.voting || p.Together
		if !p.Publishes {
			doubt = max(doubt, p.Version)
			continue
		}
		m.publishers = append(m.publishers, rank)
		if m.version == 0 {
			m.version = p.Version
		}
		if p.Version != m.version || p.Version == 0 || len(p.Digests) != 1 || len(p.Others) != 1 {
			return nil, fmt.Errorf("delta: rank %d publishes version %d, rank %d %d: %w",
				m.publishers[0], m.version, rank, p.Version, comm.ErrMismatch)
		}
	}
	if len(m.publishers) == 0 {
		return nil, fmt.Errorf("delta: no rank publishes: %w", comm.ErrMismatch)
	}
	for rank := range m.peers { // a version in doubt was committed if any rank has it
		if p := &m.peers[rank]; !p.Publishes && p.Other != 0 && doubt >= p.Other {
			p.Version = p.Other
			p.Digests = p.Others
		}
	}
	return m, nil
}

// Parts that a rank may need from a publisher.
const (
	nothing = iota
	latest  // the latest delta
	catchUp // a delta from an older version
)

// needs returns what a rank needs from the k-th publisher.
func (m *meeting) needs(rank, k int) int {
	p := &m.peers[rank]
	from := &m.peers[m.publishers[k]]
	if p.Publishes {
		return nothing
	}
	has := func(version uint64, digests []uint32) bool {
		return p.Version == version && version != 0 && k < len(p.Digests) && p.Digests[k] == digests[0]
	}
	switch {
	case has(from.Version, from.Digests):
		return nothing
	case has(from.Other, from.Others) || p.Version == 0 && from.Other == 0:
		return latest
	}
	return catchUp
}

// anyNeeds reports whether some rank needs this from the k-th publisher.
func (m *meeting) anyNeeds(k, need int) bool {
	for rank := range m.peers {
		if m.needs(rank, k) == need {
			return true
		}
	}
	return false
}

// distribute sends the messages of all publishers, and returns those for this rank. p is nil on ranks that do not
// publish.
func (l *link) distribute(ctx context.Context, m *meeting, p *Publisher, h hook) (messages [][]byte, err error) {
	defer func() {
		if err != nil { // the ranks are out of step
			l.c.Abort(err)
		}
	}()
	me := l.c.Rank()
	for k, root := range m.publishers {
		var message []byte
		for _, need := range []int{latest, catchUp} {
			if !m.anyNeeds(k, need) {
				continue
			}
			if err := h.step(); err != nil {
				return nil, err
			}
			var got []byte
			if need == latest {
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
			if m.needs(me, k) == need {
				message = got
			}
		}
		messages = append(messages, message)
	}
	return messages, nil
}

// parts makes the messages for the ranks that have missed versions.
func (p *Publisher) parts(ctx context.Context, m *meeting, k int, parts [][]byte) error {
	for rank, peer := range m.peers {
		if m.needs(rank, k) != catchUp {
			continue
		}
		digest := uint32(0)
		if k < len(peer.Digests) {
			digest = peer.Digests[k]
		}
		d, err := p.deltaFrom(ctx, peer.Version, &digest, false)
		if err != nil {
			return err
		}
		var b bytes.Buffer
		if _, err := d.WriteTo(&b); err != nil {
			return err
		}
		parts[rank] = b.Bytes()
	}
	return nil
}

// Send sends the latest version to all subscribers that do not have it; they must call [Subscriber.Update].
func (p *Publisher) Send(ctx context.Context) error {
	announced := peer{
		Publishes: true,
		Version:   p.replica.version,
		Digests:   []uint32{p.replica.digest()},
		Others:    []uint32{0},
	}
	if n := len(p.log); n > 0 {
		announced.Other = p.log[n-1].Base
		announced.Others[0] = p.log[n-1].digest
	}
	if err := p.replica.hook.step(); err != nil {
		return err
	}
	m, err := p.meet(ctx, announced)
	if err != nil {
		return err
	}
	if _, err := p.distribute(ctx, m, p, p.replica.hook); err != nil || !m.voting {
		return err
	}
	_, err = p.vote(ctx, true)
	return err
}

// Agree sets the tensors of all ranks of c, which must all call it, to the latest version that any of them has
// committed. Members of an elastic job may come back with an older version, for example: the first rank with the
// latest version sends the missing changes. Each rank's tensors are at its own committed version. If a rank has
// none, its tensors are overwritten.
func (p *Publisher) Agree(ctx context.Context, c comm.Communicator, tensors []Tensor) error {
	p.Rebind(c)
	all, err := distributed.AllGatherBytes(ctx, p.rt, c, binary.AppendUvarint(nil, p.Version()))
	if err != nil {
		return err
	}
	root := 0
	latest := uint64(0)
	for rank, b := range all {
		if v, _ := binary.Uvarint(b); v > latest {
			root = rank
			latest = v
		}
	}
	if c.Rank() == root {
		return p.Send(ctx)
	}
	s, err := NewSubscriber(ctx, p.rt, c, Config{Tensors: tensors, Version: max(p.Version(), 1)})
	if err == nil {
		_, err = s.Update(ctx)
	}
	if err == nil && p.Version() < latest {
		err = p.Commit(ctx, latest, s.parts[0].tensors)
	}
	return err
}

// vote returns the first rank that votes no, -1 if none does.
func (l *link) vote(ctx context.Context, yes bool) (no int, err error) {
	ballot := []byte{0}
	if yes {
		ballot[0] = 1
	}
	all, err := distributed.AllGatherBytes(ctx, l.rt, l.c, ballot)
	if err != nil {
		return 0, err
	}
	return slices.IndexFunc(all, func(b []byte) bool {
		return len(b) != 1 || b[0] != 1
	}), nil
}
