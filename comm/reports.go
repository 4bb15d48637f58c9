package comm

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

// Reports is where ranks leave word of what they do, beside their communicator, for
// the error of one that waits in vain. A backend whose ranks learn nothing of each
// other otherwise, as one of GPUs, has one where there is a way: memory of the
// process, or a connection to rank 0 (comm/rendezvous). Reports are told, not
// agreed on: they are for people to read, but for those of ranks that give up.
type Reports interface {
	// Report replaces what a rank of a group, a communicator by a name that the same
	// ranks know it by, has reported. It does not wait.
	Report(group string, rank int, text string)
	// Leave is Report for the last time. A group is forgotten when all who reported
	// in it have left.
	Leave(group string, rank int, text string)
	// Last returns what the ranks of a group reported last, by rank, as far as that
	// is to be had until ctx ends.
	Last(ctx context.Context, group string) (map[int]Report, error)
	// GiveUp is Report of a rank that takes part in no operation of a group any more,
	// after so many collectives that it has seen done. It returns when the ranks that
	// can be reached know, or when ctx ends. It comes before the rank's work is
	// aborted where that can end the work of others as if all were well.
	GiveUp(ctx context.Context, group string, rank int, text string, done uint64)
	// Failed returns an [ErrPeerFailed] if it is known of another rank of a group than
	// that one that it gave up before so many collectives. It does not wait, and costs
	// next to nothing as long as nobody has.
	Failed(group string, rank int, collectives uint64) error
}

// Report is what a rank has reported.
type Report struct {
	Text string
	Age  time.Duration // how long that is ago
	Gone bool          // the rank's process has ended since, or cannot be reached
}

// LocalReports are [Reports] of the ranks of one process. The zero value is ready. What
// would be more than a job has is not kept.
type LocalReports struct {
	mu     sync.Mutex
	groups map[string]map[int]localReport
	kept   int         // in all groups
	gaveUp atomic.Bool // somebody has
}

type localReport struct {
	text       string
	at         time.Time
	left, gone bool
	gaveUp     *gaveUp // nil: not
}

type gaveUp struct {
	text string
	done uint64 // collectives before
}

// mostReports bounds how many are kept: 256 communicators of a thousand ranks.
const mostReports = 1 << 18

// Report implements [Reports].
func (l *LocalReports) Report(group string, rank int, text string) {
	l.put(group, rank, text, false, nil)
}

// Leave implements [Reports].
func (l *LocalReports) Leave(group string, rank int, text string) {
	l.put(group, rank, text, true, nil)
}

// GiveUp implements [Reports].
func (l *LocalReports) GiveUp(_ context.Context, group string, rank int, text string, done uint64) {
	l.put(group, rank, "gave up: "+text, false, &gaveUp{text, done})
	l.gaveUp.Store(true)
}

// EachGivenUp calls f for all that is known of ranks that gave up.
func (l *LocalReports) EachGivenUp(f func(group string, rank int, text string, done uint64)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for group, ranks := range l.groups {
		for rank, r := range ranks {
			if g := r.gaveUp; g != nil {
				f(group, rank, g.text, g.done)
			}
		}
	}
}

// Failed implements [Reports].
func (l *LocalReports) Failed(group string, rank int, collectives uint64) error {
	if !l.gaveUp.Load() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var first *gaveUp
	who := 0
	for r, report := range l.groups[group] {
		g := report.gaveUp
		if g == nil || r == rank || g.done >= collectives {
			continue
		}
		if first == nil || g.done < first.done || g.done == first.done && r < who {
			first, who = g, r
		}
	}
	if first == nil {
		return nil
	}
	return fmt.Errorf("%w: rank %d gave up: %s", ErrPeerFailed, who, first.text)
}

func (l *LocalReports) put(group string, rank int, text string, left bool, gaveUp *gaveUp) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ranks := l.groups[group]
	before, known := ranks[rank]
	if !known {
		if l.kept == mostReports {
			return
		}
		l.kept++
	}
	if ranks == nil {
		if l.groups == nil {
			l.groups = map[string]map[int]localReport{}
		}
		ranks = map[int]localReport{}
		l.groups[group] = ranks
	}
	if gaveUp == nil {
		gaveUp = before.gaveUp
	}
	ranks[rank] = localReport{text: text, at: time.Now(), left: left, gaveUp: gaveUp}
	for _, r := range ranks {
		if !r.left {
			return
		}
	}
	l.kept -= len(ranks)
	delete(l.groups, group)
}

// Forget drops what is known of a group.
func (l *LocalReports) Forget(group string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept -= len(l.groups[group])
	delete(l.groups, group)
}

// Lost notes that a rank that has reported, and has not left, will not do so any more.
func (l *LocalReports) Lost(group string, rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r, known := l.groups[group][rank]; known && !r.left {
		r.gone = true
		l.groups[group][rank] = r
	}
}

// Last implements [Reports].
func (l *LocalReports) Last(_ context.Context, group string) (map[int]Report, error) {
	l.mu.Lock()
	ranks := maps.Clone(l.groups[group])
	l.mu.Unlock()
	last := make(map[int]Report, len(ranks))
	for rank, r := range ranks {
		last[rank] = Report{Text: r.text, Age: time.Since(r.at), Gone: r.gone}
	}
	return last, nil
}
