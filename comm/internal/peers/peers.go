// Package peers has the ranks of a communicator tell each other, over the job's store, what their devices cannot: that
// a rank aborts, and what the others were doing then. A backend of GPUs uses it, where an abort on one rank ends the
// work of the others as if it had succeeded.
//
// A rank that aborts sets a notice, which all ranks watch. Each member of the group answers with what it is doing. The
// answer also says that the member knows, so the rank waits for all of them before it ends any work. While nobody
// aborts, nothing is sent.
//
// The keys in the store end in the name of a group, a 0 byte and a rank:
//
//	peers/member/      the rank has joined and not left; outlives its session, by which a rank that is lost is known
//	peers/notice/      the rank has aborted, or its process keeps the store; leased
//	peers/answer/ID/   what the rank is doing, for the session ID that asked; leased, deleted when it is read
//
// Lock order: Session.mu before Group.mu. Neither is held during a call of the store's client, which may call the
// watches of other sessions of the process in the same goroutine.
package peers

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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
	noticeKeys = "peers/notice/"
	answerKeys = "peers/answer/"
)

// lookEvery is how often a rank that waits for answers asks which members are lost. The store learns of a process that
// is killed within milliseconds, but perhaps later than NCCL does.
const lookEvery = 100 * time.Millisecond

// longestText bounds a cause and an answer, in bytes: they go to every rank, and into its errors.
const longestText = 200

// lostText is the end of a process, in errors.
const lostText = "its process has ended, or cannot be reached"

// Session is one rank's side of a store, for a communicator and its sub-communicators.
type Session struct {
	client *store.Client
	end    func() error // closes the client, unless others use it
	id     string       // random; where the answers for this session go
	stops  []func()     // of watches
	closed chan struct{}

	mu     sync.Mutex
	groups map[string]*Group // that the rank is a member of, by name; guarded by mu
	ended  bool              // Close was called; guarded by mu
}

// Group is one rank's side of a communicator, which has the same name on all its ranks.
type Group struct {
	session *Session
	name    string
	rank    int
	size    int
	status  func() string
	aborted atomic.Bool   // Abort was called
	failed  atomic.Bool   // another rank has aborted
	heard   chan struct{} // has a value when an answer came that nobody has counted

	mu      sync.Mutex
	notices map[int]notice // of other ranks; guarded by mu
	answers map[int]string // what other ranks do; guarded by mu
}

// notice is the value of a notice key.
type notice struct {
	Aborted bool   `json:"aborted,omitempty"`
	Cause   string `json:"cause,omitempty"`
	Done    uint64 `json:"done,omitempty"`   // collectives that the rank had completed
	Asker   string `json:"asker,omitempty"`  // the session that wants answers
	Keeper  bool   `json:"keeper,omitempty"` // the rank's process keeps the store
}

// Open begins a session, which ends with its last group, or with [Session.Close] if it has none. end is called then.
func Open(ctx context.Context, client *store.Client, end func() error) (*Session, error) {
	s := &Session{client: client, end: end, id: rand.Text(), closed: make(chan struct{}), groups: map[string]*Group{}}
	watches := []struct {
		prefix string
		hear   func(name string, rank int, e store.Event)
	}{
		{noticeKeys, s.hearNotice},
		{s.answerPrefix(s.id), s.hearAnswer},
	}
	for _, w := range watches {
		stop, err := client.Watch(ctx, w.prefix, func(e store.Event) {
			name, rank, err := parse(w.prefix, e.Key)
			if err != nil {
				slog.Warn("peers: ignoring a key of no rank", "err", err)
				return
			}
			w.hear(name, rank, e)
		})
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.stops = append(s.stops, stop)
	}
	if client.LocalAddr() != nil {
		go s.awaitStore()
	}
	return s, nil
}

// parse returns the group's name and the rank in a key.
func parse(prefix, key string) (name string, rank int, err error) {
	place := strings.TrimPrefix(key, prefix)
	i := strings.LastIndexByte(place, 0)
	if i < 0 {
		return "", 0, fmt.Errorf("%.100q has no rank", key)
	}
	rank, err = strconv.Atoi(place[i+1:])
	if err != nil || rank < 0 {
		return "", 0, fmt.Errorf("%.100q has no rank", key)
	}
	return place[:i], rank, nil
}

func (s *Session) answerPrefix(session string) string { return answerKeys + session + "/" }

// group returns the group of a name if the rank is a member.
func (s *Session) group(name string) *Group {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.groups[name]
}

// hearNotice is called for each change of a notice.
func (s *Session) hearNotice(name string, rank int, e store.Event) {
	g := s.group(name)
	if g == nil || rank == g.rank {
		return
	}
	if e.Deleted {
		g.forgetKeeper(rank)
		return
	}
	g.read(rank, e.Value)
}

// hearAnswer is called for each answer to this session.
func (s *Session) hearAnswer(name string, rank int, e store.Event) {
	if e.Deleted {
		return
	}
	s.client.Drop(e.Key)
	g := s.group(name)
	if g == nil || rank >= g.size {
		return
	}
	g.mu.Lock()
	g.answers[rank] = shorten(printable.Text(string(e.Value)))
	g.mu.Unlock()
	select {
	case g.heard <- struct{}{}:
	default:
	}
}

// awaitStore waits for the end of the store.
func (s *Session) awaitStore() {
	select {
	case <-s.client.Done():
		s.loseStore()
	case <-s.closed:
	}
}

// loseStore notes that no rank can be told of an abort any more. The groups of which the store's own process is a
// member have failed.
func (s *Session) loseStore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.groups {
		g.loseKeeper()
	}
}

// Join makes the rank a member of a group. status says in a few words what it is doing; it must not wait. A rank that
// does not reach the store takes part without, which is a warning in the log.
func (s *Session) Join(ctx context.Context, name string, rank, size int, status func() string) *Group {
	g := &Group{
		session: s,
		name:    name,
		rank:    rank,
		size:    size,
		status:  status,
		heard:   make(chan struct{}, 1),
		notices: map[int]notice{},
		answers: map[int]string{},
	}
	err := s.add(g) // first: from now on notices of the group are kept
	if err == nil {
		err = g.enter(ctx)
	}
	if err != nil {
		slog.Warn("peers: this rank does not learn of peers that abort", "rank", rank, "size", size, "err", err)
	}
	return g
}

// add has the session hear of a group.
func (s *Session) add(g *Group) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return comm.ErrClosed
	}
	s.groups[g.name] = g
	return nil
}

// enter makes the rank a member. A rank that aborts later waits for its answer, and it reads the notices of those that
// have aborted before.
func (g *Group) enter(ctx context.Context) error {
	client := g.session.client
	if err := client.Set(ctx, g.key(memberKeys, g.rank), nil); err != nil {
		return err
	}
	if client.LocalAddr() == nil {
		value, err := json.Marshal(notice{Keeper: true})
		if err != nil {
			return err
		}
		client.Post(g.key(noticeKeys, g.rank), value, store.Lease)
	}
	earlier, err := client.List(ctx, g.prefix(noticeKeys))
	for _, e := range earlier {
		_, rank, err := parse(noticeKeys, e.Key)
		if err == nil && rank != g.rank {
			g.read(rank, e.Value)
		}
	}
	return err
}

func (g *Group) prefix(kind string) string { return kind + g.name + "\x00" }

func (g *Group) key(kind string, rank int) string { return g.prefix(kind) + strconv.Itoa(rank) }

// read notes a notice, and answers it.
func (g *Group) read(rank int, value []byte) {
	var n notice
	err := json.Unmarshal(value, &n)
	if err == nil && rank >= g.size {
		err = fmt.Errorf("rank %d of %d", rank, g.size)
	}
	if err != nil {
		slog.Warn("peers: ignoring a notice that is none", "rank", rank, "err", fmt.Sprintf("%.200v", err))
		return
	}
	n.Cause = shorten(printable.Text(n.Cause))
	g.note(rank, n)
	if n.Aborted {
		key := g.session.answerPrefix(n.Asker) + g.name + "\x00" + strconv.Itoa(g.rank)
		g.session.client.Post(key, []byte(shorten(g.status())), store.Lease)
	}
}

// note keeps a notice. A rank that has aborted stays so.
func (g *Group) note(rank int, n notice) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.notices[rank].Aborted {
		return
	}
	g.notices[rank] = n
	if n.Aborted {
		g.failed.Store(true)
	}
}

// forgetKeeper notes that the rank that keeps the store has left. An abort is not forgotten.
func (g *Group) forgetKeeper(rank int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.notices[rank].Aborted {
		delete(g.notices, rank)
	}
}

// loseKeeper notes that the store has ended.
func (g *Group) loseKeeper() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for rank, n := range g.notices {
		if n.Keeper && !n.Aborted {
			g.notices[rank] = notice{Aborted: true, Cause: lostText, Keeper: true}
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
func (g *Group) Abort(ctx context.Context, cause string, done uint64) (text string) {
	if g.session.group(g.name) != g {
		return ""
	}
	g.aborted.Store(true)
	value, err := json.Marshal(notice{Aborted: true, Cause: shorten(cause), Done: done, Asker: g.session.id})
	if err == nil {
		err = g.session.client.Set(ctx, g.key(noticeKeys, g.rank), value, store.Lease)
	}
	members := map[int]bool{}
	if err == nil {
		members, err = g.await(ctx)
	}
	silent := len(g.silent(members)) > 0
	switch {
	case g.session.client.Err() != nil: // the other ranks learn that from the store
		g.session.loseStore()
	case err != nil || silent:
		const text = "peers: other ranks may not know that this one has aborted"
		slog.Warn(text, "rank", g.rank, "cause", cause, "err", err)
	}
	if err != nil && !silent {
		return g.describeUnknown(err)
	}
	return g.describe(members)
}

// await waits for the answers of all members that can be reached. It returns the ranks that are members, and whether
// each can be reached.
func (g *Group) await(ctx context.Context) (members map[int]bool, err error) {
	for {
		list, err := g.session.client.List(ctx, g.prefix(memberKeys))
		if err != nil {
			return members, err
		}
		members = map[int]bool{}
		for _, e := range list {
			_, rank, err := parse(memberKeys, e.Key)
			if err == nil && rank != g.rank && rank < g.size {
				members[rank] = !e.Gone
			}
		}
		if g.awaitAnswers(ctx, members) || ctx.Err() != nil || g.session.client.Err() != nil {
			return members, nil
		}
	}
}

// awaitAnswers waits for the answers of members until it is time to ask again which can be reached. It reports whether
// all have come.
func (g *Group) awaitAnswers(ctx context.Context, members map[int]bool) bool {
	look := time.NewTimer(lookEvery)
	defer look.Stop()
	for len(g.silent(members)) > 0 {
		select {
		case <-g.heard:
		case <-look.C:
			return false
		case <-g.session.client.Done():
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// silent returns the members that can be reached and have not answered.
func (g *Group) silent(members map[int]bool) (list []int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for rank, reachable := range members {
		if _, answered := g.answers[rank]; reachable && !answered {
			list = append(list, rank)
		}
	}
	return list
}

// describe says what each other rank is doing:
//
//	ranks 1, 2: in flight: allreduce of 16 f32, sum (collective #2); rank 3: its process has ended, or cannot be reached
func (g *Group) describe(members map[int]bool) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var order []string
	doing := map[string][]int{}
	for rank := range g.size {
		if rank == g.rank {
			continue
		}
		text, answered := g.answers[rank]
		reachable, member := members[rank]
		switch {
		case answered:
		case reachable:
			text = "does not answer"
		case member:
			text = lostText
		default:
			text = "communicator closed, or not made yet"
		}
		if doing[text] == nil {
			order = append(order, text)
		}
		doing[text] = append(doing[text], rank)
	}
	var parts []string
	for _, text := range order {
		parts = append(parts, ranks.Text(doing[text])+": "+text)
	}
	return strings.Join(parts, "; ")
}

// describeUnknown says that the store does not answer, and which rank has kept it.
func (g *Group) describeUnknown(err error) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	text := fmt.Sprintf("what the other ranks do is not known: %v", err)
	for _, rank := range slices.Sorted(maps.Keys(g.notices)) {
		n := g.notices[rank]
		if n.Aborted && n.Keeper {
			text = fmt.Sprintf("rank %d: %s; %s", rank, lostText, text)
		}
	}
	return text
}

// Leave ends the rank's membership. Its notice stays if it has aborted: members that join later read it.
func (g *Group) Leave() {
	s := g.session
	s.mu.Lock()
	joined := s.groups[g.name] == g
	if joined {
		delete(s.groups, g.name)
	}
	last := len(s.groups) == 0
	s.mu.Unlock()
	if !joined {
		return
	}
	s.client.Drop(g.key(memberKeys, g.rank))
	if s.client.LocalAddr() == nil && !g.aborted.Load() {
		s.client.Drop(g.key(noticeKeys, g.rank))
	}
	if last {
		_ = s.Close()
	}
}

// Close ends a session without groups.
func (s *Session) Close() error {
	s.mu.Lock()
	before := s.ended
	s.ended = true
	s.mu.Unlock()
	if before {
		return nil
	}
	close(s.closed)
	for _, stop := range s.stops {
		stop()
	}
	return s.end()
}

// shorten cuts a text that is too long.
func shorten(text string) string {
	if len(text) <= longestText {
		return text
	}
	return strings.ToValidUTF8(text[:longestText], "")
}
