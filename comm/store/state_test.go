package store

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// witness is the knowledge of sessions about a state: the keys that each watch has been told of, and the requests
// without an answer.
type witness struct {
	watches map[uint64]map[string]string // by request, then key
	prefix  map[uint64]string
	gets    map[uint64]string // keys, by request
}

// Random sessions come, ask and go. A watch that adds up what it was told knows what the store has, a Get is
// answered when its key exists and not before, and leases end with their sessions.
func TestRandomSessions(t *testing.T) {
	seeds := uint64(50)
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		simulate(t, seed, 300)
	}
}

func simulate(t *testing.T, seed uint64, steps int) {
	random := rand.New(rand.NewPCG(seed, 1))
	var s state
	keys := map[string]string{}   // what the store should have
	leases := map[string]uint64{} // sessions, by leased key
	open := map[uint64]*witness{} // by session
	var last, next uint64
	check := func(replies []reply) {
		for _, r := range replies {
			w := open[r.To]
			require.NotNil(t, w, "seed %d: a reply to a session that has ended", seed)
			if known := w.watches[r.ID]; known != nil {
				for _, e := range r.Entries {
					require.True(t, strings.HasPrefix(e.Key, w.prefix[r.ID]))
					if known[e.Key] = string(e.Value); r.Deleted {
						delete(known, e.Key)
					}
				}
			}
			if key, ok := w.gets[r.ID]; ok {
				require.Equal(t, key, r.Entries[0].Key, "seed %d", seed)
				delete(w.gets, r.ID)
			}
		}
	}
	for step := range steps {
		session := last
		if all := slices.Sorted(maps.Keys(open)); len(all) > 0 {
			session = all[random.IntN(len(all))]
		}
		w := open[session]
		next++
		r := request{ID: next, Key: fmt.Sprintf("%c/%d", 'a'+rune(random.IntN(2)), random.IntN(4)), Value: []byte(strconv.Itoa(step))}
		value, exists := keys[r.Key]
		set := func() {
			keys[r.Key] = string(r.Value)
			if delete(leases, r.Key); r.Lease {
				leases[r.Key] = session
			}
		}
		r.Lease = random.IntN(3) == 0
		switch kind := random.IntN(20); {
		case len(open) == 0 || kind == 0 && len(open) < 6:
			last++
			s.Open(last)
			open[last] = &witness{map[uint64]map[string]string{}, map[uint64]string{}, map[uint64]string{}}
			continue
		case kind == 1:
			delete(open, session)
			for key, owner := range leases {
				if owner == session {
					delete(keys, key)
					delete(leases, key)
				}
			}
			check(s.End(session))
			continue
		case kind < 8:
			r.Op = opSet
			set()
		case kind < 10:
			r.Op = opSwap
			if e := s.entries[r.Key]; e != nil && random.IntN(2) == 1 {
				r.Version = e.version
			}
			if !exists || r.Version > 0 {
				set()
			}
		case kind < 12:
			r.Op = opAdd
			r.Delta = int64(random.IntN(9))
			n, _ := strconv.ParseInt(value, 10, 64)
			r.Value = strconv.AppendInt(nil, n+r.Delta, 10)
			set()
		case kind < 14:
			r.Op = opDelete
			delete(keys, r.Key)
			delete(leases, r.Key)
		case kind == 14:
			r.Op, r.Key = opWatch, r.Key[:random.IntN(2)]
			w.watches[r.ID], w.prefix[r.ID] = map[string]string{}, r.Key
		case kind < 17:
			r.Op = opGet
			w.gets[r.ID] = r.Key
		case kind == 17 && len(w.gets) > 0:
			r.Op, r.Version = opStop, slices.Sorted(maps.Keys(w.gets))[0]
			delete(w.gets, r.Version)
		default:
			continue
		}
		check(s.Apply(session, &r))
		for number, w := range open {
			for id, known := range w.watches {
				want := maps.Clone(keys)
				maps.DeleteFunc(want, func(key, _ string) bool { return !strings.HasPrefix(key, w.prefix[id]) })
				require.Equal(t, want, known, "seed %d, step %d: watch %d of session %d", seed, step, id, number)
			}
			for id, key := range w.gets {
				require.NotContains(t, keys, key, "seed %d: get %d has no answer", seed, id)
			}
		}
		bytes := 0
		for key, value := range keys {
			bytes += len(key) + len(value)
		}
		require.Equal(t, bytes, s.bytes, "seed %d", seed)
	}
}

// Replicas that are told the same have the same answers.
func TestReplicasAgree(t *testing.T) {
	var a, b state
	for _, s := range []*state{&a, &b} {
		for session := range uint64(50) {
			s.Open(session)
			s.Apply(session, &request{ID: 1, Op: opWatch})
			for k := range 20 {
				s.Apply(session, &request{ID: 2, Op: opSet, Key: fmt.Sprint(session, "/", k), Lease: true})
			}
		}
	}
	for session := range uint64(50) {
		require.Equal(t, a.End(session), b.End(session))
	}
	require.Equal(t, a.version, b.version)
}

// Requests beyond a bound are refused, and room that was freed can be used.
func TestBounds(t *testing.T) {
	var s state
	s.Open(1)
	ask := func(r request) reply {
		r.ID = 1
		return s.Apply(1, &r)[0]
	}
	if testing.Short() {
		t.Skip("takes a second, and a minute with the race detector")
	}
	require.NotEmpty(t, ask(request{Op: opSet, Key: strings.Repeat("k", longestKey+1)}).Fault)
	require.NotEmpty(t, ask(request{Op: opSet, Key: "k", Value: make([]byte, MaxValue+1)}).Fault)
	value := make([]byte, MaxValue)
	n := 0
	for ask(request{Op: opSet, Key: strconv.Itoa(n), Value: value}).Kind != kindFull {
		n++
	}
	require.Equal(t, mostBytes/MaxValue-1, n)
	for i := range n {
		ask(request{Op: opDelete, Key: strconv.Itoa(i)})
	}
	require.Zero(t, s.bytes)
	for n = 0; ask(request{Op: opSet, Key: strconv.Itoa(n)}).Kind != kindFull; n++ {
	}
	require.Equal(t, mostKeys, n)
	require.Equal(t, kindFull, ask(request{Op: opAdd, Key: "new"}).Kind)
	require.Empty(t, ask(request{Op: opSet, Key: "7"}).Fault)
	require.Contains(t, ask(request{Op: opAdd, Key: "7", Delta: 1}).Fault, "no counter")
	s = state{} // each watch looks at all keys
	s.Open(1)
	s.Apply(1, &request{ID: 9, Op: opGet, Key: "later"})
	require.Equal(t, kindFull, s.Apply(1, &request{ID: 9, Op: opGet, Key: "later"})[0].Kind, "a wait that has its ID")
	s.Apply(1, &request{Op: opStop, Version: 9})
	require.NotEmpty(t, ask(request{Op: opGet, Key: strings.Repeat("k", longestKey+1)}).Fault)
	for range mostWatches {
		ask(request{Op: opWatch, Key: "none"})
	}
	require.Equal(t, kindFull, ask(request{Op: opWatch, Key: "none"}).Kind)
	for id := range uint64(mostWaits) {
		s.Apply(1, &request{ID: 10 + id, Op: opGet, Key: "later"})
	}
	require.Equal(t, kindFull, ask(request{Op: opGet, Key: "later"}).Kind)
	require.Contains(t, ask(request{Op: "steal"}).Fault, "no operation")
}
