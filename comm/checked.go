package comm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// Checked is a communicator that finds out before each collective of another
// one whether all ranks have called the same: the same method, count, type,
// reduction, root and lengths. If they have not, every rank gets an error
// wrapping [ErrMismatch] that says who called what, and the communicator is
// broken; nothing of the call has reached the other communicator, which could
// have hung, or read memory that is not there. It is a tool for debugging and
// for tests: each collective first exchanges a few words and waits for them.
//
// The words travel over a communicator of their own, so that they do not meet
// what is under way. A rank that does not come at all within the timeout is
// [ErrTimeout].
//
// Send and Recv pass unchecked: which of them belong together is known only
// when they have met, and to wait for that would make programs hang that are
// right. The contract has the receiver find a message of the wrong length or
// type. For the same reason the collectives of a Group are compared, one after
// the other, before the group starts; a program in which a rank comes to them only
// after a message of the same group has arrived times out.
type Checked struct {
	Calls
	Wrapped
	side    Communicator // for the descriptors
	rt      runtime.Runtime
	check   Check
	timeout time.Duration

	// mu keeps the comparison and the call it is about together.
	mu       sync.Mutex
	sequence uint64

	memory sync.Mutex // guards what follows, from beginning to end of an exchange
	send   uintptr    // 0 when it was given back
	recv   uintptr

	stateMu sync.Mutex // guards what follows
	closed  bool
	broken  error // what broke the communicator
}

// CheckedOption changes how a [Checked] works.
type CheckedOption func(*Checked)

// CheckTimeout sets how long a rank waits for the others to come to the same
// call. It is 30 seconds unless set.
func CheckTimeout(d time.Duration) CheckedOption { return func(k *Checked) { k.timeout = d } }

// NewChecked returns a Checked around c. All ranks of c call it together. Memory
// for the descriptors comes from rt, which must be memory that c can reach.
// Closing a Checked closes c.
func NewChecked(c Communicator, rt runtime.Runtime, opts ...CheckedOption) (*Checked, error) {
	k := &Checked{
		Wrapped: Wrap(c),
		rt:      rt,
		check:   Check{Backend: "checked", Rank: c.Rank(), WorldSize: c.WorldSize()},
		timeout: 30 * time.Second,
	}
	k.Calls = NewCalls(&k.check, k)
	for _, o := range opts {
		o(k)
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.timeout)
	defer cancel()
	side, err := c.Split(ctx, 0, c.Rank())
	if err != nil {
		return nil, err
	}
	k.side = side
	// The longest that is exchanged are the two lists of counts of AllToAllV.
	bytes := max(descriptorBytes, 2*8*k.WorldSize())
	if k.send, err = rt.Allocate(bytes); err == nil {
		k.recv, err = rt.Allocate(bytes * k.WorldSize())
	}
	if err != nil {
		return nil, errors.Join(err, k.release())
	}
	return k, nil
}

// release gives up what NewChecked has made.
func (k *Checked) release() error {
	err := k.side.Close() // ends an exchange that is under way
	k.memory.Lock()
	defer k.memory.Unlock()
	err = errors.Join(err, k.rt.Deallocate(k.send), k.rt.Deallocate(k.recv))
	k.send, k.recv = 0, 0
	return err
}

// descriptor is what all ranks must agree on: the call without its addresses.
type descriptor struct {
	sequence uint64 // the number of the collective on this rank
	op       Op
	count    int
	dt       dtype.DType
	reduce   ReduceOp
	root     int
	counts   uint64 // hash of the counts of AllGatherV
}

func describe(c *Call) descriptor {
	d := descriptor{op: c.Op, count: c.Count, dt: c.DType, reduce: c.Reduce, root: c.Peer}
	if c.Op == OpAllGatherV {
		d.counts = hashCounts(c.RecvCounts)
	}
	return d
}

// descriptorBytes is the size of an encoded descriptor.
const descriptorBytes = 7 * 8

func (d descriptor) encode() []byte {
	var b []byte
	for _, x := range []uint64{d.sequence, uint64(d.op), uint64(d.count), uint64(d.dt), uint64(d.reduce), uint64(d.root), d.counts} {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

func decodeDescriptor(b []byte) descriptor {
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return descriptor{
		sequence: word(0), op: Op(word(1)), count: int(word(2)), dt: dtype.DType(word(3)),
		reduce: ReduceOp(word(4)), root: int(word(5)), counts: word(6),
	}
}

func (d descriptor) String() string {
	text := Call{Op: d.op, Count: d.count, DType: d.dt, Reduce: d.reduce, Peer: d.root}.String()
	if d.op == OpAllGatherV {
		text += fmt.Sprintf(" with counts that hash to %#x", d.counts)
	}
	return text
}

// hashCounts is FNV-1a over 64-bit words.
func hashCounts(counts []int) uint64 {
	h := uint64(14695981039346656037)
	for _, n := range counts {
		h = (h ^ uint64(n)) * 1099511628211
	}
	return h
}

// Usable implements [Backend].
func (k *Checked) Usable() error {
	k.stateMu.Lock()
	defer k.stateMu.Unlock()
	switch {
	case k.closed:
		return ErrClosed
	case k.broken != nil:
		return fmt.Errorf("%w: %w", ErrBroken, k.broken)
	}
	return nil
}

// breakWith breaks the communicator; the first cause stays. The peers learn it
// when they next want to compare something.
func (k *Checked) breakWith(err error) {
	k.stateMu.Lock()
	first := k.broken == nil
	if first {
		k.broken = err
	}
	k.stateMu.Unlock()
	if first {
		_ = k.side.Close()
	}
}

// observe passes on an error of the communicator that is checked. Whatever
// leaves the ranks out of step there does so here.
func (k *Checked) observe(err error) error {
	for _, sentinel := range []error{ErrTimeout, ErrCanceled, ErrPeerFailed, ErrMismatch, ErrBroken} {
		if errors.Is(err, sentinel) {
			k.breakWith(err)
			break
		}
	}
	return err
}

// Submit implements [Backend].
func (k *Checked) Submit(c Call) error {
	if c.Op.Message() { // the collective that holds mu may wait for it
		if err := k.Usable(); err != nil {
			return err
		}
		return k.observe(c.Make(k.Communicator))
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.agree(context.Background(), &c); err != nil {
		return err
	}
	return k.observe(c.Make(k.Communicator))
}

// SubmitTogether implements [Backend].
func (k *Checked) SubmitTogether(calls []Call) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range calls {
		if err := k.agree(context.Background(), &calls[i]); err != nil {
			return err
		}
	}
	return k.observe(k.Communicator.Group(calls...))
}

// agree compares a collective with what the other ranks called. An error breaks
// the communicator. The caller holds mu.
func (k *Checked) agree(ctx context.Context, c *Call) error {
	if err := k.Usable(); err != nil || c.Op.Message() {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	err := k.compare(ctx, describe(c))
	if err == nil && c.Op == OpAllToAllV {
		err = k.compareLengths(ctx, c.SendCounts, c.RecvCounts)
	}
	if err != nil {
		k.breakWith(err)
	}
	return err
}

// compare exchanges descriptors.
func (k *Checked) compare(ctx context.Context, mine descriptor) error {
	k.sequence++
	mine.sequence = k.sequence
	all, err := k.exchange(ctx, mine.encode())
	if err != nil {
		return fmt.Errorf("waiting for the other ranks to call %v: %w", mine, err)
	}
	descriptors := make([]descriptor, len(all))
	for r, b := range all {
		descriptors[r] = decodeDescriptor(b)
	}
	if !slices.ContainsFunc(descriptors, func(d descriptor) bool { return d != mine }) {
		return nil
	}
	return fmt.Errorf("%w about collective number %d: %s", ErrMismatch, mine.sequence, whoCalledWhat(descriptors))
}

// whoCalledWhat lists the ranks by what they called.
func whoCalledWhat(descriptors []descriptor) string {
	var parts []string
	for r, d := range descriptors {
		if slices.Index(descriptors, d) < r {
			continue // was listed with an earlier rank
		}
		var ranks []string
		for s, other := range descriptors {
			if other == d {
				ranks = append(ranks, fmt.Sprint(s))
			}
		}
		noun := "rank"
		if len(ranks) > 1 {
			noun = "ranks"
		}
		parts = append(parts, fmt.Sprintf("%s %s called %v", noun, strings.Join(ranks, ", "), d))
	}
	return strings.Join(parts, "; ")
}

// exchange gathers equally long bytes from all ranks.
func (k *Checked) exchange(ctx context.Context, mine []byte) ([][]byte, error) {
	k.memory.Lock()
	defer k.memory.Unlock()
	if k.send == 0 {
		return nil, ErrClosed
	}
	if err := k.rt.CopyIn(k.send, mine); err != nil {
		return nil, err
	}
	if err := k.rt.Synchronize(ctx); err != nil {
		if ctx.Err() != nil {
			err = ContextError(ctx)
		}
		return nil, err
	}
	if err := k.side.AllGather(k.send, k.recv, len(mine), dtype.U8); err != nil {
		return nil, err
	}
	if err := k.side.Sync(ctx); err != nil {
		return nil, err
	}
	flat := make([]byte, len(mine)*k.WorldSize())
	if err := k.rt.CopyOut(flat, k.recv); err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(flat, len(mine))), nil
}

// compareLengths checks what each rank sends to each against what that one
// receives. All ranks compare all pairs, so all come to the same result.
func (k *Checked) compareLengths(ctx context.Context, sendCounts, recvCounts []int) error {
	var mine []byte
	for _, n := range slices.Concat(sendCounts, recvCounts) {
		mine = binary.LittleEndian.AppendUint64(mine, uint64(n))
	}
	all, err := k.exchange(ctx, mine)
	if err != nil {
		return err
	}
	count := func(r, i int) int { return int(binary.LittleEndian.Uint64(all[r][8*i:])) }
	for src := range all {
		for dest := range all {
			if sent, expected := count(src, dest), count(dest, len(all)+src); sent != expected {
				return fmt.Errorf("%w about alltoallv: rank %d sends %d elements to rank %d, which receives %d",
					ErrMismatch, src, sent, dest, expected)
			}
		}
	}
	return nil
}

// Sync implements [Communicator].
func (k *Checked) Sync(ctx context.Context) error {
	if err := k.Usable(); err != nil {
		return k.check.fail(OpSync, err)
	}
	return k.observe(k.Communicator.Sync(ctx))
}

// Barrier implements [Communicator].
func (k *Checked) Barrier(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.agree(ctx, &Call{Op: OpBarrier}); err != nil {
		return k.check.fail(OpBarrier, err)
	}
	return k.observe(k.Communicator.Barrier(ctx))
}

// Split implements [Communicator]. What it makes is checked, too.
func (k *Checked) Split(ctx context.Context, color, key int) (Communicator, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.agree(ctx, &Call{Op: OpSplit}); err != nil {
		return nil, k.check.fail(OpSplit, err)
	}
	c, err := k.Communicator.Split(ctx, color, key)
	if err != nil || c == nil {
		return nil, k.observe(err)
	}
	child, err := NewChecked(c, k.rt, CheckTimeout(k.timeout))
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return child, nil
}

// Close implements [Communicator]. It closes the communicator that is checked.
func (k *Checked) Close() error { return k.leave(k.Communicator.Close) }

// End implements [Ender], whether the communicator does or not.
func (k *Checked) End(cause error) error {
	return k.leave(func() error { return end(k.Communicator, cause) })
}

// leave closes, once, and gives back what NewChecked has made.
func (k *Checked) leave(closeInner func() error) error {
	k.stateMu.Lock()
	closed := k.closed
	k.closed = true
	k.stateMu.Unlock()
	if closed {
		return nil
	}
	return errors.Join(closeInner(), k.release())
}
