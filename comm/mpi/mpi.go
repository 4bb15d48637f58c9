// Package mpi connects processes that mpirun or srun started. The MPI library (Open MPI,
// MPICH and its relatives, or one with the ABI of MPI 5) is opened at run time:
// one binary, built without cgo and without an MPI installation, runs under
// each of them.
//
//	err := mpi.Run(ctx, func(ctx context.Context, c comm.Communicator) error {
//		return distributed.AllReduce(ctx, c, tensor, comm.Sum)
//	})
//	if err != nil {
//		log.Fatal(err) // with this status the launcher ends the job
//	}
//
// Run is Init, the body, and Finalize. Start the program with the launcher of the library
// (mpirun -n 4 ./program); without a launcher it is a world of one. docs/mpi.md describes how
// the library is found, how collectives work, and how fast they are.
//
// # Environment variables
//
//   - TUTTI_MPI_LIB names the library to open, a file name or path, whatever else is found.
//   - TUTTI_MPI_COLLECTIVES=native makes every collective one call of the library (MPI_Iallreduce, …), which uses
//     networks and GPUs that the library knows, instead of this package's own. Reductions are combined in the
//     library's order and precision, not by the order contract ([comm.FixedOrder]). Reductions that MPI does not
//     define (Avg, 16-bit and 8-bit floats), ReduceScatter in place and, if the library lacks MPI 4's large counts,
//     more than 2^31-1 elements at once are [comm.ErrUnsupported]. A mix of settings is [comm.ErrMismatch] on every
//     rank.
//   - TUTTI_MPI_SHARED=off for any rank has all ranks of a host go through MPI instead of sharing memory.
//
// Any other value is an error of [Init].
//
// # How it is written
//
//   - library.go: which library is opened; abi.go, abi_*.go: which binary interface it has, and what that is;
//     api.go, errors.go: its functions and their errors; turn.go: one call at a time, where the library allows no more
//   - mpi.go, run.go: the process, from Init to Finalize; signals*.go: handlers that the library must not keep
//   - wire.go: messages over the library, on which comm/internal/schedule runs; matching.go: which receive a user's
//     message is for; share.go: memory that ranks of a host share in their place
//   - native.go: collectives that are one call of the library
//   - endpoint.go, progress.go: a rank, and the goroutine that goes on with the calls of all; split.go, close.go:
//     its beginning and end; communicator.go: what the user sees
//   - timeouts.go: all times
package mpi

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/inquiry"
	"github.com/tutti-go/tutti/internal/machine"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/waiting"
)

// state is MPI in this process.
type state struct {
	lib         *library      // opened by start, not changed after
	collectives collectives   // those of the environment
	threads     string        // the thread level that the library provides
	ours        bool          // this package initialized MPI and has to finalize it
	maxTag      uint64        // the highest tag
	progress    *progress     // drives all endpoints
	world       *communicator // all processes; its rank is this process's
	thread      mainThread    // the one that initialized MPI
	home        *poll.Home    // of this process's waits; nil if the ranks of the world are on several hosts
	patience    time.Duration // finalizePatience; tests have less
	manager     *os.File      // the connection of the library to its process manager, never closed

	failed atomic.Pointer[error] // of a call that left MPI in an unknown state
}

// process guards the state of this process: MPI can be initialized once.
var process struct {
	sync.Mutex
	state     *state
	finalized bool
}

// Info describes the MPI library.
type Info struct {
	Library string // its own description, as MPI_Get_library_version gives it
	File    string // the file name under which it was opened
	ABI     string // "Open MPI", "MPICH" or "MPI-5"
	// Threads is the thread level that it provides, "" before Init.
	Threads string
	// LargeCounts: one message or collective can carry more than 2^31-1
	// elements.
	LargeCounts bool
	// Unshared is why ranks do not share memory for collectives, "" if they do: after Init
	// the ranks of the world, before Init this process and others on its host.
	Unshared string
	// CUDA: the library says that it accepts device memory; false before Init.
	CUDA bool
}

// Library opens the MPI library, without initializing MPI, and describes it.
// The error lists the files that were tried.
func Library() (Info, error) {
	process.Lock()
	defer process.Unlock()
	if s := process.state; s != nil {
		info := s.lib.info()
		info.Threads = s.threads
		info.share(s.world.e.unshared)
		return info, nil
	}
	lib, err := openLibrary()
	if err != nil {
		return Info{}, &comm.OpError{
			Backend: name,
			Op:      "open",
			Rank:    -1,
			Err:     err,
		}
	}
	info := lib.info()
	info.share(sharable())
	return info, nil
}

func (i *Info) share(unshared error) {
	if unshared != nil {
		i.Unshared = unshared.Error()
	}
}

func (l *library) info() Info {
	return Info{
		Library:     firstLine(l.version),
		File:        l.file,
		ABI:         l.abi.name,
		LargeCounts: l.IallreduceC.Found(),
		CUDA:        l.cuda,
	}
}

// collectives is a value of TUTTI_MPI_COLLECTIVES.
type collectives string

const (
	scheduled collectives = ""
	native    collectives = "native"
)

// Init opens the MPI library, initializes MPI and returns the world
// communicator. A second Init returns the same. If the
// program has initialized MPI by other means, Init uses it as it is and leaves
// MPI_Finalize to the program. After Finalize, MPI cannot be initialized again:
// [comm.ErrClosed].
//
// Init waits for the other ranks. If ctx ends before they arrive, it returns [comm.ErrTimeout] or [comm.ErrCanceled].
// Without a deadline, it waits for 10 minutes, or TUTTI_CONNECT_TIMEOUT. After such an error and after
// [comm.ErrMismatch] (see "Environment variables"), MPI cannot be used in this process any more: it should exit with
// a non-zero status.
func Init(ctx context.Context) (comm.Communicator, error) {
	process.Lock()
	defer process.Unlock()
	if process.finalized {
		return nil, &comm.OpError{
			Backend: name,
			Op:      "init",
			Rank:    -1,
			Err:     comm.ErrClosed,
		}
	}
	if process.state == nil {
		s, err := startWithin(ctx)
		if err != nil {
			return nil, &comm.OpError{
				Backend: name,
				Op:      "init",
				Rank:    -1,
				Err:     err,
			}
		}
		process.state = s
		if warning := machine.Bound(); warning != "" && s.world.Rank() == 0 && s.world.WorldSize() > 1 {
			slog.Warn("mpi: " + warning)
		}
	}
	return process.state.world, nil
}

// startWithin is start, left behind when ctx ends. The caller holds process.
func startWithin(ctx context.Context) (*state, error) {
	if ctx.Err() != nil {
		return nil, comm.ContextError(ctx)
	}
	limit, err := patience(os.Getenv)
	if err != nil {
		return nil, err
	}
	ctx, cancel := waiting.Bounded(ctx, limit)
	defer cancel()
	type started struct {
		*state
		err error // why the state is nil; nil otherwise
	}
	done := make(chan started, 1)
	go func() {
		s, err := start(ctx)
		done <- started{s, err}
	}()
	const reason = "other ranks have not called MPI_Init, or the launcher's processes do not reach each other"
	rank, size := launched(os.Getenv)
	defer inquiry.Begin(inquiry.Wait{Rank: rank, Size: size, Text: func() string { return "in MPI_Init: " + reason }})()
	reminder := waiting.Remind()
	defer reminder.Stop()
	for {
		select {
		case s := <-done:
			process.finalized = errors.Is(s.err, comm.ErrMismatch) || s.err != nil && ctx.Err() != nil
			return s.state, s.err
		case <-reminder.C:
			slog.Warn("mpi: MPI_Init has not returned", "rank", rank, "why", reason, "waited", reminder.Next())
		case <-ctx.Done():
			process.finalized = true
			return nil, fmt.Errorf("the other ranks have not called MPI_Init: %w", comm.ContextError(ctx))
		}
	}
}

// patience is how long MPI_Init may take without a deadline, 0 unless the user has set it.
func patience(getenv func(string) string) (time.Duration, error) {
	text := getenv(env.ConnectTimeout)
	if text == "" {
		return 0, nil
	}
	limit, err := waiting.ReadLimit(text)
	if err != nil {
		return 0, fmt.Errorf("%w: %s=%q: %w", comm.ErrArgument, env.ConnectTimeout, text, err)
	}
	return limit, nil
}

// launched is what the launcher says of this process before MPI does: rank 0 of 1 if it says nothing.
func launched(getenv func(string) string) (rank, size int) {
	for _, names := range [][2]string{
		{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
		{"PMI_RANK", "PMI_SIZE"},
		{"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
	} {
		rank, err := strconv.Atoi(getenv(names[0]))
		if err == nil && rank >= 0 {
			size, _ = strconv.Atoi(getenv(names[1])) // of less than the rank says, a world of as many
			return rank, max(size, rank+1)
		}
	}
	return 0, 1
}

// Finalize closes all communicators and finalizes MPI. It is collective, as MPI_Finalize is,
// and waits for the other ranks until ctx ends ([comm.ErrTimeout], [comm.ErrCanceled]). The
// error, and after 30 seconds the log, names ranks that have not closed their communicators,
// or says that some have not called Finalize. When all ranks have called it, MPI_Finalize gets
// 30 seconds. Later calls return nil and do nothing.
//
// If a communicator has aborted, because a rank died or did not come in time, or a Split
// failed, MPI_Finalize would wait for that rank as well. Finalize then leaves it out and
// returns an error wrapping [comm.ErrBroken].
//
// After an error the process should exit with a non-zero status, which makes the launcher end
// the job.
func Finalize(ctx context.Context) error {
	process.Lock()
	s := process.state
	done := process.finalized
	process.finalized = done || s != nil
	process.Unlock() // Abort may be called while it waits
	if done || s == nil {
		return nil
	}
	if err := s.finalize(ctx); err != nil {
		return &comm.OpError{
			Backend: name,
			Op:      "finalize",
			Rank:    s.world.Rank(),
			Err:     err,
		}
	}
	return nil
}

// Abort ends all processes of the job at once (MPI_Abort) with the given exit code. Without
// MPI it ends this process.
func Abort(code int) {
	process.Lock()
	s := process.state
	process.Unlock()
	if s != nil {
		s.lib.call(s.lib.Abort, s.lib.handles.world, uintptr(code))
	}
	os.Exit(code)
}

// mainThread is the operating system's thread that initialized MPI. The standard requires
// MPI_Finalize on the same thread.
type mainThread struct {
	calls chan func() // to be made on the thread, one after the other; closed when it has no more
}

func newMainThread() mainThread {
	t := mainThread{calls: make(chan func())}
	go func() {
		goruntime.LockOSThread()
		defer goruntime.UnlockOSThread()
		for call := range t.calls {
			call()
		}
	}()
	return t
}

// do runs f on the thread, and reports whether it returned before ctx ended.
func (t mainThread) do(ctx context.Context, f func()) bool {
	done := make(chan struct{})
	t.calls <- func() {
		f()
		close(done)
	}
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return false
	}
}

// start initializes MPI and makes the world communicator.
func start(ctx context.Context) (*state, error) {
	chosen := collectives(os.Getenv(env.MPICollectives))
	if chosen != scheduled && chosen != native {
		return nil, fmt.Errorf("%w: %s is %q, want %s or nothing", comm.ErrArgument, env.MPICollectives, chosen, native)
	}
	if shared := os.Getenv(env.MPIShared); shared != "" && shared != sharedOff {
		return nil, fmt.Errorf("%w: %s is %q, want %s or nothing", comm.ErrArgument, env.MPIShared, shared, sharedOff)
	}
	lib, err := openLibrary()
	if err != nil {
		return nil, err
	}
	s := &state{
		lib:         lib,
		collectives: chosen,
		patience:    finalizePatience,
		thread:      newMainThread(),
	}
	catchBrokenPipes()
	s.thread.do(context.Background(), func() {
		keepSignals(func() { err = s.initialize() })
	})
	if err != nil {
		close(s.thread.calls)
		return nil, err
	}
	s.progress = newProgress()
	// MPICH reports errors in messages of any communicator to this one's handler.
	if err := lib.must(lib.CommSetErrhandler, lib.handles.world, lib.handles.errorsReturn); err != nil {
		return nil, err
	}
	handle, err := s.duplicate(lib.handles.world)
	if err != nil {
		return nil, err
	}
	world, err := s.wrap(handle)
	if err != nil {
		return nil, err
	}
	if err := world.compare(ctx); err != nil {
		return nil, err
	}
	if err := world.nameRun(ctx); err != nil {
		return nil, err
	}
	if err := world.share(ctx); err != nil {
		return nil, err
	}
	if world.shared != nil {
		s.home = poll.NewHome(world.rank, world.size)
		world.SetHome(s.home)
	}
	s.world = newCommunicator(world)
	if n := launchedSize(os.Getenv); n > 1 && world.size == 1 {
		return nil, fmt.Errorf(
			"%w: %w: %d processes were launched, but each is a world of one under %s (%s); "+
				"use the launcher of that library, or set %s",
			comm.ErrUnavailable,
			errMixed,
			n,
			firstLine(lib.version),
			lib.file,
			env.MPILibrary,
		)
	}
	return s, nil
}

// protocol is the version of what ranks send each other: schedules, heads and control messages.
var protocol uint64 = 5

// compare returns an error if ranks have another version of this package, or have chosen different collectives.
func (e *endpoint) compare(ctx context.Context) error {
	if e.size == 1 {
		return nil
	}
	out := newCells() // MPI's after an error
	lowest := hostmem.Slice[uint64](out.addr(0), 4)
	for i := range 2 { // ranks with native collectives, and without
		lowest[i] = math.MaxUint64
	}
	lowest[2] = protocol
	lowest[3] = math.MaxUint64 - protocol
	if e.native() {
		lowest[0] = uint64(e.rank)
	} else {
		lowest[1] = uint64(e.rank)
	}
	call := comm.AllReduceCall(out.addr(0), out.addr(0), len(lowest), dtype.U64, comm.Min)
	if err := e.SetUp(ctx, call); err != nil {
		return err
	}
	with := lowest[0]
	without := lowest[1]
	oldest := lowest[2]
	newest := math.MaxUint64 - lowest[3]
	out.free()
	if oldest != newest {
		return fmt.Errorf("%w: ranks speak versions %d to %d of this library's messages, this one %d: use one version",
			comm.ErrMismatch, oldest, newest, protocol)
	}
	if max(with, without) < uint64(e.size) {
		return fmt.Errorf("%w: rank %d has native collectives and rank %d has not; set %s to the same on all ranks",
			comm.ErrMismatch, with, without, env.MPICollectives)
	}
	return nil
}

// nameRun has the flight records of all ranks name one run, so that those of earlier runs are left out, where the
// launcher does not name it, as Hydra. Rank 0 makes the name. It is collective.
func (e *endpoint) nameRun(ctx context.Context) error {
	out := newCells() // MPI's after an error
	name := hostmem.Slice[byte](out.addr(0), 2*cellSize)
	if e.rank == 0 {
		_, _ = rand.Read(name) // never fails
	}
	if e.size > 1 {
		if err := e.SetUp(ctx, comm.BroadcastCall(out.addr(0), len(name), dtype.U8, 0)); err != nil {
			return err
		}
	}
	dump.Agree(hex.EncodeToString(name))
	out.free()
	return nil
}

// initialize initializes MPI, with the highest thread level that the library has.
func (s *state) initialize() error {
	lib := s.lib
	out := newCells()
	defer out.free()
	if err := lib.must(lib.Finalized, out.addr(0)); err != nil {
		return err
	}
	if out.int32(0) != 0 {
		return fmt.Errorf("%w: the program has finalized MPI", comm.ErrClosed)
	}
	if err := lib.must(lib.Initialized, out.addr(0)); err != nil {
		return err
	}
	if out.int32(0) != 0 {
		if err := lib.must(lib.QueryThread, out.addr(1)); err != nil {
			return err
		}
	} else {
		if err := lib.must(lib.InitThread, 0, 0, uintptr(lib.abi.threadMultiple), out.addr(1)); err != nil {
			return err
		}
		s.ours = true
	}
	switch level := out.int32(1); {
	case level >= lib.abi.threadMultiple:
		s.threads = "MPI_THREAD_MULTIPLE"
	case level >= lib.abi.threadSerialized:
		s.threads = "MPI_THREAD_SERIALIZED"
		lib.turn = newTurn()
	default:
		return fmt.Errorf("%w: %s provides thread level %d, less than MPI_THREAD_SERIALIZED (%d)",
			comm.ErrUnavailable, firstLine(lib.version), level, lib.abi.threadSerialized)
	}
	lib.cuda = lib.QueryCUDA.Found() && lib.QueryCUDA.Int() == 1
	var err error
	if lib.signed, err = lib.comparesSigned(out); err != nil {
		return err
	}
	return s.readTagLimit(out)
}

// leastTags is the highest tag that each library has.
const leastTags = 1<<15 - 1

// readTagLimit reads the highest tag. The attribute MPI_TAG_UB is the address of an int.
func (s *state) readTagLimit(out cells) error {
	lib := s.lib
	err := lib.must(
		lib.CommGetAttr,
		lib.handles.world,
		lib.abi.tagUB,
		out.addr(2),
		out.addr(3),
	)
	if err != nil {
		return err
	}
	s.maxTag = leastTags // the least that the standard allows
	if out.int32(3) != 0 {
		s.maxTag = uint64(hostmem.Slice[int32](out.uintptr(2), 1)[0])
	}
	return nil
}

// failure returns an error if a call has left MPI in an unknown state.
func (s *state) failure() error {
	if failed := s.failed.Load(); failed != nil {
		return *failed
	}
	return nil
}

// closeAll closes all communicators, which abort when ctx ends, and returns why one of them
// has aborted.
func (s *state) closeAll(ctx context.Context) (broken error) {
	if open := s.forgotten(); open > 0 {
		slog.Warn("communicators were never closed", "backend", name, "rank", s.world.e.rank, "communicators", open)
	}
	endpoints := append(slices.Clip(s.progress.all()), s.world.e)
	for _, c := range append(s.world.SubCommunicators(), s.world) {
		defer context.AfterFunc(ctx, func() { c.Abort(comm.ContextError(ctx)) })()
	}
	_ = comm.CloseAll(s.world, nil)
	for _, e := range endpoints {
		broken = cmp.Or(broken, e.Life.Cause())
	}
	return broken
}

// finalize closes everything.
func (s *state) finalize(ctx context.Context) error {
	broken := s.closeAll(ctx)
	broken = cmp.Or(s.failure(), broken)
	if broken == nil {
		broken = s.await(ctx, func() (string, error) {
			return s.progress.missing(ctx), nil
		})
	}
	if !s.progress.close(ctx) && broken == nil {
		broken = fmt.Errorf("MPI_Comm_free has not returned: %w", comm.ContextError(ctx))
	}
	broken = cmp.Or(s.failure(), broken)
	if !s.ours {
		return broken
	}
	if broken != nil {
		return fmt.Errorf("%w: MPI_Finalize left out: %w", comm.ErrBroken, broken)
	}
	if err := s.assemble(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	var err error
	if !s.thread.do(ctx, func() {
		if err = s.fallSilent(ctx); err == nil {
			err = s.lib.must(s.lib.Finalize)
		}
	}) {
		return fmt.Errorf("MPI_Finalize has not returned: %w", comm.ContextError(ctx))
	}
	close(s.thread.calls)
	return err
}

// fallSilent waits until no rank polls for the last barrier, if ranks are connected by UCX.
//
// MPI_Finalize of MPICH before 4.2 over UCX flushes its connections, which takes an answer
// from the peer, and then waits in a barrier of the process manager, where it answers
// nothing. If a peer answers the first rank's flush before its own MPI_Finalize, because it
// still polls, nobody answers the peer's flush. If it does not poll any more, it flushes
// before it answers, on the same connection. So the ranks meet in the same barrier once
// before, which neither needs nor makes progress in UCX.
func (s *state) fallSilent(ctx context.Context) error {
	if e := s.world.e; e.size == 1 || e.unshared == nil || !strings.Contains(s.lib.version, "ch4:ucx") {
		return nil
	}
	fd, err := strconv.Atoi(os.Getenv("PMI_FD"))
	if _, slurm := os.LookupEnv("PMI_JOBID"); err != nil || slurm { // Slurm speaks PMI-2
		select {
		case <-time.After(silence):
		case <-ctx.Done():
		}
		return nil
	}
	s.manager = os.NewFile(uintptr(fd), "the process manager")
	if err := managerBarrier(s.manager); err != nil {
		return fmt.Errorf("%w: a barrier of the process manager: %w", comm.ErrPeerFailed, err)
	}
	return nil
}

// managerBarrier waits for all processes of the job, over the connection to their PMI-1 manager.
func managerBarrier(manager io.ReadWriter) error {
	if _, err := io.WriteString(manager, "cmd=barrier_in\n"); err != nil {
		return err
	}
	answer, err := bufio.NewReader(manager).ReadString('\n')
	if err != nil {
		return err
	}
	if !strings.HasPrefix(answer, "cmd=barrier_out") {
		return fmt.Errorf("the answer is %q", answer)
	}
	return nil
}

// assemble waits until all ranks are in finalize, as they may have closed their communicators
// long before.
func (s *state) assemble(ctx context.Context) error {
	out := newCells() // a request, a flag and a status; MPI's after an error
	if err := s.lib.reach(s.lib.Ibarrier, s.lib.handles.world, out.addr(0)); err != nil {
		return err
	}
	err := s.await(ctx, func() (string, error) {
		err := s.lib.reach(
			s.lib.Testall,
			1,
			out.addr(0),
			out.addr(1),
			out.addr(2),
		)
		if err != nil || out.int32(1) != 0 {
			return "", err
		}
		return "not all ranks have called it", nil
	})
	if err == nil {
		out.free()
	}
	return err
}

// await waits until look returns nothing that is missing, or an error. Its error when ctx
// ends, and the log when the patience is over, say what is missing.
func (s *state) await(ctx context.Context, look func() (missing string, err error)) error {
	began := time.Now()
	told := false
	for pace := (poll.Pace{}); ; pace.Next() {
		missing, err := look()
		switch {
		case err != nil || missing == "":
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("%s: %w", missing, comm.ContextError(ctx))
		case !told && time.Since(began) > s.patience:
			slog.Warn("mpi: Finalize waits for other ranks: " + missing)
			told = true
		}
	}
}
