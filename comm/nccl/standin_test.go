package nccl_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/gputest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dl"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/logtest"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// TestOnStandIns runs what one rank does without a GPU, and what a GPU does not
// do on request.
func TestOnStandIns(t *testing.T) {
	out := gputest.OnStandIns(t,
		"^(TestStandIn|TestConformance|TestHostMemory|TestAllReduceDoesNot|TestSyncInACapture|TestForeignCaptureRefuses|TestFromOther|"+
			"TestStreamOrder|TestSymmetric|TestMembers)",
		"^TestConformanceOfProcesses$", "FAKE_CUDA_MAJOR=9")
	require.NotRegexp(t, "(?m)^--- SKIP", out)
}

// Communicators are freed also where NCCL's threads have no names.
func TestWithoutThreadNames(t *testing.T) {
	gputest.OnStandIns(t, "^TestStandInFreesWhatIsFinalized$", "^$", "NCCL_SET_THREAD_NAME=0")
}

// A communicator that is forgotten is found, in a separate process: NCCL's part of it stays.
func TestForgottenOnStandIns(t *testing.T) {
	gputest.OnStandIns(t, "^TestForgotten$", "^$")
}

func TestForgotten(t *testing.T) {
	if os.Getenv(gputest.StandInVariable) == "" {
		t.Skip("needs the stand-ins; see TestForgottenOnStandIns")
	}
	logged := logtest.Capture(t)
	forget(t)
	require.Eventually(t, func() bool {
		runtime.GC()
		return len(logged.Lines("communicators were never closed")) > 0
	}, time.Minute, time.Millisecond)
	assert.Len(t, logged.Lines(`backend=nccl count=1 first="rank 0 of 1 on cuda:0, made at `), 1)
}

// forget loses a communicator, and its runtime, which has its memory.
func forget(t *testing.T) {
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	world, err := nccl.InProcess(t.Context(), []*cuda.Runtime{rt})
	require.NoError(t, err)
	require.NoError(t, world[0].Barrier(t.Context()))
}

// standIns is what the libraries export beside their API.
type standIns struct {
	nccl struct {
		Alive      dl.Func `sym:"fake_alive"`
		FailEnd    dl.Func `sym:"fake_fail_end"`
		OpenGroups dl.Func `sym:"fake_open_groups"`
		Ended      dl.Func `sym:"fake_threads_ended"`
		Fail       dl.Func `sym:"fake_fail"`
		InProgress dl.Func `sym:"fake_in_progress"`
		Pending    dl.Func `sym:"fake_pending"`
		HoldAbort  dl.Func `sym:"fake_hold_abort"`
		Ending     dl.Func `sym:"fake_ending"`
		Reductions dl.Func `sym:"fake_reductions"`
		Violations dl.Func `sym:"fake_violations"`
		HoldLaunch dl.Func `sym:"fake_hold_launch"`
		Stuck      dl.Func `sym:"fake_stuck"`
		Aborted    dl.Func `sym:"fake_aborted"`
		Abrupt     dl.Func `sym:"fake_abrupt"`
		HoldThread dl.Func `sym:"fake_hold_services"`
		Early      dl.Func `sym:"fake_early"`

		EndedWindows dl.Func `sym:"fake_ended_windows"`
	}
	driver struct {
		Alive      dl.Func `sym:"fake_alive"`
		Break      dl.Func `sym:"fake_break"`
		Fail       dl.Func `sym:"fake_fail"`
		Hold       dl.Func `sym:"fake_hold"`
		Stall      dl.Func `sym:"fake_stall"`
		Violations dl.Func `sym:"fake_violations"`
	}
}

// openStandIns opens a runtime. At the end it checks that nothing is left, and that no call was
// made that would crash a library.
func openStandIns(t *testing.T) (*standIns, *cuda.Runtime) {
	if os.Getenv(gputest.StandInVariable) == "" {
		t.Skip("needs the stand-ins; see TestOnStandIns")
	}
	s := &standIns{}
	for variable, table := range map[string]any{gputest.LibraryVariable: &s.nccl, gputest.DriverVariable: &s.driver} {
		lib, err := dl.Open(os.Getenv(variable))
		require.NoError(t, err)
		require.NoError(t, lib.Bind(table))
	}
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, rt.Close(), "it would tell of memory that is left")
		assert.Zero(t, s.nccl.Alive.Int(), "native communicators that are left")
		assert.Zero(t, s.nccl.Violations.Int()+s.driver.Violations.Int())
	})
	return s, rt
}

func (s *standIns) alone(t *testing.T, rt *cuda.Runtime) *nccl.Comm {
	world, err := nccl.InProcess(t.Context(), []*cuda.Runtime{rt})
	require.NoError(t, err)
	return world[0]
}

// pend puts work into the stream that stays in flight until a native communicator is
// aborted, as a collective does whose peer has died.
func (s *standIns) pend(t *testing.T, c *nccl.Comm, buf uintptr) {
	alive := s.nccl.Alive.Int()
	stream := c.Stream().Handle()
	s.driver.Stall.Call(stream, 1)
	require.NoError(t, c.Runtime().CopyInAsync(c.Stream(), buf, make([]byte, 8)))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s.nccl.Alive.Int() == alive {
			time.Sleep(time.Millisecond)
		}
		s.driver.Stall.Call(stream, 0)
	}()
	t.Cleanup(func() { <-done })
}

// A deadline aborts the communicator for all goroutines that wait. Close and its memory come
// after that.
func TestStandInDeadline(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	require.NoError(t, c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum))
	require.NoError(t, c.Sync(t.Context()))
	s.pend(t, c, buf)
	require.NoError(t, c.AllReduce(buf, buf, 4, dtype.F32, comm.Max))
	require.NoError(t, c.Broadcast(buf, 4, dtype.F32, 0))
	patient := make(chan error)
	go func() { patient <- c.Sync(context.Background()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err = c.Sync(ctx)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.NotErrorIs(t, err, comm.ErrBroken)
	require.ErrorContains(t, err, "waiting for allreduce of 4 f32, max (collective #2); 1 operation behind that")
	require.NotContains(t, err.Error(), "restart")
	require.ErrorIs(t, <-patient, comm.ErrBroken)
	for _, err := range []error{
		c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum),
		c.Group(),
		c.Barrier(t.Context()),
		c.CommAfter(rt.ComputeStream()),
	} {
		assert.ErrorIs(t, err, comm.ErrBroken)
		assert.ErrorIs(t, err, comm.ErrTimeout, "with the first cause")
	}
	require.NoError(t, c.Close())
	assert.ErrorIs(t, c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum), comm.ErrClosed)
	assert.ErrorIs(t, c.Group(), comm.ErrClosed)
	require.NoError(t, rt.Deallocate(buf))
}

// A call in flight is aborted at once, and its communicator is freed when it has returned.
func TestStandInAbortBesideALaunch(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	s.nccl.HoldLaunch.Call(1)
	defer s.nccl.HoldLaunch.Call(0)
	launched, ended := make(chan error, 1), make(chan error, 1)
	go func() { launched <- reduce(c, buf) }()
	until := func(f dl.Func, n int32) {
		t.Helper()
		require.Eventually(t, func() bool { return f.Int() == n }, time.Minute, time.Millisecond)
	}
	until(s.nccl.Stuck, 1)
	alive, aborted := s.nccl.Alive.Int(), s.nccl.Aborted.Int()
	go func() { ended <- comm.CloseAll(c, errors.New("changed its mind")) }()
	until(s.nccl.Aborted, aborted+2) // what carries data, and control
	until(s.nccl.Alive, alive-1)     // control, which has no call in flight
	s.nccl.HoldLaunch.Call(0)
	require.Error(t, <-launched)
	require.NoError(t, <-ended)
	until(s.nccl.Alive, alive-2)
	require.NoError(t, rt.Deallocate(buf))
}

// Where other ranks are in the process, every communicator is finalized before it is freed.
func TestStandInFreesWhatIsFinalized(t *testing.T) {
	s, rt := openStandIns(t)
	nccl.UnmapWithin(t, 100*time.Millisecond)
	abrupt := s.nccl.Abrupt.Int()
	for _, cause := range []error{nil, errors.New("changed its mind")} {
		c := s.alone(t, rt)
		nccl.AmongOthers(c)
		alive := s.nccl.Alive.Int()
		require.NoError(t, comm.CloseAll(c, cause))
		require.Eventually(t, func() bool { return s.nccl.Alive.Int() == alive-2 }, time.Minute, time.Millisecond)
	}
	require.Equal(t, abrupt, s.nccl.Abrupt.Int())
}

// There, nothing is freed before NCCL's service threads have ended.
func TestStandInWaitsForServiceThreads(t *testing.T) {
	s, rt := openStandIns(t)
	for _, cause := range []error{nil, errors.New("changed its mind")} {
		c := s.alone(t, rt)
		nccl.AmongOthers(c)
		early := s.nccl.Early.Int()
		s.nccl.HoldThread.Call(1)
		time.AfterFunc(100*time.Millisecond, func() { s.nccl.HoldThread.Call(0) })
		require.NoError(t, comm.CloseAll(c, cause))
		require.Eventually(t, func() bool { return s.nccl.Alive.Int() == 0 }, time.Minute, time.Millisecond)
		require.Equal(t, early, s.nccl.Early.Int())
	}
}

// A call that fails to free a communicator leaves a group open on its thread, where the next
// collective would only be queued. The group is closed, the communicator is freed all the same,
// and the thread is not used again: it ends, but for the first one of the process, which Go parks.
func TestStandInFailsToFree(t *testing.T) {
	s, rt := openStandIns(t)
	causes := []error{nil, errors.New("changed its mind"), nil}
	ended := s.nccl.Ended.Int()
	for _, cause := range causes {
		c := s.alone(t, rt)
		s.nccl.FailEnd.Call(1)
		require.NoError(t, comm.CloseAll(c, cause))
		require.Eventually(t, func() bool { return s.nccl.Alive.Int() == 0 }, time.Minute, time.Millisecond)
	}
	least := ended + int32(len(causes)) - 1
	require.Eventually(t, func() bool { return s.nccl.Ended.Int() >= least }, time.Minute, time.Millisecond)
	require.Zero(t, s.nccl.OpenGroups.Int())
}

// Ranks of one process do not deregister windows at the same time, nor end a framework's capture by it.
func TestStandInFreesWindowsOneByOne(t *testing.T) {
	s, rt := openStandIns(t)
	const ranks, windows = 2, 8
	comms := make([]*nccl.Comm, ranks)
	for i := range comms {
		comms[i] = s.alone(t, rt)
		require.NoError(t, nccl.UseWindows(t.Context(), comms[i]))
		nccl.AsOfTwoGoroutines(comms[i])
	}
	before := s.nccl.EndedWindows.Int()
	require.NoError(t, gputest.Each(ranks, func(r int) error {
		for range windows {
			buf, err := comms[r].AllocateSymmetric(t.Context(), 1<<20)
			if err := errors.Join(err, comms[r].FreeSymmetric(t.Context(), buf)); err != nil {
				return err
			}
		}
		return comms[r].Close()
	}))
	require.EqualValues(t, ranks*windows, s.nccl.EndedWindows.Int()-before)
}

// Where the GPU of another rank is not known, windows are not used. A rank that cannot tell its own aborts: the others go by
// the outcome.
func TestStandInWindowRows(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	rows, err := nccl.WindowRows(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, 5, rows, "those of one GPU")
	nccl.AsOfTwoGoroutines(c)
	rows, err = nccl.WindowRows(t.Context(), c)
	require.NoError(t, err)
	require.Zero(t, rows)
	copied := append([]byte("cuMemcpyHtoDAsync_v2"), 0)
	s.driver.Fail.Call(hostmem.Addr(copied), 400, 1)
	_, err = nccl.WindowRows(t.Context(), c)
	runtime.KeepAlive(copied)
	require.ErrorContains(t, err, "cuMemcpyHtoDAsync")
	require.ErrorIs(t, c.Barrier(t.Context()), comm.ErrBroken)
	require.NoError(t, c.Close())
}

// The windows of an aborted communicator stay mapped while NCCL frees something: it unmaps them from the other GPUs of
// the process.
func TestStandInKeepsWindowsWhileFreeing(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	nccl.AsOfTwoGoroutines(c)
	for range 2 {
		_, err := c.AllocateSymmetric(t.Context(), 1<<20)
		require.NoError(t, err)
	}
	const mappings = 5 // the stand-in's number for address ranges and memory
	mapped := func() int32 { return s.driver.Alive.Int(mappings) }
	before := mapped()
	s.nccl.HoldAbort.Call(1)
	t.Cleanup(func() { s.nccl.HoldAbort.Call(0) })
	require.NoError(t, comm.CloseAll(c, errors.New("changed its mind")))
	for s.nccl.Ending.Int() == 0 {
		time.Sleep(time.Millisecond)
	}
	require.Equal(t, before, mapped())
	s.nccl.HoldAbort.Call(0)
	require.Eventually(t, func() bool { return mapped() == before-2*2 }, time.Minute, time.Millisecond)
}

// reduce launches a collective.
func reduce(c *nccl.Comm, buf uintptr) error { return c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum) }

// launchWhileFreeing launches a collective of two ranks while NCCL frees a part of their
// communicator, until HoldAbort is 0, and checks that it waits.
func (s *standIns) launchWhileFreeing(t *testing.T, rt *cuda.Runtime,
	launch func(c *nccl.Comm, buf uintptr) error) (c *nccl.Comm, buf uintptr, launched <-chan error) {
	t.Helper()
	c = s.alone(t, rt)
	part, err := c.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	nccl.AsOfTwo(c)
	buf, err = rt.Allocate(64)
	require.NoError(t, err)
	s.nccl.HoldAbort.Call(1)
	t.Cleanup(func() { s.nccl.HoldAbort.Call(0) }) // what a failure leaves would wait
	require.NoError(t, part.Close(), "which does not wait")
	for s.nccl.Ending.Int() == 0 {
		time.Sleep(time.Millisecond)
	}
	done := make(chan error, 1)
	go func() { done <- launch(c, buf) }()
	select {
	case err := <-done:
		t.Fatalf("it was launched: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	return c, buf, done
}

// A collective that is launched while NCCL frees a communicator may delay that, and block in the
// launch. So it waits before it is launched.
func TestStandInWaitsForWhatIsFreed(t *testing.T) {
	s, rt := openStandIns(t)
	c, buf, launched := s.launchWhileFreeing(t, rt, reduce)
	s.nccl.HoldAbort.Call(0)
	require.NoError(t, <-launched)
	require.NoError(t, c.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// A context ends that wait, and nothing is launched.
func TestStandInBarrierWhileFreeing(t *testing.T) {
	s, rt := openStandIns(t)
	ctx, cancel := context.WithCancel(t.Context())
	c, buf, ended := s.launchWhileFreeing(t, rt, func(c *nccl.Comm, _ uintptr) error { return c.Barrier(ctx) })
	before := s.nccl.Reductions.Int()
	cancel()
	err := <-ended
	require.ErrorIs(t, err, comm.ErrCanceled)
	require.ErrorContains(t, err, "waiting for barrier")
	require.Equal(t, before, s.nccl.Reductions.Int(), "it was launched all the same")
	s.nccl.HoldAbort.Call(0)
	require.ErrorIs(t, reduce(c, buf), comm.ErrBroken)
	require.NoError(t, c.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// Close ends that wait, and does not wait for the launch itself.
func TestStandInCloseBesideALaunch(t *testing.T) {
	s, rt := openStandIns(t)
	c, buf, launched := s.launchWhileFreeing(t, rt, reduce)
	assert.NoError(t, c.Close())
	err := <-launched
	s.nccl.HoldAbort.Call(0)
	require.ErrorIs(t, err, comm.ErrClosed)
	require.NotErrorIs(t, err, comm.ErrBroken)
	require.NoError(t, rt.Deallocate(buf))
}

// An abort on another rank ends this rank's kernels without an error. A collective that is done
// then counts only if the other rank had done its part before.
func TestStandInAnotherRankAborts(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	part, err := c.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	reduce := func() error { return c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum) }
	otherAborts := nccl.AnotherRank(t, c, 5)
	require.NoError(t, reduce())
	otherAborts(2)
	require.NoError(t, c.Sync(t.Context()), "it had done that as well")
	require.NoError(t, c.Barrier(t.Context()), "and left this one")
	require.NoError(t, c.Sync(t.Context()))
	require.NoError(t, reduce())
	alive := s.nccl.Alive.Int()
	err = c.Sync(t.Context())
	require.ErrorIs(t, err, comm.ErrPeerFailed)
	require.ErrorContains(t, err, "rank 5 aborted: changed its mind")
	require.ErrorIs(t, reduce(), comm.ErrBroken)
	require.NoError(t, part.Barrier(t.Context()), "another group")
	freed := func() bool { return s.nccl.Alive.Int() < alive }
	require.Eventually(t, freed, time.Minute, time.Millisecond)

	// A wait that goes on ends at once, and so does one for a message.
	child := part.(*nccl.Comm)
	otherAborts = nccl.AnotherRank(t, child, 1)
	s.pend(t, child, buf)
	require.NoError(t, part.Group(comm.SendCall(buf, 4, dtype.F32, 0, 0), comm.RecvCall(buf+32, 4, dtype.F32, 0, 0)))
	waiting := make(chan error)
	go func() { waiting <- part.Sync(context.Background()) }()
	otherAborts(0)
	require.ErrorIs(t, <-waiting, comm.ErrPeerFailed)
	require.NoError(t, part.Close())
	require.NoError(t, c.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// The ranks of a world have a name in flight records that no other world has, and so do communicators split from it.
// The name of the process counts for ranks of several processes.
func TestStandInWorldsAreNamed(t *testing.T) {
	s, rt := openStandIns(t)
	t.Setenv(env.Run, "of the launcher")
	name := func(c comm.Communicator) string {
		world, ok := comm.As[interface{ RunName() string }](c)
		require.True(t, ok)
		return world.RunName()
	}
	base, err := local.New(1)
	require.NoError(t, err)
	from, err := nccl.From(t.Context(), base[0], rt)
	require.NoError(t, err)
	names := map[string]bool{}
	for _, c := range []*nccl.Comm{s.alone(t, rt), s.alone(t, rt), from} {
		part, err := c.Split(t.Context(), 0, 0)
		require.NoError(t, err)
		assert.Equal(t, name(c), name(part))
		names[name(c)] = true
		nccl.AsOfTwo(c)
		assert.Equal(t, "of the launcher", name(c))
		require.NoError(t, comm.CloseAll(c, nil))
	}
	require.NoError(t, base[0].Close())
	assert.Len(t, names, 3)
	assert.NotContains(t, names, "")
}

// Progress is known before any wait, from marks in the stream, and from an idle stream for calls before the first
// question.
func TestStandInProgress(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	submitted, messages := uint64(0), uint64(0)
	reduce := func(n int) {
		for range n {
			require.NoError(t, c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum))
			submitted++
		}
	}
	exchange := func() {
		require.NoError(t, c.Group(comm.SendCall(buf, 4, dtype.F32, 0, 0), comm.RecvCall(buf+32, 4, dtype.F32, 0, 0)))
		messages += 2
	}
	want := func(collectives, messagesDone uint64) {
		t.Helper()
		assert.Equal(t, backend.Progress{Collectives: backend.Count{Submitted: submitted, Done: collectives},
			Messages: backend.Count{Submitted: messages, Done: messagesDone}}, c.Progress())
	}
	stall := func(on uintptr) { s.driver.Stall.Call(c.Stream().Handle(), on) }
	// write is work that stalls.
	write := func() { require.NoError(t, rt.CopyInAsync(c.Stream(), buf, make([]byte, 8))) }

	reduce(3)
	stall(1)
	write()
	want(0, 0) // nobody had asked
	stall(0)
	want(3, 0) // idle
	stall(1)
	write()
	reduce(4)
	want(7, 0)
	exchange()
	want(7, 2)
	reduce(7)
	want(14, 2)
	s.driver.Hold.Call(1)
	reduce(1)
	want(14, 2)
	s.driver.Hold.Call(0)
	want(15, 2)
	stall(0)
	reduce(2)
	want(17, 2)

	// Nothing is written into graphs, and what they hold back is not asked.
	graph, err := c.Stream().Capture(func() error {
		reduce(20)
		want(17, 2)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, graph.Close())
	other, err := rt.NewStream(0)
	require.NoError(t, err)
	require.NoError(t, c.UseStream(other.Handle()))
	stall(1)
	write()
	want(17, 2)
	reduce(8)
	want(45, 2) // the first one tells of what was captured, too
	stall(0)
	require.NoError(t, c.Sync(t.Context()))
	want(45, 2)
	otherAborts := nccl.AnotherRank(t, c, 1)
	reduce(1)
	otherAborts(0)
	want(45, 2) // as that may have ended what others wait for
	require.ErrorIs(t, c.Close(), comm.ErrPeerFailed)
	want(45, 2)
	require.NoError(t, other.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// A question about progress does not touch the stream once calls have marks: a query ends a capture that begins beside
// it.
func TestStandInProgressAsksNoStream(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	query := append([]byte("cuStreamQuery"), 0)
	// asked reports whether the question asks the stream.
	asked := func() bool {
		t.Helper()
		s.driver.Fail.Call(hostmem.Addr(query), 900, 1)
		c.Progress()
		return int32(s.driver.Fail.Call(hostmem.Addr(query), 900, 0)) == 0
	}
	reduce := func() error { return c.AllReduce(0, 0, 0, dtype.F32, comm.Sum) }
	require.NoError(t, reduce())
	require.True(t, asked(), "nobody had asked for marks")
	for range 20 {
		require.NoError(t, reduce())
		require.False(t, asked())
	}
	graph, err := c.Stream().Capture(reduce)
	require.NoError(t, err)
	require.False(t, asked(), "captured calls have no mark")
	require.NoError(t, graph.Close())
	require.NoError(t, c.Close())
}

// A Split that waits for its peers is not done even if the stream is idle.
func TestStandInProgressInASplit(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	require.NoError(t, c.AllReduce(0, 0, 0, dtype.F32, comm.Sum))
	s.nccl.InProgress.Call(1)
	var part comm.Communicator
	split := make(chan error)
	go func() {
		var err error
		part, err = c.Split(t.Context(), 0, 0)
		split <- err
	}()
	for c.Progress().Collectives.Submitted < 2 {
		runtime.Gosched()
	}
	require.NoError(t, c.AllReduce(0, 0, 0, dtype.F32, comm.Sum))
	done := c.Progress().Collectives
	s.nccl.InProgress.Call(0)
	require.NoError(t, <-split)
	require.Equal(t, backend.Count{Submitted: 3, Done: 1}, done)
	require.Equal(t, backend.Count{Submitted: 3, Done: 3}, c.Progress().Collectives)
	require.NoError(t, errors.Join(part.Close(), c.Close()))
}

// A Split that waits for its peers ends when the communicator is aborted.
func TestStandInAbortBesideASplit(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	s.nccl.InProgress.Call(1)
	defer s.nccl.InProgress.Call(0)
	split := make(chan error)
	go func() {
		_, err := c.Split(context.Background(), 0, 0)
		split <- err
	}()
	for c.Progress().Collectives.Submitted == 0 {
		runtime.Gosched()
	}
	cause := errors.New("aborted")
	c.Abort(cause)
	require.ErrorIs(t, <-split, cause)
	s.nccl.InProgress.Call(0)
	require.NoError(t, c.Close())
}

// A flight record shows completed calls although nobody has waited, without allocations.
func TestStandInRecord(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	r := record.New(c, 100, "")
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	reduce := func() error { return r.AllReduce(buf, buf, 8, dtype.F32, comm.Sum) }
	for range 5 {
		require.NoError(t, reduce())
	}
	states := func() (completed, scheduled int) {
		var text bytes.Buffer
		require.NoError(t, r.WriteJSON(&text))
		var d dump.File
		require.NoError(t, json.Unmarshal(text.Bytes(), &d))
		for _, e := range d.Entries {
			if e.State == "completed" {
				completed++
			} else {
				scheduled++
			}
		}
		return completed, scheduled
	}
	completed, scheduled := states()
	assert.Equal(t, [2]int{5, 0}, [2]int{completed, scheduled})
	s.driver.Stall.Call(c.Stream().Handle(), 1)
	require.NoError(t, rt.CopyInAsync(c.Stream(), buf, make([]byte, 8)))
	for range 3 {
		require.NoError(t, reduce())
	}
	s.driver.Hold.Call(1)
	for range 3 {
		require.NoError(t, reduce())
	}
	completed, scheduled = states()
	s.driver.Hold.Call(0)
	assert.Equal(t, [2]int{8, 3}, [2]int{completed, scheduled})
	s.driver.Stall.Call(c.Stream().Handle(), 0)
	race.NoAllocs(t, 100, reduce)
	require.NoError(t, r.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// Replays of graphs are not counted, so after a capture any aborted rank is an error.
func TestStandInAnotherRankAbortsAReplay(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	graph, err := c.Stream().Capture(func() error { return c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum) })
	require.NoError(t, err)
	require.NoError(t, graph.Launch(c.Stream()))
	require.NoError(t, c.Sync(t.Context()))
	nccl.AnotherRank(t, c, 1)(0)
	require.NoError(t, graph.Launch(c.Stream()))
	require.ErrorIs(t, c.Sync(t.Context()), comm.ErrPeerFailed)
	require.NoError(t, graph.Close())
	require.NoError(t, c.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// When the context of a guarded call ends, its abort ends other waits as well, with an error.
func TestStandInAbortOfAGuardedCall(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	s.pend(t, c, buf)
	require.NoError(t, c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum))
	waiting, ends := make(chan error), make(chan struct{})
	go func() { waiting <- c.Sync(context.Background()) }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = nccl.Guarded(ctx, c, func() error {
		<-ends
		return nil
	})
	require.ErrorIs(t, err, comm.ErrCanceled)
	require.ErrorIs(t, <-waiting, comm.ErrBroken)
	close(ends)
	require.NoError(t, c.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// Buffers are registered as windows only where these are faster at some size: GPUs whose links are not known, and more
// ranks than the table has, get plain memory.
func TestStandInUnusedWindows(t *testing.T) {
	s, rt := openStandIns(t)
	for _, ranks := range []int{2, 9} {
		c := s.alone(t, rt)
		nccl.AsOf(c, ranks)
		before := s.nccl.Alive.Int()
		for range 2 {
			buf, err := c.AllocateSymmetric(t.Context(), 1024)
			require.NoError(t, err)
			require.LessOrEqual(t, s.nccl.Alive.Int(), before, "a native communicator for windows of %d ranks", ranks)
			require.NoError(t, c.FreeSymmetric(t.Context(), buf))
		}
		require.NoError(t, c.Close())
	}
}

// A wait that is done while its rank tells the others of an abort has failed: a rank that aborts as well may have ended
// the kernels.
func TestStandInSyncBesideAnAbort(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	nccl.AnotherRank(t, c, 1)
	s.pend(t, c, buf)
	require.NoError(t, c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum))
	nccl.AsOfTwo(c)
	beside := make(chan error, 1)
	var telling atomic.Bool
	var looking sync.Once
	looks := make(chan struct{})
	nccl.Watch(c, nil, func() {
		telling.Store(true)
		s.driver.Stall.Call(c.Stream().Handle(), 0)
		go func() { beside <- c.Sync(context.Background()) }()
		<-looks
		for i := 0; i < 20 && len(beside) == 0; i++ { // a wait that succeeds is over by then
			time.Sleep(time.Millisecond)
		}
	}, func() {
		if telling.Load() {
			looking.Do(func() { close(looks) })
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, c.Sync(ctx), comm.ErrCanceled)
	err = <-beside
	require.ErrorIs(t, err, comm.ErrBroken)
	require.ErrorIs(t, err, comm.ErrCanceled, "with the cause")
	require.NoError(t, c.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// A rank that closes with work in flight leaves its group only after that: it may have to
// abort, and to tell its peers.
func TestStandInLeavesAfterItsWork(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	stream := c.Stream().Handle()
	s.driver.Stall.Call(stream, 1)
	require.NoError(t, rt.CopyInAsync(c.Stream(), buf, make([]byte, 8)))
	var done, early atomic.Bool
	nccl.Watch(c, func() { early.Store(!done.Load()) }, nil, nil)
	closed := make(chan error)
	go func() { closed <- c.Close() }()
	for !errors.Is(c.Group(), comm.ErrClosed) {
		time.Sleep(time.Millisecond)
	}
	done.Store(true)
	s.driver.Stall.Call(stream, 0)
	require.NoError(t, <-closed)
	require.False(t, early.Load())
	require.NoError(t, rt.Deallocate(buf))
}

// A communicator that aborts does not wait for work in flight, nor do its sub-communicators.
func TestStandInEnd(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	part, err := c.Split(t.Context(), 3, 0)
	require.NoError(t, err)
	none, err := c.Split(t.Context(), -1, 0)
	require.NoError(t, err)
	require.Nil(t, none)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	s.pend(t, part.(*nccl.Comm), buf)
	waiting := make(chan error)
	go func() { waiting <- part.Sync(context.Background()) }()
	cause := errors.New("aborted")
	part.Abort(cause) // before c, whose abort ends the kernels of all with the stand-in
	require.NoError(t, comm.CloseAll(c, cause))
	err = <-waiting
	assert.True(t, errors.Is(err, cause) || errors.Is(err, comm.ErrClosed), "%v", err)
	assert.ErrorIs(t, part.Barrier(t.Context()), comm.ErrClosed)
	assert.ErrorIs(t, c.Barrier(t.Context()), comm.ErrClosed)
	require.NoError(t, rt.Deallocate(buf))
}

// A rank that aborts several communicators tells its peers of all at once, as each may take a
// while.
func TestStandInEndsTogether(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	const n = 3
	var told sync.WaitGroup
	told.Add(n)
	all := make(chan struct{})
	go func() {
		told.Wait()
		close(all)
	}()
	var first sync.Once
	tells := func() {
		told.Done()
		select {
		case <-all:
		case <-time.After(time.Minute):
			first.Do(func() { t.Error("one after the other") })
		}
	}
	for range n {
		part, err := c.Split(t.Context(), 0, 0)
		require.NoError(t, err)
		nccl.AsOfTwo(part.(*nccl.Comm))
		nccl.Watch(part.(*nccl.Comm), nil, tells, nil)
	}
	require.NoError(t, comm.CloseAll(c, errors.New("aborted")))
}

// Close during a wait drops what is known of aborted ranks, so the wait does not succeed.
func TestStandInCloseBesideSync(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	require.NoError(t, c.AllReduce(buf, buf, 8, dtype.F32, comm.Sum))
	looks := 0
	nccl.Watch(c, nil, nil, func() {
		// The first look comes before the stream is asked, the second one after that.
		if looks++; looks == 2 {
			require.NoError(t, c.Close())
		}
	})
	require.ErrorIs(t, c.Sync(t.Context()), comm.ErrClosed)
	require.Equal(t, 4, looks, "two of which are Close's own, which drains")
	require.NoError(t, rt.Deallocate(buf))
}

// A wait whose context ends after Close tells its peers nothing: Close has told them that all is
// well.
func TestStandInCanceledAfterClose(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	nccl.AsOfTwo(c)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	closed, left, after := false, false, 0
	nccl.Watch(c, func() { left = true }, func() { after++ }, func() {
		if !closed {
			closed = true // Close, which drains, looks as well
			require.NoError(t, c.Close())
			cancel()
		}
	})
	require.Error(t, c.Sync(ctx))
	require.True(t, left)
	require.Zero(t, after, "it aborted after its end")
}

// A rank that cannot take part in a vote is aborted: the others go on to the next collective, and it
// would be one behind them.
func TestStandInVoteWithoutARank(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	s.driver.Stall.Call(rt.Stream().Handle(), 1)
	require.NoError(t, rt.CopyInAsync(rt.Stream(), buf, make([]byte, 8)))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = c.AllocateSymmetric(ctx, 1<<20)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorIs(t, c.Barrier(t.Context()), comm.ErrBroken)
	s.driver.Stall.Call(rt.Stream().Handle(), 0)
	require.NoError(t, c.Close())
	require.NoError(t, rt.Deallocate(buf))
}

// The same holds for a rank that cannot read the result of a vote.
func TestStandInVoteNotRead(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	read := append([]byte("cuMemcpyDtoHAsync_v2"), 0)
	s.driver.Fail.Call(hostmem.Addr(read), 400, 1)
	_, err := c.AllocateSymmetric(t.Context(), 1<<20)
	runtime.KeepAlive(read)
	require.ErrorContains(t, err, "cuMemcpyDtoHAsync")
	require.ErrorIs(t, c.Barrier(t.Context()), comm.ErrBroken)
	require.NoError(t, c.Close())
}

// Creation ends with its context, even if the abort takes longer.
func TestStandInCreationEnds(t *testing.T) {
	s, rt := openStandIns(t)
	s.nccl.InProgress.Call(1)
	s.nccl.HoldAbort.Call(1)
	t.Cleanup(func() { s.nccl.InProgress.Call(0); s.nccl.HoldAbort.Call(0) })
	ctx, cancel := context.WithCancel(t.Context())
	made := make(chan error)
	go func() {
		_, err := nccl.InProcess(ctx, []*cuda.Runtime{rt})
		made <- err
	}()
	for s.nccl.Alive.Int() == 0 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	select {
	case err := <-made:
		require.ErrorIs(t, err, comm.ErrCanceled)
	case <-time.After(time.Minute):
		t.Fatal("it waits for the abort")
	}
	s.nccl.InProgress.Call(0)
	s.nccl.HoldAbort.Call(0)
	require.Eventually(t, func() bool { return s.nccl.Alive.Int() == 0 }, time.Minute, time.Millisecond)
}

// A rank that NCCL refuses tells the others, which wait for it in their creation.
func TestStandInCreationWithoutARank(t *testing.T) {
	s, rt := openStandIns(t)
	nccl.UnmapWithin(t, 10*time.Millisecond)
	for _, way := range []struct {
		name   string
		create func(ctx context.Context, errs []error)
	}{
		{"goroutines", func(ctx context.Context, errs []error) {
			_, errs[0] = nccl.InProcess(ctx, []*cuda.Runtime{rt, rt})
		}},
		{"from another communicator", func(ctx context.Context, errs []error) {
			assert.NoError(t, local.Run(ctx, len(errs), func(ctx context.Context, base comm.Communicator) error {
				_, errs[base.Rank()] = nccl.From(ctx, base, rt)
				return nil
			}))
		}},
	} {
		t.Run(way.name, func(t *testing.T) {
			s.nccl.InProgress.Call(1)
			defer s.nccl.InProgress.Call(0)
			const second = 3 // of ncclGetUniqueId, and ncclCommInitRankConfig of one rank and of the other
			s.nccl.Fail.Call(second)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			errs := make([]error, 2)
			way.create(ctx, errs)
			require.NoError(t, ctx.Err(), "a rank waits for the other")
			var refused *nccl.Error
			for _, err := range errs {
				if errors.As(err, &refused) || err == nil {
					continue
				}
				require.ErrorIs(t, err, comm.ErrPeerFailed)
				require.ErrorContains(t, err, "aborted: ncclCommInitRankConfig: a failure")
			}
			require.NotNil(t, refused, "%v", errs)
			s.nccl.InProgress.Call(0)
			require.Eventually(t, func() bool { return s.nccl.Alive.Int() == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// If the context of a Split ends first, NCCL may finish the sub-communicator later. It is freed.
func TestStandInSplitMadeLate(t *testing.T) {
	s, rt := openStandIns(t)
	for _, late := range []bool{false, true} {
		c := s.alone(t, rt)
		s.nccl.InProgress.Call(1)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err := c.Split(ctx, 0, 0)
		cancel()
		require.ErrorIs(t, err, comm.ErrTimeout)
		if late {
			require.NoError(t, c.Close())
		}
		s.nccl.InProgress.Call(0)
		require.NoError(t, c.Close())
		require.Eventually(t, func() bool { return s.nccl.Alive.Int() == 0 }, time.Minute, time.Millisecond)
	}
}

// A communicator in creation on a device that breaks is freed.
func TestStandInDeviceBreaksBeforeTheEnd(t *testing.T) {
	s, _ := openStandIns(t)
	rt, err := cuda.Open(0)
	require.NoError(t, err)
	s.nccl.InProgress.Call(1)
	ctx, cancel := context.WithCancel(t.Context())
	made := make(chan error)
	go func() {
		_, err := nccl.InProcess(ctx, []*cuda.Runtime{rt})
		made <- err
	}()
	for s.nccl.Alive.Int() == 0 {
		time.Sleep(time.Millisecond)
	}
	s.driver.Break.Call(700, 0)
	assert.ErrorContains(t, rt.Synchronize(t.Context()), "unusable")
	s.driver.Break.Call(0, 0)
	cancel()
	require.ErrorIs(t, <-made, comm.ErrCanceled)
	s.nccl.InProgress.Call(0)
	require.ErrorContains(t, rt.Close(), "device is broken")
	assert.Zero(t, s.nccl.Alive.Int())
}

// Ordering streams during a Close succeeds or returns ErrClosed: nothing is recorded in a stream
// that is destroyed.
func TestStandInOrderBesideClose(t *testing.T) {
	s, rt := openStandIns(t)
	compute := rt.ComputeStream()
	event, err := rt.NewEvent()
	require.NoError(t, err)
	for range 30 {
		c := s.alone(t, rt)
		var all sync.WaitGroup
		for _, order := range []func() error{
			func() error { return c.CommAfter(compute) },
			func() error { return c.AfterComm(compute) },
			func() error { return c.RecordOnCommStream(event.Handle()) },
			func() error { return c.CommStreamWaitEvent(event.Handle()) },
		} {
			begun := make(chan struct{})
			all.Go(func() {
				err := order()
				close(begun)
				for err == nil {
					err = order()
				}
				assert.ErrorIs(t, err, comm.ErrClosed)
			})
			<-begun
		}
		assert.NoError(t, c.Close())
		all.Wait()
	}
	require.NoError(t, event.Close())
}

// Close may be called by several goroutines, and sub-communicators live on.
func TestStandInClose(t *testing.T) {
	s, rt := openStandIns(t)
	c := s.alone(t, rt)
	part, err := c.Split(t.Context(), 0, 0)
	require.NoError(t, err)
	_, err = c.AllocateSymmetric(t.Context(), 1<<20)
	require.NoError(t, err)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() { assert.NoError(t, c.Close()) })
	}
	all.Wait()
	assert.NoError(t, part.Barrier(t.Context()))
	assert.NoError(t, part.Close())
}
