package comm_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestExamineIsOffWithoutTheVariables(t *testing.T) {
	rt := newRuntime(t)
	bare := noop.New(rt)
	for check, record := range map[string]string{"": "", "0": "0"} {
		t.Setenv(comm.CheckVariable, check)
		for _, record := range []string{record, "-1", "many"} { // what is no number is in the log
			t.Setenv(comm.RecordVariable, record)
			require.NoError(t, comm.Examine(t.Context(), rt, bare, func(_ context.Context, c comm.Communicator) error {
				assert.Same(t, bare, c)
				return nil
			}))
		}
	}
	for _, check := range []string{"yes", "-1s", "0s", "2"} {
		t.Setenv(comm.CheckVariable, check)
		err := comm.Examine(t.Context(), rt, bare, nil)
		assert.ErrorIs(t, err, comm.ErrArgument, check)
		assert.ErrorContains(t, err, check)
	}
}

func TestExamineCompares(t *testing.T) {
	rt := newRuntime(t)
	buf := allocate(t, rt, 64)
	for text, limit := range map[string]time.Duration{"1": 0, "20ms": 20 * time.Millisecond} {
		t.Setenv(comm.CheckVariable, text)
		body := func(ctx context.Context, c comm.Communicator) error {
			require.IsType(t, &comm.Checked{}, c)
			if limit == 0 {
				err := c.AllReduce(buf, buf, 1+c.Rank(), dtype.F32, comm.Sum)
				assert.ErrorIs(t, err, comm.ErrMismatch)
			} else if c.Rank() == 0 {
				assert.ErrorIs(t, c.AllReduce(buf, buf, 1, dtype.F32, comm.Sum), comm.ErrTimeout)
			}
			return c.(*comm.Checked).Unwrap().Barrier(ctx)
		}
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			return comm.Examine(ctx, rt, c, func(ctx context.Context, c comm.Communicator) error {
				return comm.Examine(ctx, rt, c, body) // once
			})
		}))
	}
}

// What Examine made gives its memory back and writes its record, and the other ranks
// learn why this one gave up.
func TestExamineEndsWithTheError(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(comm.CheckVariable, "1")
	t.Setenv(comm.RecordVariable, "10")
	t.Setenv(comm.RecordDirVariable, dir)
	failure := errors.New("no disk space")
	for _, failure := range []error{nil, failure} {
		rt := cpu.New()
		body := func(ctx context.Context, c comm.Communicator) error {
			err := c.Barrier(ctx)
			if c.Rank() == 1 || err != nil {
				return errors.Join(err, failure)
			}
			err = c.Barrier(context.WithoutCancel(ctx))
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			if failure != nil {
				assert.ErrorIs(t, err, failure)
			}
			return nil
		}
		err := local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			return comm.Examine(ctx, rt, c, body)
		})
		assert.ErrorIs(t, err, failure)
		assert.NoError(t, rt.Close())
	}
	text, err := os.ReadFile(filepath.Join(dir, "tutti-record-1.json"))
	require.NoError(t, err)
	var d comm.Dump
	require.NoError(t, json.Unmarshal(text, &d))
	assert.Equal(t, "barrier", d.Entries[0].Tutti.Op)
}
