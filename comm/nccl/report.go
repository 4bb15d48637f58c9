package nccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/ranks"
)

// reporter publishes the status of a communicator and its sub-communicators to the other ranks,
// and reads theirs. It looks for changes at intervals, so that calls cost nothing.
type reporter struct {
	reports
	close func() error

	mu   sync.Mutex
	open []*submissions
	stop chan struct{} // nil as long as none is open
}

// reports are [rendezvous.Reports].
type reports interface {
	Report(group string, rank int, text string)
	Leave(group string, rank int, text string)
	Last(ctx context.Context, group string) (map[int]rendezvous.Report, error)
	Abort(ctx context.Context, group string, rank int, text string, done uint64)
	Failed(group string, rank int, collectives uint64) error
}

// reportEvery is the interval at which a rank publishes changes of its status.
const reportEvery = 100 * time.Millisecond

// answerTimeout bounds how long a rank whose wait timed out asks for the status of its peers,
// as the deadline of that wait is over. The store answers within a round trip or has lost its host.
const answerTimeout = 500 * time.Millisecond

func noClose() error { return nil }

// add publishes a communicator's status from now on.
func (r *reporter) add(s *submissions) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = append(r.open, s)
	if r.stop == nil {
		r.stop = make(chan struct{})
		go r.run(r.stop)
	}
	s.tell(r.reports)
}

// remove ends that.
func (r *reporter) remove(s *submissions, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.Index(r.open, s)
	if i < 0 {
		return
	}
	r.open = slices.Delete(r.open, i, i+1)
	s.leave(r.reports, why)
	if len(r.open) == 0 {
		close(r.stop)
		r.stop = nil
		_ = r.close()
	}
}

func (r *reporter) run(stop <-chan struct{}) {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			r.mu.Lock()
			for _, s := range r.open {
				s.tell(r.reports)
			}
			r.mu.Unlock()
		}
	}
}

// others describes the last status of the other ranks of a communicator. An error says that the
// store does not answer, as the text does.
func (r *reporter) others(s *submissions) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	s.tell(r.reports)
	last, err := r.Last(ctx, s.group)
	if err != nil {
		return fmt.Sprintf("what the others do is not known: %v", err), err
	}
	var texts []string
	who := map[string][]int{}
	for rank := range s.size {
		if rank == s.rank {
			continue
		}
		report, ok := last[rank]
		text := "reported nothing"
		if ok {
			text = "reported: " + report.Text
			if age := report.Age.Round(time.Second); age > 0 {
				text = fmt.Sprintf("reported %v ago: %s", age, report.Text)
			}
			if report.Gone {
				text = "is gone, and had " + text
			}
		}
		if who[text] == nil {
			texts = append(texts, text)
		}
		who[text] = append(who[text], rank)
	}
	for i, text := range texts {
		texts[i] = ranks.Text(who[text]) + " " + text
	}
	return strings.Join(texts, "; "), nil
}

// name adds what is known of the other ranks to an error of NCCL's that says that one of them is
// gone, and not which.
func (r *reporter) name(err error, s *submissions) error {
	var native *Error
	if !errors.As(err, &native) || native.Status != statusRemote {
		return err
	}
	text, storeErr := r.others(s)
	if storeErr == nil {
		return fmt.Errorf("%w; %s", err, text)
	}
	// The store has ended with its rank, which this process has noticed or will in a moment.
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	var cause error
	_ = poll.Until(ctx, func() (bool, error) {
		cause = r.Failed(s.group, s.rank, math.MaxUint64)
		return cause != nil, nil
	})
	if cause == nil {
		return fmt.Errorf("%w; %s", err, text)
	}
	return fmt.Errorf("%w; %w", cause, err)
}

// storeReports is the reporter of a job of several processes, over its store.
func storeReports(ctx context.Context, kv *store.Client, closeStore func() error) (*reporter, error) {
	r, err := rendezvous.NewReports(ctx, kv)
	if err != nil {
		return nil, errors.Join(err, closeStore())
	}
	return &reporter{reports: r, close: func() error { return errors.Join(r.Close(), closeStore()) }}, nil
}

// invited is the reporter of a rank that was told of a store; kv is that of the rank that keeps it. A rank that
// cannot keep or reach a store has no reports, which is not worth an error.
func invited(ctx context.Context, kv *store.Client, invitation []byte, rank int) *reporter {
	if len(invitation) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, backend.HostTimeout) // the store is there before the invitation
	defer cancel()
	var err error
	if kv == nil {
		var in rendezvous.Invitation
		if err = json.Unmarshal(invitation, &in); err == nil {
			kv, err = in.Accept(ctx, rank)
		}
	}
	var r *reporter
	if err == nil {
		r, err = storeReports(ctx, kv, kv.Close)
	}
	if err != nil {
		slog.Warn("nccl: no status reports: this rank does not learn of peers that abort", "rank", rank, "err", err)
	}
	return r
}

// invite is called on rank 0 before it shares the unique id.
func invite(thisHost bool) (*store.Client, []byte) {
	kv, in, err := rendezvous.Invite(thisHost)
	if err != nil {
		return nil, nil
	}
	invitation, err := json.Marshal(in)
	if err != nil || len(invitation) > maxInvitation {
		_ = kv.Close()
		return nil, nil
	}
	return kv, invitation
}

// maxInvitation is the most bytes of an invitation.
const maxInvitation = 2048
