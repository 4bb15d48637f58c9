package nccl_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// The kinds of calls that the stand-in for NCCL leaves in progress.
const splits = 2

// until waits until a function of a stand-in returns n or more.
func until(t *testing.T, f dl.Func, n int32) {
	t.Helper()
	require.Eventually(t, func() bool { return f.Int() >= n }, time.Minute, time.Millisecond)
}

// outcome is what a rank's step returns.
type outcome struct {
	rank int
	err  error
}

// pair is a world of two ranks on one GPU, each with its own context.
type pair struct {
	ctx   [2]context.Context
	end   [2]context.CancelFunc
	base  []comm.Communicator
	ranks [2]*nccl.Comm
	ended chan outcome
}

func newPair(t *testing.T) *pair {
	base, err := local.New(2)
	require.NoError(t, err)
	p := &pair{base: base, ended: make(chan outcome, 2)}
	for r := range p.ctx {
		p.ctx[r], p.end[r] = context.WithTimeout(t.Context(), time.Minute)
		t.Cleanup(p.end[r])
	}
	return p
}

// create makes the communicator of a rank.
func (p *pair) create(rank int, rt *cuda.Runtime) (err error) {
	p.ranks[rank], err = nccl.From(p.ctx[rank], p.base[rank], rt)
	return err
}

// begin begins a step of a rank.
func (p *pair) begin(rank int, step func(rank int) error) {
	go func() { p.ended <- outcome{rank, step(rank)} }()
}

// errs returns the errors of both ranks' steps.
func (p *pair) errs() (errs [2]error) {
	for range errs {
		o := <-p.ended
		errs[o.rank] = o.err
	}
	return errs
}

// freeFast shortens the wait for threads of communicators that are freed in the middle of a call, and has the test wait
// until all are free.
func (s *standIns) freeFast(t *testing.T) {
	nccl.UnmapWithin(t, 10*time.Millisecond)
	t.Cleanup(func() {
		s.nccl.InProgress.Call(0)
		s.nccl.HoldLaunch.Call(0)
		assert.Eventually(t, func() bool { return s.nccl.Alive.Int() == 0 }, time.Minute, time.Millisecond)
	})
}

// close closes what there is.
func (p *pair) close(t *testing.T) {
	for r := range p.ranks {
		if p.ranks[r] != nil {
			assert.NoError(t, comm.CloseAll(p.ranks[r], errors.New("the test is over")))
		}
		assert.NoError(t, p.base[r].Close())
	}
}

// Each step in which NCCL waits for all ranks ends when another rank's context has ended within it, with that rank's
// reason.
func TestStandInAnotherRankLeavesAStep(t *testing.T) {
	s, rt := openStandIns(t)
	s.freeFast(t)
	create := func(p *pair) func(rank int) error {
		return func(rank int) error { return p.create(rank, rt) }
	}
	split := func(p *pair) func(rank int) error {
		return func(rank int) error {
			_, err := p.ranks[rank].Split(p.ctx[rank], 0, rank)
			return err
		}
	}
	allocate := func(p *pair) func(rank int) error {
		nccl.ForceWindows(p.ranks[0], true)
		nccl.ForceWindows(p.ranks[1], true)
		return func(rank int) error {
			_, err := p.ranks[rank].AllocateSymmetric(p.ctx[rank], 1<<20)
			return err
		}
	}
	const createdBefore = true
	for _, test := range []struct {
		name    string
		created bool
		held    bool // the first calls are, otherwise splits within NCCL
		step    func(p *pair) func(rank int) error
	}{
		{"creation", !createdBefore, false, create},
		{"first calls", !createdBefore, true, create},
		{"split", createdBefore, false, split},
		{"first calls after a split", createdBefore, true, split},
		{"window", createdBefore, false, allocate},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPair(t)
			defer p.close(t)
			if test.created {
				for r := range p.ranks {
					p.begin(r, create(p))
				}
				require.Equal(t, [2]error{}, p.errs())
			}
			hold, holds, waiting := s.nccl.InProgress, uintptr(splits), s.nccl.Pending
			if test.held {
				hold, holds, waiting = s.nccl.HoldLaunch, 1, s.nccl.Stuck
			}
			aborted := s.nccl.Aborted.Int()
			hold.Call(holds)
			defer hold.Call(0)
			step := test.step(p)
			for r := range p.ranks {
				p.begin(r, step)
			}
			until(t, waiting, 2)
			p.end[1]()
			if test.held { // NCCL returns from a call after the abort
				until(t, s.nccl.Aborted, aborted+4) // of each rank, what carries data and control
				hold.Call(0)
			}
			errs := p.errs()
			require.NoError(t, p.ctx[0].Err())
			require.ErrorIs(t, errs[0], comm.ErrPeerFailed)
			require.ErrorContains(t, errs[0], "rank 1 aborted: canceled")
			require.NotErrorIs(t, errs[0], comm.ErrCanceled)
			require.ErrorIs(t, errs[1], comm.ErrCanceled)
			require.NotErrorIs(t, errs[1], comm.ErrPeerFailed)
		})
	}
}

// A rank that aborts instead of a Split ends the others' at whatever point of it.
func TestStandInAnotherRankAbortsBesideASplit(t *testing.T) {
	s, rt := openStandIns(t)
	s.freeFast(t)
	for _, held := range []bool{false, true} {
		p := newPair(t)
		for r := range p.ranks {
			p.begin(r, func(rank int) error { return p.create(rank, rt) })
		}
		require.Equal(t, [2]error{}, p.errs())
		hold, holds, waiting := s.nccl.InProgress, uintptr(splits), s.nccl.Pending
		if held {
			hold, holds, waiting = s.nccl.HoldLaunch, 1, s.nccl.Stuck
		}
		aborted := s.nccl.Aborted.Int()
		hold.Call(holds)
		p.begin(0, func(int) error {
			_, err := p.ranks[0].Split(p.ctx[0], 0, 0)
			return err
		})
		until(t, waiting, 1)
		p.ranks[1].Abort(errors.New("no disk space"))
		if held {
			until(t, s.nccl.Aborted, aborted+3) // rank 1's data, and both of the sub-communicator
			hold.Call(0)
		}
		err := (<-p.ended).err
		hold.Call(0)
		require.NoError(t, p.ctx[0].Err())
		require.ErrorIs(t, err, comm.ErrPeerFailed)
		require.ErrorContains(t, err, "rank 1 aborted: no disk space")
		p.close(t)
	}
}

// A rank that closes its communicator ends no step of others: it may have finished its own. The store of rank 0 ends
// with its last communicator.
func TestStandInAnotherRankClosesBesideASplit(t *testing.T) {
	s, rt := openStandIns(t)
	s.freeFast(t)
	for closing := range 2 {
		p := newPair(t)
		for r := range p.ranks {
			p.begin(r, func(rank int) error { return p.create(rank, rt) })
		}
		require.Equal(t, [2]error{}, p.errs())
		s.nccl.InProgress.Call(splits)
		p.begin(1-closing, func(rank int) error {
			_, err := p.ranks[rank].Split(p.ctx[rank], 0, 0)
			return err
		})
		until(t, s.nccl.Pending, 1)
		require.NoError(t, p.ranks[closing].Close())
		s.nccl.InProgress.Call(0)
		require.NoError(t, (<-p.ended).err)
		p.close(t)
	}
}

// A rank that aborts after it has finished a Split ends no one's: NCCL no longer waits for it.
func TestStandInAnotherRankAbortsAfterASplit(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	otherAborts := nccl.AnotherRank(t, c, 5)
	s.nccl.InProgress.Call(splits)
	defer s.nccl.InProgress.Call(0)
	split := make(chan error)
	go func() {
		_, err := c.Split(t.Context(), 0, 0)
		split <- err
	}()
	until(t, s.nccl.Pending, 1)
	otherAborts(1) // returns when this rank knows
	s.nccl.InProgress.Call(0)
	require.NoError(t, <-split)
	require.NoError(t, comm.CloseAll(c, nil))
}

// The error of a creation that its context ends says so, whatever its ranks learn first.
func TestStandInCreationOfTwoEnds(t *testing.T) {
	s, rt := openStandIns(t)
	s.freeFast(t)
	s.nccl.InProgress.Call(splits)
	defer s.nccl.InProgress.Call(0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	made := make(chan error)
	go func() {
		_, err := nccl.InProcess(ctx, []*cuda.Runtime{rt, rt})
		made <- err
	}()
	until(t, s.nccl.Pending, 2)
	cancel()
	err := <-made
	require.ErrorIs(t, err, comm.ErrCanceled)
	require.NotErrorIs(t, err, comm.ErrPeerFailed)
}
