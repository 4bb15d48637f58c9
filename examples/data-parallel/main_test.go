package main

import (
	"bytes"
	"context"
	"encoding/gob"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/distributed/sparse"
)

// run trains on goroutines. All ranks must end with the same parameters.
func run(t *testing.T, ranks int, s settings) result {
	t.Helper()
	results := make([]result, ranks)
	world := tutti.Config{Backend: tutti.Local, Ranks: ranks}
	require.NoError(t, world.Run(t.Context(), func(ctx context.Context, r tutti.Rank) (err error) {
		results[r.Comm.Rank()], err = train(ctx, r, s)
		return err
	}))
	for _, r := range results {
		assert.Equal(t, results[0], r)
	}
	return results[0]
}

// TestResume checks that a run that is interrupted and resumed ends with the bits of an uninterrupted one, including
// ranks with a residual.
func TestResume(t *testing.T) {
	for pattern, accuracy := range map[string]float64{sparse.Dense: 0.95, sparse.Oktopk: 0.9} {
		s := settings{epochs: 10, batch: 16, learningRate: 0.1, momentum: 0.9, pattern: pattern, density: 0.1}
		through := run(t, 3, s)
		assert.Greater(t, through.accuracy, accuracy, pattern)

		s.checkpoint = filepath.Join(t.TempDir(), "run.gob")
		s.epochs = 4
		assert.NotEqual(t, through.parameters, run(t, 3, s).parameters)
		s.epochs = 10
		resumed := run(t, 3, s)
		assert.Equal(t, through.parameters, resumed.parameters, pattern)
		assert.Equal(t, through.accuracy, resumed.accuracy)

		s.epochs = 12
		assert.Greater(t, run(t, 2, s).accuracy, accuracy, "on fewer ranks")
		s.epochs = 14
		assert.Greater(t, run(t, 4, s).accuracy, accuracy, "and on more")
	}
}

// TestRefusedCheckpoints checks that a file that is no checkpoint of this network is an error on all ranks and is
// kept. One such file is the empty file that a host's crash can leave.
func TestRefusedCheckpoints(t *testing.T) {
	encoded := func(saved checkpoint) []byte {
		var b bytes.Buffer
		require.NoError(t, gob.NewEncoder(&b).Encode(saved))
		return b.Bytes()
	}
	parameters := newModel(0).parameters
	whole := encoded(checkpoint{Epoch: 1, Parameters: parameters, Ranks: [][]byte{{}, {}}})
	for text, content := range map[string][]byte{
		"not all of it":        {},
		"EOF":                  whole[:len(whole)-1],
		"not a checkpoint":     []byte("notes"),
		"of another network":   encoded(checkpoint{Epoch: 1, Parameters: parameters[1:], Ranks: [][]byte{{}, {}}}),
		"the states of 0 rank": encoded(checkpoint{Epoch: 1, Parameters: parameters}),
	} {
		s := settings{epochs: 2, batch: 16, learningRate: 0.1, momentum: 0.9, pattern: sparse.Dense}
		s.checkpoint = filepath.Join(t.TempDir(), "run.gob")
		require.NoError(t, os.WriteFile(s.checkpoint, content, 0o600))
		err := tutti.Config{Backend: tutti.Local, Ranks: 2}.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
			_, err := train(ctx, r, s)
			return err
		})
		require.ErrorContains(t, err, text)
		require.ErrorContains(t, err, s.checkpoint)
		got, err := os.ReadFile(s.checkpoint)
		require.NoError(t, err)
		require.Equal(t, string(content), string(got))
	}
}

// TestNoFolder checks that nothing is trained without the checkpoint's directory.
func TestNoFolder(t *testing.T) {
	s := settings{epochs: 1, batch: 16, pattern: sparse.Dense, checkpoint: filepath.Join(t.TempDir(), "none", "run.gob")}
	err := tutti.Config{Backend: tutti.Local, Ranks: 2}.Run(t.Context(), func(ctx context.Context, r tutti.Rank) error {
		_, err := train(ctx, r, s)
		return err
	})
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "stat ")
}

// TestMoreRanks checks that the same batches on more ranks give the same training, apart from rounding.
func TestMoreRanks(t *testing.T) {
	s := settings{epochs: 5, batch: 48, learningRate: 0.1, momentum: 0.9, pattern: sparse.Dense}
	one := run(t, 1, s)
	s.batch = 16
	three := run(t, 3, s)
	assert.InDelta(t, one.accuracy, three.accuracy, 0.02)
}
