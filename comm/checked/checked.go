// Package checked finds the rank that calls a different collective: wrap the communicator of each rank with [New],
// and a mismatch that would hang is an error on all ranks that names each rank's call.
package checked

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	goruntime "runtime"
	"slices"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/runtime"
)

// Communicator checks, before each collective of the communicator that it wraps, that all ranks make the same call:
// the same method, count, type, reduction, root and lengths. If they do not, every rank gets an error wrapping
// [comm.ErrMismatch] that names each rank's call, and the communicator is aborted. The call does not reach the
// wrapped communicator, which could hang, or read memory that is not there. Communicator is a tool for debugging and
// for tests: each collective first exchanges a few words and waits for them.
//
// The words travel over their own communicator, so that they do not mix with operations in flight. If a rank does not
// arrive within the timeout, the error is [comm.ErrTimeout].
//
// Messages are not compared. They go to the wrapped communicator at once, which may detect that their ends differ:
// package nccl does not.
//
// The collectives of a Group are compared, one after the other, before the group
// starts. A program in which a rank comes to them only after a message of the same
// group has arrived times out.
type Communicator struct {
	*backend.Base
	comm.Wrapped
}

// checker is the state of a Communicator, to which it does not refer: the garbage collector finds one that nobody
// closes.
type checker struct {
	comm.Communicator                   // the checked one
	side              comm.Communicator // over which encoded calls are exchanged
	rt                runtime.Runtime   // of sub-communicators
	device            runtime.Runtime   // where encoded calls lie: rt, or a fork of it
	check             backend.Check     // of arguments
	life              backend.Life      // sound, aborted or closed
	timeout           time.Duration     // for the other ranks' calls
	leakAlarm         goruntime.Cleanup // reports a Communicator that was lost without Close, which stops it

	// mu keeps the comparison and the call it is about together.
	mu          sync.Mutex
	collectives int // compared so far; guarded by mu

	memory sync.Mutex // held from beginning to end of an exchange
	send   uintptr    // 0 when it was freed; guarded by memory
	recv   uintptr    // guarded by memory
}

// checkPatience is how long a Communicator waits unless told, and at least when it is made: longer
// than a healthy job's ranks are apart at a call, or take to make a communicator of NCCL.
const checkPatience = 30 * time.Second

// New returns a Communicator around c, which all ranks of c make together. timeout is how long a rank waits for the
// others to come to the same call, 0 for 30 s. New itself waits for them for that time, at least 30 s, and no longer
// than ctx. Memory for the comparison comes from rt, and must be memory that c can reach. If rt is a
// [runtime.StreamForker], it comes from a fork of rt, so that no call waits for the device's computation. Closing a
// Communicator closes c.
func New(ctx context.Context, c comm.Communicator, rt runtime.Runtime, timeout time.Duration) (*Communicator, error) {
	k := &checker{
		Communicator: c,
		rt:           rt,
		device:       rt,
		check: backend.Check{
			Backend:   "checked",
			Rank:      c.Rank(),
			WorldSize: c.WorldSize(),
		},
		timeout: cmp.Or(timeout, checkPatience),
	}
	ctx, cancel := context.WithTimeout(ctx, max(k.timeout, checkPatience))
	defer cancel()
	var err error
	if k.side, err = c.Split(ctx, 0, c.Rank()); err != nil {
		return nil, err
	}
	if forker, ok := rt.(runtime.StreamForker); ok {
		if k.device, err = forker.ForkStream(); err != nil {
			return nil, errors.Join(err, k.side.Close())
		}
	}
	if err := k.allocate(); err != nil {
		return nil, errors.Join(err, k.release())
	}
	checked := &Communicator{backend.New(&k.check, &k.life, decorator{k}), comm.Wrap(c)}
	mark := leak.NewMark(k.check.Backend, fmt.Sprintf("rank %d of %d", c.Rank(), c.WorldSize()))
	k.leakAlarm = goruntime.AddCleanup(checked, (*leak.Mark).Report, mark)
	return checked, nil
}

// allocate makes the memory for an exchange.
func (k *checker) allocate() (err error) {
	bytes := 8 * k.words()
	k.send, err = k.device.Allocate(bytes)
	if err != nil {
		return err
	}
	k.recv, err = k.device.Allocate(bytes * k.WorldSize())
	return err
}

// release frees what New has made.
func (k *checker) release() error {
	err := k.side.Close()
	k.memory.Lock()
	defer k.memory.Unlock()
	err = errors.Join(err, k.device.Deallocate(k.send), k.device.Deallocate(k.recv))
	k.send = 0
	k.recv = 0
	if k.device != k.rt {
		err = errors.Join(err, k.device.Close())
	}
	return err
}

// bound returns a context for an exchange: one that ends with the timeout, and with
// the communicator.
func (k *checker) bound(ctx context.Context) (context.Context, func()) {
	ctx, stop := k.life.Until(ctx)
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	return ctx, func() {
		cancel()
		stop()
	}
}

// awaitCopy waits until bytes that were copied to memory for an exchange are there.
func (k *checker) awaitCopy(ctx context.Context) error {
	err := k.device.Synchronize(ctx)
	if down := k.life.Err(); err != nil && down != nil {
		return down
	}
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w, waiting for the device", comm.ContextError(ctx))
	}
	return err
}

// callWords is the length of an encoded call without its counts.
const callWords = 5

// words is the length of an encoded call, the same for all.
func (k *checker) words() int {
	return callWords + 2*k.WorldSize()
}

// encode returns what all ranks must know of a call: everything but its addresses.
func (k *checker) encode(c *comm.Call) []byte {
	b := make([]byte, 0, 8*k.words())
	for _, x := range []int{int(c.Op), int(c.DType), int(c.Reduce), c.Peer, c.Count} {
		b = binary.LittleEndian.AppendUint64(b, uint64(x))
	}
	for _, x := range slices.Concat(c.RecvCounts, c.SendCounts) {
		b = binary.LittleEndian.AppendUint64(b, uint64(x))
	}
	return b[:cap(b)]
}

func (k *checker) decode(b []byte) comm.Call {
	word := func(i int) int {
		return int(binary.LittleEndian.Uint64(b[8*i:]))
	}
	c := comm.Call{
		Op:     comm.Op(word(0)),
		DType:  dtype.DType(word(1)),
		Reduce: comm.ReduceOp(word(2)),
		Peer:   word(3),
		Count:  word(4),
	}
	if c.Op == comm.OpAllGatherV || c.Op == comm.OpAllToAllV {
		size := k.WorldSize()
		for r := range size {
			c.RecvCounts = append(c.RecvCounts, word(callWords+r))
			c.SendCounts = append(c.SendCounts, word(callWords+size+r))
		}
	}
	return c
}

// decorator is the [backend.Backend] of a Communicator.
type decorator struct{ k *checker }

// Submit implements [backend.Backend].
func (d decorator) Submit(c comm.Call) error {
	return d.k.submit([]comm.Call{c}, c.Make)
}

// SubmitTogether implements [backend.Backend].
func (d decorator) SubmitTogether(calls []comm.Call) error {
	return d.k.submit(calls, func(c comm.Communicator) error { return c.Group(calls...) })
}

// submit compares the collectives among calls, and makes the calls.
func (k *checker) submit(calls []comm.Call, send func(comm.Communicator) error) error {
	if !slices.ContainsFunc(calls, func(c comm.Call) bool { return !c.Op.Message() }) {
		// A collective that holds mu may wait for a rank that waits for these messages.
		if err := k.life.Err(); err != nil {
			return err
		}
		return send(k.Communicator)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range calls {
		if err := k.agree(context.Background(), &calls[i]); err != nil {
			return err
		}
	}
	return send(k.Communicator)
}

// agree compares a collective with what the other ranks called. The caller holds mu.
func (k *checker) agree(ctx context.Context, c *comm.Call) error {
	if err := k.life.Err(); err != nil || c.Op.Message() {
		return err
	}
	ctx, cancel := k.bound(ctx)
	defer cancel()
	err := k.compare(ctx, c)
	if err == nil {
		return nil
	}
	if down := k.life.Err(); down != nil {
		return down // it ended the exchange
	}
	return err
}

// compare exchanges calls.
func (k *checker) compare(ctx context.Context, c *comm.Call) error {
	k.collectives++
	all, err := k.exchange(ctx, k.encode(c))
	var found *disagreement // by another rank, which has ended the exchange
	if errors.As(err, &found) {
		return found
	}
	if err != nil {
		return fmt.Errorf("waiting for the other ranks to call %v: %w", c, err)
	}
	calls := make([]comm.Call, len(all))
	for r, b := range all {
		calls[r] = k.decode(b)
	}
	if err := backend.Agree(calls); err != nil {
		return &disagreement{fmt.Errorf("collective #%d: %w", k.collectives, err)}
	}
	return nil
}

// disagreement is the error of all ranks that compare the same calls.
type disagreement struct{ error }

// Unwrap returns it.
func (d *disagreement) Unwrap() error { return d.error }

// exchange gathers equally long bytes from all ranks.
func (k *checker) exchange(ctx context.Context, call []byte) ([][]byte, error) {
	k.memory.Lock()
	defer k.memory.Unlock()
	if k.send == 0 {
		return nil, comm.ErrClosed
	}
	if err := k.device.CopyIn(k.send, call); err != nil {
		return nil, err
	}
	if err := k.awaitCopy(ctx); err != nil {
		return nil, err
	}
	if err := k.side.AllGather(k.send, k.recv, len(call), dtype.U8); err != nil {
		return nil, err
	}
	if err := k.side.Sync(ctx); err != nil {
		return nil, backend.Cause(err) // what aborted that one aborts this one
	}
	flat := make([]byte, len(call)*k.WorldSize())
	if err := k.device.CopyOut(flat, k.recv); err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(flat, len(call))), nil
}

// Wait implements [backend.Backend]. Communicators of Split are checked, too.
func (d decorator) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	k := d.k
	switch {
	case k.life.Closed(): // which drains the other communicator as well
		return nil, nil
	case w.Op == comm.OpSync:
		return nil, k.Communicator.Sync(ctx)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.agree(ctx, &comm.Call{Op: w.Op}); err != nil {
		return nil, err
	}
	c, err := w.Make(ctx, k.Communicator)
	if err != nil || c == nil {
		return nil, err
	}
	child, err := New(ctx, c, k.rt, k.timeout)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return child, nil
}

// Abort implements [backend.Backend]. The peers learn the cause from both communicators.
func (d decorator) Abort(_ context.Context, cause error) {
	var aborts sync.WaitGroup
	for _, c := range []comm.Communicator{d.k.side, d.k.Communicator} {
		aborts.Go(func() { c.Abort(cause) })
	}
	aborts.Wait()
}

// Release implements [backend.Backend]. It closes the communicator that is checked.
func (d decorator) Release(context.Context) error {
	d.k.leakAlarm.Stop()
	return errors.Join(d.k.Communicator.Close(), d.k.release())
}
