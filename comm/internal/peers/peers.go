// Package peers has the ranks of a communicator tell each other, over the job's store, what their devices cannot: that
// a rank aborts, and what the others were doing then. A backend of GPUs uses it, where an abort on one rank ends the
// work of the others as if it had succeeded.
//
// A rank that aborts sets a notice, which the members of its group watch. Each answers with what it is doing. The
// answer also says that the member knows, so the rank waits for all answers before it ends any work. While nobody
// aborts, nothing is sent.
//
// The keys in the store are these, with the name of the group and 0 bytes in between:
//
//	peers/member/  RANK           has joined and not left; outlives its process
//	peers/alive/   RANK           the same, leased: a member without is lost
//	peers/notice/  RANK           has aborted, or its process keeps the store; leased
//	peers/answer/  ABORTED, RANK  what the rank was doing; leased, deleted when the aborted rank leaves
//
// No lock is held during a call of the store's client, which may call the watches of other ranks of the process.
package peers

import (
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

// lookEvery is how often a rank that waits for an answer asks which members are lost. The store learns within
// milliseconds that a process was killed, but perhaps later than the rank that aborts because of it.
const lookEvery = 100 * time.Millisecond

// longestText bounds a cause and an answer, in bytes: they go to every rank, and into its errors.
const longestText = 200

// What a rank is doing that has not answered.
const (
	lost   = "its process has ended, or cannot be reached"
	silent = "does not answer"
	absent = "communicator closed, or not made yet"
)

// Group is one rank's side of a communicator, which has the same name on all its ranks.
type Group struct {
	client  *store.Client
	name    string
	rank    int
	size    int
	status  func() string
	stop    func()        // ends the watch for notices; nil if the rank is no member
	left    chan struct{} // closed by Leave
	leave   sync.Once
	aborted atomic.Bool // Abort was called
	failed  atomic.Bool // another rank has aborted

	mu      sync.Mutex
	notices map[int]notice // of other ranks; guarded by mu
}

// notice is what a rank tells the others. The zero notice says nothing.
type notice struct {
	Aborted bool   `json:"aborted,omitempty"`
	Cause   string `json:"cause,omitempty"`
	Done    uint64 `json:"done,omitempty"`   // collectives that the rank had completed
	Keeper  bool   `json:"keeper,omitempty"` // the rank's process keeps the store
}

// Join makes a rank a member of a group. status says in a few words what the rank is doing; it must not wait. A rank
// that cannot reach the store, or has 256 groups already, which is the store's bound on watches, goes on without. That
// is a warning in the log.
func Join(ctx context.Context, client *store.Client, name string, rank, size int, status func() string) *Group {
	g := &Group{
		client:  client,
		name:    name,
		rank:    rank,
		size:    size,
		status:  status,
		left:    make(chan struct{}),
		notices: map[int]notice{},
	}
	if err := g.join(ctx); err != nil {
		g.forget()
		slog.Warn("peers: this rank does not learn of peers that abort", "rank", rank, "size", size, "err", err)
	}
	return g
}

func (g *Group) join(ctx context.Context) error {
	// In this order, the rank answers all that abort when it is a member already.
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

func (g *Group) key(kind string, rank int) string { return g.prefix(kind) + strconv.Itoa(rank) }

func (g *Group) answerPrefix(aborted int) string { return g.key(answerKeys, aborted) + "\x00" }

func (g *Group) answerKey(aborted, rank int) string {
	return g.answerPrefix(aborted) + strconv.Itoa(rank)
}

// rankOf returns the rank at the end of a key, false if it is none of another rank.
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

// hear is called for each notice, and answers one of an abort.
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
	n.Cause = shorten(printable.Text(n.Cause))
	if g.note(rank, n) {
		g.client.Post(g.answerKey(rank, g.rank), []byte(shorten(g.status())), store.Lease)
	}
}

// note keeps a notice, and reports whether it is of an abort that was not known. An abort is not taken back.
func (g *Group) note(rank int, n notice) (aborts bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.notices[rank].Aborted {
		return false
	}
	g.notices[rank] = n
	if n.Aborted {
		g.failed.Store(true)
	}
	return n.Aborted
}

// awaitStore waits for the end of the store.
func (g *Group) awaitStore() {
	select {
	case <-g.client.Done():
		g.loseStore()
	case <-g.left:
	}
}

// loseStore notes that the rank learns of no abort any more. That is a failure of the rank that kept the store, if it
// is a member.
func (g *Group) loseStore() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for rank, n := range g.notices {
		if n.Keeper && !n.Aborted {
			g.notices[rank] = notice{Aborted: true, Cause: lost}
			g.failed.Store(true)
		}
	}
}

// Failed returns [comm.ErrPeerFailed] if another rank is known to have aborted before it completed that many
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
	return fmt.Errorf("%w: rank %d aborted: %s", comm.ErrPeerFailed, first, g.notices[first].Cause)
}

// Abort tells the members that this rank takes part in no further operation of the group. done is the number of
// collectives that it has seen completed. Abort returns when all members that can be reached know, or when ctx ends,
// with a text of what each other rank is doing. Call it before ending work, if that can end the work of others as if it
// had succeeded. It does nothing after [Group.Leave].
func (g *Group) Abort(ctx context.Context, cause string, done uint64) string {
	select {
	case <-g.left:
		return ""
	default:
	}
	g.aborted.Store(true)
	var doing []string
	err := g.publish(ctx, notice{Aborted: true, Cause: shorten(cause), Done: done})
	if err == nil {
		doing, err = g.askAll(ctx)
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

// askAll waits until no member that can be reached is silent, and returns what each rank is doing.
func (g *Group) askAll(ctx context.Context) (doing []string, err error) {
	for {
		known, err := g.ask(ctx)
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
		look, cancel := context.WithTimeout(ctx, lookEvery)
		_, _ = g.client.Get(look, g.answerKey(g.rank, rank))
		cancel()
	}
}

// ask returns what each rank is doing as far as it is known now.
func (g *Group) ask(ctx context.Context) ([]string, error) {
	members, membersErr := g.list(ctx, g.prefix(memberKeys))
	alive, aliveErr := g.list(ctx, g.prefix(aliveKeys))
	answers, answersErr := g.list(ctx, g.answerPrefix(g.rank))
	if err := errors.Join(membersErr, aliveErr, answersErr); err != nil {
		return nil, err
	}
	doing := make([]string, g.size)
	for rank := range doing {
		answer, answered := answers[rank]
		_, reachable := alive[rank]
		_, member := members[rank]
		switch {
		case answered:
			doing[rank] = shorten(printable.Text(answer))
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
func (g *Group) list(ctx context.Context, prefix string) (map[int]string, error) {
	entries, err := g.client.List(ctx, prefix)
	values := map[int]string{}
	for _, e := range entries {
		if rank, ok := g.rankOf(e.Key); ok {
			values[rank] = string(e.Value)
		}
	}
	return values, err
}

// describe says what each other rank is doing:
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
		switch {
		case g.aborted.Load():
			for rank := range g.size {
				g.client.Drop(g.answerKey(g.rank, rank))
			}
		case g.keeps():
			g.client.Drop(g.key(noticeKeys, g.rank))
		}
	})
}

// forget deletes that the rank has joined.
func (g *Group) forget() {
	g.client.Drop(g.key(aliveKeys, g.rank))
	g.client.Drop(g.key(memberKeys, g.rank))
}

// shorten cuts a text that is too long.
func shorten(text string) string {
	if len(text) <= longestText {
		return text
	}
	return strings.ToValidUTF8(text[:longestText], "")
}
