package backend_test

import (
	"context"
	"errors"
	"fmt"
	goruntime "runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
)

var errCause = errors.New("no disk space")

// script is a backend that records the calls of its adapter. Its waits end when they are let go, when their context
// ends, or when the life does.
type script struct {
	*backend.Base
	check  backend.Check
	life   backend.Life
	wait   chan error        // what a wait returns, for each one
	child  comm.Communicator // of a Split
	during func()            // called by a wait
	fail   error             // of Submit
	last   func()            // called by Release

	mu    sync.Mutex
	notes []string
}

func newScript() *script {
	s := &script{check: backend.Check{Backend: "script", WorldSize: 1}, wait: make(chan error, 99)}
	s.Base = backend.New(&s.check, &s.life, door{s})
	return s
}

// idle lets n waits find nothing in flight.
func (s *script) idle(n int) {
	for range n {
		s.wait <- nil
	}
}

func (s *script) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notes = append(s.notes, fmt.Sprintf(format, args...))
}

func (s *script) seen() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.notes)
}

type door struct{ s *script }

func (d door) Submit(c comm.Call) error {
	if err := d.s.life.Err(); err != nil {
		return err
	}
	d.s.note("submit %v", c.Op)
	return d.s.fail
}

func (d door) SubmitTogether(calls []comm.Call) error { return d.Submit(calls[0]) }

func (d door) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	d.s.note("%v", w.Op)
	if d.s.during != nil {
		d.s.during()
	}
	select {
	case err := <-d.s.wait:
		return d.s.child, err
	case <-ctx.Done():
		return nil, comm.ContextError(ctx)
	case <-d.s.life.Aborting():
		return nil, d.s.life.Broken()
	}
}

func (d door) Abort(_ context.Context, cause error) { d.s.note("abort: %v", cause) }

func (d door) Release(context.Context) error {
	d.s.note("release")
	if d.s.last != nil {
		d.s.last()
	}
	return nil
}

func allReduce(c comm.Communicator) error { return c.AllReduce(64, 64, 1, dtype.F32, comm.Sum) }

// The ways through a life, as the diagram at Life has them.
func TestLife(t *testing.T) {
	for _, test := range []struct {
		name string
		live func(t *testing.T, s *script)
		want []string // what the backend is asked for, in this order
	}{
		{"closed when idle", func(t *testing.T, s *script) {
			s.idle(1)
			require.NoError(t, s.Err())
			require.NoError(t, allReduce(s))
			require.NoError(t, s.Close())
			require.NoError(t, s.Close(), "twice")
			assert.Equal(t, comm.ErrClosed, s.Err())
			assert.ErrorIs(t, allReduce(s), comm.ErrClosed)
			assert.ErrorIs(t, s.Group(), comm.ErrClosed)
			assert.ErrorIs(t, s.Sync(t.Context()), comm.ErrClosed)
			s.Abort(errCause)
		}, []string{"submit allreduce", "sync", "release"}},

		{"closed with operations in flight", func(t *testing.T, s *script) {
			began := time.Now()
			err := s.Close()
			assert.ErrorIs(t, err, comm.ErrTimeout)
			assert.ErrorContains(t, err, "script: close on rank 0")
			assert.Equal(t, backend.HostTimeout, time.Since(began))
		}, []string{"sync", "abort: timed out: context deadline exceeded", "release"}},

		{"aborted, then closed", func(t *testing.T, s *script) {
			s.Abort(errCause)
			s.Abort(errors.New("another cause"))
			assert.ErrorIs(t, s.Err(), comm.ErrBroken)
			assert.ErrorIs(t, s.Err(), errCause)
			assert.EqualError(t, allReduce(s), "script: allreduce on rank 0: communicator was aborted: no disk space")
			assert.ErrorIs(t, s.Barrier(t.Context()), errCause)
			require.NoError(t, s.Close(), "the cause is known")
		}, []string{"abort: no disk space", "sync", "release"}},

		{"aborted beside a wait", func(t *testing.T, s *script) {
			waited := make(chan error)
			go func() { waited <- s.Sync(context.Background()) }()
			synctest.Wait()
			s.Abort(nil)
			err := <-waited
			assert.ErrorIs(t, err, comm.ErrBroken)
			assert.ErrorIs(t, err, comm.ErrCanceled)
			require.NoError(t, s.Close())
		}, []string{"sync", "abort: canceled", "sync", "release"}},

		{"failed by a wait", func(t *testing.T, s *script) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			err := s.Sync(ctx)
			assert.ErrorIs(t, err, comm.ErrTimeout)
			assert.NotErrorIs(t, err, comm.ErrBroken, "the first to know gets the cause itself")
			assert.ErrorIs(t, s.Sync(t.Context()), comm.ErrBroken)
			require.NoError(t, s.Close())
		}, []string{"sync", "abort: timed out: context deadline exceeded", "sync", "release"}},

		{"failed by a call", func(t *testing.T, s *script) {
			s.fail = errCause
			assert.ErrorIs(t, allReduce(s), errCause)
			assert.ErrorIs(t, s.Err(), errCause)
			require.NoError(t, s.Close())
		}, []string{"submit allreduce", "abort: no disk space", "sync", "release"}},

		{"a call refused", func(t *testing.T, s *script) {
			s.fail = comm.ErrUnsupported
			assert.ErrorIs(t, allReduce(s), comm.ErrUnsupported)
			require.NoError(t, s.Err())
			assert.ErrorIs(t, s.AllReduce(0, 0, -1, dtype.F32, comm.Sum), comm.ErrArgument)
			s.idle(1)
			require.NoError(t, s.Close())
		}, []string{"submit allreduce", "sync", "release"}},

		{"a call refused, then closed with operations in flight", func(t *testing.T, s *script) {
			s.fail = comm.ErrUnsupported
			require.ErrorIs(t, allReduce(s), comm.ErrUnsupported)
			assert.ErrorIs(t, s.Close(), comm.ErrTimeout, "a refusal is not the cause")
		}, []string{"submit allreduce", "sync", "abort: timed out: context deadline exceeded", "release"}},

		{"failed during its release", func(t *testing.T, s *script) {
			s.idle(1)
			s.last = func() {
				assert.False(t, s.life.Fail(errCause))
				assert.NoError(t, s.life.Cause(), "there was no Abort")
			}
			require.NoError(t, s.Close())
			assert.Equal(t, comm.ErrClosed, s.Err())
		}, []string{"sync", "release"}},

		{"failed by the backend, unknown to the user", func(t *testing.T, s *script) {
			assert.True(t, s.life.Fail(fmt.Errorf("%w: rank 1", comm.ErrPeerFailed)))
			assert.False(t, s.life.Fail(errCause))
			assert.ErrorIs(t, s.Close(), comm.ErrPeerFailed, "something was in flight")
		}, []string{"sync", "abort: peer failed: rank 1", "release"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScript()
				test.live(t, s)
				assert.Equal(t, test.want, s.seen())
			})
		})
	}
}

// The cause that aborted another communicator is the cause of this one, too.
func TestLifeTakesTheCauseOfAnotherOne(t *testing.T) {
	below, above := newScript(), newScript()
	below.Abort(errCause)
	above.life.Fail(fmt.Errorf("below: %w", below.Err()))
	assert.Equal(t, errCause, above.life.Cause())
	assert.EqualError(t, above.life.Broken(), "communicator was aborted: no disk space")
}

// Until ends with its context, with the first failure, and with Close, whichever comes
// first, and says which.
func TestUntil(t *testing.T) {
	s := newScript()
	parent, cancel := context.WithCancelCause(t.Context())
	first, stop := s.life.Until(parent)
	defer stop()
	cancel(errCause)
	<-first.Done()
	assert.Equal(t, errCause, context.Cause(first))

	for _, end := range []struct {
		by   func(s *script)
		want error
	}{
		{func(s *script) { s.life.Fail(errCause) }, errCause},
		{func(s *script) { s.idle(1); _ = s.Close() }, comm.ErrClosed},
	} {
		s := newScript()
		before, stop := s.life.Until(t.Context())
		defer stop()
		require.NoError(t, before.Err())
		end.by(s)
		<-before.Done()
		assert.Equal(t, end.want, context.Cause(before))
		after, stop := s.life.Until(t.Context())
		defer stop()
		<-after.Done()
		assert.Equal(t, end.want, context.Cause(after))
	}
}

// Sub-communicators outlive a Close and an Abort of their parent, are found from above
// also when those between are closed, and end with CloseAll, the deepest first.
func TestSubCommunicators(t *testing.T) {
	root, middle, leaf := newScript(), newScript(), newScript()
	for parent, child := range map[*script]*script{root: middle, middle: leaf} {
		parent.child = child
		parent.idle(1)
		made, err := parent.Split(t.Context(), 0, 0)
		require.NoError(t, err)
		require.Same(t, child, made)
	}
	sub := func() (of []*script) {
		for _, c := range root.SubCommunicators() {
			for _, s := range []*script{middle, leaf} {
				if c == comm.Communicator(s.Base) {
					of = append(of, s)
				}
			}
		}
		return of
	}
	assert.Equal(t, []*script{leaf, middle}, sub())
	middle.Abort(errCause)
	require.NoError(t, middle.Close())
	assert.Equal(t, []*script{leaf}, sub())
	require.NoError(t, leaf.Err())

	lost := newScript()
	root.child = lost
	root.idle(1)
	_, err := root.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	assert.Len(t, root.SubCommunicators(), 2)
	lost.life.Forget()
	assert.Equal(t, []*script{leaf}, sub())

	root.idle(1)
	require.NoError(t, comm.CloseAll(root, errCause))
	assert.Empty(t, sub())
	assert.Equal(t, []string{"abort: no disk space", "sync", "release"}, leaf.seen())
	assert.Equal(t, []string{"split", "split", "abort: no disk space", "sync", "release"}, root.seen())
}

// A sub-communicator that comes with an error is nobody's, and closed.
func TestSplitWithAnError(t *testing.T) {
	parent, child := newScript(), newScript()
	parent.child = child
	parent.wait <- errCause
	made, err := parent.Split(t.Context(), 0, 0)
	assert.ErrorIs(t, err, errCause)
	assert.Nil(t, made)
	assert.ErrorIs(t, child.Err(), comm.ErrClosed)
	assert.Empty(t, parent.SubCommunicators())
}

// Looking for sub-communicators does not tell the user of an error, which Close returns.
func TestCloseAllReturnsWhatASubCommunicatorAbortedBy(t *testing.T) {
	parent, child := newScript(), newScript()
	parent.child = child
	parent.idle(2)
	_, err := parent.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	child.life.Fail(fmt.Errorf("%w: rank 1", comm.ErrPeerFailed))
	assert.ErrorIs(t, comm.CloseAll(parent, nil), comm.ErrPeerFailed)
}

// A sub-communicator of one that was closed meanwhile is not left open.
func TestSplitBesideClose(t *testing.T) {
	parent, child := newScript(), newScript()
	closed := make(chan error)
	parent.child = child
	parent.during = func() {
		parent.during = nil
		go func() { closed <- parent.Close() }()
		for !parent.life.Closed() {
			goruntime.Gosched()
		}
	}
	parent.idle(2)
	_, err := parent.Split(t.Context(), 0, 0)
	assert.ErrorIs(t, err, comm.ErrClosed)
	assert.ErrorIs(t, child.Err(), comm.ErrClosed)
	require.NoError(t, <-closed)
}

// A second Close returns when the first one is done.
func TestCloseBesideClose(t *testing.T) {
	s := newScript()
	first := make(chan error)
	go func() { first <- s.Close() }()
	for !s.life.Closed() {
		goruntime.Gosched()
	}
	s.idle(1)
	require.NoError(t, s.Close())
	assert.Equal(t, []string{"sync", "release"}, s.seen())
	require.NoError(t, <-first)
}

// Aborts, closes, calls and waits from everywhere end in one Abort and one Release, in
// this order.
func TestLifeBesideItself(t *testing.T) {
	for range 200 {
		s := newScript()
		var all sync.WaitGroup
		for _, f := range []func(){
			func() { s.Abort(errCause) }, func() { _ = s.Close() }, func() { _ = allReduce(s) },
			func() { _ = s.Barrier(t.Context()) }, func() { s.Abort(errCause) }, func() { _ = s.Close() },
			func() { s.life.Fail(errCause) },
		} {
			all.Go(f)
		}
		all.Wait()
		var ends []string
		for _, n := range s.seen() {
			if n == "release" || n == "abort: no disk space" {
				ends = append(ends, n)
			}
		}
		require.Equal(t, []string{"abort: no disk space", "release"}, ends)
	}
}

func TestRefused(t *testing.T) {
	for _, err := range []error{comm.ErrArgument, comm.ErrUnsupported, comm.ErrDevice, comm.ErrUnavailable, comm.ErrClosed} {
		assert.True(t, backend.Refused(fmt.Errorf("x: %w", err)), err)
		assert.False(t, backend.Refused(fmt.Errorf("%w: rank 2: %w", comm.ErrPeerFailed, err)), "of another rank")
	}
	assert.False(t, backend.Refused(errCause))
}

// TestFailedByTwo: when Fail has returned calls are refused, also where another goroutine was first and is not done.
func TestFailedByTwo(t *testing.T) {
	defer goruntime.GOMAXPROCS(goruntime.GOMAXPROCS(max(2, goruntime.GOMAXPROCS(0))))
	lives := make([]backend.Life, 20_000)
	var all sync.WaitGroup
	var here atomic.Int64
	for range 2 {
		all.Go(func() {
			for i := range lives {
				here.Add(1)
				for here.Load() < 2*int64(i+1) { // both fail the same one
					goruntime.Gosched()
				}
				if lives[i].Fail(errCause); lives[i].Err() == nil {
					t.Error("a call after Fail is accepted")
				}
			}
		})
	}
	all.Wait()
}
