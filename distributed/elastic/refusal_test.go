package elastic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// answer is what a store makes of a write.
type answer int

const (
	taken    answer = iota
	declined        // it is not made
	denied          // it is made, and the answer is an error
)

// errSpace is what such a store answers.
var errSpace = errors.New("database space exceeded")

// fickle is a session of a store that does not take every write.
type fickle struct {
	store.Store
	judge func(key string) answer
}

func (f *fickle) Set(ctx context.Context, key string, value []byte, options ...store.Option) error {
	a := f.judge(key)
	if a == taken || a == denied {
		if err := f.Store.Set(ctx, key, value, options...); err != nil {
			return err
		}
	}
	if a == declined || a == denied {
		return errSpace
	}
	return nil
}

func (f *fickle) CompareAndSet(
	ctx context.Context, key string, version uint64, value []byte, options ...store.Option,
) (store.Entry, bool, error) {
	switch f.judge(key) {
	case declined:
		return store.Entry{}, false, errSpace
	case denied:
		_, _, err := f.Store.CompareAndSet(ctx, key, version, value, options...)
		return store.Entry{}, false, errors.Join(errSpace, err)
	}
	return f.Store.CompareAndSet(ctx, key, version, value, options...)
}

// logged has what is logged during a test, which no other one may be beside.
func logged(t *testing.T) *bytes.Buffer {
	var mu sync.Mutex
	var text bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return text.Write(p)
	}), nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return &text
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// TestRefusedWrites: a job whose store refuses some writes, or all of them for a while, goes on without a member that
// is killed, and tells a later one that it has ended. The store's answers are in the log.
func TestRefusedWrites(t *testing.T) {
	every := func(n uint64, a answer) func(*atomic.Uint64, bool) answer {
		return func(writes *atomic.Uint64, _ bool) answer {
			if writes.Add(1)%n == 0 {
				return a
			}
			return taken
		}
	}
	meanwhile := func(a answer) func(*atomic.Uint64, bool) answer {
		return func(_ *atomic.Uint64, bad bool) answer {
			if bad {
				return a
			}
			return taken
		}
	}
	for name, judge := range map[string]func(writes *atomic.Uint64, bad bool) answer{
		"every second is refused":             every(2, declined),
		"every third is refused":              every(3, declined),
		"every second is made, with an error": every(2, denied),
		"every third is made, with an error":  every(3, denied),
		"all are refused for a while":         meanwhile(declined),
		"all are made for a while, in error":  meanwhile(denied),
	} {
		t.Run(name, func(t *testing.T) {
			text := logged(t)
			bubble(t, func(t *testing.T) {
				rooms := new(rooms)
				refusedWrites(t, judge, func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error) {
					_, ok, err := kv.CompareAndSet(ctx, fmt.Sprint(p.World, p.Rank), 0, []byte("here"), store.Lease)
					if err == nil && !ok {
						err = errors.New("somebody else has this rank")
					}
					if err == nil {
						err = kv.Set(ctx, "formed by "+p.World, nil)
					}
					if err != nil {
						return nil, err
					}
					return rooms.form(ctx, kv, p)
				})
			})
			assert.Contains(t, text.String(), errSpace.Error())
		})
	}
}

func refusedWrites(t *testing.T, judge func(writes *atomic.Uint64, bad bool) answer, form former) {
	server := store.NewServer(store.Options{})
	defer func() { assert.NoError(t, server.Close()) }()
	var writes atomic.Uint64
	var bad atomic.Bool
	badFor := func(d time.Duration) {
		bad.Store(true)
		time.AfterFunc(d, func() { bad.Store(false) })
	}
	log := newReplay()
	join := func(name string) *trainee {
		dial := func(context.Context) (store.Store, error) {
			return &fickle{server.Local(name), func(string) answer { return judge(&writes, bad.Load()) }}, nil
		}
		return newTrainee(t, log, quick(Config{Name: name, Form: form, Dial: dial}))
	}
	list := []*trainee{join("a"), join("b"), join("c")}
	together(t, list, func(a *trainee, e *Epoch, made int) bool {
		if a == list[0] && len(e.Members) == 3 && made == 3 {
			badFor(5 * time.Second) // longer than five times Silence
			a.kill()
		}
		if a == list[1] && len(e.Members) == 2 && made == 4 {
			badFor(800 * time.Millisecond) // until after the last step
		}
		return list[0].dead() && len(e.Members) == 2 && made == 5
	})
	log.repeat(t, list[1].steps, list[1:])
	for _, a := range list[1:] {
		assert.NoError(t, a.Close())
	}
	late := join("late")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var err error
	for err = ErrStore; errors.Is(err, ErrStore); {
		_, err = late.Next(ctx, nil)
	}
	require.ErrorIs(t, err, ErrEnded)
	assert.NoError(t, late.Close())
}

// TestClaim: a write is repeated unless the store has it, in whatever order answers and events come.
func TestClaim(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	kv := server.Local("a")
	next := taken
	f := &fickle{kv, func(string) answer { return next }}
	c := claim{key: "k", want: "1"}
	_, err := kv.Watch(t.Context(), "k", c.hear)
	require.NoError(t, err)
	write := func(how answer) {
		next = how
		now, err := c.write(t.Context(), f)
		if how == declined || how == denied {
			require.ErrorIs(t, err, errSpace)
			return
		}
		require.NoError(t, err)
		c.confirm(now)
	}
	write(declined)
	assert.True(t, c.due(), "it was refused")
	write(taken)
	assert.False(t, c.due())
	c.want = "2"
	assert.True(t, c.due(), "another one")
	write(denied)
	assert.False(t, c.due(), "the store has it, as its event says")
	c.hear(store.Event{Entry: store.Entry{Key: "k", Value: []byte("1"), Version: 1}})
	assert.False(t, c.due(), "an event that comes late")
	require.NoError(t, kv.Delete(t.Context(), "k", 0))
	assert.True(t, c.due(), "somebody has deleted it")
	write(taken)
	assert.False(t, c.due())
	require.NoError(t, kv.Set(t.Context(), "k", []byte("an earlier write")))
	assert.True(t, c.due(), "another write came behind it")
	write(taken)
	assert.False(t, c.due())
	now, err := kv.Get(t.Context(), "k")
	require.NoError(t, err)
	assert.Equal(t, "2", string(now))
	require.NoError(t, kv.Set(t.Context(), "k", nil))
	assert.True(t, c.due(), "somebody has written nothing")
	write(taken)
	assert.False(t, c.due(), "which is not the same as that there is none")
	c.forget() // as at the beginning of a session
	c.want = "3"
	write(taken)
	assert.True(t, c.due(), "there is one of an unknown version")
	write(taken)
	assert.False(t, c.due())
}
