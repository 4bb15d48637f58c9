package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
)

// exchange has some ranks of a job exchange ids over one store at the same time, and returns their errors by rank.
func exchange(ctx context.Context, server *store.Server, size int, ranks []int,
	body func(ctx context.Context, job rendezvous.Job, kv *store.Client) error) []error {
	errs := make([]error, size)
	var all sync.WaitGroup
	for _, rank := range ranks {
		all.Go(func() {
			kv := server.Local(fmt.Sprint("rank ", rank))
			errs[rank] = errors.Join(body(ctx, rendezvous.Job{Rank: rank, WorldSize: size}, kv), kv.Close())
		})
	}
	all.Wait()
	return errs
}

// joint is a step of all ranks with an id: each waits until all have arrived with the same one.
type joint struct {
	mu   sync.Mutex
	came map[string]*sync.WaitGroup // by id and number; guarded by mu
}

func (j *joint) join(size int, id uniqueID, number string) {
	key := fmt.Sprintf("%x %s", id, number)
	j.mu.Lock()
	if j.came[key] == nil {
		j.came[key] = new(sync.WaitGroup)
		j.came[key].Add(size)
	}
	came := j.came[key]
	j.mu.Unlock()
	came.Done()
	came.Wait()
}

// Ids follow each other without a word between, and all ranks have the same ones.
func TestExchangedIDs(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	const size, rounds = 4, 50
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	together := joint{came: map[string]*sync.WaitGroup{}}
	order := []int{0, 1, 2, 3}
	errs := exchange(ctx, server, size, order, func(ctx context.Context, job rendezvous.Job, kv *store.Client) error {
		for round := range rounds {
			newID := func() (id uniqueID, err error) {
				id[0] = byte(round)
				return id, nil
			}
			err := joinWithID(ctx, job, kv, newID, func(_ context.Context, id uniqueID, number string) error {
				assert.Equal(t, byte(round), id[0], "rank %d", job.Rank)
				together.join(size, id, number)
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
	assert.Len(t, together.came, rounds)
}

// The other ranks name the one that is missing, and learn that rank 0 cannot make an id.
func TestNoID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		never := func(context.Context, uniqueID, string) error { panic("there is no id") }
		server := store.NewServer(store.Options{})
		defer server.Close() //nolint:errcheck // it is in this process
		failure := errors.New("no memory for an id")
		newID := func() (uniqueID, error) { return uniqueID{}, failure }
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		present := []int{0, 2, 3}
		body := func(ctx context.Context, job rendezvous.Job, kv *store.Client) error {
			return joinWithID(ctx, job, kv, newID, never)
		}
		errs := exchange(ctx, server, 4, present, body)
		for _, rank := range present {
			assert.ErrorIs(t, errs[rank], comm.ErrTimeout, "rank %d", rank)
			assert.ErrorContains(t, errs[rank], "rendezvous: rank 1 did not come: ", "rank %d", rank)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		errs = exchange(ctx, server, 4, []int{0, 1, 2, 3}, body)
		assert.ErrorIs(t, errs[0], failure)
		for _, err := range errs[1:] {
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, "rank 0 sent no unique id")
		}
	})
}

// A rank takes a whole id from the store, and nothing else.
func TestReceivedIDs(t *testing.T) {
	kv := store.NewServer(store.Options{}).Owner("rank 1")
	defer kv.Close() //nolint:errcheck // nothing is lost
	var whole uniqueID
	for i := range whole {
		whole[i] = byte(i + 1)
	}
	for _, sent := range [][]byte{nil, whole[:1], whole[:len(whole)-1], append(slices.Clone(whole[:]), 1)} {
		require.NoError(t, kv.Set(t.Context(), "id", sent))
		_, err := receiveID(t.Context(), kv, "id")
		assert.ErrorIs(t, err, comm.ErrPeerFailed, "%d bytes", len(sent))
	}
	require.NoError(t, kv.Set(t.Context(), "id", whole[:]))
	id, err := receiveID(t.Context(), kv, "id")
	require.NoError(t, err)
	assert.Equal(t, whole, id)
}
