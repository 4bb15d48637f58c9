package nccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/invitation"
	"github.com/tutti-go/tutti/comm/internal/peers"
	"github.com/tutti-go/tutti/comm/store"
)

// group is the part of [peers.Group] that a communicator uses.
type group interface {
	Failed(collectives uint64) error
	Until(ctx context.Context, collectives uint64) (context.Context, context.CancelFunc)
	Abort(ctx context.Context, cause string, done uint64) (text string)
	Leave()
}

// session is a rank's connection to the store, for a communicator and its sub-communicators.
type session struct {
	client  *store.Client // closed by end unless it is shared
	shared  bool          // the client has other users and stays open
	members atomic.Int64  // groups that the rank has joined and not left
}

// member is a group of a session.
type member struct {
	*peers.Group
	session *session  // the session that counts it
	leave   sync.Once // ends the membership, once
}

// join makes a rank a member of a group, which is nil without a session.
func (s *session) join(ctx context.Context, name string, rank, size int, status func() string) group {
	if s == nil {
		return nil
	}
	s.members.Add(1)
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	return &member{Group: peers.Join(ctx, s.client, name, rank, size, status), session: s}
}

// Leave ends the session with its last group.
func (m *member) Leave() {
	m.leave.Do(func() {
		m.Group.Leave()
		if m.session.members.Add(-1) == 0 {
			_ = m.session.end()
		}
	})
}

// membership is the part of a communicator that a rank has before NCCL has made it.
type membership struct {
	submitted *submissions // of the communicator; locks itself
	group     group        // nil if the ranks cannot tell each other of an abort
}

// enroll begins the membership of a rank.
func (o options) enroll(ctx context.Context, rank, size int) membership {
	submitted := new(submissions)
	return membership{
		submitted: submitted,
		group:     o.session.join(ctx, o.name, rank, size, submitted.status),
	}
}

// step runs a step, in which NCCL waits for all ranks: creation, Split, and the registration of a window. NCCL does not
// tell a rank that another one has aborted. The context of run therefore ends when a rank is known to have aborted
// before it finished the step, and waits return the error of [waitError].
func (m membership) step(ctx context.Context, run func(ctx context.Context) error) error {
	number := m.submitted.beginStep()
	if m.group != nil {
		bounded, cancel := m.group.Until(ctx, number)
		defer cancel()
		ctx = bounded
	}
	err := run(ctx)
	m.submitted.endStep(number, err == nil)
	return err
}

// waitError returns the error of a wait that ctx ended: which rank has aborted in a step, or the caller's reason.
func waitError(ctx context.Context) error {
	aborted, ok := context.Cause(ctx).(*peers.Aborted) // a caller's context may end with an error that wraps one
	if ok {
		return aborted
	}
	return comm.ContextError(ctx)
}

// withdraw ends a membership without a communicator, and returns why. The other ranks, which would wait for this one in
// their creation, learn of that first.
func (m membership) withdraw(cause error) error {
	if m.group == nil {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.Background(), tellTimeout)
	defer cancel()
	m.submitted.abort(cause)
	answers := m.group.Abort(ctx, cause.Error(), 0)
	m.group.Leave()
	return describeFailure(cause, answers)
}

// end closes the client, unless others use it.
func (s *session) end() error {
	if s == nil || s.shared {
		return nil
	}
	return s.client.Close()
}

// maxInvitation is the longest invitation, in bytes.
const maxInvitation = 2048

// invite keeps a store for the ranks of [From]. Rank 0 calls it before it shares the unique id. The results are nil if
// that fails.
func invite(thisHost bool) (kv *store.Client, text []byte) {
	kv, in, err := invitation.New(thisHost)
	if err != nil {
		return nil, nil
	}
	text, err = json.Marshal(in)
	if err != nil || len(text) > maxInvitation {
		_ = kv.Close()
		return nil, nil
	}
	return kv, text
}

// invited begins the session of a rank with an invitation to a store. kv is nil except on the rank that keeps the
// store. If a rank cannot keep or reach the store, it logs a warning and gets nil.
func invited(ctx context.Context, kv *store.Client, text []byte, rank int) *session {
	if len(text) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	if kv != nil {
		return &session{client: kv}
	}
	var in invitation.Invitation
	err := json.Unmarshal(text, &in)
	if err == nil {
		kv, err = in.Accept(ctx, rank)
	}
	if err != nil {
		slog.Warn("nccl: this rank does not learn of peers that abort", "rank", rank, "err", err)
		return nil
	}
	return &session{client: kv}
}

// tell tells the other ranks, once and before the abort, that this rank aborts, and returns their states: see
// abandoned. The caller must hold no lock.
func (c *Comm) tell(cause error) (answers string) {
	c.told.Do(func() {
		c.submitted.abort(cause)
		if c.group == nil || c.WorldSize() == 1 {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), tellTimeout)
		defer cancel()
		c.answers = c.group.Abort(ctx, cause.Error(), c.submitted.seen.Load())
	})
	return c.answers
}

// describeFailure adds the states of the other ranks to an error that does not name the rank to blame.
func describeFailure(err error, answers string) error {
	if answers == "" || !blamesNobody(err) {
		return err
	}
	return fmt.Errorf("%w; %s", err, answers)
}

// blamesNobody reports whether err is the error of a wait that ended, or an error of NCCL's with an address and no
// rank.
func blamesNobody(err error) bool {
	var native *Error
	if errors.As(err, &native) && ncclResult(native.Status) == statusRemote {
		return true
	}
	return errors.Is(err, comm.ErrTimeout) || errors.Is(err, comm.ErrCanceled)
}

// abandoned returns an error if another rank is known to have aborted before it completed n collectives.
//
// The abort of one rank lets kernels of the others continue with whatever is in memory: its own kernels still store
// the flags and steps that the others wait for before they exit. NCCL does not tell the others, so a rank tells them
// before it aborts ([Comm.tell]).
func (c *Comm) abandoned(n uint64) error {
	if c.group == nil {
		return nil
	}
	if c.rt.HasCaptured() { // replays are not counted
		n = math.MaxUint64
	}
	return c.group.Failed(n)
}
