package elastic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/dump"
)

// severed is a session that a test has ended for its member. The store has not noticed, so its leases last.
type severed struct {
	store.Store
	done chan struct{}
	once sync.Once
}

func (s *severed) Done() <-chan struct{} { return s.done }

func (s *severed) Err() error {
	select {
	case <-s.done:
		return comm.ErrPeerFailed
	default:
		return nil
	}
}

func (s *severed) Close() error {
	s.once.Do(func() { close(s.done) })
	return nil
}

// overtaken is a session whose first write of a key comes behind another one.
type overtaken struct {
	store.Store
	key    string
	before func()
	once   sync.Once
}

func (o *overtaken) CompareAndSet(
	ctx context.Context, key string, version uint64, value []byte, options ...store.Option,
) (store.Entry, bool, error) {
	if key == o.key {
		o.once.Do(o.before)
	}
	return o.Store.CompareAndSet(ctx, key, version, value, options...)
}

// A member that connects again does not take a late write of its earlier session for its own: that vanishes with the
// lease of that session.
func TestLateWriteOfAnEarlierSession(t *testing.T) { bubble(t, lateWrite) }

func lateWrite(t *testing.T) {
	server := store.NewServer(store.Options{})
	observer := server.Local("observer")
	const key = memberKeys + "a"
	var mu sync.Mutex
	text, deleted := []byte(nil), 0
	_, err := observer.Watch(t.Context(), key, func(e store.Event) {
		mu.Lock()
		defer mu.Unlock()
		if e.Deleted {
			deleted++
			return
		}
		text = e.Value
	})
	require.NoError(t, err)
	first := server.Local("first session")
	severing := &severed{Store: first, done: make(chan struct{})}
	var dials atomic.Int32
	dial := func(context.Context) (store.Store, error) {
		if dials.Add(1) == 1 {
			return severing, nil
		}
		return &overtaken{Store: server.Local("second session"), key: key, before: func() {
			mu.Lock()
			late := text
			mu.Unlock()
			assert.NoError(t, first.Set(context.Background(), key, late, store.Lease))
		}}, nil
	}
	m, err := Join(t.Context(), quick(Config{Name: "a", Min: 1, Form: new(rooms).form, Dial: dial}), Plain{})
	require.NoError(t, err)
	require.NoError(t, severing.Close())
	time.Sleep(m.cfg.Silence / 2) // of the bubble
	require.EqualValues(t, 2, dials.Load())
	m.mu.Lock()
	connected := m.kv != nil
	m.mu.Unlock()
	require.True(t, connected)
	require.NoError(t, first.Close()) // its lease ends
	mu.Lock()
	assert.Zero(t, deleted, "the entry was that of the first session")
	mu.Unlock()
	require.NoError(t, m.Close())
	require.NoError(t, server.Close())
}

// slow is a session of a store whose leases last longer than a member's Silence.
type slow struct {
	store.Store
	lease time.Duration
}

func (s *slow) LeaseTime() time.Duration { return s.lease }

// A process that starts again takes its name over once the store's lease of the earlier process ends, however short its
// own Silence is, and is refused while another process has the name for longer.
func TestNameOfAnEarlierProcess(t *testing.T) {
	for _, ends := range []bool{true, false} {
		t.Run(fmt.Sprint(ends), func(t *testing.T) {
			bubble(t, func(t *testing.T) { nameOfAnEarlierProcess(t, ends) })
		})
	}
}

func nameOfAnEarlierProcess(t *testing.T, ends bool) {
	const lease = 10 * time.Second
	server := store.NewServer(store.Options{})
	earlier := server.Local("an earlier process")
	text, err := json.Marshal(status{Name: "a", Incarnation: "earlier", Standing: fresh})
	require.NoError(t, err)
	require.NoError(t, earlier.Set(t.Context(), memberKeys+"a", text, store.Lease))
	dial := func(context.Context) (store.Store, error) { return &slow{server.Local("a member"), lease}, nil }
	m, err := Join(t.Context(), quick(Config{Name: "a", Min: 1, Form: new(rooms).form, Dial: dial}), Plain{})
	require.NoError(t, err, "it waits for longer than five times Silence")
	if ends {
		time.AfterFunc(lease, func() { assert.NoError(t, earlier.Close()) })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*lease)
	defer cancel()
	began := time.Now()
	err = ErrStore
	for errors.Is(err, ErrStore) {
		_, err = m.Next(ctx, nil)
	}
	if ends {
		require.NoError(t, err)
	} else {
		require.ErrorIs(t, err, ErrIdentity)
		assert.Less(t, time.Since(began), 2*lease+time.Second)
	}
	require.NoError(t, m.Close())
	require.NoError(t, server.Close())
}

// TestRunOfMembers: the members of a job that no launcher names agree on a name for their flight records, and keep it in
// a store that has lost it.
func TestRunOfMembers(t *testing.T) {
	noLauncher := func(string) string { return "" }
	join := func(server *store.Server, name string) *Member {
		dial := func(context.Context) (store.Store, error) { return server.Local(name), nil }
		m, err := Join(t.Context(), quick(Config{Name: name, Min: 1, Dial: dial, Form: new(rooms).form}), Plain{})
		require.NoError(t, err)
		return m
	}
	seen := map[string]bool{}
	for range 2 {
		server := store.NewServer(store.Options{})
		a := join(server, "a")
		run := dump.RunName(noLauncher)
		assert.NotEmpty(t, run)
		assert.False(t, seen[run], "another job has it")
		seen[run] = true
		dump.Agree("of an earlier job of this process")
		b := join(server, "b")
		assert.Equal(t, run, dump.RunName(noLauncher))
		other := store.NewServer(store.Options{})
		require.NoError(t, a.nameRun(t.Context(), other.Local("a")))
		kept, err := other.Local("somebody").Get(t.Context(), runKey)
		require.NoError(t, err)
		assert.Equal(t, run, string(kept))
		require.NoError(t, errors.Join(a.Close(), b.Close(), server.Close(), other.Close()))
	}
}

// TestEntersAsFresh: a member that was cut off may still have the state of an earlier epoch when the others take it into
// one that is to give it theirs. From then on its own state counts for nothing, also if that epoch is never formed.
func TestEntersAsFresh(t *testing.T) {
	for _, s := range []standing{boundary, prepared} {
		m := &Member{cfg: Config{Name: "a"}, changed: make(chan struct{}), wakeup: make(chan struct{}, 1)}
		m.status = at("a", epochOf(3, "ab"), func(own *status) { own.Standing = s })
		r := epochOf(5, "ba")
		r.Step = 9
		r.Members[1].Fresh = true
		require.NoError(t, m.enter(r))
		assert.Equal(t, fresh, m.now().Standing, string(s))
	}
}
