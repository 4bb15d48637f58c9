package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/distributed/elastic"
)

// TestDemonstration: members join, one is killed, and the others come to the end.
func TestDemonstration(t *testing.T) {
	*steps = 100
	require.NoError(t, demonstrate(t.Context()))
}

// TestAnyMembers: members join, leave in order and are killed at random steps, up to seven at a time, and the weights after
// each step are those of a member that is alone.
func TestAnyMembers(t *testing.T) {
	const seed = 3
	*steps = 60
	var hashes hashes
	require.NoError(t, run(t.Context(), 1, func(_ int, m *elastic.Member, _ *elastic.Epoch, weights []float32) bool {
		hashes.add(m.Steps(), weights)
		return true
	}))
	conf, err := store.TLS([]byte("churn"), "example")
	require.NoError(t, err)
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // the members have ended
	var knocked sync.Map // keys in the store
	stop, err := server.Local("observer").Watch(t.Context(), "", func(e store.Event) { knocked.Store(e.Key, true) })
	require.NoError(t, err)
	defer stop()
	random := rand.New(rand.NewPCG(seed, 0))
	var members sync.WaitGroup
	var sizes sync.Map
	var start func(name string, end uint64, kill bool)
	start = func(name string, end uint64, kill bool) {
		cfg := elastic.Config{Name: name, Min: 1, Max: 8, Terms: "digits 1", TLS: conf}
		cfg.Dial = func(context.Context) (store.Store, error) { return server.Local(name), nil }
		err := train(t.Context(), cfg, "localhost", func(m *elastic.Member, e *elastic.Epoch, weights []float32) bool {
			hashes.add(m.Steps(), weights)
			sizes.Store(len(e.Members), true)
			switch {
			case m.Steps() >= end && kill:
				_ = m.Close()
			case m.Steps() >= end:
				m.Leave()
			case name == "first" && m.Steps()%6 == 0 && m.Steps() < *steps-10:
				next := fmt.Sprint("member ", m.Steps())
				last := m.Steps() + 6 + random.Uint64N(20)
				killed := random.IntN(2) == 0
				members.Go(func() { start(next, last, killed) })
				// A step takes so little that the first member would be done before.
				assert.Eventually(t, func() bool { return knocks(&knocked, next) }, time.Minute, 2*time.Millisecond)
			}
			return true
		})
		if !kill {
			assert.NoError(t, err, name)
		}
	}
	members.Go(func() { start("first", 1<<62, false) })
	members.Wait()
	assert.Zero(t, hashes.differ, "seed %d", seed)
	assert.Len(t, hashes.steps, int(*steps))
	several := 0
	sizes.Range(func(any, any) bool {
		several++
		return true
	})
	assert.Greater(t, several, 2, "numbers of members")
}

// knocks reports whether a member has a key of its own.
func knocks(keys *sync.Map, name string) (found bool) {
	keys.Range(func(key, _ any) bool {
		found = found || strings.HasSuffix(key.(string), name)
		return !found
	})
	return found
}
