package noop

import (
	"slices"

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
	var err error
	partner := -1
	count := &r.calls.Collectives
	if call.Op.Message() {
		count = &r.calls.Messages
		partner = slices.IndexFunc(r.waiting, func(w comm.Call) bool {
			return w.Op.Message() && w.Op != call.Op && w.Tag == call.Tag
		})
	}
	count.Submitted++
	switch {
	case partner >= 0:
		err = r.deliver(r.waiting[partner], *call)
		r.waiting = slices.Delete(r.waiting, partner, partner+1)
	case len(r.waiting) > 0 || call.Op.Message():
		r.waiting = append(r.waiting, backend.Clone(*call))
		return nil
	default:
		err = r.carry(call, call)
	}
	for err == nil && len(r.waiting) > 0 && !r.waiting[0].Op.Message() {
		err = r.carry(&r.waiting[0], &r.waiting[0])
		r.waiting = slices.Delete(r.waiting, 0, 1)
	}
	if err != nil {
		return err
	}
	if len(r.waiting) == 0 {
		r.calls.Collectives.Done = r.calls.Collectives.Submitted
		r.calls.Messages.Done = r.calls.Messages.Submitted
	}
	r.announce()
	return nil
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
