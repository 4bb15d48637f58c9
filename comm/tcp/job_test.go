package tcp

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/internal/jobtest"
)

// each calls f for some ranks of a job at the same time, and returns the errors by rank.
func each(job rendezvous.Job, ranks []int, f func(rendezvous.Job) error) []error {
	errs := make([]error, job.WorldSize)
	var all sync.WaitGroup
	for _, rank := range ranks {
		job := job
		job.Rank = rank
		all.Go(func() { errs[rank] = f(job) })
	}
	all.Wait()
	return errs
}

func testJob(t *testing.T, size int) rendezvous.Job {
	return rendezvous.Job{WorldSize: size, Address: jobtest.Address(t, 4), Secret: []byte("a secret of tests, long enough as it is")}
}

// One missing rank is the only one that the others accuse. Their time grows until they have found each other.
func TestOneMissingRank(t *testing.T) {
	t.Parallel()
	job := testJob(t, 4)
	present := []int{0, 2, 3}
	for patience := 500 * time.Millisecond; ; patience *= 2 {
		require.Less(t, patience, time.Minute, "ranks accuse others that are there")
		errs := each(job, present, func(job rendezvous.Job) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := Config{}.join(ctx, job)
			return err
		})
		found := 0
		for _, rank := range present {
			require.ErrorIs(t, errs[rank], comm.ErrTimeout, "rank %d", rank)
			var missing interface{ MissingRanks() []int }
			if errors.As(errs[rank], &missing) && assert.ObjectsAreEqual([]int{1}, missing.MissingRanks()) {
				found++
				assert.ErrorContains(t, errs[rank], "rendezvous: rank 1 did not come: ", "rank %d", rank)
				assert.ErrorContains(t, errs[rank], "no connection to rank 1", "rank %d", rank)
				assert.NotContains(t, errs[rank].Error(), "no connection to ranks", "rank %d", rank)
			}
		}
		if found == len(present) {
			break
		}
	}
	// They try again when it has come.
	errs := each(job, []int{0, 1, 2, 3}, func(job rendezvous.Job) error {
		c, err := Config{}.join(soonJob(t), job)
		if err != nil {
			return err
		}
		return errors.Join(c.Barrier(soonJob(t)), c.Close())
	})
	require.NoError(t, errors.Join(errs...))
}

func soonJob(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// A job's worlds follow each other without a word between, and ranks that wait go on with rank 0 when it tries again.
func TestWorldsOfAJob(t *testing.T) {
	t.Parallel()
	job := testJob(t, 3)
	var missed sync.WaitGroup
	missed.Add(1)
	errs := each(job, []int{0, 1, 2}, func(job rendezvous.Job) error {
		if job.Rank == 0 { // rank 2 is not there yet
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			_, err := Config{}.join(ctx, job)
			cancel()
			assert.ErrorIs(t, err, comm.ErrTimeout)
			missed.Done()
		}
		if job.Rank == 2 {
			missed.Wait()
		}
		for range 5 {
			c, err := Config{}.join(soonJob(t), job)
			if err != nil {
				return err
			}
			if err := errors.Join(c.Barrier(soonJob(t)), c.Close()); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
}
