package instrument_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/instrument"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestExamineIsOffWithoutTheVariables(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	bare := noop.New(rt)
	for _, off := range []string{"", "0"} {
		t.Setenv(env.Check, off)
		t.Setenv(env.Record, off)
		require.NoError(t, instrument.Run(t.Context(), rt, bare, func(_ context.Context, c comm.Communicator) error {
			assert.Same(t, bare, c)
			return nil
		}))
	}
}

func TestExamineRefusesWhatItDoesNotUnderstand(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	for variable, texts := range map[string][]string{
		env.Check:  {"yes", "-1s", "0s", "2"},
		env.Record: {"yes", "-1", "1e3", "16777217"},
	} {
		for _, text := range texts {
			t.Setenv(variable, text)
			err := instrument.Run(t.Context(), rt, noop.New(rt), nil)
			assert.ErrorIs(t, err, comm.ErrArgument)
			assert.ErrorContains(t, err, variable+" is "+strconv.Quote(text))
		}
		t.Setenv(variable, "")
	}
}

func TestExamineCompares(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	buf := hosttest.Allocate(t, rt, 64)
	for text, limit := range map[string]time.Duration{"1": 0, "20ms": 20 * time.Millisecond} {
		t.Setenv(env.Check, text)
		var compared sync.WaitGroup // before anybody closes
		compared.Add(2)
		body := func(_ context.Context, c comm.Communicator) error {
			require.IsType(t, &checked.Communicator{}, c)
			if limit == 0 {
				err := c.AllReduce(buf, buf, 1+c.Rank(), dtype.F32, comm.Sum)
				assert.ErrorIs(t, err, comm.ErrMismatch)
			} else if c.Rank() == 0 {
				assert.ErrorIs(t, c.AllReduce(buf, buf, 1, dtype.F32, comm.Sum), comm.ErrTimeout)
			}
			compared.Done()
			compared.Wait()
			return nil
		}
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			return instrument.Run(ctx, rt, c, func(ctx context.Context, c comm.Communicator) error {
				return instrument.Run(ctx, rt, c, body) // once
			})
		}))
	}
}

// Calls that are recorded already are not recorded again in the same file.
func TestExamineRecordsOnce(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	t.Setenv(env.Record, "10")
	t.Setenv(env.RecordDir, t.TempDir())
	recorders := func(c comm.Communicator) (n int) {
		for {
			if _, ok := c.(*record.Recorder); ok {
				n++
			}
			w, ok := c.(interface{ Unwrap() comm.Communicator })
			if !ok {
				return n
			}
			c = w.Unwrap()
		}
	}
	require.NoError(t, instrument.Run(t.Context(), rt, noop.New(rt), func(ctx context.Context, c comm.Communicator) error {
		part, err := c.Split(ctx, 0, 0)
		require.NoError(t, err)
		for name, inner := range map[string]comm.Communicator{"itself": c, "a part": part, "within another": metered.New(c)} {
			assert.NoError(t, instrument.Run(ctx, rt, inner, func(_ context.Context, c comm.Communicator) error {
				assert.Equal(t, 1, recorders(c), name)
				return nil
			}))
		}
		return nil
	}))
}

// larger is a communicator of a world with a rank that writes nothing.
type larger struct{ comm.Communicator }

func (larger) WorldSize() int { return 2 }

// Each epoch has its dumps apart, the last 16 of them are kept, and nobody waits for those of others.
func TestEpoch(t *testing.T) {
	rt, dir := hosttest.NewRuntime(t), t.TempDir()
	plain, err := instrument.Epoch(t.Context(), rt, noop.New(rt), 1, "a")
	require.NoError(t, err)
	require.IsType(t, noop.New(rt), plain)
	t.Setenv(env.Record, "10")
	t.Setenv(env.RecordDir, dir)
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now() // of a clock that stands while anything runs
		for number := uint64(1); number <= 20; number++ {
			c, err := instrument.Epoch(t.Context(), rt, larger{noop.New(rt)}, number, "rank 2")
			require.NoError(t, err)
			c.Abort(errors.New("no disk space"))
			require.NoError(t, c.Close())
		}
		assert.Equal(t, begin, time.Now())
	})
	for number := 1; number <= 20; number++ {
		path := filepath.Join(dir, dump.EpochDir+strconv.Itoa(number), "tutti-record-0.json")
		if number <= 4 {
			assert.NoFileExists(t, path)
		} else {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			assert.Contains(t, string(text), `"name":"rank 2"`)
		}
	}
}

// The result of Examine frees its memory and writes its record, and the other ranks learn why this one aborted.
func TestExamineEndsWithTheError(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.Check, "1")
	t.Setenv(env.Record, "10")
	t.Setenv(env.RecordDir, dir)
	for _, failure := range []error{nil, errors.New("no disk space")} {
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
			return instrument.Run(ctx, rt, c, body)
		})
		assert.ErrorIs(t, err, failure)
		assert.NoError(t, rt.Close())
	}
	text, err := os.ReadFile(filepath.Join(dir, "tutti-record-1.json"))
	require.NoError(t, err)
	var d dump.File
	require.NoError(t, json.Unmarshal(text, &d))
	assert.Equal(t, "barrier", d.Entries[0].Tutti.Op)
}
