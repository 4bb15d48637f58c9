package delta

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

var (
	// ErrNoVersion is that a subscriber has no tensors to read: before its first update, and after a
	// failed update that could not be rolled back. The next update brings a full copy.
	ErrNoVersion = errors.New("delta: no version")
	// ErrInDoubt is that a subscriber does not know whether the others have committed a version with it: it lost them in
	// between. It shows no tensors until an update with those that are left has told.
	ErrInDoubt = errors.New("delta: in doubt whether the version was committed")
)

// Config is what a subscriber begins with.
type Config struct {
	// Tensors, if any, are of version Version, from 1 on; those that its publisher knows by that
	// number, or they are replaced. No two of them share memory.
	Tensors []Tensor
	Version uint64
	// Together has the subscribers of a communicator commit a version all or none, if it is set on any.
	Together bool
}

// A Subscriber keeps tensors at the version that was published last. Its methods may be called from
// any goroutine, Update and Read by one at a time.
type Subscriber struct {
	link
	together bool
	updating sync.Mutex

	mu    sync.RWMutex // held while tensors change
	parts []*replica   // by publisher
	doubt []*applied   // what is in doubt, by part
	hook  hook
}

// NewSubscriber returns a subscriber, whose new tensors are allocated in rt, through whose memory it receives over c.
// Without communicator (nil), [Subscriber.Read] alone.
func NewSubscriber(ctx context.Context, rt runtime.Runtime, c comm.Communicator, cfg Config) (*Subscriber, error) {
	s := &Subscriber{link: link{rt, c}, together: cfg.Together}
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

// View calls f with the version and its tensors, those of the first publisher first, by name. They do not change until f has returned. It fails
// with [ErrNoVersion] or [ErrInDoubt] if there is none to be seen.
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

// Update receives the version that the publishers of the communicator send, all of which call [Publisher.Publish] or
// [Publisher.Send], and returns its number. After an error the tensors are those of the version
// before, except as [ErrNoVersion] and [ErrInDoubt] say.
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
	if s.doubt != nil {
		// All ranks have found what became of it when they met.
		s.settle(m.peers[s.c.Rank()].Version)
	}
	messages, err := s.distribute(ctx, m, nil, s.hook)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.parts) < len(messages) {
		s.parts = append(s.parts, &replica{})
	}
	all, err := s.apply(ctx, messages)
	if m.together {
		no, voting := -1, s.hook.step()
		if voting == nil {
			no, voting = s.vote(ctx, err == nil)
		}
		switch voting = cmp.Or(voting, s.hook.step()); {
		case err != nil: // and nobody commits
		case voting != nil:
			s.doubt = all
			return 0, errors.Join(ErrInDoubt, voting)
		case no >= 0:
			err = errors.Join(fmt.Errorf("delta: rank %d has not got version %d", no, m.version), rollBack(all))
		}
	}
	if err != nil {
		return 0, err
	}
	commit(all)
	for _, gone := range s.parts[len(messages):] {
		gone.free()
	}
	s.parts = s.parts[:len(messages)]
	return m.version, nil
}

// Read reads a delta from r, which [Publisher.WriteSince] wrote, and returns its version. A [VersionError] says
// which version the subscriber has, from which the publisher can write another. A subscriber to several publishers cannot read.
func (s *Subscriber) Read(ctx context.Context, r io.Reader) (uint64, error) {
	s.updating.Lock()
	defer s.updating.Unlock()
	d, err := Read(r)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.doubt != nil {
		return 0, ErrInDoubt
	}
	if len(s.parts) > 1 {
		return 0, fmt.Errorf("delta: read the tensors of one of %d publishers: %w", len(s.parts), comm.ErrArgument)
	}
	a, err := s.parts[0].apply(ctx, d, nil, s.alloc, nil)
	if err != nil {
		return 0, err
	}
	a.commit()
	return d.Target, nil
}

// Close frees the tensors that the subscriber has allocated.
func (s *Subscriber) Close() {
	s.settle(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.parts {
		r.free()
	}
	s.parts = []*replica{{}}
}

// announcement is what the subscriber has.
func (s *Subscriber) announcement() peer {
	p := peer{Together: s.together, Version: s.parts[0].version}
	for _, r := range s.parts {
		p.Digests = append(p.Digests, r.digest())
		if r.version == 0 { // of any part: all come anew
			p.Version = 0
		}
	}
	for k, a := range s.doubt {
		p.Others = append(p.Others, p.Digests[k])
		if a != nil {
			p.Other, p.Others[k] = a.next.version, a.next.digest()
		}
	}
	return p
}

// settle ends the doubt: what has that version is committed.
func (s *Subscriber) settle(version uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.doubt {
		if a != nil && a.next.version == version {
			a.commit()
		} else if a != nil {
			_ = a.rollback() // the error is kept: the next message is a full copy
		}
	}
	s.doubt = nil
}

// apply applies the messages to the parts, all or none.
func (s *Subscriber) apply(ctx context.Context, messages [][]byte) (all []*applied, err error) {
	all = make([]*applied, len(messages))
	for k, message := range messages {
		if message == nil {
			continue
		}
		d, err := Read(bytes.NewReader(message))
		if err == nil {
			all[k], err = s.parts[k].apply(ctx, d, nil, s.alloc, nil)
		}
		if err != nil {
			return nil, errors.Join(err, rollBack(all))
		}
	}
	return all, nil
}

func rollBack(all []*applied) (err error) {
	for _, a := range all {
		if a != nil {
			err = errors.Join(err, a.rollback())
		}
	}
	return err
}

func commit(all []*applied) {
	for _, a := range all {
		if a != nil {
			a.commit()
		}
	}
}

// alloc allocates a tensor.
func (s *Subscriber) alloc(t Tensor) (Memory, error) { return allocate(s.rt, t) }

// allocate allocates a tensor in the memory of a runtime, or of Go.
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

// beside allocates a tensor like t in memory of its kind, or of Go.
func (t Tensor) beside() (Memory, error) {
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
