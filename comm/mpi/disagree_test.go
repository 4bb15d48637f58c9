package mpi_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/mpi"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// TestFailedSplit lets one rank fail in the steps of a Split where MPI does not tell
// the others, under a library of either thread level.
func TestFailedSplit(t *testing.T) {
	for test, ranks := range map[string]int{"TestRankFailedSplit": 3, "TestRankSkippedSplit": 3, "TestRankAbortedSplit": 3,
		"TestRankAbandonedSplit": 2, "TestRankSerializedSplit": 3, "TestRankSerializedFree": 2, "TestRankFinalizeInTime": 2,
		"TestRankFinalizeAlone": 3, "TestRankFinalizeHangs": 2, "TestRankFinalizeLate": 3} {
		t.Run(test, func(t *testing.T) {
			forOneMPI(t, func(t *testing.T, l launcher) { l.mustPass(t, job{ranks: ranks, test: test}) })
		})
	}
}

func TestLateRanks(t *testing.T) {
	forEachMPI(t, func(t *testing.T, l launcher) {
		for _, env := range l.transports() {
			l.mustRun(t, job{ranks: 4, test: "TestRankLateRanks", env: env})
		}
	})
}

// disagreement is what the last rank calls and what the others call, and what
// the errors say.
type disagreement struct {
	name       string
	last, most []comm.Call
	says       []string
	// late: a rank that has only sent, or got what it expected, learns of it from
	// the next barrier.
	late bool
}

func disagreements(send, recv uintptr, size int) []disagreement {
	last := size - 1
	calls := func(c ...comm.Call) []comm.Call { return c }
	sum := func(n int, dt dtype.DType) []comm.Call {
		return calls(comm.AllReduceCall(send, recv, n, dt, comm.Sum))
	}
	lists := func(n int) []int {
		s := make([]int, size)
		for i := range s {
			s[i] = n
		}
		return s
	}
	at := func(n int) []int {
		s := make([]int, size)
		for i := range s {
			s[i] = i * n
		}
		return s
	}
	v := func(n int) []comm.Call {
		return calls(comm.AllGatherVCall(send, recv, lists(n), at(1000), dtype.F32))
	}
	gather, reduce := comm.AllGatherCall(send, recv, 10, dtype.F32), comm.AllReduceCall(send, recv, 10, dtype.F32, comm.Sum)
	return []disagreement{
		{"count, in pieces", sum(512, dtype.F32), sum(1024, dtype.F32), []string{"allreduce of 512 f32, sum", "allreduce of 1024 f32, sum"}, false},
		{"count, in blocks", sum(2_097_152, dtype.F32), sum(3_000_000, dtype.F32), []string{"of 2097152 f32", "of 3000000 f32"}, false},
		{"count zero", sum(0, dtype.F32), sum(4, dtype.F32), []string{"of 0 f32", "of 4 f32"}, false},
		{"one more", calls(reduce), calls(gather, reduce), []string{"allreduce of 10 f32", "allgather of 10 f32"}, false},
		{"counts", v(3), v(4), []string{"allgatherv of f32", "different counts"}, false},
		{"matrix", calls(comm.AllToAllVCall(send, lists(5), at(1000), recv, lists(5), at(1000), dtype.F32)),
			calls(comm.AllToAllVCall(send, lists(4), at(1000), recv, lists(4), at(1000), dtype.F32)),
			[]string{"alltoallv of f32"}, false},
		{"root of a long broadcast", calls(comm.BroadcastCall(recv, 100_000, dtype.F32, last)), calls(comm.BroadcastCall(recv, 100_000, dtype.F32, 0)),
			[]string{fmt.Sprintf("root %d", last), "root 0"}, size > 2},
		{"root of reduce", calls(comm.ReduceCall(send, recv, 10, dtype.F32, comm.Sum, last)), calls(comm.ReduceCall(send, recv, 10, dtype.F32, comm.Sum, 0)),
			[]string{fmt.Sprintf("root %d", last), "root 0"}, size > 2},
		{"root of gather", calls(comm.GatherCall(send, recv, 10, dtype.F32, last)), calls(comm.GatherCall(send, recv, 10, dtype.F32, 0)),
			[]string{fmt.Sprintf("root %d", last), "root 0"}, size > 2},
		{"root of scatter", calls(comm.ScatterCall(send, recv, 10, dtype.F32, last)), calls(comm.ScatterCall(send, recv, 10, dtype.F32, 0)),
			[]string{fmt.Sprintf("root %d", last), "root 0"}, size > 2},
	}
}

// TestRankDisagreement lets the last rank call something else than the others, in
// ways that the fault matrix leaves out: all ranks get an error that says what.
func TestRankDisagreement(t *testing.T) {
	r := newRank(t)
	send, _ := r.floats(3_000_000, func(int) float32 { return 1 })
	recv, _ := r.floats(3_000_000, func(int) float32 { return 0 })
	me, size := r.world.Rank(), r.world.WorldSize()
	for _, d := range disagreements(send, recv, size) {
		t.Run(d.name, func(t *testing.T) {
			c, err := r.world.Split(r.ctx, 0, me)
			require.NoError(t, err)
			calls := d.most
			if me == size-1 {
				calls = d.last
			}
			for _, call := range calls {
				err = errors.Join(err, call.Make(c))
			}
			if err == nil {
				err = c.Sync(r.ctx)
			}
			if err == nil && d.late {
				err = c.Barrier(r.ctx)
			}
			if assert.ErrorIs(t, err, comm.ErrMismatch, "rank %d", me) {
				for _, text := range d.says {
					assert.ErrorContains(t, err, text, "rank %d", me)
				}
			}
			assert.ErrorIs(t, c.Sync(r.ctx), comm.ErrBroken)
			assert.NoError(t, c.Close())
			require.NoError(t, r.world.Barrier(r.ctx))
		})
	}
	for _, m := range []struct {
		name  string
		n     int
		dt    dtype.DType
		wants int
	}{
		{"type of long data", 4000, dtype.F32, 4000},
		{"longer", 5, dtype.I32, 4}, {"long data", 5000, dtype.I32, 4}, {"short data", 4, dtype.I32, 5000},
		{"no data", 0, dtype.I32, 4},
	} {
		t.Run("message/"+m.name, func(t *testing.T) {
			c, err := r.world.Split(r.ctx, 0, me)
			require.NoError(t, err)
			switch me {
			case 0:
				err = errors.Join(c.Send(send, m.n, m.dt, 1, 9))
			case 1:
				err = errors.Join(c.Recv(recv, m.wants, dtype.I32, 0, 9))
			}
			if err == nil {
				err = c.Sync(r.ctx)
			}
			if me == 1 || err != nil {
				require.ErrorIs(t, err, comm.ErrMismatch)
				assert.ErrorContains(t, err, fmt.Sprintf("rank 0 called send of %d %v to rank 1, tag 9", m.n, m.dt))
				assert.ErrorContains(t, err, fmt.Sprintf("rank 1 called recv of %d i32 from rank 0, tag 9", m.wants))
			}
			assert.ErrorIs(t, c.Barrier(r.ctx), comm.ErrMismatch, "everybody is told")
			assert.NoError(t, c.Close())
			require.NoError(t, r.world.Barrier(r.ctx))
		})
	}
}

// TestRankAborting has faults that are not in the fault matrix: rank 1 aborts with its
// sub-communicators, or does not send. It looks at the texts of the errors.
func TestRankAborting(t *testing.T) {
	r := newRank(t)
	buf, _ := r.floats(100, func(int) float32 { return 1 })
	me := r.world.Rank()
	forever := context.Background()
	t.Run("error", func(t *testing.T) {
		c, err := r.world.Split(r.ctx, 0, me)
		require.NoError(t, err)
		child, err := c.Split(r.ctx, 0, me)
		require.NoError(t, err)
		require.NoError(t, r.world.Barrier(r.ctx), "nobody is still in the split, which giving up would end as well")
		if me == 1 {
			_ = comm.Run(forever, []comm.Communicator{c}, func(context.Context, comm.Communicator) error { return errors.New("disk full") })
		} else {
			assert.ErrorIs(t, c.Barrier(forever), comm.ErrPeerFailed)
			err := child.Barrier(forever)
			assert.ErrorIs(t, err, comm.ErrPeerFailed, "of what was split off")
			assert.ErrorContains(t, err, "rank 1")
			assert.ErrorContains(t, err, "disk full")
		}
		assert.NoError(t, child.Close())
		assert.NoError(t, c.Close())
		require.NoError(t, r.world.Barrier(r.ctx))
	})
	t.Run("message", func(t *testing.T) {
		c, err := r.world.Split(r.ctx, 0, me)
		require.NoError(t, err)
		if me == 1 {
			require.NoError(t, c.Close())
		} else {
			err := c.Recv(buf, 4, dtype.F32, 1, 3)
			if err == nil { // or the other waiting rank has aborted already
				err = c.Sync(forever)
			}
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
		}
		assert.NoError(t, c.Close())
		require.NoError(t, r.world.Barrier(r.ctx))
	})
	t.Run("deadline", func(t *testing.T) {
		c, err := r.world.Split(r.ctx, 0, me)
		require.NoError(t, err)
		other, _ := r.floats(300, func(int) float32 { return 1 })
		calls := func() error {
			return errors.Join(c.AllReduce(buf, buf, 7, dtype.F32, comm.Max),
				c.Broadcast(buf, 9, dtype.F32, 1), c.AllGather(buf, other, 9, dtype.F32))
		}
		part, err := c.Split(r.ctx, 0, me) // counts once
		require.NoError(t, err)
		defer func() { assert.NoError(t, part.Close()) }()
		require.NoError(t, r.world.Barrier(r.ctx), "nobody is still in the split")
		if me == 0 {
			require.NoError(t, calls())
			ctx, cancel := context.WithTimeout(r.ctx, 50*time.Millisecond)
			defer cancel()
			err := c.Sync(ctx)
			require.ErrorIs(t, err, comm.ErrTimeout)
			assert.ErrorContains(t, err, "waiting for allreduce of 7 f32, max (collective #2), nothing from ranks 1, 2")
			assert.ErrorContains(t, err, "2 operations behind that")
		}
		require.NoError(t, r.world.Barrier(r.ctx))
		if me != 0 {
			// The same, as rank 0 may have sent what it called before it aborted.
			err := errors.Join(calls(), c.Sync(forever))
			require.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, "rank 0 aborted: sync: timed out")
		}
		assert.NoError(t, c.Close())
		require.NoError(t, r.world.Barrier(r.ctx))
	})
	// A rank that has left a barrier, or a Split, may abort at once: the others leave it, too.
	t.Run("after a barrier", func(t *testing.T) {
		rounds := 6 // each rank after either
		if extended {
			rounds = 30
		}
		for round := range rounds {
			c, err := r.world.Split(r.ctx, 0, me)
			require.NoError(t, err)
			if round%2 == 0 {
				require.NoError(t, c.Barrier(r.ctx))
			} else {
				child, err := c.Split(r.ctx, 0, me)
				require.NoError(t, err)
				require.NoError(t, child.Close())
			}
			if me == round%3 {
				c.Abort(errors.New("disk full"))
			} else {
				err := c.Barrier(forever)
				require.ErrorIs(t, err, comm.ErrPeerFailed)
				assert.ErrorContains(t, err, "disk full")
			}
			require.NoError(t, c.Close())
		}
	})
	// The failure of one communicator may be why a rank aborts another one, whose other ranks
	// do not know about it.
	t.Run("passed on", func(t *testing.T) {
		all, err := r.world.Split(r.ctx, 0, me)
		require.NoError(t, err)
		pair, err := r.world.Split(r.ctx, me/2, me)
		require.NoError(t, err)
		cause := errors.New("disk full")
		if me == 1 {
			cause = pair.Barrier(forever)
			require.ErrorIs(t, cause, comm.ErrPeerFailed)
			all.Abort(cause)
		} else {
			if me == 0 {
				pair.Abort(cause)
			}
			err := all.Barrier(r.ctx)
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, "rank 1 aborted: ")
			assert.ErrorContains(t, err, "disk full")
		}
		assert.NoError(t, errors.Join(pair.Close(), all.Close()))
		require.NoError(t, r.world.Barrier(r.ctx))
	})
	t.Run("without a word", func(t *testing.T) {
		if !mpi.Shares(r.world) {
			t.Skip("there is MPI alone to tell it")
		}
		c, err := r.world.Split(r.ctx, 0, me)
		require.NoError(t, err)
		if me == 1 {
			mpi.FailUntold(c, errors.New("disk full"))
		} else {
			err := c.Barrier(r.ctx)
			assert.ErrorIs(t, err, comm.ErrPeerFailed)
			assert.ErrorContains(t, err, "rank 1 aborted: why could not be sent")
		}
		assert.NoError(t, c.Close())
		require.NoError(t, r.world.Barrier(r.ctx))
	})
}

// TestRankFailedSplit fails after MPI_Comm_split.
func TestRankFailedSplit(t *testing.T) {
	onlyChild(t)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), rankTimeout)
	defer cancel()
	c, err := world.Split(ctx, 0, 0)
	require.NoError(t, err)
	says := "mpi: split on rank 1: MPI_Comm_set_errhandler"
	if c.Rank() == 1 {
		mpi.SpoilSplit(c)
		_, err = c.Split(ctx, 0, 0)
	} else {
		_, err = c.Split(ctx, 0, 0)
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		says = "rank 1 aborted: split: MPI_Comm_set_errhandler"
	}
	assert.ErrorContains(t, err, says)
	assert.ErrorIs(t, c.Barrier(ctx), comm.ErrBroken)
	require.NoError(t, c.Close())
	require.NoError(t, world.Barrier(ctx), "what it was split from goes on")
	broken(t, ctx, c)
}

// broken checks that Finalize leaves MPI_Finalize out because a communicator is aborted, and
// passes.
func broken(t *testing.T, ctx context.Context, c comm.Communicator) {
	assert.ErrorIs(t, mpi.Finalize(ctx), comm.ErrBroken)
	passed(t, c)
}

// passedReport is the file of a rank that has passed.
func passedReport(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("passed-%d", rank))
}

// passed ends one of the ranks that may not leave as MPI expects, unless its test
// has failed. The launcher kills the others when one does so: all have to be here.
func passed(t *testing.T, c comm.Communicator) { passedAs(t, c.Rank(), c.WorldSize()) }

// passedAs is passed for a rank without a communicator.
func passedAs(t *testing.T, rank, size int) {
	if t.Failed() {
		return
	}
	dir := os.Getenv(childVariable)
	reach(t, passedReport(dir, rank))
	reports := make([]string, size)
	for peer := range reports {
		reports[peer] = passedReport(dir, peer)
	}
	awaitFiles(reports...)
	os.Exit(9)
}

// awaitFiles returns when other ranks have written the files, or after a minute.
func awaitFiles(files ...string) {
	for _, file := range files {
		for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(file); err == nil {
				break
			}
		}
	}
}

// milestone is the file of a rank that has come to a place in its test. It tells ranks whose communicators cannot.
func milestone(place string, rank int) string {
	return filepath.Join(os.Getenv(childVariable), fmt.Sprintf("%s-%d", place, rank))
}

// reach writes the file of a milestone.
func reach(t *testing.T, milestone string) { assert.NoError(t, os.WriteFile(milestone, nil, 0o600)) }

// splitWorld returns a communicator of all ranks, to be aborted.
func splitWorld(t *testing.T) (ctx context.Context, world, c comm.Communicator) {
	onlyChild(t)
	world, err := mpi.Init(context.Background())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), rankTimeout)
	t.Cleanup(cancel)
	c, err = world.Split(ctx, 0, 0)
	require.NoError(t, err)
	return ctx, world, c
}

// TestRankSkippedSplit fails before MPI_Comm_split, where the others wait already.
func TestRankSkippedSplit(t *testing.T) {
	ctx, world, c := splitWorld(t)
	if c.Rank() == 1 {
		mpi.SkipSplit(c)
	}
	_, err := c.Split(ctx, 0, 0)
	if c.Rank() == 1 {
		assert.ErrorContains(t, err, "mpi: split on rank 1: invalid argument: MPI_Comm_set_errhandler")
		assert.ErrorIs(t, err, comm.ErrArgument, "by the library's class")
		assert.NotErrorIs(t, err, comm.ErrPeerFailed)
	} else {
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "rank 1 aborted: split: invalid argument: MPI_Comm_set_errhandler")
	}
	require.NoError(t, ctx.Err(), "nobody waits for a deadline")
	assert.ErrorIs(t, c.Barrier(ctx), comm.ErrBroken)
	require.NoError(t, c.Close())
	require.NoError(t, world.Barrier(ctx), "what it was split from goes on")
	broken(t, ctx, c)
}

// inSplit is a context that tells when a Split begins to wait for MPI_Comm_split, and
// goes on as another one then.
type inSplit struct {
	context.Context
	enter func() context.Context // nil when it has been called
}

func (s *inSplit) Done() <-chan struct{} {
	if enter := s.enter; enter != nil {
		s.enter = nil
		s.Context = enter()
	}
	return s.Context.Done()
}

// ended is a context that has been canceled, but does not end waits.
type ended struct{ context.Context }

func (ended) Done() <-chan struct{} { return nil }
func (ended) Err() error            { return context.Canceled }

// TestRankAbortedSplit lets rank 1 abort between MPI_Comm_split and the end of the
// barrier behind it, to which rank 2 comes when it has.
func TestRankAbortedSplit(t *testing.T) {
	ctx, world, c := splitWorld(t)
	buf, err := cpu.New().Allocate(8)
	require.NoError(t, err)
	from := &inSplit{Context: ctx, enter: func() context.Context { return ctx }}
	switch c.Rank() {
	case 1:
		from.enter = func() context.Context { return ended{ctx} }
	case 2:
		from.enter = func() context.Context {
			assert.NoError(t, errors.Join(world.Recv(buf, 1, dtype.I64, 1, 0), world.Sync(ctx)))
			return ctx
		}
	}
	_, err = c.Split(from, 0, 0)
	if c.Rank() == 1 {
		assert.ErrorIs(t, err, comm.ErrCanceled)
		require.NoError(t, errors.Join(world.Send(buf, 1, dtype.I64, 2, 0), world.Sync(ctx)))
	} else {
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "rank 1 aborted: split: canceled")
	}
	assert.ErrorIs(t, c.Barrier(ctx), comm.ErrBroken)
	require.NoError(t, c.Close())
	require.NoError(t, world.Barrier(ctx), "what it was split from goes on")
	broken(t, ctx, c)
}

// TestRankAbandonedSplit has a communicator that rank 1 does not have.
func TestRankAbandonedSplit(t *testing.T) {
	ctx, world, c := splitWorld(t)
	if c.Rank() == 1 {
		mpi.Abandon(c, comm.ErrTimeout)
	} else {
		err := c.Barrier(ctx)
		assert.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "rank 1 aborted: split: timed out")
	}
	_ = c.Close()
	require.NoError(t, world.Barrier(ctx), "what it was split from goes on")
	assert.NoError(t, mpi.Finalize(ctx))
	passed(t, c)
}

// TestRankSerializedSplit lets rank 1 fail before MPI_Comm_split when the others are past
// their last barrier, and cannot be notified: their contexts end the call. Before that they
// would learn of it, and leave no call behind. Rank 1 closes nothing meanwhile.
func TestRankSerializedSplit(t *testing.T) {
	ctx, world, c := splitWorld(t)
	mpi.Serialize(c)
	rt := cpu.New()
	buf, err := rt.Allocate(8)
	require.NoError(t, err)
	require.NoError(t, world.AllReduce(buf, buf, 1, dtype.I64, comm.Sum))
	require.NoError(t, world.Barrier(ctx))
	whole, err := c.Split(ctx, 0, 0)
	require.NoError(t, err)
	require.NoError(t, whole.Barrier(ctx))
	split := milestone("split", c.Rank())
	failed := milestone("failed", 1)
	ended := milestone("ended", c.Rank())
	if c.Rank() == 1 {
		mpi.SkipSplit(c)
		_, err = c.Split(&inSplit{Context: ctx, enter: func() context.Context {
			awaitFiles(milestone("split", 0), milestone("split", 2))
			return ctx
		}}, 0, 0)
		assert.ErrorContains(t, err, "MPI_Comm_set_errhandler")
		reach(t, failed)
		awaitFiles(milestone("ended", 0), milestone("ended", 2))
	} else {
		_, err = c.Split(&inSplit{Context: ctx, enter: func() context.Context {
			reach(t, split)
			awaitFiles(failed)
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			t.Cleanup(cancel)
			return short
		}}, 0, 0)
		assert.ErrorIs(t, err, comm.ErrTimeout)
		assert.ErrorIs(t, c.Barrier(ctx), comm.ErrBroken)
		err = whole.Barrier(ctx)
		assert.ErrorContains(t, err, "one call at a time, and one was left behind")
		reach(t, ended)
	}
	require.NoError(t, ctx.Err(), "nobody waits for a deadline of its own")
	broken(t, ctx, c)
}

// TestRankSerializedFree has an MPI_Comm_free that does not come back.
func TestRankSerializedFree(t *testing.T) {
	ctx, world, c := splitWorld(t)
	mpi.Serialize(c)
	mpi.ReplaceFree(c, libc(t).Pause)
	require.NoError(t, world.Barrier(ctx))
	require.NoError(t, c.Close())
	assert.ErrorIs(t, mpi.Finalize(ctx), comm.ErrBroken)
	require.NoError(t, ctx.Err(), "nobody waits for a deadline of its own")
	passed(t, c)
}

// TestRankFinalizeInTime finalizes with operations in flight on several communicators:
// for all of them together it waits no longer than its context, however long each may take.
func TestRankFinalizeInTime(t *testing.T) {
	ctx, world, c := splitWorld(t)
	rt := cpu.New()
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	comms := []comm.Communicator{world, c}
	for range 3 {
		one, err := world.Split(ctx, 0, 0)
		require.NoError(t, err)
		comms = append(comms, one)
	}
	for i, one := range comms { // which nobody sends
		require.NoError(t, one.Recv(buf+uintptr(8*i), 1, dtype.F32, (one.Rank()+1)%one.WorldSize(), 1))
	}
	for _, one := range comms {
		mpi.CloseWithin(one, time.Hour)
	}
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, mpi.Finalize(short), comm.ErrBroken)
	require.NoError(t, ctx.Err(), "nobody waits for a communicator")
	passed(t, c)
}

// TestRankFinalizeAlone lets one rank stay away from Finalize: the others say which, in
// the log where nothing ends their wait, and in the error.
func TestRankFinalizeAlone(t *testing.T) {
	ctx, world, c := splitWorld(t)
	require.NoError(t, world.Barrier(ctx))
	if c.Rank() == 1 {
		passed(t, c) // when the others have
		return
	}
	const missing = "a communicator of size 3 is still open on (rank 1|ranks 0, 1|ranks 1, 2)[^,]" // one may be on its way
	mpi.SetPatience(c, time.Millisecond)
	log := make(told, 10)
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
	waits, cancel := context.WithCancel(ctx)
	go func() {
		assert.Contains(t, <-log, "communicators were never closed")
		assert.Regexp(t, missing, <-log)
		cancel()
	}()
	err := mpi.Finalize(waits)
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.Regexp(t, missing, err)
	passed(t, c)
}

// inPlace are functions of the C library that tests have called instead of MPI's functions.
type inPlace struct {
	Pause dl.Func `sym:"pause"`       // does not come back
	Yield dl.Func `sym:"sched_yield"` // does nothing
	Fail  dl.Func `sym:"sysconf"`     // fails: the first argument is no setting
}

func libc(t *testing.T) (f inPlace) {
	t.Helper()
	lib, err := dl.Open("libc.so.6")
	require.NoError(t, err)
	require.NoError(t, lib.Bind(&f))
	return f
}

// TestRankFinalizeLate lets a rank come to Finalize after it has closed everything, when
// the others say that they wait for that: nobody calls MPI_Finalize, which has its time
// then, before it comes.
func TestRankFinalizeLate(t *testing.T) {
	ctx, world, c := splitWorld(t)
	mpi.ReplaceFinalize(c, libc(t).Yield)
	require.NoError(t, world.Barrier(ctx))
	require.NoError(t, c.Close())
	require.NoError(t, world.Close())
	late := milestone("late", 1)
	if c.Rank() == 1 {
		awaitFiles(milestone("waits", 0), milestone("waits", 2))
		reach(t, late)
	} else {
		mpi.SetPatience(c, 0)
		slog.SetDefault(slog.New(slog.NewTextHandler(hears(func(text string) { // where Finalize waits
			if strings.Contains(text, "not all ranks have called it") {
				mpi.SetPatience(c, time.Minute) // with MPI_Finalize
				reach(t, milestone("waits", c.Rank()))
			}
		}), nil)))
	}
	require.NoError(t, mpi.Finalize(ctx))
	assert.FileExists(t, late)
	passed(t, c)
}

// hears is called with what is written to it.
type hears func(text string)

func (f hears) Write(text []byte) (int, error) {
	f(string(text))
	return len(text), nil
}

// told receives the lines of a log.
type told chan string

func (c told) Write(text []byte) (int, error) {
	c <- string(text)
	return len(text), nil
}

// TestRankFinalizeHangs has an MPI_Finalize that does not come back though all ranks are
// there: Run comes back.
func TestRankFinalizeHangs(t *testing.T) {
	_, world, c := splitWorld(t)
	mpi.ReplaceFinalize(c, libc(t).Pause)
	mpi.SetPatience(c, time.Millisecond)
	require.NoError(t, c.Close())
	err := mpi.Run(context.Background(), func(ctx context.Context, c comm.Communicator) error { return c.Barrier(ctx) })
	assert.ErrorIs(t, err, comm.ErrTimeout)
	assert.ErrorContains(t, err, "MPI_Finalize has not returned")
	passed(t, world)
}

// TestRankLateRanks lets ranks come late, so that the others report where they
// wait, to random calls that all of them agree on: nobody takes that for a
// disagreement.
func TestRankLateRanks(t *testing.T) {
	const n = 3000
	rounds := 12
	if extended {
		rounds = 120
	}
	r := newRank(t)
	me, size := r.world.Rank(), r.world.WorldSize()
	send, mine := r.floats(n*size, func(int) float32 { return 0 })
	recv, got := r.floats(n*size, func(int) float32 { return 0 })
	seed := uint64(time.Now().UnixNano())
	buf, err := r.rt.Allocate(8)
	require.NoError(t, err)
	hostmem.Slice[uint64](buf, 1)[0] = seed
	require.NoError(t, r.world.Broadcast(buf, 1, dtype.U64, 0))
	r.sync()
	seed = hostmem.Slice[uint64](buf, 1)[0]
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c, err := r.world.Split(r.ctx, 0, me)
	require.NoError(t, err)
	for round := range rounds {
		count, root, late := 1+random.IntN(n), random.IntN(size), random.IntN(size)
		for i := range count {
			mine[i] = float32(me + round + i%7)
		}
		if late == me {
			time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
		} else {
			random.IntN(20)
		}
		want := func(q, i int) float32 { return float32(q + round + i%7) }
		check := func(at int, value func(i int) float32) {
			for i := range count {
				if got[at+i] != value(i) {
					t.Fatalf("round %d: element %d is %v, want %v", round, at+i, got[at+i], value(i))
				}
			}
		}
		next, before := (me+1)%size, (me+size-1)%size
		switch random.IntN(6) {
		case 0:
			require.NoError(t, c.AllReduce(send, recv, count, dtype.F32, comm.Max))
			require.NoError(t, c.Sync(r.ctx))
			check(0, func(i int) float32 { return want(size-1, i) })
		case 1:
			require.NoError(t, c.Broadcast(send, count, dtype.F32, root))
			require.NoError(t, c.AllGather(send, recv, count, dtype.F32))
			require.NoError(t, c.Sync(r.ctx))
			check(before*count, func(i int) float32 { return want(root, i) })
		case 2:
			require.NoError(t, c.Reduce(send, recv, count, dtype.F32, comm.Min, root))
			if random.IntN(2) == 0 {
				require.NoError(t, c.Sync(r.ctx))
			}
		case 3:
			require.NoError(t, c.Group(
				comm.RecvCall(recv, count, dtype.F32, before, 5),
				comm.AllGatherCall(send, recv+4*n, 0, dtype.F32),
				comm.SendCall(send, count, dtype.F32, next, 5)))
			require.NoError(t, c.Sync(r.ctx))
			check(0, func(i int) float32 { return want(before, i) })
		case 4:
			require.NoError(t, c.Barrier(r.ctx))
		case 5:
			child, err := c.Split(r.ctx, 0, -me)
			require.NoError(t, err)
			require.NoError(t, c.Close())
			c = child
			// Ranks are numbered the other way round from here on.
			me = c.Rank()
		}
		require.NoError(t, c.Sync(r.ctx))
	}
	require.NoError(t, c.Close())
}
