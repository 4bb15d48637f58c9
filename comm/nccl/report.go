package nccl

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/internal/ranks"
)

// reporter publishes the status of a communicator and its sub-communicators to the other ranks,
// and reads theirs. It looks for changes at intervals, so that calls cost nothing.
type reporter struct {
	rendezvous.Reports
	close func() error
	told  <-chan struct{} // closed when this rank knows who has aborted so far; nil if it always does

	mu   sync.Mutex
	open []*submissions
	stop chan struct{} // nil as long as none is open
}

// reportEvery is the interval at which a rank publishes changes of its status.
const reportEvery = 100 * time.Millisecond

// answerTimeout bounds how long a rank whose wait timed out asks for the status of its peers.
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
	s.tell(r.Reports)
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
	s.leave(r.Reports, why)
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
				s.tell(r.Reports)
			}
			r.mu.Unlock()
		}
	}
}

// others describes the last status of the other ranks of a communicator.
func (r *reporter) others(s *submissions) string {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	s.tell(r.Reports)
	last, err := r.Last(ctx, s.group)
	if err != nil {
		return fmt.Sprintf("what the others do is not known: %v", err)
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
	return strings.Join(texts, "; ")
}

// sharedReports is the reporter of a job of several processes. The invitation comes with the unique
// id; it is nil if rank 0 cannot keep reports.
func sharedReports(kept *rendezvous.ReportKeeper, invitation []byte, rank, size int) *reporter {
	switch {
	case kept != nil:
		return &reporter{Reports: kept, close: kept.Close}
	case len(invitation) == 0:
		return nil
	}
	var in rendezvous.Invitation
	if json.Unmarshal(invitation, &in) != nil {
		return nil
	}
	r := rendezvous.FollowReports(in, rank, size)
	return &reporter{Reports: r, close: r.Close, told: r.Told()}
}

// awaitTold waits until rank 0 tells this rank who aborts, or [tellTimeout].
func (r *reporter) awaitTold() {
	if r == nil || r.told == nil {
		return
	}
	select {
	case <-r.told:
	case <-time.After(tellTimeout):
	}
}

// keepReports is called on rank 0 before it shares the unique id. A rank that cannot listen has no
// reports, which is not worth an error.
func keepReports(thisHost bool) (*rendezvous.ReportKeeper, []byte) {
	kept, in, err := rendezvous.KeepReports(thisHost)
	if err != nil {
		return nil, nil
	}
	invitation, err := json.Marshal(in)
	if err != nil || len(invitation) > maxInvitation {
		_ = kept.Close()
		return nil, nil
	}
	return kept, invitation
}

// maxInvitation is the most bytes of an invitation.
const maxInvitation = 2048
