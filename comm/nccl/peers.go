package nccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/peers"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
)

// group is what a communicator needs of a [peers.Group].
type group interface {
	Failed(collectives uint64) error
	Abort(ctx context.Context, cause string, done uint64) (text string)
	Leave()
}

// maxInvitation is the longest invitation, in bytes.
const maxInvitation = 2048

// invite keeps a store for the ranks of [From]. Rank 0 calls it before it shares the unique id. The results are nil if
// it cannot.
func invite(thisHost bool) (kv *store.Client, invitation []byte) {
	kv, in, err := rendezvous.Invite(thisHost)
	if err != nil {
		return nil, nil
	}
	invitation, err = json.Marshal(in)
	if err != nil || len(invitation) > maxInvitation {
		_ = kv.Close()
		return nil, nil
	}
	return kv, invitation
}

// invited begins the session of a rank that has an invitation to a store; kv is nil but on the rank that keeps it. A
// rank that cannot keep or reach the store gets nil, which is a warning and no error.
func invited(ctx context.Context, kv *store.Client, invitation []byte, rank int) *peers.Session {
	if len(invitation) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, inviteTimeout)
	defer cancel()
	session, err := acceptInvitation(ctx, kv, invitation, rank)
	if err != nil {
		slog.Warn("nccl: this rank does not learn of peers that abort", "rank", rank, "err", err)
		return nil
	}
	return session
}

func acceptInvitation(ctx context.Context, kv *store.Client, invitation []byte, rank int) (*peers.Session, error) {
	if kv == nil {
		var in rendezvous.Invitation
		err := json.Unmarshal(invitation, &in)
		if err != nil {
			return nil, err
		}
		kv, err = in.Accept(ctx, rank)
		if err != nil {
			return nil, err
		}
	}
	return peers.Open(ctx, kv, kv.Close)
}

// keepOpen is the end of a session whose store others use.
func keepOpen() error { return nil }

// endSession ends a session that no communicator was made with.
func (o options) endSession() error {
	if o.session == nil {
		return nil
	}
	return o.session.Close()
}

// tell tells the other ranks, once, that this one aborts, before it does, and returns what they are doing: see
// abandoned. The caller holds no lock.
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

// describeFailure adds what the other ranks are doing to an error that does not say who is to blame.
func describeFailure(err error, answers string) error {
	if answers == "" || !blamesNobody(err) {
		return err
	}
	return fmt.Errorf("%w; %s", err, answers)
}

// blamesNobody reports whether an error is of a wait that ended, or one of NCCL's that names an address and no rank.
func blamesNobody(err error) bool {
	var native *Error
	if errors.As(err, &native) && native.Status == statusRemote {
		return true
	}
	return errors.Is(err, comm.ErrTimeout) || errors.Is(err, comm.ErrCanceled)
}

// abandoned returns an error if another rank is known to have aborted before it completed n
// collectives.
//
// The abort of one rank lets kernels of the others go on with whatever lies in memory: its own
// kernels still store the flags and steps that the others wait for before they exit. NCCL does
// not tell the others, so a rank tells them before it aborts ([Comm.tell]).
func (c *Comm) abandoned(n uint64) error {
	if c.group == nil {
		return nil
	}
	if c.rt.HasCaptured() { // replays are not counted
		n = math.MaxUint64
	}
	return c.group.Failed(n)
}
