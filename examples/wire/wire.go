package main

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
)

// worker is one rank of one communicator. Every call is posted to the ranks that take
// part in it, with the bytes that it sends them, and is done when theirs have come: all
// ranks for a collective, the other end for a message. So all of them compare the same
// calls, and none is more than one submission ahead.
type worker struct {
	*node
	id    string // of the communicator, the same on all its ranks
	rank  int
	ranks []int // their ranks in the world
	box   *box

	busy        sync.Mutex // held by Work and Meet
	collectives int        // that are done
	left        error      // why Work and Meet end; under node.mu
}

// frame is what goes over a connection: a call, or a goodbye.
type frame struct {
	ID   string // the communicator
	From int    // the sender's rank there
	Call comm.Call
	Wait comm.Wait // of a Barrier or Split, beside its Call
	Data []byte
	Bye  *goodbye
}

// goodbye is the last frame of a rank.
type goodbye struct {
	Collectives int // that were done
	Cause       string
	Mismatch    bool // whether the cause is a comm.ErrMismatch
}

func (w *worker) communicator() comm.Communicator {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open++
	w.box = w.node.box(w.id)
	w.box.size = len(w.ranks)
	return backend.NewSerial(backend.Check{Backend: "wire", Rank: w.rank, WorldSize: len(w.ranks)}, w)
}

// Work implements backend.Worker.
func (w *worker) Work(calls []comm.Call) error {
	_, err := w.do(calls, comm.Wait{})
	return err
}

// Meet implements backend.Worker.
func (w *worker) Meet(wait comm.Wait) (comm.Communicator, error) {
	frames, err := w.do([]comm.Call{{Op: wait.Op}}, wait)
	if err != nil || wait.Op != comm.OpSplit || wait.Color < 0 {
		return nil, err
	}
	splits := make([]comm.Wait, len(frames))
	for rank, f := range frames {
		splits[rank] = f.Wait
	}
	sub := &worker{node: w.node, id: fmt.Sprintf("%s/%d.%d", w.id, w.collectives, wait.Color)}
	for _, group := range backend.SplitGroups(splits) {
		if i := slices.Index(group, w.rank); i >= 0 {
			sub.rank = i
			for _, rank := range group {
				sub.ranks = append(sub.ranks, w.ranks[rank])
			}
		}
	}
	return sub.communicator(), nil
}

// do posts all calls before it waits for one. It returns the frames of the last one.
func (w *worker) do(calls []comm.Call, wait comm.Wait) (frames []frame, err error) {
	w.busy.Lock()
	defer w.busy.Unlock()
	for i := range calls {
		if err := w.post(&calls[i], wait); err != nil {
			return nil, err
		}
	}
	for calls = slices.Clone(calls); len(calls) > 0; {
		var done int
		if done, frames, err = w.await(calls); err != nil {
			return nil, err
		}
		if err := w.finish(&calls[done], frames); err != nil {
			return nil, err
		}
		calls = slices.Delete(calls, done, done+1)
	}
	return frames, nil
}

// peers returns the ranks that take part in a call.
func (w *worker) peers(c *comm.Call) []int {
	if c.Op.Message() {
		return []int{c.Peer}
	}
	all := make([]int, len(w.ranks))
	for rank := range all {
		all[rank] = rank
	}
	return all
}

// post sends a call to its peers.
func (w *worker) post(c *comm.Call, wait comm.Wait) error {
	for _, peer := range w.peers(c) {
		f := frame{ID: w.id, From: w.rank, Call: *c, Wait: wait}
		if address, bytes, ok := c.SendPart(w.rank, peer); ok {
			f.Data = make([]byte, bytes)
			if err := w.memory.CopyOut(f.Data, address); err != nil {
				return err
			}
		}
		if c.Op.Message() { // what it had posted before it left, it gave up
			w.mu.Lock()
			err := w.gone(peer)
			w.mu.Unlock()
			if err != nil {
				return err
			}
		}
		w.send(w.ranks[peer], f)
	}
	return nil
}

// await returns the index of a call whose frames are all there, and takes these.
func (w *worker) await(calls []comm.Call) (int, []frame, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ; ; w.arrived.Wait() {
		if w.left != nil {
			return 0, nil, w.left
		}
		collective := false // one comes before
		for i := range calls {
			c := &calls[i]
			if !c.Op.Message() {
				if collective {
					continue
				}
				collective = true
			}
			if frames, err := w.take(c); frames != nil || err != nil {
				return i, frames, err
			}
		}
	}
}

// take takes the frames of a call's peers, if they are all there.
func (w *worker) take(c *comm.Call) ([]frame, error) {
	peers := w.peers(c)
	at := make([]int, len(peers))
	missing, failed := false, error(nil)
	for i, peer := range peers {
		at[i] = slices.IndexFunc(w.box.frames[peer], func(f frame) bool {
			if c.Op.Message() {
				return f.Call.Op.Message() && f.Call.Op != c.Op && f.Call.Tag == c.Tag
			}
			return !f.Call.Op.Message()
		})
		missing = missing || at[i] < 0
		bye := w.box.byes[peer]
		if at[i] < 0 || !c.Op.Message() && bye != nil && bye.Collectives <= w.collectives {
			failed = errors.Join(failed, w.gone(peer))
		}
	}
	if missing {
		return nil, failed
	}
	frames := make([]frame, len(peers))
	for i, peer := range peers {
		frames[i] = w.box.frames[peer][at[i]]
		w.box.frames[peer] = slices.Delete(w.box.frames[peer], at[i], at[i]+1)
	}
	if err := w.agree(c, frames); err != nil {
		return nil, err
	}
	return frames, failed
}

// gone returns an error if a rank has left.
func (w *worker) gone(rank int) error {
	switch bye := w.box.byes[rank]; {
	case bye != nil && bye.Mismatch:
		return fmt.Errorf("%w: rank %d: %w: %s", comm.ErrPeerFailed, rank, comm.ErrMismatch, bye.Cause)
	case bye != nil:
		return fmt.Errorf("%w: rank %d: %s", comm.ErrPeerFailed, rank, bye.Cause)
	case w.lost[w.ranks[rank]] != nil:
		return fmt.Errorf("%w: rank %d: %w", comm.ErrPeerFailed, rank, w.lost[w.ranks[rank]])
	}
	return nil
}

// agree compares what the peers of a call have called.
func (w *worker) agree(c *comm.Call, frames []frame) error {
	switch c.Op {
	case comm.OpSend:
		return backend.AgreeOnMessage(w.rank, c, c.Peer, &frames[0].Call)
	case comm.OpRecv:
		return backend.AgreeOnMessage(c.Peer, &frames[0].Call, w.rank, c)
	}
	calls := make([]comm.Call, len(frames))
	for rank := range frames {
		calls[rank] = frames[rank].Call
	}
	return backend.Agree(calls)
}

// finish puts what the peers of a call sent where the call wants it.
func (w *worker) finish(c *comm.Call, frames []frame) error {
	if !c.Op.Message() {
		w.collectives++
	}
	if c.Op.Reduces() {
		return w.reduce(c, frames)
	}
	for i, peer := range w.peers(c) {
		if address, _, ok := c.RecvPart(w.rank, peer); ok {
			if err := w.memory.CopyIn(address, frames[i].Data); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *worker) reduce(c *comm.Call, frames []frame) error {
	result, bytes, ok := c.RecvPart(w.rank, w.rank)
	if !ok {
		return nil
	}
	parts := make([]uintptr, len(frames))
	for rank := range parts {
		var err error
		if parts[rank], err = w.memory.Allocate(bytes); err != nil {
			return err
		}
		defer w.memory.Deallocate(parts[rank])
		if err := w.memory.CopyIn(parts[rank], frames[rank].Data); err != nil {
			return err
		}
	}
	return w.memory.Reduce([]uintptr{result}, parts, bytes/c.DType.Size(), c.DType, c.Reduce)
}

// Leave implements backend.Worker.
func (w *worker) Leave(cause error) {
	bye := &goodbye{Cause: "closed"}
	w.mu.Lock()
	w.left = comm.ErrClosed
	if cause != nil {
		w.left = cause
		bye.Cause, bye.Mismatch = cause.Error(), errors.Is(cause, comm.ErrMismatch)
	}
	w.arrived.Broadcast()
	w.mu.Unlock()

	w.busy.Lock()
	defer w.busy.Unlock()
	bye.Collectives = w.collectives
	for _, peer := range w.ranks {
		w.send(peer, frame{ID: w.id, From: w.rank, Bye: bye})
	}
	w.release()
}
