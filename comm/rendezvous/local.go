package rendezvous

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// Reports is an out-of-band channel on which ranks publish their status, so that a rank
// whose wait times out can say what its peers were doing. A backend uses it whose ranks
// learn nothing of each other otherwise, such as one of GPUs. Ranks of one process have
// [LocalReports], others a [ReportKeeper] and [RemoteReports]. Status reports are for
// people to read; the program acts only on those of ranks that abort.
type Reports interface {
	// Report replaces the status of a rank in a group: a communicator, by a name that is
	// the same on its ranks. It does not wait.
	Report(group string, rank int, text string)
	// Leave is the last Report. A group is forgotten when all ranks that reported in it
	// have left.
	Leave(group string, rank int, text string)
	// Last returns the last status of the ranks of a group, by rank, as far as it can be
	// obtained before ctx ends.
	Last(ctx context.Context, group string) (map[int]Report, error)
	// Abort is Report of a rank that takes part in no further operation of a group. done
	// is the number of collectives that it has seen completed. Abort returns when the
	// ranks that can be reached know, or when ctx ends. Call it before aborting work, if
	// that can end the work of others as if it had succeeded.
	Abort(ctx context.Context, group string, rank int, text string, done uint64)
	// Failed returns [comm.ErrPeerFailed] if any rank other than rank is known to have
	// aborted before completing that many collectives. It does not wait, and costs a few
	// nanoseconds as long as no rank has aborted.
	Failed(group string, rank int, collectives uint64) error
}

// Report is the status that a rank reported last.
type Report struct {
	Text string
	Age  time.Duration // since then
	Gone bool          // the rank's process has ended since, or cannot be reached
}

// LocalReports are [Reports] of the ranks of one process. The zero value is ready. At most
// 2¹⁸ reports are kept, those of 256 communicators of 1024 ranks; later ones are dropped.
type LocalReports struct {
	mu      sync.Mutex
	groups  map[string]map[int]localReport
	kept    int         // in all groups
	aborted atomic.Bool // whether any rank has
}

type localReport struct {
	text       string
	at         time.Time
	left, gone bool
	aborted    *aborted // nil if the rank has not
}

// aborted is the end of a rank in a group.
type aborted struct {
	text string
	done uint64 // collectives before
}

// mostReports bounds how many are kept.
const mostReports = 1 << 18

// Report implements [Reports].
func (l *LocalReports) Report(group string, rank int, text string) {
	l.put(group, rank, text, false, nil)
}

// Leave implements [Reports].
func (l *LocalReports) Leave(group string, rank int, text string) {
	l.put(group, rank, text, true, nil)
}

// Abort implements [Reports].
func (l *LocalReports) Abort(_ context.Context, group string, rank int, text string, done uint64) {
	l.put(group, rank, "aborted: "+text, false, &aborted{text, done})
	l.aborted.Store(true)
}

// EachAborted calls f for each rank that is known to have aborted in a group.
func (l *LocalReports) EachAborted(f func(group string, rank int, text string, done uint64)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for group, ranks := range l.groups {
		for rank, r := range ranks {
			if g := r.aborted; g != nil {
				f(group, rank, g.text, g.done)
			}
		}
	}
}

// Failed implements [Reports].
func (l *LocalReports) Failed(group string, rank int, collectives uint64) error {
	if !l.aborted.Load() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var first *aborted
	who := 0
	for r, report := range l.groups[group] {
		g := report.aborted
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
	return fmt.Errorf("%w: rank %d aborted: %s", comm.ErrPeerFailed, who, first.text)
}

func (l *LocalReports) put(group string, rank int, text string, left bool, end *aborted) {
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
	if end == nil {
		end = before.aborted
	}
	ranks[rank] = localReport{text: text, at: time.Now(), left: left, aborted: end}
	for _, r := range ranks {
		if !r.left {
			return
		}
	}
	l.kept -= len(ranks)
	delete(l.groups, group)
}

// Forget drops all reports of a group.
func (l *LocalReports) Forget(group string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept -= len(l.groups[group])
	delete(l.groups, group)
}

// Lost notes that a rank which has reported, and has not left, is gone.
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
