package checked

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// messageEnds are the messages of a [Communicator] whose ends were not compared yet.
//
// With each message the sender's call travels to the receiver and the receiver's
// back, as messages of the same ranks and tag on communicators of their own: what
// belongs together is what the backend matches, by tags or by order alone. Two
// communicators, because a message from rank 0 to 1 could otherwise meet the answer
// to one from 1 to 0.
type messageEnds struct {
	forth, back comm.Communicator

	mu      sync.Mutex // keeps messages and their ends in one order
	pending []messageEnd
	unused  []uintptr // memory of some that were compared
	freed   bool
	holders sync.WaitGroup // those who have memory that is in neither list
}

// messageEnd is this rank's end of a message. Its memory has the encoded call of this
// rank, and room for the other end's.
type messageEnd struct {
	call   comm.Call
	memory uintptr
}

// endBytes is the length of an encoded end: operation, type, tag, count and the rank
// that called it. The operation counts from 1, so that memory without an end has 0.
const endBytes = 5 * 8

func (k *Communicator) encodeEnd(c *comm.Call) []byte {
	b := make([]byte, 0, 2*endBytes)
	for _, x := range []int{int(c.Op) + 1, int(c.DType), int(c.Tag), c.Count, c.Peer} {
		b = binary.LittleEndian.AppendUint64(b, uint64(x))
	}
	return b[:cap(b)]
}

// decodeEnd reports whether the other end has come.
func decodeEnd(b []byte) (c comm.Call, come bool) {
	word := func(i int) int { return int(binary.LittleEndian.Uint64(b[8*i:])) }
	return comm.Call{Op: comm.Op(word(0) - 1), DType: dtype.DType(word(1)), Tag: uint32(word(2)), Count: word(3), Peer: word(4)}, word(0) != 0
}

// announce submits calls, and starts telling the other ends of those that are
// messages what they are. It takes over the ends, which are this rank's.
func (k *Communicator) announce(ends []messageEnd, submit func() error) error {
	err := k.submitWithEnds(ends, submit)
	if errors.Is(err, comm.ErrMismatch) { // the other end is to hear of it, too
		if better := k.compareMessages(context.Background()); errors.Is(better, comm.ErrMismatch) {
			return better
		}
	}
	return err
}

func (k *Communicator) submitWithEnds(ends []messageEnd, submit func() error) error {
	e := &k.ends
	e.mu.Lock()
	defer e.mu.Unlock()
	err := submit()
	if err != nil && !errors.Is(err, comm.ErrMismatch) {
		e.give(ends)
		return err
	}
	e.pending = append(e.pending, ends...)
	e.holders.Done()
	return cmp.Or(e.exchange(ends), err)
}

// prepareEnds returns the ends of the calls that are messages, with this rank's in
// memory. It may wait for the device, so nothing is submitted yet, and no lock held.
func (k *Communicator) prepareEnds(calls []comm.Call) (ends []messageEnd, err error) {
	for i := range calls {
		if c := &calls[i]; c.Op.Message() {
			ends = append(ends, messageEnd{call: comm.Call{Op: c.Op, DType: c.DType, Tag: c.Tag, Count: c.Count, Peer: c.Peer}})
		}
	}
	if err := k.ends.take(k.own, ends); err != nil || len(ends) == 0 {
		return nil, err
	}
	for i := range ends {
		if err == nil {
			err = k.own.CopyIn(ends[i].memory, k.encodeEnd(&ends[i].call))
		}
	}
	if err == nil {
		ctx, cancel := k.within(context.Background())
		defer cancel()
		err = k.settle(ctx)
	}
	if err != nil {
		k.forgetEnds(ends)
		return nil, cmp.Or(k.life.Err(), err)
	}
	return ends, nil
}

// forgetEnds drops ends whose calls are not made, or were compared.
func (k *Communicator) forgetEnds(ends []messageEnd) {
	k.ends.mu.Lock()
	defer k.ends.mu.Unlock()
	k.ends.give(ends)
}

// exchange starts the exchange. The caller holds the lock.
func (e *messageEnds) exchange(ends []messageEnd) error {
	var forth, back []comm.Call
	for i := range ends {
		c, memory := &ends[i].call, ends[i].memory
		mine := comm.SendCall(memory, endBytes, dtype.U8, c.Peer, c.Tag)
		theirs := comm.RecvCall(memory+endBytes, endBytes, dtype.U8, c.Peer, c.Tag)
		if c.Op == comm.OpSend {
			forth, back = append(forth, mine), append(back, theirs)
		} else {
			forth, back = append(forth, theirs), append(back, mine)
		}
	}
	if len(ends) == 0 {
		return nil
	}
	return errors.Join(e.forth.Group(forth...), e.back.Group(back...))
}

// take gives ends memory, and makes the caller one of the holders.
func (e *messageEnds) take(rt runtime.Runtime, ends []messageEnd) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.freed {
		return comm.ErrClosed
	}
	for len(e.unused) < len(ends) {
		memory, err := rt.Allocate(2 * endBytes)
		if err != nil {
			return err
		}
		e.unused = append(e.unused, memory)
	}
	rest := len(e.unused) - len(ends)
	for i := range ends {
		ends[i].memory = e.unused[rest+i]
	}
	e.unused = e.unused[:rest]
	e.holders.Add(1)
	return nil
}

// give takes the memory of ends back from a holder, who holds the lock.
func (e *messageEnds) give(ends []messageEnd) {
	e.unused = append(e.unused, memoryOf(ends)...)
	e.holders.Done()
}

func memoryOf(ends []messageEnd) (memory []uintptr) {
	for i := range ends {
		memory = append(memory, ends[i].memory)
	}
	return memory
}

// free gives the memory back, as soon as nobody is at it. Nobody waits for long any
// more.
func (e *messageEnds) free(rt runtime.Runtime) error {
	e.mu.Lock()
	e.freed = true
	e.mu.Unlock()
	e.holders.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	var errs []error
	for _, memory := range append(e.unused, memoryOf(e.pending)...) {
		errs = append(errs, rt.Deallocate(memory))
	}
	e.unused, e.pending = nil, nil
	return errors.Join(errs...)
}

// compareMessages waits for the other ends of this rank's messages, and compares.
func (k *Communicator) compareMessages(ctx context.Context) error {
	e := &k.ends
	e.mu.Lock()
	if len(e.pending) == 0 || e.freed {
		e.mu.Unlock()
		return nil
	}
	pending := e.pending
	e.pending = nil
	e.holders.Add(1)
	e.mu.Unlock()
	err := k.meet(ctx, pending)
	k.forgetEnds(pending)
	return err
}

// mostMissing is how many messages an error names.
const mostMissing = 4

// meet is compareMessages for some ends.
func (k *Communicator) meet(ctx context.Context, pending []messageEnd) error {
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	waited := k.ends.forth.Sync(ctx)
	if err := k.ends.back.Sync(ctx); waited == nil {
		waited = err
	}
	// What has come is compared even if not all has: it may be why.
	var missing []string
	b := make([]byte, endBytes)
	for i := range pending {
		m := &pending[i]
		if err := k.own.CopyOut(b, m.memory+endBytes); err != nil {
			return errors.Join(waited, err)
		}
		other, come := decodeEnd(b)
		if !come {
			missing = append(missing, m.call.String())
			continue
		}
		sender, send, receiver, recv := k.Rank(), &m.call, m.call.Peer, &other
		if m.call.Op == comm.OpRecv {
			sender, send, receiver, recv = receiver, recv, sender, send
		}
		if err := backend.AgreeOnMessage(sender, send, receiver, recv); err != nil {
			return err
		}
	}
	if waited == nil {
		return nil
	}
	if ctx.Err() != nil && !errors.Is(waited, comm.ErrPeerFailed) {
		waited = comm.ContextError(ctx) // of the messages, not of what travels with them
	}
	if more := len(missing) - mostMissing; more > 0 {
		missing = append(missing[:mostMissing], fmt.Sprintf("%d more messages", more))
	}
	return fmt.Errorf("waiting for the other end of %s: %w", strings.Join(missing, "; "), waited)
}
