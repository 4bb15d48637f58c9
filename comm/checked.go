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
// type. For the same reason a collective inside a Group is compared when it is
// called, before the group starts; a program in which a rank comes to that
// collective only after a message of the same group has arrived times out.
type Checked struct {
	Communicator
	side    Communicator // for the descriptors
	rt      runtime.Runtime
	check   Check
	timeout time.Duration
	group   Grouping

	// mu keeps the comparison and the call it is about together. A group has
	// it from beginning to end.
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
		Communicator: c,
		rt:           rt,
		check:        Check{Backend: "checked", Rank: c.Rank(), WorldSize: c.WorldSize()},
		timeout:      30 * time.Second,
	}
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

// Unwrap returns the communicator that is checked.
func (k *Checked) Unwrap() Communicator { return k.Communicator }

// descriptor is what all ranks must agree on.
type descriptor struct {
	sequence uint64 // the number of the call on this rank
	call     operation
	count    int
	dt       dtype.DType
	op       ReduceOp
	root     int
	counts   uint64 // hash of the counts of AllGatherV
}

// descriptorBytes is the size of an encoded descriptor.
const descriptorBytes = 7 * 8

func (d descriptor) encode() []byte {
	var b []byte
	for _, x := range []uint64{d.sequence, uint64(d.call), uint64(d.count), uint64(d.dt), uint64(d.op), uint64(d.root), d.counts} {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

func decodeDescriptor(b []byte) descriptor {
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return descriptor{
		sequence: word(0), call: operation(word(1)), count: int(word(2)), dt: dtype.DType(word(3)),
		op: ReduceOp(word(4)), root: int(word(5)), counts: word(6),
	}
}

func (d descriptor) String() string {
	var b strings.Builder
	b.WriteString(d.call.String())
	switch d.call {
	case opAllGatherV:
		fmt.Fprintf(&b, " of %v with counts that hash to %#x", d.dt, d.counts)
	case opAllToAllV:
		fmt.Fprintf(&b, " of %v", d.dt)
	default:
		if d.call.hasElements() {
			fmt.Fprintf(&b, " of %d %v", d.count, d.dt)
		}
	}
	if d.call.reduces() {
		fmt.Fprintf(&b, ", %v", d.op)
	}
	if d.call.hasRoot() {
		fmt.Fprintf(&b, ", root %d", d.root)
	}
	return b.String()
}

// hashCounts is FNV-1a over 64-bit words.
func hashCounts(counts []int) uint64 {
	h := uint64(14695981039346656037)
	for _, n := range counts {
		h = (h ^ uint64(n)) * 1099511628211
	}
	return h
}

// usable returns why the communicator takes no more calls, or nil.
func (k *Checked) usable(call operation) error {
	k.stateMu.Lock()
	defer k.stateMu.Unlock()
	switch {
	case k.closed:
		return k.check.Fail(call.String(), ErrClosed)
	case k.broken != nil:
		return k.check.Fail(call.String(), fmt.Errorf("%w: %w", ErrBroken, k.broken))
	}
	return nil
}

// fail breaks the communicator and returns err as this rank's error.
func (k *Checked) fail(call operation, err error) error {
	k.breakWith(err)
	return k.group.Refuse(k.check.Fail(call.String(), err))
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
	return k.group.Refuse(err)
}

// collective compares a call with the other ranks' and then makes it. invalid
// is what is wrong with its arguments. agree, if there is one, compares more
// than a descriptor holds.
func (k *Checked) collective(ctx context.Context, d descriptor, invalid error, agree func(ctx context.Context) error, call func() error) error {
	if !k.group.Enter() {
		k.mu.Lock()
		defer k.mu.Unlock()
	}
	if err := k.usable(d.call); err != nil {
		return k.group.Refuse(err)
	}
	if invalid != nil {
		return k.group.Refuse(invalid)
	}
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	if err := k.compare(ctx, d); err != nil {
		return k.fail(d.call, err)
	}
	if agree != nil {
		if err := agree(ctx); err != nil {
			return k.fail(d.call, err)
		}
	}
	return k.observe(call())
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

// AllReduce implements [Communicator].
func (k *Checked) AllReduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	return k.collective(context.Background(), descriptor{call: opAllReduce, count: count, dt: dt, op: op},
		k.check.AllReduce(send, recv, count, dt, op), nil,
		func() error { return k.Communicator.AllReduce(send, recv, count, dt, op) })
}

// Broadcast implements [Communicator].
func (k *Checked) Broadcast(buf uintptr, count int, dt dtype.DType, root int) error {
	return k.collective(context.Background(), descriptor{call: opBroadcast, count: count, dt: dt, root: root},
		k.check.Broadcast(buf, count, dt, root), nil,
		func() error { return k.Communicator.Broadcast(buf, count, dt, root) })
}

// Reduce implements [Communicator].
func (k *Checked) Reduce(send, recv uintptr, count int, dt dtype.DType, op ReduceOp, root int) error {
	return k.collective(context.Background(), descriptor{call: opReduce, count: count, dt: dt, op: op, root: root},
		k.check.Reduce(send, recv, count, dt, op, root), nil,
		func() error { return k.Communicator.Reduce(send, recv, count, dt, op, root) })
}

// AllGather implements [Communicator].
func (k *Checked) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	return k.collective(context.Background(), descriptor{call: opAllGather, count: count, dt: dt},
		k.check.AllGather(send, recv, count, dt), nil,
		func() error { return k.Communicator.AllGather(send, recv, count, dt) })
}

// AllGatherV implements [Communicator].
func (k *Checked) AllGatherV(send, recv uintptr, counts, displs []int, dt dtype.DType) error {
	return k.collective(context.Background(), descriptor{call: opAllGatherV, dt: dt, counts: hashCounts(counts)},
		k.check.AllGatherV(send, recv, counts, displs, dt), nil,
		func() error { return k.Communicator.AllGatherV(send, recv, counts, displs, dt) })
}

// ReduceScatter implements [Communicator].
func (k *Checked) ReduceScatter(send, recv uintptr, count int, dt dtype.DType, op ReduceOp) error {
	return k.collective(context.Background(), descriptor{call: opReduceScatter, count: count, dt: dt, op: op},
		k.check.ReduceScatter(send, recv, count, dt, op), nil,
		func() error { return k.Communicator.ReduceScatter(send, recv, count, dt, op) })
}

// AllToAll implements [Communicator].
func (k *Checked) AllToAll(send, recv uintptr, count int, dt dtype.DType) error {
	return k.collective(context.Background(), descriptor{call: opAllToAll, count: count, dt: dt},
		k.check.AllToAll(send, recv, count, dt), nil,
		func() error { return k.Communicator.AllToAll(send, recv, count, dt) })
}

// AllToAllV implements [Communicator].
func (k *Checked) AllToAllV(send uintptr, sendCounts, sendDispls []int, recv uintptr, recvCounts, recvDispls []int, dt dtype.DType) error {
	return k.collective(context.Background(), descriptor{call: opAllToAllV, dt: dt},
		k.check.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt),
		func(ctx context.Context) error { return k.compareLengths(ctx, sendCounts, recvCounts) },
		func() error {
			return k.Communicator.AllToAllV(send, sendCounts, sendDispls, recv, recvCounts, recvDispls, dt)
		})
}

// Gather implements [Communicator].
func (k *Checked) Gather(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return k.collective(context.Background(), descriptor{call: opGather, count: count, dt: dt, root: root},
		k.check.Gather(send, recv, count, dt, root), nil,
		func() error { return k.Communicator.Gather(send, recv, count, dt, root) })
}

// Scatter implements [Communicator].
func (k *Checked) Scatter(send, recv uintptr, count int, dt dtype.DType, root int) error {
	return k.collective(context.Background(), descriptor{call: opScatter, count: count, dt: dt, root: root},
		k.check.Scatter(send, recv, count, dt, root), nil,
		func() error { return k.Communicator.Scatter(send, recv, count, dt, root) })
}

// Send implements [Communicator]. It is not compared.
func (k *Checked) Send(buf uintptr, count int, dt dtype.DType, dest int, tag uint32) error {
	return k.message(opSend, k.check.Send(buf, count, dt, dest),
		func() error { return k.Communicator.Send(buf, count, dt, dest, tag) })
}

// Recv implements [Communicator]. It is not compared.
func (k *Checked) Recv(buf uintptr, count int, dt dtype.DType, src int, tag uint32) error {
	return k.message(opRecv, k.check.Recv(buf, count, dt, src),
		func() error { return k.Communicator.Recv(buf, count, dt, src, tag) })
}

// message makes a call that concerns two ranks only.
func (k *Checked) message(op operation, invalid error, call func() error) error {
	if !k.group.Enter() {
		k.mu.Lock()
		defer k.mu.Unlock()
	}
	err := k.usable(op)
	if err == nil {
		err = invalid
	}
	if err != nil {
		return k.group.Refuse(err)
	}
	return k.observe(call())
}

// Group implements [Communicator].
func (k *Checked) Group(submit func() error) error {
	if !k.group.Enter() {
		k.mu.Lock()
		defer k.mu.Unlock()
	}
	if err := k.usable(opGroup); err != nil {
		return k.group.Refuse(err)
	}
	return k.observe(k.Communicator.Group(func() error {
		return k.group.Run(submit, func(error) error { return nil })
	}))
}

// Sync implements [Communicator].
func (k *Checked) Sync(ctx context.Context) error {
	if err := k.outside(opSync); err != nil {
		return err
	}
	if err := k.usable(opSync); err != nil {
		return err
	}
	return k.observe(k.Communicator.Sync(ctx))
}

// outside refuses a call that waits if the caller is in a group, before the
// other ranks, which may not be, are waited for.
func (k *Checked) outside(op operation) error {
	if err := k.group.Outside(); err != nil {
		return k.group.Refuse(k.check.Fail(op.String(), err))
	}
	return nil
}

// Barrier implements [Communicator].
func (k *Checked) Barrier(ctx context.Context) error {
	if err := k.outside(opBarrier); err != nil {
		return err
	}
	return k.collective(ctx, descriptor{call: opBarrier}, nil, nil,
		func() error { return k.Communicator.Barrier(ctx) })
}

// Split implements [Communicator]. What it makes is checked, too.
func (k *Checked) Split(ctx context.Context, color, key int) (Communicator, error) {
	if err := k.outside(opSplit); err != nil {
		return nil, err
	}
	var child *Checked
	err := k.collective(ctx, descriptor{call: opSplit}, nil, nil, func() error {
		c, err := k.Communicator.Split(ctx, color, key)
		if err != nil || c == nil {
			return err
		}
		child, err = NewChecked(c, k.rt, CheckTimeout(k.timeout))
		return err
	})
	if err != nil || child == nil {
		return nil, err
	}
	return child, nil
}

// Close implements [Communicator]. It closes the communicator that is checked.
func (k *Checked) Close() error {
	k.stateMu.Lock()
	closed := k.closed
	k.closed = true
	k.stateMu.Unlock()
	if closed {
		return nil
	}
	return errors.Join(k.Communicator.Close(), k.release())
}
