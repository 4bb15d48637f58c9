package delta

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

var (
	// ErrNoVersion means that a subscriber has no tensors to read: before its first update, and after a failed update
	// that could not be rolled back. The next update is a full copy.
	ErrNoVersion = errors.New("delta: no version")
	// ErrInDoubt means that a subscriber does not know whether the others have committed a version, because it lost
	// them during the vote. It shows no tensors until an update with the remaining subscribers resolves the doubt.
	ErrInDoubt = errors.New("delta: in doubt whether the version was committed")
)

// Config is the initial state of a subscriber, and its way to commit.
type Config struct {
	// Tensors, if any, are of version Version, which is at least 1. If they differ from the publisher's tensors of
	// that version, they are replaced. No two of them may share memory.
	Tensors []Tensor
	Version uint64 // 0 without tensors
	// Together makes the subscribers of a communicator vote on each version, if any of them sets it. They vote after
	// they have read and checked it; then each applies it at its own pace. Either all commit a version or none does.
	// One exception is a subscriber whose memory fails while it applies an accepted version: its Update returns the
	// error, and it shows the previous version, or none.
	Together bool
}

// A Subscriber keeps tensors at the latest published version. Its methods may be called from any goroutine. Update,
// Read and Close wait for each other.
type Subscriber struct {
	link
	voting bool // Config.Together; never changed
	hook   hook // nil outside tests

	updating sync.Mutex   // held by Update, Read and Close
	mu       sync.RWMutex // held while tensors change
	parts    []*replica   // by publisher; changed with both locks held
	doubt    *pending     // nil: there is none; changed with both locks held
}

// pending is a version that can be applied, with a part for each publisher.
type pending struct {
	version uint64     // at least 1
	digests []uint32   // hashes of the version, by publisher
	parts   []*replica // the subscriber's, and empty ones for new publishers
	updates []*update  // by part; nil: the subscriber has this version
}

// NewSubscriber returns a subscriber. It allocates new tensors in rt, and receives over c through memory of rt.
// Without a communicator (nil), it receives versions only through [Subscriber.Read].
func NewSubscriber(ctx context.Context, rt runtime.Runtime, c comm.Communicator, cfg Config) (*Subscriber, error) {
	s := &Subscriber{link: link{rt, c}, voting: cfg.Together}
	if (cfg.Version == 0) != (len(cfg.Tensors) == 0) {
		return nil, fmt.Errorf("delta: %d tensors of version %d: %w", len(cfg.Tensors), cfg.Version, comm.ErrArgument)
	}
	r, err := newReplica(cfg.Version, cfg.Tensors)
	if err == nil {
		err = separate(r.tensors, nil)
	}
	if err == nil {
		err = r.measure(ctx, nil)
	}
	s.parts = []*replica{r}
	return s, err
}

// View calls f with the version and its tensors: first those of the first publisher, by name, and so on. They do not
// change until f has returned. It fails with [ErrNoVersion] or [ErrInDoubt] if there is no version to show.
func (s *Subscriber) View(f func(version uint64, tensors []Tensor) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.doubt != nil {
		return ErrInDoubt
	}
	var all []Tensor
	for _, r := range s.parts {
		if r.version == 0 {
			return errors.Join(ErrNoVersion, r.lost)
		}
		all = append(all, r.tensors...)
	}
	return f(s.parts[0].version, all)
}

// Update receives the version that the publishers of the communicator send, and returns its number. All publishers
// must call [Publisher.Publish] or [Publisher.Send]. After an error the tensors are those of the previous version,
// except as [ErrNoVersion] and [ErrInDoubt] say. Readers wait only while the version is applied.
func (s *Subscriber) Update(ctx context.Context) (uint64, error) {
	s.updating.Lock()
	defer s.updating.Unlock()
	if err := s.hook.step(); err != nil {
		return 0, err
	}
	m, err := s.meet(ctx, s.announcement())
	if err != nil {
		return 0, err
	}
	// The ranks have resolved a version in doubt when they met. If this one cannot apply it, it still takes part in
	// the remaining steps.
	resolved := s.resolve(ctx, m.peers[s.c.Rank()].Version)
	messages, err := s.distribute(ctx, m, nil, s.hook)
	if err != nil {
		return 0, errors.Join(resolved, err)
	}
	v, err := s.prepare(m, messages)
	err = errors.Join(resolved, err)
	if m.voting {
		err = s.agree(ctx, v, err)
		ctx = context.WithoutCancel(ctx) // from here on the others commit without waiting for this rank
	}
	if err != nil {
		return 0, err
	}
	if err := s.adopt(ctx, v); err != nil {
		return 0, err
	}
	return m.version, nil
}

// prepare reads and checks the messages.
func (s *Subscriber) prepare(m *meeting, messages [][]byte) (*pending, error) {
	v := &pending{version: m.version, parts: slices.Clone(s.parts[:min(len(s.parts), len(messages))])}
	for len(v.parts) < len(messages) {
		v.parts = append(v.parts, &replica{})
	}
	for k, message := range messages {
		v.digests = append(v.digests, m.peers[m.publishers[k]].Digests[0])
		var u *update
		if message != nil {
			d, err := Read(bytes.NewReader(message))
			if err == nil {
				u, err = v.parts[k].prepare(d, nil, s.alloc)
			}
			if err != nil {
				return nil, errors.Join(err, v.rollback())
			}
		}
		v.updates = append(v.updates, u)
	}
	return v, nil
}

// agree makes all ranks vote on a version that this one can apply or, if failed is not nil, cannot apply. It returns
// nil if all can. If this rank does not learn the outcome, the version is in doubt.
func (s *Subscriber) agree(ctx context.Context, v *pending, failed error) error {
	no := -1
	err := s.hook.step()
	if err == nil {
		no, err = s.vote(ctx, failed == nil)
	}
	err = cmp.Or(err, s.hook.step())
	if failed != nil { // nobody commits
		if v != nil {
			failed = errors.Join(failed, v.rollback())
		}
		return failed
	}
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.doubt = v
		return errors.Join(ErrInDoubt, err)
	}
	if no >= 0 {
		return errors.Join(fmt.Errorf("delta: rank %d has not got version %d", no, v.version), v.rollback())
	}
	return nil
}

// adopt installs a version, with all of its parts or none, while readers wait.
func (s *Subscriber) adopt(ctx context.Context, v *pending) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range v.updates {
		if u == nil {
			continue
		}
		if err := u.apply(ctx, nil); err != nil {
			return errors.Join(fmt.Errorf("delta: apply version %d: %w", v.version, err), v.rollback())
		}
	}
	for _, u := range v.updates {
		if u != nil {
			u.commit()
		}
	}
	if len(s.parts) > len(v.parts) { // some publishers are gone
		for _, gone := range s.parts[len(v.parts):] {
			gone.free()
		}
	}
	s.parts = v.parts
	return nil
}

// rollback restores all parts, and frees memory allocated for the version.
func (v *pending) rollback() (err error) {
	for _, u := range v.updates {
		if u != nil {
			err = errors.Join(err, u.rollback())
		}
	}
	return err
}

// resolve ends the doubt: the version was committed if the others have it.
func (s *Subscriber) resolve(ctx context.Context, version uint64) error {
	v := s.doubt
	if v == nil {
		return nil
	}
	var err error
	if v.version == version {
		err = s.adopt(context.WithoutCancel(ctx), v)
	} else {
		err = v.rollback()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doubt = nil
	return err
}

// Read reads a delta from r, which [Publisher.WriteSince] wrote, and returns its version. If the delta does not apply,
// a [VersionError] says which version the subscriber has, from which the publisher can write another delta. A
// subscriber to several publishers cannot read.
func (s *Subscriber) Read(ctx context.Context, r io.Reader) (uint64, error) {
	s.updating.Lock()
	defer s.updating.Unlock()
	d, err := Read(r)
	if err != nil {
		return 0, err
	}
	if s.doubt != nil {
		return 0, ErrInDoubt
	}
	if len(s.parts) > 1 {
		return 0, fmt.Errorf("delta: read the tensors of one of %d publishers: %w", len(s.parts), comm.ErrArgument)
	}
	u, err := s.parts[0].prepare(d, nil, s.alloc)
	if err != nil {
		return 0, err
	}
	v := &pending{
		version: d.Target,
		parts:   s.parts,
		updates: []*update{u},
	}
	if err := s.adopt(ctx, v); err != nil {
		return 0, err
	}
	return d.Target, nil
}

// Close frees the tensors that the subscriber has allocated.
func (s *Subscriber) Close() {
	s.updating.Lock()
	defer s.updating.Unlock()
	_ = s.resolve(context.Background(), 0) // without a version from now on
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.parts {
		r.free()
	}
	s.parts = []*replica{{}}
}

// announcement returns what the subscriber tells the other ranks.
func (s *Subscriber) announcement() peer {
	p := peer{Together: s.voting, Version: s.parts[0].version}
	for _, r := range s.parts {
		p.Digests = append(p.Digests, r.digest())
		if r.version == 0 { // if any part has none, all are sent again
			p.Version = 0
		}
	}
	if s.doubt != nil {
		p.Other = s.doubt.version
		p.Others = s.doubt.digests
	}
	return p
}

// alloc allocates a tensor.
func (s *Subscriber) alloc(t Tensor) (Memory, error) { return allocate(s.rt, t) }

// allocate allocates a tensor in the memory of a runtime, or in Go memory.
func allocate(rt runtime.Runtime, t Tensor) (Memory, error) {
	if rt == nil {
		return make(Host, t.elements*t.DType.Size()), nil
	}
	x, err := runtime.New(rt, t.DType, t.Shape...)
	if err != nil {
		return nil, err
	}
	return device{x, true}, nil
}

// sameMemory allocates a tensor like t in the same kind of memory, or in Go memory.
func (t Tensor) sameMemory() (Memory, error) {
	p, err := t.place()
	if err == nil && p.rt == host {
		p.rt = nil
	}
	return allocate(p.rt, t)
}

func (r *replica) free() {
	for _, t := range r.tensors {
		release(t.Memory)
	}
}
