// Package peers lets the ranks of a communicator exchange, over the job's store, what their devices cannot: that a
// rank aborts, and the states of the others at that time. Backends of GPUs use it, because there an abort on one rank
// ends the work of the others as if it had succeeded.
//
// A rank that aborts sets a notice, which the members of its group watch. Each answers with its state. The answer also
// confirms the notice, so the rank waits for all answers before it ends any work. A member has one answer for all
// ranks that abort, which it repeats only for one that had completed less than those before. A rank that has aborted
// answers nobody: its notice is its answer. So n ranks that abort at the same time write 2n keys, not n². While nobody
// aborts, nothing is sent.
//
// The keys in the store are these, with the name of the group and 0 bytes in between:
//
//	peers/member/  RANK  has joined and not left; outlives its process
//	peers/alive/   RANK  the same, leased: a member without is lost
//	peers/notice/  RANK  has aborted, or its process keeps the store; leased
//	peers/answer/  RANK  knows of an abort, and its state at that time; leased, deleted when it leaves
//
// No lock is held during a call of the store's client, which may call the watches of other ranks of the process.
package peers

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/ranks"
)

const (
	memberKeys = "peers/member/"
	aliveKeys  = "peers/alive/"
	noticeKeys = "peers/notice/"
	answerKeys = "peers/answer/"
)

// lookEvery is the interval at which a rank that waits for an answer checks which members are lost. The store learns
// within milliseconds that a process was killed, but perhaps later than the rank that aborts because of it.
const lookEvery = 100 * time.Millisecond

// longestText bounds a cause and an answer, in bytes: they go to every rank, and into its errors.
const longestText = 200

// States of a rank that has not answered.
const (
	lost   = "its process has ended, or cannot be reached"
	silent = "does not answer"
	absent = "communicator closed, or not made yet"
)

// Group is one rank's side of a communicator, which has the same name on all its ranks.
type Group struct {
	client  *store.Client // session with the job's store
	name    string        // of the communicator, the same on all ranks
	rank    int           // in the group
	size    int           // ranks of the group
	status  func() string // describes the state of this rank
	stop    func()        // ends the watch for notices; nil if the rank is not a member
	left    chan struct{} // closed by Leave
	leave   sync.Once     // makes Leave do its work once
	aborted atomic.Bool   // Abort was called
	failed  atomic.Bool   // another rank has aborted

	mu      sync.Mutex         // guards notices, known and waits
	notices map[int]notice     // of other ranks; guarded by mu
	known   answer             // the rank's answer, zero while it knows of no abort; guarded by mu
	waits   map[*wait]struct{} // contexts of Until that have not ended; guarded by mu
}

// wait is a context that the abort of another rank ends.
type wait struct {
	collectives uint64                  // that a rank has completed if its abort does not end the context
	cancel      context.CancelCauseFunc // ends it, with the error of Failed
}

// notice is a rank's message to the others. The zero notice is empty.
type notice struct {
	Aborted bool   `json:"aborted,omitempty"`
	Cause   string `json:"cause,omitempty"`
	Done    uint64 `json:"done,omitempty"`   // collectives that the rank had completed
	Doing   string `json:"doing,omitempty"`  // state of the rank when it aborted
	Answer  string `json:"answer,omitempty"` // its answer to earlier aborts, "" for none
	Keeper  bool   `json:"keeper,omitempty"` // the rank's process keeps the store
}

// answer is a member's message to ranks that abort.
type answer struct {
	Doing string `json:"doing"`
	Done  uint64 `json:"done"` // the rank knows that its later collectives have failed
}

// Join makes a rank a member of a group. status describes the rank's state in a few words; it must not wait. A rank
// that cannot reach the store, or has 256 groups already, the store's limit of watches, continues without the group
// and logs a warning.
func Join(ctx context.Context, client *store.Client, name string, rank, size int, status func() string) *Group {
	g := &Group{
		client:  client,
		name:    name,
		rank:    rank,
		size:    size,
		status:  status,
		left:    make(chan struct{}),
		notices: map[int]notice{},
		waits:   map[*wait]struct{}{},
	}
	if err := g.join(ctx); err != nil {
		g.forget()
		slog.Warn("peers: this rank does not learn of peers that abort", "rank", rank, "size", size, "err", err)
	}
	return g
}

func (g *Group) join(ctx context.Context) error {
	// In this order, a member already answers all ranks that abort.
	if err := g.client.Set(ctx, g.key(memberKeys, g.rank), nil); err != nil {
		return err
	}
	if err := g.client.Set(ctx, g.key(aliveKeys, g.rank), nil, store.Lease); err != nil {
		return err
	}
	stop, err := g.client.Watch(ctx, g.prefix(noticeKeys), g.hear)
	if err != nil {
		return err
	}
	g.stop = stop
	if g.keeps() {
		return g.publish(ctx, notice{Keeper: true})
	}
	go g.awaitStore()
	return nil
}

func (g *Group) prefix(kind string) string { return kind + g.name + "\x00" }

func (g *Group) key(kind string, rank int) string {
	return g.prefix(kind) + strconv.Itoa(rank)
}

// rankOf returns the rank at the end of a key, false if it is not the key of another rank.
func (g *Group) rankOf(key string) (int, bool) {
	rank, err := strconv.Atoi(key[strings.LastIndexByte(key, 0)+1:])
	return rank, err == nil && rank >= 0 && rank < g.size && rank != g.rank
}

// keeps reports whether this process keeps the store.
func (g *Group) keeps() bool { return g.client.LocalAddr() == nil }

// publish replaces the rank's notice.
func (g *Group) publish(ctx context.Context, n notice) error {
	value, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return g.client.Set(ctx, g.key(noticeKeys, g.rank), value, store.Lease)
}

// hear is called for each notice, and answers notices of aborts.
func (g *Group) hear(e store.Event) {
	rank, ok := g.rankOf(e.Key)
	if !ok {
		return
	}
	var n notice
	if !e.Deleted {
		if err := json.Unmarshal(e.Value, &n); err != nil {
			slog.Warn("peers: ignoring a notice that is none", "rank", rank, "err", fmt.Sprintf("%.200v", err))
			return
		}
	}
	n.Cause = legible(n.Cause)
	n.Doing = legible(n.Doing)
	n.Answer = legible(n.Answer)
	uncovered := g.note(rank, n)
	g.endWaits()
	if uncovered && !g.aborted.Load() {
		g.answer()
	}
}

// note stores a notice, and reports whether it is an abort that the rank's answer does not cover. An abort is never
// revoked.
func (g *Group) note(rank int, n notice) (uncovered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.notices[rank].Aborted {
		return false
	}
	g.notices[rank] = n
	if !n.Aborted {
		return false
	}
	uncovered = !g.failed.Load() || n.Done < g.known.Done
	if uncovered {
		g.known.Done = n.Done
	}
	g.failed.Store(true)
	return uncovered
}

// answer tells the ranks that have aborted that this one knows, and its state.
func (g *Group) answer() {
	doing := shorten(g.status())
	g.mu.Lock()
	g.known.Doing = doing
	value, err := json.Marshal(g.known)
	g.mu.Unlock()
	if err != nil {
		return // a text and a number can always be encoded
	}
	g.client.Post(g.key(answerKeys, g.rank), value, store.Lease)
	select {
	case <-g.left: // Leave may have deleted the answer before it was written
		g.client.Drop(g.key(answerKeys, g.rank))
	default:
	}
}

// awaitStore waits for the end of the rank's session.
func (g *Group) awaitStore() {
	select {
	case <-g.left:
		return
	case <-g.client.Done():
	}
	select {
	case <-g.left: // Leave ended the session
		return
	default:
	}
	g.loseStore()
	if g.Failed(math.MaxUint64) == nil { // no rank keeps the store, so its loss fails nobody
		const text = "peers: the session with the store is lost: this rank no longer learns of peers that abort"
		slog.Warn(text, "rank", g.rank, "size", g.size, "err", g.client.Err())
	}
}

// loseStore records that the rank no longer learns of aborts. That is a failure of the rank that kept the store, if it
// is a member.
func (g *Group) loseStore() {
	defer g.endWaits()
	g.mu.Lock()
	defer g.mu.Unlock()
	for rank, n := range g.notices {
		if n.Keeper && !n.Aborted {
			g.notices[rank] = notice{Aborted: true, Cause: lost}
			g.failed.Store(true)
		}
	}
}

// Failed returns an [Aborted] if another rank is known to have aborted before it completed this number of
// collectives. It does not wait, and costs a few nanoseconds while no rank has aborted.
func (g *Group) Failed(collectives uint64) error {
	if !g.failed.Load() {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	first := -1
	for _, rank := range slices.Sorted(maps.Keys(g.notices)) {
		n := g.notices[rank]
		if n.Aborted && n.Done < collectives && (first < 0 || n.Done < g.notices[first].Done) {
			first = rank
		}
	}
	if first < 0 {
		return nil
	}
	return &Aborted{Rank: first, Cause: g.notices[first].Cause}
}

// Aborted is the error of work that another rank's abort ends, a [comm.ErrPeerFailed].
type Aborted struct {
	Rank  int    // in the group
	Cause string // why it aborted
}

// Error says which rank has aborted and why.
func (a *Aborted) Error() string {
	return fmt.Sprintf("%v: rank %d aborted: %s", comm.ErrPeerFailed, a.Rank, a.Cause)
}

// Unwrap returns [comm.ErrPeerFailed].
func (a *Aborted) Unwrap() error { return comm.ErrPeerFailed }

// Until returns a context that ends with ctx, and as soon as Failed returns an error for this number of collectives,
// which is its cause then. A rank that leaves ends no context.
func (g *Group) Until(ctx context.Context, collectives uint64) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &wait{collectives: collectives, cancel: cancel}
	g.mu.Lock()
	g.waits[w] = struct{}{}
	g.mu.Unlock()
	g.endWaits() // another rank may have aborted before
	return ctx, func() {
		g.mu.Lock()
		delete(g.waits, w)
		g.mu.Unlock()
		cancel(nil)
	}
}

// endWaits ends the contexts of waits that another rank has failed.
func (g *Group) endWaits() {
	if !g.failed.Load() {
		return
	}
	g.mu.Lock()
	waits := slices.Collect(maps.Keys(g.waits))
	g.mu.Unlock()
	for _, w := range waits {
		if err := g.Failed(w.collectives); err != nil {
			w.cancel(err)
		}
	}
}

// Abort tells the members that this rank takes part in no further operation of the group. done is the number of
// collectives that it has seen completed. Abort returns when all members that can be reached know, or when ctx ends,
// with a text about the state of each other rank. Call it before ending work, if that can end the work of others as if
// it had succeeded. It does nothing after [Group.Leave].
func (g *Group) Abort(ctx context.Context, cause string, done uint64) string {
	select {
	case <-g.left:
		return ""
	default:
	}
	g.aborted.Store(true)
	earlier := g.abortedRanks()
	var doing []string
	err := g.publishAbort(ctx, cause, done)
	if err == nil {
		doing, err = g.askAll(ctx, done, earlier)
	}
	if g.client.Err() != nil { // the others learn of it from the store
		g.loseStore()
		if failed := g.Failed(math.MaxUint64); failed != nil {
			err = failed
		}
	} else if err != nil || slices.Contains(doing, silent) {
		const text = "peers: other ranks may not know that this one has aborted"
		slog.Warn(text, "rank", g.rank, "cause", cause, "err", err)
	}
	if err != nil {
		return fmt.Sprintf("what the other ranks do is not known: %v", err)
	}
	return g.describe(doing)
}

// publishAbort sets the notice of an abort, which is the rank's answer to others that abort.
func (g *Group) publishAbort(ctx context.Context, cause string, done uint64) error {
	doing := shorten(g.status())
	g.mu.Lock()
	before := g.known.Doing
	g.mu.Unlock()
	err := g.publish(ctx, notice{Aborted: true, Cause: shorten(cause), Done: done, Doing: doing, Answer: before})
	if err != nil { // there may be no notice, so the ranks that abort wait for an answer
		g.aborted.Store(false)
		if g.failed.Load() {
			g.answer()
		}
	}
	return err
}

// abortedRanks returns the notices of the ranks that are known to have aborted.
func (g *Group) abortedRanks() map[int]notice {
	g.mu.Lock()
	defer g.mu.Unlock()
	aborted := maps.Clone(g.notices)
	maps.DeleteFunc(aborted, func(_ int, n notice) bool { return !n.Aborted })
	return aborted
}

// askAll waits until every member that can be reached has answered, and returns the state of each rank. earlier are
// the ranks that had aborted before this one, which had completed done collectives.
func (g *Group) askAll(ctx context.Context, done uint64, earlier map[int]notice) (doing []string, err error) {
	for {
		known, err := g.ask(ctx, done, earlier)
		if err != nil && doing != nil && g.client.Err() == nil { // ctx has ended
			return doing, nil
		}
		if err != nil {
			return nil, err
		}
		doing = known
		rank := slices.Index(doing, silent)
		if rank < 0 {
			return doing, nil
		}
		g.await(ctx, rank, done)
	}
}

// await waits for the answer of a rank, until ctx or an interval ends.
func (g *Group) await(ctx context.Context, rank int, done uint64) {
	look, cancel := context.WithTimeout(ctx, lookEvery)
	defer cancel()
	stop, err := g.client.Watch(look, g.key(answerKeys, rank), func(e store.Event) {
		from, ok := g.rankOf(e.Key) // the key of rank 1 is a prefix of rank 10's
		if _, covers := parseAnswer(e.Value, done); ok && from == rank && covers {
			cancel()
		}
	})
	if err == nil {
		defer stop()
	}
	<-look.Done()
}

// parseAnswer returns the state of a rank, and whether its answer is for an abort after done collectives.
func parseAnswer(value []byte, done uint64) (doing string, ok bool) {
	var a answer
	err := json.Unmarshal(value, &a)
	return legible(a.Doing), err == nil && a.Done <= done
}

// ask returns the state of each rank as far as it is known now.
func (g *Group) ask(ctx context.Context, done uint64, earlier map[int]notice) ([]string, error) {
	if g.stop == nil { // nobody calls hear
		notices, err := g.client.List(ctx, g.prefix(noticeKeys))
		if err != nil {
			return nil, err
		}
		for _, e := range notices {
			g.hear(store.Event{Entry: e})
		}
	}
	aborted := g.abortedRanks()
	var members, alive, answers map[int][]byte
	if len(aborted) < g.size-1 {
		var errs [3]error
		members, errs[0] = g.list(ctx, g.prefix(memberKeys))
		alive, errs[1] = g.list(ctx, g.prefix(aliveKeys))
		answers, errs[2] = g.list(ctx, g.prefix(answerKeys))
		if err := errors.Join(errs[:]...); err != nil {
			return nil, err
		}
	}
	doing := make([]string, g.size)
	for rank := range doing {
		n, knows := aborted[rank]
		text, answered := parseAnswer(answers[rank], done)
		_, reachable := alive[rank]
		_, member := members[rank]
		switch {
		case earlier[rank].Doing != "":
			doing[rank] = n.Doing
		case answered:
			doing[rank] = text
		case n.Answer != "" || n.Doing != "":
			doing[rank] = cmp.Or(n.Answer, n.Doing)
		case reachable && knows:
			doing[rank] = "aborted: " + n.Cause
		case reachable:
			doing[rank] = silent
		case member:
			doing[rank] = lost
		default:
			doing[rank] = absent
		}
	}
	return doing, nil
}

// list returns the values of keys by rank.
func (g *Group) list(ctx context.Context, prefix string) (map[int][]byte, error) {
	entries, err := g.client.List(ctx, prefix)
	values := map[int][]byte{}
	for _, e := range entries {
		if rank, ok := g.rankOf(e.Key); ok {
			values[rank] = e.Value
		}
	}
	return values, err
}

// describe lists the states of the other ranks:
//
//	ranks 1, 2: in flight: allreduce of 16 f32, sum (collective #2); rank 3: its process has ended, or cannot be reached
func (g *Group) describe(doing []string) string {
	var texts []string
	list := map[string][]int{}
	for rank, text := range doing {
		if rank == g.rank {
			continue
		}
		if list[text] == nil {
			texts = append(texts, text)
		}
		list[text] = append(list[text], rank)
	}
	for i, text := range texts {
		texts[i] = ranks.Text(list[text]) + ": " + text
	}
	return strings.Join(texts, "; ")
}

// Leave ends the rank's membership. Its notice stays if it has aborted, for members that join later.
func (g *Group) Leave() {
	g.leave.Do(func() {
		close(g.left)
		if g.stop == nil {
			return
		}
		g.stop()
		g.forget()
		if g.failed.Load() {
			g.client.Drop(g.key(answerKeys, g.rank))
		}
		if g.keeps() && !g.aborted.Load() {
			g.client.Drop(g.key(noticeKeys, g.rank))
		}
	})
}

// forget deletes the key of the rank's membership.
func (g *Group) forget() {
	g.client.Drop(g.key(aliveKeys, g.rank))
	g.client.Drop(g.key(memberKeys, g.rank))
}

// legible makes a text of another rank safe for errors.
func legible(text string) string { return shorten(printable.Text(text)) }

// shorten cuts a text that is too long.
func shorten(text string) string {
	if len(text) <= longestText {
		return text
	}
	return strings.ToValidUTF8(text[:longestText], "")
}
