package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/printable"
)

// Reports is where ranks publish their status out of band, in the job's store, so that a rank whose wait times out
// can say what its peers were doing. A backend uses it whose ranks learn nothing of each other otherwise, such as one
// of GPUs. Status reports are for people to read; the program acts only on those of ranks that abort.
//
// Ranks report in a group: a communicator, by a name that is the same on its ranks. A group is forgotten when all
// ranks that reported in it have left.
type Reports struct {
	kv      *store.Client
	stops   []func()      // of watches
	closed  chan struct{} // by Close, once
	once    sync.Once
	aborted atomic.Bool // whether any rank has

	mu     sync.Mutex
	own    map[string]map[int]bool  // ranks of this process that report, by group
	aborts map[string]map[int]abort // by group and rank
	home   map[string]int           // the groups that the store's own process is in, and its rank there
}

// abort is the end of a rank in a group.
type abort struct {
	Text string `json:"text"`
	Done uint64 `json:"done"` // collectives before
}

// Report is the status that a rank reported last.
type Report struct {
	Text string
	Age  time.Duration // since then
	Gone bool          // the rank's process has ended since, or cannot be reached
}

const (
	// mostGroups bounds the groups in which a process reports. Reports in others are dropped.
	mostGroups = 1 << 12
	// leaveTime bounds how long a rank that leaves waits for the store, which answers within a round trip or is lost.
	leaveTime = 500 * time.Millisecond
)

// Keys in the store: a kind, the group, 0 and the rank. A status that begins with 0 is a rank's last.
const (
	statusKeys  = "status\x00"
	abortedKeys = "aborted\x00"
	homeKeys    = "home\x00"
)

func reportKey(kind, group string, rank int) string {
	return kind + group + "\x00" + strconv.Itoa(rank)
}

// place is the group and the rank of a key, if it is one of a report.
func place(key string) (group string, rank int, ok bool) {
	_, rest, _ := strings.Cut(key, "\x00")
	i := strings.LastIndex(rest, "\x00")
	if i < 0 {
		return "", 0, false
	}
	rank, err := strconv.Atoi(rest[i+1:])
	return rest[:i], rank, err == nil && rank >= 0
}

// NewReports has a process publish its reports in a store. Ranks of one process may share it. When it returns, it knows
// which ranks aborted before.
func NewReports(ctx context.Context, kv *store.Client) (*Reports, error) {
	r := &Reports{kv: kv, closed: make(chan struct{}), own: map[string]map[int]bool{}, aborts: map[string]map[int]abort{}, home: map[string]int{}}
	for kind, see := range map[string]func(group string, rank int, e store.Event){homeKeys: r.seeHome, abortedKeys: r.seeAbort} {
		stop, err := kv.Watch(ctx, kind, func(e store.Event) {
			group, rank, ok := place(e.Key)
			if !ok {
				slog.Warn("rendezvous: ignoring a key that is no report's", "key", fmt.Sprintf("%.100q", e.Key))
				return
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			see(group, rank, e)
		})
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		r.stops = append(r.stops, stop)
	}
	if kv.LocalAddr() != nil {
		go r.watchStore()
	}
	return r, nil
}

func (r *Reports) seeHome(group string, rank int, e store.Event) {
	if r.home[group] = rank; e.Deleted {
		delete(r.home, group)
	}
}

func (r *Reports) seeAbort(group string, rank int, e store.Event) {
	if e.Deleted {
		if delete(r.aborts[group], rank); len(r.aborts[group]) == 0 {
			delete(r.aborts, group)
		}
		return
	}
	var a abort
	if err := json.Unmarshal(e.Value, &a); err != nil {
		slog.Warn("rendezvous: ignoring an abort that is none", "rank", rank, "err", fmt.Sprintf("%.200v", err))
		return
	}
	a.Text = printable.Text(a.Text)
	r.note(group, rank, a)
}

// watchStore waits for the end of the store. Ranks do not learn of aborts then, so the communicators that the store's
// process takes part in have failed.
func (r *Reports) watchStore() {
	select {
	case <-r.kv.Done():
	case <-r.closed:
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for group, rank := range r.home {
		if r.own[group] != nil {
			r.note(group, rank, abort{Text: "its process has ended, or cannot be reached"})
		}
	}
}

// note keeps that a rank has aborted. The caller holds the lock.
func (r *Reports) note(group string, rank int, a abort) {
	if r.aborts[group] == nil {
		r.aborts[group] = map[int]abort{}
	}
	r.aborts[group][rank] = a
	r.aborted.Store(true)
}

// Report replaces the status of a rank in a group. It does not wait.
func (r *Reports) Report(group string, rank int, text string) {
	r.mu.Lock()
	if r.own[group] == nil {
		if len(r.own) == mostGroups {
			r.mu.Unlock()
			return
		}
		r.own[group] = map[int]bool{}
	}
	first := !r.own[group][rank]
	r.own[group][rank] = true
	r.mu.Unlock()
	r.kv.Post(reportKey(statusKeys, group, rank), []byte(text))
	if first && r.kv.LocalAddr() == nil {
		r.kv.Post(reportKey(homeKeys, group, rank), nil)
	}
}

// Leave is the last Report. It waits for the store, but not for long.
func (r *Reports) Leave(group string, rank int, text string) {
	r.mu.Lock()
	reported := r.own[group][rank]
	delete(r.own[group], rank)
	if len(r.own[group]) == 0 {
		delete(r.own, group)
		delete(r.aborts, group)
	}
	r.mu.Unlock()
	if !reported {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	r.kv.Post(reportKey(statusKeys, group, rank), []byte("\x00"+text))
	if r.kv.LocalAddr() == nil {
		r.kv.Drop(reportKey(homeKeys, group, rank))
	}
	all, _ := r.kv.List(ctx, statusKeys+group+"\x00")
	for _, e := range all {
		if !left(e) {
			return
		}
	}
	for _, e := range all {
		_ = r.kv.Delete(ctx, e.Key, e.Version) // what stays is a few bytes until the store ends
		if _, member, ok := place(e.Key); ok {
			r.kv.Drop(reportKey(abortedKeys, group, member))
		}
	}
}

func left(e store.Entry) bool { return len(e.Value) > 0 && e.Value[0] == 0 }

// Last returns the last status of the ranks of a group, by rank.
func (r *Reports) Last(ctx context.Context, group string) (map[int]Report, error) {
	all, err := r.kv.List(ctx, statusKeys+group+"\x00")
	last := make(map[int]Report, len(all))
	for _, e := range all {
		_, rank, ok := place(e.Key)
		if !ok {
			continue
		}
		last[rank] = Report{Text: printable.Text(strings.TrimPrefix(string(e.Value), "\x00")), Age: e.Age, Gone: e.Gone && !left(e)}
	}
	return last, err
}

// Abort is Report of a rank that takes part in no further operation of a group. done is the number of collectives
// that it has seen completed. Abort returns when the ranks that can be reached know, or when ctx ends. Call it before
// aborting work, if that can end the work of others as if it had succeeded.
func (r *Reports) Abort(ctx context.Context, group string, rank int, text string, done uint64) {
	r.Report(group, rank, "aborted: "+text)
	value, _ := json.Marshal(abort{text, done})
	err := r.kv.Set(ctx, reportKey(abortedKeys, group, rank), value, store.Heard)
	if err != nil && r.kv.Err() == nil { // with the session ended, the others know that this rank is gone
		slog.Warn("rendezvous: the others may not know that this rank has aborted", "rank", rank, "cause", text, "err", err)
	}
}

// Failed returns [comm.ErrPeerFailed] if any rank other than rank is known to have aborted before completing that
// many collectives. It does not wait, and costs a few nanoseconds as long as no rank has aborted.
func (r *Reports) Failed(group string, rank int, collectives uint64) error {
	if !r.aborted.Load() {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var first abort
	who := -1
	for other, a := range r.aborts[group] {
		if other != rank && a.Done < collectives && (who < 0 || a.Done < first.Done || a.Done == first.Done && other < who) {
			first, who = a, other
		}
	}
	if who < 0 {
		return nil
	}
	return fmt.Errorf("%w: rank %d aborted: %s", comm.ErrPeerFailed, who, first.Text)
}

// Close ends the reports, and leaves the store open.
func (r *Reports) Close() error {
	r.once.Do(func() {
		close(r.closed)
		for _, stop := range r.stops {
			stop()
		}
	})
	return nil
}
