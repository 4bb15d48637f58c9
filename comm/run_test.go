package comm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/comm/staged"
)

// closing is a decorator that has something to free.
type closing struct {
	comm.Wrapped
	closed *int
}

func (c closing) Close() error {
	*c.closed++
	return c.Communicator.Close()
}

// The error of a Close has the number of the rank, too.
func TestRunNamesTheRankOfAClose(t *testing.T) {
	worlds, err := local.New(2)
	require.NoError(t, err)
	worlds[1] = stuck{comm.Wrap(worlds[1])}
	err = comm.Run(t.Context(), worlds, func(context.Context, comm.Communicator) error { return nil })
	assert.EqualError(t, err, "rank 1: stuck")
}

// stuck is a decorator whose Close fails.
type stuck struct{ comm.Wrapped }

func (s stuck) Close() error { return errors.New("stuck") }

// Run closes decorators, and peers learn the cause all the same.
func TestRunClosesDecorators(t *testing.T) {
	failure := errors.New("no more")
	for _, cause := range []error{nil, failure} {
		worlds, err := local.New(2)
		require.NoError(t, err)
		closed := make([]int, len(worlds))
		for r, c := range worlds {
			worlds[r] = closing{comm.Wrap(c), &closed[r]}
		}
		err = comm.Run(t.Context(), worlds, func(ctx context.Context, c comm.Communicator) error {
			if c.Rank() == 0 {
				return cause
			}
			if cause == nil {
				return nil
			}
			err := c.Barrier(context.WithoutCancel(ctx))
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorIs(t, err, failure)
			return nil
		})
		assert.ErrorIs(t, err, cause)
		assert.Equal(t, []int{1, 1}, closed)
	}
}

// The failure comes first, and every error has the number of its rank, once.
func TestRunSaysWhatWentWrongFirst(t *testing.T) {
	failure := errors.New("no disk space")
	err := local.Run(t.Context(), 3, func(ctx context.Context, c comm.Communicator) error {
		return comm.Run(ctx, []comm.Communicator{c}, func(ctx context.Context, c comm.Communicator) error {
			if c.Rank() == 2 {
				return failure
			}
			return c.Barrier(context.WithoutCancel(ctx))
		})
	})
	require.ErrorIs(t, err, failure)
	lines := strings.Split(err.Error(), "\n")
	require.Len(t, lines, 3)
	assert.Equal(t, "rank 2: no disk space", lines[0])
	for rank, line := range lines[1:] {
		assert.True(t, strings.HasPrefix(line, fmt.Sprintf("rank %d: local: barrier on rank %d: ", rank, rank)), line)
		assert.True(t, strings.HasSuffix(line, "peer failed: rank 2 aborted: no disk space"), line)
	}
}

// The stack of a panic is its own rank's, also where one Run is within another.
func TestRunKeepsTheStackOfAPanic(t *testing.T) {
	worlds, err := local.New(2)
	require.NoError(t, err)
	var heard error
	err = comm.Run(t.Context(), worlds, func(ctx context.Context, c comm.Communicator) error {
		return comm.Run(ctx, []comm.Communicator{c}, func(ctx context.Context, c comm.Communicator) error {
			if c.Rank() == 1 {
				panic("nothing to normalize")
			}
			heard = c.Barrier(context.WithoutCancel(ctx))
			return nil
		})
	})
	var panicked *comm.PanicError
	require.ErrorAs(t, err, &panicked)
	assert.Equal(t, 1, panicked.Rank)
	assert.Contains(t, string(panicked.Stack), "TestRunKeepsTheStackOfAPanic")
	assert.True(t, strings.HasPrefix(err.Error(), "rank 1: panic: nothing to normalize\n"), err.Error())
	require.ErrorContains(t, heard, "nothing to normalize")
	assert.NotContains(t, heard.Error(), "goroutine")
}

// Run names in the log the ranks that do not return.
func TestRunNamesWhoDoesNotReturn(t *testing.T) {
	var log bytes.Buffer
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	failure := errors.New("no more")
	synctest.Test(t, func(t *testing.T) {
		comms := make([]comm.Communicator, 3)
		for r := range comms {
			comms[r] = backend.NewSerial(&backend.Check{Rank: r, WorldSize: len(comms)}, alone{})
		}
		err := comm.Run(t.Context(), comms, func(ctx context.Context, c comm.Communicator) error {
			if c.Rank() == 1 {
				return failure
			}
			return comm.Run(ctx, []comm.Communicator{c}, func(context.Context, comm.Communicator) error {
				time.Sleep(time.Hour) // of the bubble
				return nil
			})
		})
		assert.ErrorIs(t, err, failure)
	})
	assert.Equal(t, 1, strings.Count(log.String(), "waiting for"), log.String())
	assert.Contains(t, log.String(), "comm: waiting for ranks 0, 2, whose context has ended")
	assert.Contains(t, log.String(), "peer failed: rank 1: no more")
}

// A Run on a sub-communicator names both ranks: its own, and that in the world, by which
// the others know it.
func TestRunOfASplitNamesTheRankOfTheWorld(t *testing.T) {
	failure := errors.New("no disk space")
	for _, fail := range []func() error{func() error { return failure }, func() error { panic(failure) }} {
		heard := make(chan error, 1)
		var splits sync.WaitGroup
		splits.Add(4)
		err := local.Run(t.Context(), 4, func(ctx context.Context, c comm.Communicator) error {
			part, err := c.Split(ctx, c.Rank()/2, 0)
			splits.Done()
			splits.Wait() // nobody aborts before all have split
			if err != nil || c.Rank() == 2 {
				return err
			}
			if c.Rank() == 0 {
				<-ctx.Done()
				heard <- context.Cause(ctx)
				return nil
			}
			return comm.Run(ctx, []comm.Communicator{part}, func(ctx context.Context, part comm.Communicator) error {
				if c.Rank() == 3 {
					return fail()
				}
				return nil
			})
		})
		require.ErrorIs(t, err, failure)
		line, _, _ := strings.Cut(err.Error(), "\n")
		assert.Regexp(t, "^rank 3: rank 1: (panic: )?no disk space$", line)
		assert.Regexp(t, "^peer failed: rank 3: (panic: )?no disk space$", (<-heard).Error(), "without a stack")
	}
}

// A Run within the body of another one says itself who does not return if that other one
// does not know of a failure.
func TestRunWithinARunNamesWhoDoesNotReturn(t *testing.T) {
	var log bytes.Buffer
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	failure := errors.New("no more")
	world := func(size int) []comm.Communicator {
		comms := make([]comm.Communicator, size)
		for r := range comms {
			comms[r] = backend.NewSerial(&backend.Check{Rank: r, WorldSize: size}, alone{})
		}
		return comms
	}
	synctest.Test(t, func(t *testing.T) {
		err := comm.Run(t.Context(), world(1), func(ctx context.Context, _ comm.Communicator) error {
			return comm.Run(ctx, world(2), func(_ context.Context, c comm.Communicator) error {
				if c.Rank() == 1 {
					return failure
				}
				time.Sleep(time.Hour) // of the bubble
				return nil
			})
		})
		assert.ErrorIs(t, err, failure)
	})
	assert.Equal(t, 1, strings.Count(log.String(), "waiting for"), log.String())
	assert.Contains(t, log.String(), "comm: waiting for rank 0, whose context has ended")
}

// alone is a backend that does nothing.
type alone struct{}

func (alone) Work([]comm.Call) error                          { return nil }
func (alone) Collective(comm.Wait) (comm.Communicator, error) { return nil, nil }
func (alone) Leave(context.Context, error)                    {}

// The wait of a goroutine whose rank is ended by another one has a sentinel, and the cause.
func TestEndBesideAWait(t *testing.T) {
	rt := hosttest.NewRuntime(t)
	for name, around := range map[string]func(context.Context, comm.Communicator) (comm.Communicator, error){
		"local": func(ctx context.Context, c comm.Communicator) (comm.Communicator, error) { return c, nil },
		"staged": func(ctx context.Context, c comm.Communicator) (comm.Communicator, error) {
			return staged.New(c, rt, rt)
		},
		"recorder": func(ctx context.Context, c comm.Communicator) (comm.Communicator, error) {
			return record.New(c, 10, ""), nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			worlds, err := local.New(2)
			require.NoError(t, err)
			c, err := around(t.Context(), worlds[0])
			require.NoError(t, err)
			ctx := &watched{Context: t.Context(), looked: make(chan struct{})}
			waited := make(chan error)
			go func() { waited <- c.Barrier(ctx) }()
			<-ctx.looked
			cause := errors.New("no more")
			c.Abort(cause)
			err = <-waited
			assert.ErrorIs(t, err, comm.ErrBroken)
			assert.ErrorIs(t, err, cause)
			assert.ErrorContains(t, worlds[1].Barrier(t.Context()), "peer failed: rank 0 aborted: no more")
			require.NoError(t, worlds[1].Close())
		})
	}
}

// watched is a context that tells when somebody looks for its end.
type watched struct {
	context.Context
	once   sync.Once
	looked chan struct{}
}

func (w *watched) Done() <-chan struct{} {
	w.once.Do(func() { close(w.looked) })
	return w.Context.Done()
}
