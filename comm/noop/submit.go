package noop

import (
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
)

// Submit implements [backend.Backend].
func (r *rank) Submit(call comm.Call) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.life.Err(); err != nil {
		return err
	}
	return r.submit(&call)
}

// SubmitTogether implements [backend.Backend]. The calls of a group are not ordered
// among themselves. Messages go first, lest a collective waits behind one whose
// partner comes after it.
func (r *rank) SubmitTogether(calls []comm.Call) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.life.Err(); err != nil {
		return err
	}
	for _, messages := range []bool{true, false} {
		for i := range calls {
			if calls[i].Op.Message() != messages {
				continue
			}
			if err := r.submit(&calls[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// submit does a call, and what waited for it, or keeps it: a message until its
// partner comes, a collective until no message is before it, whose data it may
// need. A message does overtake collectives, which wait for its partner. An error
// aborts the communicator: what failed may be another submission's.
func (r *rank) submit(call *comm.Call) error {
	if err := r.doOrKeep(call); err != nil {
		return err
	}
	for first := r.waiting.first(); first != nil && !first.Op.Message(); first = r.waiting.first() {
		err := r.carry(&first.Call, &first.Call)
		r.waiting.remove(first)
		if err != nil {
			return err
		}
	}
	if r.waiting.first() == nil {
		r.calls.Collectives.Done = r.calls.Collectives.Submitted
		r.calls.Messages.Done = r.calls.Messages.Submitted
		r.announce()
	}
	return nil
}

// doOrKeep does a message whose partner waits, and a collective if nothing waits. Others it keeps.
func (r *rank) doOrKeep(call *comm.Call) error {
	if !call.Op.Message() {
		r.calls.Collectives.Submitted++
		if r.waiting.first() == nil {
			return r.carry(call, call)
		}
		r.waiting.push(backend.Clone(*call))
		return nil
	}
	r.calls.Messages.Submitted++
	tag := uint64(call.Tag)
	partner, ok := r.messages.First(tag)
	if !ok || partner.Op == call.Op {
		r.messages.Push(tag, r.waiting.push(*call))
		return nil
	}
	r.messages.Pop(tag)
	err := r.deliver(partner.Call, *call)
	r.waiting.remove(partner)
	return err
}

// deliver carries a message, given its two ends.
func (r *rank) deliver(send, recv comm.Call) error {
	if send.Op == comm.OpRecv {
		send, recv = recv, send
	}
	if err := backend.AgreeOnMessage(0, &send, 0, &recv); err != nil {
		return err
	}
	return r.carry(&send, &recv)
}

// carry copies what a call sends to where another one, or the same, receives it,
// on the runtime's stream. Any reduction of Bool makes bytes that are not zero 1.
func (r *rank) carry(send, recv *comm.Call) error {
	src := send.Send
	dst := recv.Recv
	bytes := send.Bytes()
	if send.RecvCounts != nil { // of a V-collective, whose lists say where its parts lie
		src, bytes, _ = send.SendPart(0, 0)
		dst, _, _ = recv.RecvPart(0, 0)
	}
	switch {
	case send.Op.Reduces() && send.DType == dtype.Bool:
		return r.copyTruth(dst, src, bytes)
	case bytes == 0 || dst == src:
		return nil
	}
	return r.rt.Copy(dst, src, bytes)
}

// copyTruth reduces Bool elements. It does so on the host, piece by piece, as
// no runtime has a kernel for it.
func (r *rank) copyTruth(dst, src uintptr, count int) error {
	piece := make([]byte, min(count, 64<<10))
	for offset := 0; offset < count; offset += len(piece) {
		piece = piece[:min(len(piece), count-offset)]
		if err := r.rt.CopyOut(piece, src+uintptr(offset)); err != nil {
			return err
		}
		for i, b := range piece {
			piece[i] = min(b, 1)
		}
		if err := r.rt.CopyIn(dst+uintptr(offset), piece); err != nil {
			return err
		}
	}
	return nil
}
