package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/distributed/elastic"
)

// hashes holds the hashes of the ranks' weights.
type hashes struct {
	mu     sync.Mutex
	steps  map[uint64][sha256.Size]byte // by step; guarded by mu
	differ int                          // number that differed from earlier ones; guarded by mu
}

// add compares the weights after a step with the weights of other ranks.
func (h *hashes) add(step uint64, weights []float32) {
	sum := sha256.Sum256(fmt.Append(nil, weights))
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.steps == nil {
		h.steps = make(map[uint64][sha256.Size]byte)
	}
	before, known := h.steps[step]
	if known && before != sum {
		h.differ++
	}
	h.steps[step] = sum
}

// ranks trains with a number of goroutines and adds the weights after each step.
func (h *hashes) ranks(t *testing.T, count int) {
	require.NoError(t, tutti.Config{Backend: tutti.Local, Ranks: count}.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
		training, err := newTraining(ctx, r.Runtime, r.Comm)
		if err != nil {
			return err
		}
		defer training.close()
		for step := range *steps {
			if err := training.step(ctx, r.Comm, step); err != nil {
				return err
			}
			h.add(step+1, training.weights)
		}
		return nil
	}))
}

// TestAnyRanks checks that the weights after each step are the same for any number of ranks, including ranks without
// a microbatch.
func TestAnyRanks(t *testing.T) {
	*steps = 20
	var hashes hashes
	for _, count := range []int{1, 2, 3, 4, 6, microbatches, microbatches + 1} {
		hashes.ranks(t, count)
	}
	assert.Zero(t, hashes.differ)
}

// TestAnyMembers has members join, leave in order and die at random steps, up to seven at a time. The weights after
// each step equal those of goroutines.
func TestAnyMembers(t *testing.T) {
	const seed = 3
	*steps = 60
	var hashes hashes
	hashes.ranks(t, 4)
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
		training, m, err := join(t.Context(), cfg, "localhost")
		if !assert.NoError(t, err, name) {
			return
		}
		defer training.close()
		defer m.Close()
		err = m.Run(t.Context(), func(ctx context.Context, e *elastic.Epoch) error {
			if err := training.step(ctx, e.Comm, m.Steps()); err != nil {
				return err
			}
			hashes.add(m.Steps(), training.weights)
			sizes.Store(len(e.Members), true)
			switch {
			case m.Steps() >= *steps:
				return io.EOF
			case m.Steps() >= end && kill:
				_ = m.Close()
			case m.Steps() >= end:
				m.Leave()
			case name == "first" && m.Steps()%6 == 0 && m.Steps() < *steps-10:
				next := fmt.Sprint("member ", m.Steps())
				last := m.Steps() + 6 + random.Uint64N(20)
				killed := random.IntN(2) == 0
				members.Go(func() { start(next, last, killed) })
				// Steps are so short that the first member would finish before.
				assert.Eventually(t, func() bool { return knocks(&knocked, next) }, time.Minute, 2*time.Millisecond)
			}
			return nil
		})
		if name != "first" && errors.Is(err, elastic.ErrEnded) { // it left, and first heard that the job had ended
			err = nil
		}
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

// knocks reports whether a member has set its key.
func knocks(keys *sync.Map, name string) (found bool) {
	keys.Range(func(key, _ any) bool {
		found = found || strings.HasSuffix(key.(string), name)
		return !found
	})
	return found
}

// TestLines checks that the program, and its part for members, have as many lines as the tutorial says.
func TestLines(t *testing.T) {
	text, err := os.ReadFile("main.go")
	require.NoError(t, err)
	_, members, found := strings.Cut(string(text), "\nfunc member(")
	require.True(t, found)
	assert.LessOrEqual(t, codeLines(string(text)), 196, "the program")
	assert.LessOrEqual(t, codeLines(members), 52, "what members add")
	assert.Equal(t, 2, strings.Count(string(text), "t.step(ctx, "), "ranks and members make the same steps")
}

// codeLines counts lines that are neither empty nor only a comment.
func codeLines(text string) (count int) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "//") {
			count++
		}
	}
	return count
}
