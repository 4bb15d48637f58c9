//go:build simulated

package simulation

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/sim"
)

// judge decides how a store answers writes. It simulates an etcd that is full or changes its leader.
type judge struct {
	every  int  // one write of this number gets a bad answer; 0 means none
	denied bool // such a write takes effect, and its answer is an error
	bad    bool // all writes get a bad answer
	writes int
}

var errRoom = errors.New("the store has no room")

// judge returns whether a write takes effect, and whether its answer is an error.
func (j *judge) judge() (made, refused bool) {
	j.writes++
	refused = j.bad || j.every > 0 && j.writes%j.every == 0
	return !refused || j.denied, refused
}

// fickle is a session of such a store.
type fickle struct {
	store.Store
	judge *judge
}

func (f *fickle) Set(ctx context.Context, key string, value []byte, options ...store.Option) (err error) {
	made, refused := f.judge.judge()
	if made {
		err = f.Store.Set(ctx, key, value, options...)
	}
	if refused {
		return errors.Join(errRoom, err)
	}
	return err
}

func (f *fickle) CompareAndSet(
	ctx context.Context, key string, version uint64, value []byte, options ...store.Option,
) (now store.Entry, ok bool, err error) {
	made, refused := f.judge.judge()
	if made {
		now, ok, err = f.Store.CompareAndSet(ctx, key, version, value, options...)
	}
	if refused {
		return store.Entry{}, false, errors.Join(errRoom, err)
	}
	return now, ok, err
}

// refuse makes the store refuse all writes for a while, in which a member may be lost.
func (j *job) refuse() {
	away := j.away(4)
	j.Event("the store refuses writes for %v", away)
	j.judge.bad = true
	sim.AfterFunc(away, func() { j.judge.bad = false })
}

// isolate cuts a member off from all others but not from the store. The member is joining, or trains with at least
// two others. The others lose one attempt at an epoch, and the member joins again when it is back. Leaving members
// still reach it: even then the attempt lasts for five times the others' silence and no longer.
func (j *job) isolate(m *simulated) {
	sim.Sleep(max(time.Until(j.calm), 0))
	last := j.steps[uint64(len(j.steps)-1)]
	few := len(j.members) < 3 || len(last.members) < 3
	if few || !slices.Contains(j.members, m) || j.Chance(2) {
		if len(j.members) > 4 {
			return
		}
		m = j.join()
	}
	j.Event("nobody reaches %s", m.name)
	events++
	all := slices.Clone(j.members)
	cut := func(until time.Time) {
		for _, other := range all {
			if other != m {
				j.Cut(other.node, m.node, until)
				j.Cut(m.node, other.node, until)
			}
		}
	}
	cut(time.Now().Add(time.Hour))
	j.gone(m)
	// The connections' silence and an attempt, perhaps with an earlier one.
	j.convergeIn("those who do not reach one", 14*j.silence)
	sim.Sleep(j.Between(0, 10*j.silence))
	cut(time.Now())
	j.members = all
	j.convergeIn("those who reach one again", 100*j.silence)
}
