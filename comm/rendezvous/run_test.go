package rendezvous

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/dump"
)

// noLauncher is an environment without variables.
func noLauncher(string) string { return "" }

// The ranks of a job agree on a name of the run, which no other run has, unless a launcher names it.
func TestRunName(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	seen := map[string]bool{}
	for range 2 {
		job := Job{WorldSize: 2, Address: freeAddress(t), Secret: []byte("a secret of tests, long enough as it is")}
		var names [2]string
		var kvs [2]*store.Client
		var all sync.WaitGroup
		for rank := range kvs {
			all.Go(func() {
				job := job
				job.Rank = rank
				kv, err := job.Connect(ctx)
				if !assert.NoError(t, err) {
					return
				}
				kvs[rank] = kv
				name, err := kv.Get(ctx, runKey)
				assert.NoError(t, err)
				names[rank] = string(name)
			})
		}
		all.Wait()
		for _, kv := range kvs {
			require.NoError(t, kv.Close())
		}
		assert.Equal(t, names[0], names[1])
		assert.Equal(t, names[0], dump.RunName(noLauncher), "flight records have it")
		assert.False(t, seen[names[0]], names[0])
		seen[names[0]] = true
	}
	slurm := func(name string) string { return map[string]string{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}[name] }
	assert.Equal(t, "7.1", dump.RunName(slurm))
}

// A name that no rank 0 makes is not taken over.
func TestForgedRunNames(t *testing.T) {
	server := store.NewServer(store.Options{})
	defer server.Close() //nolint:errcheck // it is in this process
	kv := server.Local("rank 1")
	dump.Agree("an earlier name")
	for _, forged := range []string{"", "short", strings.Repeat("x", 1<<16), "\x1b[2J" + strings.Repeat("x", 22)} {
		require.NoError(t, kv.Set(t.Context(), runKey, []byte(forged)))
		require.NoError(t, Job{Rank: 1, WorldSize: 2}.nameRun(t.Context(), kv))
		assert.Equal(t, "an earlier name", dump.RunName(noLauncher), "%.100q", forged)
	}
}
