// Package record has a flight recorder: a communicator that remembers the last calls made
// to another one, for programs that hang or crash.
package record

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"
	"weak"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/caller"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/inquiry"
)

// Recorder is a communicator that remembers the last calls made to another one, for
// programs that hang: the call, its source line, its time, whether it is known to be done,
// and the error. Its dump ([Recorder.WriteJSON]) has the form of PyTorch's flight recorder.
// `tutti diagnose` compares the dumps of all ranks.
//
// A call is known to be done when a later Sync or a Barrier has returned, or earlier if the communicator reports its
// progress ([backend.Progresser]). In that case, its time is the time of the next progress check, at one of the next
// eight calls or for the dump.
//
// A dump is written to a file when a wait fails (Sync, Barrier, Split), when the rank
// aborts, on a signal ([Recorder.NotifyOn], [Recorder.SaveBefore]), and by
// [Recorder.Save]. A rank that aborts then waits up to two seconds for the dumps of other
// processes in the same directory: a launcher may end them as soon as this one exits.
//
// Sub-communicators are recorded under their own names, and are in their parent's dump
// until they are closed.
//
// A Recorder can be used from any goroutine, costs 0.6 µs a call, and
// allocates nothing.
type Recorder struct {
	comm.Methods
	comm.Wrapped
	*flight
	name string // of the group, the same on all its ranks

	mu    sync.Mutex // guards the fields below
	ring  []record   // the last calls
	calls uint64     // recorded so far; call i is in ring[i % len(ring)]
	done  uint64     // the calls before this one have been seen by a wait
	// progress is what the communicator says of the calls in the ring.
	progress progress
	number   numbers
	last     numbers // of the last call that is done
	splits   uint64  // that have succeeded; names of sub-communicators have their numbers
	waits    waits
	cause    error // the first failure, for which the dump was written
	// failure is what a dump says of it.
	failure *dump.Failure
}

// flight is what a Recorder shares with those of its sub-communicators.
type flight struct {
	caller.Origin // of calls that a worker makes

	dir    string    // of the dump, "" for none
	member string    // name of an elastic member, "" for another rank
	alone  bool      // see Member
	path   string    // of the dump, "" for none
	run    string    // name of the communicator's world; "" for the name of the process
	begun  time.Time // when the recording began
	spans  *spans    // of all communicators

	top *Recorder // the first; never changed

	mu    sync.Mutex               // guards parts and stops
	parts []weak.Pointer[Recorder] // of open sub-communicators, which the program may forget; guarded by mu
	stops []func()                 // of NotifyOn and SaveBefore; guarded by mu

	writes sync.Mutex // held while the dump is written
}

// numbers count collectives and messages; the first is 1.
type numbers struct{ collective, message uint64 }

// record is one call.
type record struct {
	op        comm.Op             // the operation
	dt        dtype.DType         // type of its elements
	reduce    comm.ReduceOp       // operation of a reduction
	left      bool                // the call failed before the rank took part in it
	shared    bool                // a call of another goroutine may have been submitted before it, or after it
	tag       uint32              // of a message
	peer      int                 // root, destination or source
	count     int                 // elements; of a V-collective those that it sends
	received  int                 // elements that a V-collective receives
	number    numbers             // among collectives or messages
	submitted time.Time           // when the call was made
	done      time.Time           // zero if it is not known
	err       error               // what the call returned; nil for success
	from      [stackDepth]uintptr // return addresses, innermost first; the first depth are set
	depth     int                 // how many return addresses from has
}

// call is the call without addresses and lists.
func (e *record) call() comm.Call {
	return comm.Call{
		Op:     e.op,
		DType:  e.dt,
		Reduce: e.reduce,
		Tag:    e.tag,
		Peer:   e.peer,
		Count:  e.count,
	}
}

// wait is a Sync.
type wait struct {
	record
	number  uint64 // of this one
	pending bool   // it has not returned
}

// waits are the Syncs in flight, one for each goroutine, and the one that a dump shows of
// those that have ended.
type waits struct {
	begun uint64  // number begun
	all   []*wait // reused
	ended *wait   // the one that a dump shows; nil before the first
}

// begin adds a wait. The caller holds the Recorder's lock, here and below.
func (s *waits) begin() *wait {
	s.begun++
	i := slices.IndexFunc(s.all, func(w *wait) bool { return !w.pending && w != s.ended })
	if i < 0 {
		i = len(s.all)
		s.all = append(s.all, new(wait))
	}
	w := s.all[i]
	w.number = s.begun
	w.pending = true
	return w
}

// end notes how a wait ended. An error that follows from an earlier failure does not
// replace that.
func (s *waits) end(w *wait, done time.Time, err error) {
	w.pending = false
	w.done = done
	w.err = err
	if s.ended != nil && s.ended.err != nil && errors.Is(err, comm.ErrBroken) {
		return
	}
	s.ended = w
}

// shown returns the wait that a dump shows: the one that failed, or else the one that
// takes longest, or else the one that ended last. It is nil if there was none.
func (s *waits) shown() *wait {
	shown := s.ended
	if shown != nil && shown.err != nil {
		return shown
	}
	for _, w := range s.all {
		if w.pending && (shown == nil || !shown.pending || w.number < shown.number) {
			shown = w
		}
	}
	return shown
}

// New returns a Recorder of the last n calls (at least one) around c,
// which writes its dump to the file tutti-record-RANK.json in dir; "" for none.
// Package comm/instrument makes one if the environment asks for it.
func New(c comm.Communicator, n int, dir string) *Recorder {
	f := &flight{dir: dir, begun: time.Now()}
	if world, ok := comm.As[interface{ RunName() string }](c); ok {
		f.run = world.RunName()
	}
	if dir != "" {
		f.path = dump.Path(dir, c.Rank())
		dumpsOfProcess.Store(f.path, true)
		inquiry.Reserve(f.path)
	}
	n = max(n, 1)
	f.spans = newSpans(n)
	f.top = newRecorder(c, n, "0", f)
	return f.top
}

// Member makes the rank an elastic member with a name, "" for none. The dump has the name, as another epoch gives the
// member another rank. A member that aborts does not wait for the dumps of others, because its abort ends no other
// process. Call Member before any other method of r.
func (r *Recorder) Member(name string) {
	r.member = name
	r.alone = true
	dumpsOfProcess.Delete(r.path)
}

func newRecorder(c comm.Communicator, n int, name string, f *flight) *Recorder {
	r := &Recorder{
		Wrapped: comm.Wrap(c),
		flight:  f,
		name:    name,
		ring:    make([]record, n),
	}
	do := func(c comm.Call) error { // no method, so that a call is not copied once more
		id := r.enter(&c)
		err := c.Make(r.Communicator)
		r.submitted(c.Op)
		if err != nil {
			r.failed(id, c.Op.Message(), false, err)
		}
		return err
	}
	r.Methods = comm.Methods{Do: do, Together: r.group}
	r.progress = newProgress(c)
	return r
}

// enter records a call that is about to be made.
func (r *Recorder) enter(c *comm.Call) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	id := r.add(c)
	r.progress.submitting[kind(c.Op)]++
	return id
}

// submitted ends what enter began, whether the call was made or failed.
func (r *Recorder) submitted(op comm.Op) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress.submitting[kind(op)]--
}

// add is enter with the lock held.
func (r *Recorder) add(c *comm.Call) uint64 {
	id := r.calls
	r.calls++
	var done [2]uint64
	look := r.progress.source != nil && id%lookEvery == 0
	if look {
		done = r.progress.done()
	}
	e := &r.ring[id%uint64(len(r.ring))]
	e.fill(c, r.Frames())
	if c.Op.Message() {
		r.number.message++
	} else {
		r.number.collective++
	}
	e.number = r.number
	if r.progress.submitting[kind(c.Op)] > 0 {
		r.overlap(id)
	}
	if look {
		r.markDone(done, e.submitted)
	}
	return id
}

// stackDepth is how many frames of a caller's stack are kept.
const stackDepth = 32

// fill sets the record of a call that is made now. If a worker makes it, asker are the return addresses of who has
// asked for it.
func (e *record) fill(c *comm.Call, asker []uintptr) {
	e.depth = runtime.Callers(2, e.from[:])
	e.depth += copy(e.from[e.depth:], asker)
	e.op = c.Op
	e.dt = c.DType
	e.reduce = c.Reduce
	e.tag = c.Tag
	e.peer = c.Peer
	e.count = c.Count
	e.received = 0
	if c.Op == comm.OpAllGatherV || c.Op == comm.OpAllToAllV {
		for _, n := range c.SendCounts {
			e.count += n
		}
		for _, n := range c.RecvCounts {
			e.received += n
		}
	}
	e.submitted = time.Now()
	e.done = time.Time{}
	e.err = nil
	e.left = false
	e.shared = false
}

// failed records the error of call id. A call that the rank took no part in gives its
// number to the next one. waited means that it is a wait, and the communicator had not
// aborted before it.
func (r *Recorder) failed(id uint64, message, waited bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := backend.Refused(err) || !waited && errors.Is(err, comm.ErrBroken)
	if left {
		r.number.drop(message)
		for next := id + 1; next < r.calls; next++ { // of other goroutines
			if e := r.lookup(next); e != nil {
				e.number.drop(message)
			}
		}
	}
	if e := r.lookup(id); e != nil {
		e.err = err
		e.left = left
	}
}

// drop takes back the number of a call that was not made.
func (n *numbers) drop(message bool) {
	if message {
		n.message--
	} else {
		n.collective--
	}
}

// lookup returns call id, nil if it is forgotten.
func (r *Recorder) lookup(id uint64) *record {
	if r.calls-id > uint64(len(r.ring)) {
		return nil
	}
	return &r.ring[id%uint64(len(r.ring))]
}

func (r *Recorder) group(calls []comm.Call) error {
	r.mu.Lock()
	first := r.calls
	for i := range calls {
		r.add(&calls[i])
	}
	for i := range calls {
		r.progress.submitting[kind(calls[i].Op)]++
	}
	r.mu.Unlock()
	err := r.Communicator.Group(calls...)
	for i := range calls {
		r.submitted(calls[i].Op)
	}
	if err != nil {
		for i := range calls {
			r.failed(first+uint64(i), calls[i].Op.Message(), false, err)
		}
	}
	return err
}

// Sync implements [comm.Communicator].
func (r *Recorder) Sync(ctx context.Context) error {
	r.mu.Lock()
	before := r.calls
	w := r.waits.begin()
	w.fill(&comm.Call{Op: comm.OpSync}, r.Frames())
	r.mu.Unlock()

	err := r.Communicator.Sync(ctx)
	r.mu.Lock()
	var done time.Time
	if err == nil {
		done = r.finish(before)
	}
	started := w.submitted
	r.waits.end(w, done, err)
	r.mu.Unlock()
	r.spans.add(span{
		name:    comm.OpSync.String(),
		wait:    true,
		started: started,
		ended:   time.Now(),
	})
	return r.waited(err)
}

// finish marks the calls before that one as done. The lock is held.
func (r *Recorder) finish(before uint64) time.Time {
	now := time.Now()
	if oldest := r.calls - min(r.calls, uint64(len(r.ring))); r.done < oldest {
		r.done = oldest
	}
	for ; r.done < before; r.done++ {
		if e := r.lookup(r.done); e.err == nil {
			if e.done.IsZero() {
				e.done = now
			}
			r.last = e.number
		}
	}
	return now
}

// waited writes the dump when a wait has failed, and returns err.
func (r *Recorder) waited(err error) error {
	if err != nil && !errors.Is(err, comm.ErrClosed) {
		r.saveOnce(err, true)
	}
	return err
}

// saveOnce writes the dump for a failure, of a wait or of the rank itself, but not again
// for failures that follow from it.
func (r *Recorder) saveOnce(err error, wait bool) {
	r.mu.Lock()
	follows := r.cause != nil && (errors.Is(err, comm.ErrBroken) || errors.Is(err, r.cause))
	if !follows {
		r.cause = err
	}
	if r.failure == nil {
		r.failure = &dump.Failure{Time: time.Now().UnixNano(), Error: err.Error(), Wait: wait,
			Peer: errors.Is(err, comm.ErrPeerFailed) || errors.Is(err, comm.ErrBroken)}
	}
	r.mu.Unlock()
	if !follows {
		r.Save(err.Error())
	}
}

// sound reports whether something can be submitted.
func (r *Recorder) sound() bool {
	return r.Communicator.Err() == nil
}

// Barrier implements [comm.Communicator].
func (r *Recorder) Barrier(ctx context.Context) error {
	sound := r.sound()
	id := r.enter(&comm.Call{Op: comm.OpBarrier})
	err := r.Communicator.Barrier(ctx)
	r.submitted(comm.OpBarrier)
	if err != nil {
		r.failed(id, false, sound, err)
		return r.waited(err)
	}
	r.mu.Lock()
	r.finish(id + 1)
	r.mu.Unlock()
	return nil
}

// Split implements [comm.Communicator]. The sub-communicator is recorded, too.
func (r *Recorder) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	sound := r.sound()
	id := r.enter(&comm.Call{Op: comm.OpSplit})
	c, err := r.Communicator.Split(ctx, color, key)
	r.submitted(comm.OpSplit)
	if err != nil {
		r.failed(id, false, sound, err)
		return nil, r.waited(err)
	}
	r.mu.Lock()
	r.splits++
	number := r.splits
	if e := r.lookup(id); e != nil {
		e.done = time.Now()
	}
	r.mu.Unlock()
	if c == nil {
		return nil, nil
	}
	// The ranks of a communicator split it in one order, so this is its name on all of them, and no other's. Records of
	// other goroutines do not count.
	name := fmt.Sprintf("%s/%d.%d", r.name, number, color)
	child := newRecorder(c, len(r.ring), name, r.flight)
	r.flight.mu.Lock()
	defer r.flight.mu.Unlock()
	lost := func(p weak.Pointer[Recorder]) bool { return p.Value() == nil }
	r.parts = append(slices.DeleteFunc(r.parts, lost), weak.Make(child))
	return child, nil
}

// open returns the Recorders that a dump shows.
func (f *flight) open() []*Recorder {
	f.mu.Lock()
	defer f.mu.Unlock()
	open := []*Recorder{f.top}
	for _, part := range f.parts {
		if r := part.Value(); r != nil {
			open = append(open, r)
		}
	}
	return open
}

// Close implements [comm.Communicator].
func (r *Recorder) Close() error {
	r.forget()
	return r.Communicator.Close()
}

// Abort implements [comm.Communicator].
func (r *Recorder) Abort(cause error) {
	r.saveOnce(cmp.Or(cause, comm.ErrCanceled), false)
	r.Communicator.Abort(cause)
	if r.name == "0" && r.path != "" && !r.alone {
		r.awaitPeers()
	}
}

// dumpsOfProcess has the paths of all dumps of this process.
var dumpsOfProcess sync.Map

// awaitPeers waits until the ranks of other processes have written their dumps to the
// same directory, in a bounded time.
func (r *Recorder) awaitPeers() {
	ctx, cancel := context.WithTimeout(context.Background(), peerPatience)
	defer cancel()
	for rank := range r.WorldSize() {
		path := dump.Path(r.dir, rank)
		if _, local := dumpsOfProcess.Load(path); local {
			continue
		}
		for !r.written(path) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(peerEvery):
			}
		}
	}
}

// written reports whether a dump is of this job. File systems round times to a second.
func (r *Recorder) written(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.ModTime().Before(r.begun.Truncate(time.Second))
}

// forget removes a sub-communicator from the dump. For the first communicator, it ends
// the handling of signals, after a dump that is being written.
func (r *Recorder) forget() {
	f := r.flight
	f.mu.Lock()
	if r == f.top {
		stops := f.stops
		f.mu.Unlock()
		for _, stop := range stops {
			stop()
		}
		return // its calls stay in the dump of its sub-communicators
	}
	defer f.mu.Unlock()
	if i := slices.Index(f.parts, weak.Make(r)); i >= 0 {
		f.parts = slices.Delete(f.parts, i, i+1)
	}
}

// Save writes the dump to the file, if there is one, and logs its path and the reason.
func (r *Recorder) Save(reason string) {
	if r.path == "" {
		return
	}
	r.writes.Lock()
	defer r.writes.Unlock()
	if err := r.writeFile(); err != nil {
		slog.Error("record: the flight record cannot be written", "path", r.path, "error", err)
		return
	}
	slog.Warn("record: wrote the flight record; see it with tutti diagnose", "path", r.path, "why", reason)
}

// writeFile replaces the file whole.
func (r *Recorder) writeFile() error {
	if err := os.MkdirAll(filepath.Dir(r.path), 0o777); err != nil {
		return err
	}
	return atomicfile.Write(r.path, r.WriteJSON)
}
