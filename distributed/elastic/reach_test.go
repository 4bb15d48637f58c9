package elastic

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// comers is an epoch of which the members that are written as capitals have no state.
func comers(number uint64, members string, failed ...failure) *record {
	r := epochOf(number, strings.ToLower(members))
	for i, c := range members {
		r.Members[i].Fresh = c < 'a'
	}
	r.Failed = failed
	return r
}

// missing has a member say whom it has not reached.
func missing(ranks ...int) func(s *status) { return func(s *status) { s.Unreached = ranks } }

// resting makes a member have waited after this number of attempts.
func resting(attempts int) func(s *status) { return func(s *status) { s.BackedOff = attempts } }

// TestUnreachable: after an attempt that failed, the next epoch is made without those that it failed for.
func TestUnreachable(t *testing.T) {
	abd := comers(4, "abD")
	abde := comers(4, "abDE")
	abc := comers(4, "abc")
	abcD := comers(4, "abcD")
	aDE := comers(4, "aDE")
	aBC := comers(1, "aBC")
	again := comers(4, "abD", failure{"d", 1})
	fourth := comers(4, "abD", failure{"d", 3})
	once := comers(4, "ab", failure{"d", 1})
	twice := comers(4, "ab", failure{"d", 2})
	both := comers(4, "ab", failure{"d", 3}, failure{"e", 2})
	tried := func(name string, r *record, change ...func(s *status)) status {
		return at(name, r, append([]func(s *status){unformed}, change...)...)
	}
	fresh := func(name string, r *record, change ...func(s *status)) status {
		return tried(name, r, append([]func(s *status){withoutAny}, change...)...)
	}
	for name, c := range map[string]struct {
		v       view
		members string
		failed  []failure
		lost    []string
		why     string
	}{
		"one that joins": {v: view{record: abd, present: []status{
			tried("a", abd),
			tried("b", abd),
			fresh("d", abd),
		}}, members: "ab", failed: []failure{{"d", 1}}},
		"… and hangs": {v: view{record: abd, present: []status{
			tried("a", abd),
			tried("b", abd),
			fresh("d", abd, training),
		}}, members: "ab", failed: []failure{{"d", 1}}, lost: []string{"d"}},
		"… and hangs, while another one tries": {v: view{record: abd, present: []status{
			tried("a", abd),
			tried("b", abd, training),
			fresh("d", abd, training),
		}},
			why: "is not at the boundary"},
		"… is gone": {v: view{record: abd, present: []status{
			tried("a", abd),
			tried("b", abd),
		}}, members: "ab", lost: []string{"d"}},
		"… for the second time": {v: view{record: again, present: []status{
			tried("a", again),
			tried("b", again),
			fresh("d", again, resting(1)),
		}}, members: "ab", failed: []failure{{"d", 2}}},
		"… got no state": {v: view{record: abd, present: []status{
			at("a", abd),
			at("b", abd),
			at("d", abd, withoutAny),
		}}, members: "ab", failed: []failure{{"d", 1}}},
		"… got the state": {v: view{record: fourth, present: []status{
			at("a", fourth),
			at("b", fourth),
			at("d", fourth),
		}}, members: "abd", failed: []failure{}},
		"… and is needed": {v: view{record: abd, min: 3, present: []status{
			tried("a", abd),
			tried("b", abd),
			fresh("d", abd),
		}}, members: "abd"},
		"two that join, nobody knows which": {v: view{record: abde, present: []status{
			tried("a", abde),
			tried("b", abde),
			fresh("d", abde),
			fresh("e", abde),
		}}, members: "ab", failed: []failure{{"d", 1}, {"e", 1}}},
		"two that join, one is known": {v: view{record: abde, present: []status{
			tried("a", abde, missing(3)),
			tried("b", abde),
			fresh("d", abde),
			fresh("e", abde, missing(0, 1, 2)),
		}}, members: "abd", failed: []failure{{"e", 1}}},
		"one that joins, and one with the state is gone": {v: view{record: abcD, present: []status{
			tried("a", abcD),
			tried("b", abcD),
			fresh("d", abcD),
		}}, members: "abd", lost: []string{"c"}},
		"one with the state, that all miss": {v: view{record: abc, present: []status{
			tried("a", abc, missing(1)),
			tried("b", abc, missing(0, 2)),
			tried("c", abc, missing(1)),
		}}, members: "ac", failed: []failure{{"b", 1}}, lost: []string{"b"}},
		"one with the state, as one says": {v: view{record: abc, present: []status{
			tried("a", abc),
			tried("b", abc, missing(2)),
			tried("c", abc),
		}}, members: "ab", failed: []failure{{"c", 1}}, lost: []string{"c"}},
		"nobody with the state reaches another": {v: view{record: abc, present: []status{
			tried("a", abc, missing(1, 2)),
			tried("b", abc, missing(0, 2)),
			tried("c", abc, missing(0, 1)),
		}}, members: "a", failed: []failure{{"c", 1}, {"b", 1}}, lost: []string{"b", "c"}},
		"the only one with the state": {v: view{record: aDE, present: []status{
			tried("a", aDE, missing(1, 2)),
			fresh("d", aDE, missing(0)),
			fresh("e", aDE, missing(0)),
		}}, members: "ade"},
		"what is said of an earlier epoch": {v: view{record: abc, present: []status{
			at("a", epochOf(3, "ab"), missing(1)),
			tried("b", abc),
			tried("c", abc),
		}},
			why: "a is not at the boundary"},
		"ranks that there are not": {v: view{record: abc, present: []status{
			tried("a", abc, missing(-1, 0, 7, 1<<40)),
			tried("b", abc),
			tried("c", abc),
		}}, members: "abc"},
		"it may be tried again": {v: view{record: twice, present: []status{
			at("a", twice),
			at("b", twice),
			at("d", nil, resting(2)),
		}}, members: "abd", failed: []failure{{"d", 2}}},
		"it may not be tried yet": {v: view{record: twice, present: []status{
			at("a", twice),
			at("b", twice),
			at("d", nil, resting(1)),
		}}, members: "ab", failed: []failure{{"d", 2}}},
		"one that none failed for comes first": {v: view{record: once, present: []status{
			at("a", once),
			at("b", once),
			at("d", nil, resting(1)),
			at("e", nil),
		}}, members: "abe", failed: []failure{{"d", 1}}},
		"they are tried one by one": {v: view{record: both, present: []status{
			at("a", both),
			at("b", both),
			at("d", nil, resting(3)),
			at("e", nil, resting(2)),
		}}, members: "abe", failed: []failure{{"d", 3}, {"e", 2}}},
		"a first epoch": {v: view{record: aBC, orphaned: 1, present: []status{
			fresh("a", aBC, missing(2)),
			fresh("b", aBC, missing(2)),
			fresh("c", aBC, missing(0, 1)),
		}}, members: "ab", failed: []failure{{"c", 1}}},
		"a first epoch, nobody knows why": {v: view{record: aBC, orphaned: 1, present: []status{
			fresh("a", aBC),
			fresh("b", aBC),
			fresh("c", aBC),
		}}, members: "abc"},
	} {
		t.Run(name, func(t *testing.T) {
			v := c.v
			v.min = max(v.min, 1)
			next, why := v.next()
			if c.why != "" {
				require.Nil(t, next)
				assert.Contains(t, why, c.why)
				return
			}
			require.NotNil(t, next, why)
			members := ""
			for _, p := range next.Members {
				members += p.Name
			}
			assert.Equal(t, c.members, members)
			assert.ElementsMatch(t, c.failed, next.Failed)
			assert.Equal(t, c.lost, next.Lost)
		})
	}
}

// TestFailuresAreBounded: a record forgets the names that it has had for longest.
func TestFailuresAreBounded(t *testing.T) {
	r := &record{}
	for i := range 2 * maxFailures {
		r.Failed = r.failures(nil, []person{{Name: name(i)}})
	}
	assert.Len(t, r.Failed, maxFailures)
	assert.Equal(t, 0, r.attempts(name(0)))
	assert.Equal(t, 1, r.attempts(name(2*maxFailures-1)))
}

// partly forms communicators between members that reach each other.
type partly struct {
	rooms
	reached func(name string) bool
	says    bool // errors name ranks
}

// unconnected is the error of a member that misses others.
type unconnected struct {
	error
	ranks []int
}

func (u unconnected) MissingRanks() []int { return u.ranks }
func (u unconnected) Unwrap() error       { return u.error }

// former is a member's, which knows the others by its Member.
func (p *partly) former(m func() *Member) former {
	return func(ctx context.Context, kv store.Store, place Place) (comm.Communicator, error) {
		own := m()
		r := own.epoch.record
		var lacks []int
		for rank, other := range r.Members {
			if rank != place.Rank && (!p.reached(other.Name) || !p.reached(own.cfg.Name)) {
				lacks = append(lacks, rank)
			}
		}
		if len(lacks) == 0 {
			return p.form(ctx, kv, place)
		}
		<-ctx.Done()
		err := fmt.Errorf("%w: no connection to %v", comm.ContextError(ctx), lacks)
		if p.says {
			err = unconnected{err, lacks}
		}
		return nil, err
	}
}

// TestAMemberThatNobodyReaches: members whose newest one, or an older one, cannot be reached by the others lose the
// time of one attempt, and go on without it. It waits ever longer, joins when it is in reach, and fails when it never
// is.
func TestAMemberThatNobodyReaches(t *testing.T) {
	for name, c := range map[string]struct {
		says, old, never bool
	}{
		"one that joins":                    {says: true},
		"one that joins, not named":         {},
		"one that joins, never in reach":    {never: true},
		"a member":                          {says: true, old: true},
		"a member, which is never in reach": {says: true, old: true, never: true},
	} {
		t.Run(name, func(t *testing.T) {
			text := logged(t)
			bubble(t, func(t *testing.T) { nobodyReaches(t, c.says, c.old, c.never) })
			assert.Contains(t, text.String(), "the others had no connection to this member")
			assert.Contains(t, text.String(), "going on without members that have no connection to the others")
		})
	}
}

func nobodyReaches(t *testing.T, says, old, never bool) {
	server := store.NewServer(store.Options{})
	defer func() { assert.NoError(t, server.Close()) }()
	log := newReplay()
	var away, back atomic.Bool
	world := &partly{says: says}
	world.reached = func(name string) bool { return name != "c" || !away.Load() }
	join := func(name string) *trainee {
		var a *trainee
		dial := func(context.Context) (store.Store, error) { return server.Local(name), nil }
		form := world.former(func() *Member { return a.Member })
		a = newTrainee(t, log, quick(Config{Name: name, Dial: dial, Form: form}))
		return a
	}
	const pace = 100 * time.Millisecond
	var longest time.Duration // between steps of a
	last := time.Now()
	rounds := 0 // steps of a and b alone
	var all sync.WaitGroup
	run := func(a *trainee) {
		all.Go(func() {
			err := a.run(t.Context(), t, func(e *Epoch, made int) bool {
				time.Sleep(pace)
				three := slices.Contains(e.Members, "c")
				if a.cfg.Name == "a" {
					longest = max(longest, time.Since(last))
					last = time.Now()
					if !three {
						rounds++
					}
				}
				if three && !away.Load() && !back.Load() && made == 3 { // an older member is cut off
					away.Store(true)
					a.guard.Lock()
					for _, c := range a.comms {
						comm.AbortAll(c, comm.ErrPeerFailed)
					}
					a.guard.Unlock()
				}
				return three && back.Load() && made == 5 || never && back.Load()
			})
			if never && a.cfg.Name == "c" {
				assert.ErrorContains(t, err, fmt.Sprintf("no connection to it in %d attempts", maxAttempts))
				assert.ErrorContains(t, err, "no connection to [", "its own error")
				back.Store(true)
				return
			}
			assert.NoError(t, err, a.cfg.Name)
		})
	}
	list := []*trainee{join("a"), join("b")}
	away.Store(!old)
	if old {
		list = append(list, join("c"))
	}
	for _, a := range list {
		run(a)
	}
	if !old {
		time.Sleep(time.Second)
		list = append(list, join("c"))
		run(list[2])
	}
	if !never {
		time.Sleep(30 * time.Second)
		back.Store(true)
		away.Store(false)
	}
	all.Wait()
	assert.LessOrEqual(t, longest, list[0].cfg.limit+time.Second/2, "more than one attempt")
	if !never {
		// Attempts of 1 s, 2, 4, 8, 16 s apart.
		assert.Greater(t, rounds, int(24*time.Second/(2*pace)))
	}
	log.repeat(t, list[0].steps, list[:2])
	for _, a := range list {
		err := a.Close()
		if !errors.Is(err, comm.ErrPeerFailed) {
			assert.NoError(t, err)
		}
	}
}
