// Package wire is a complete backend whose ranks share nothing but the bytes that go over
// network connections. Its test runs the conformance suite.
package wire

import (
	"cmp"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// frame is what goes over a connection: a call, or a goodbye.
type frame struct {
	Slot Slot
	Call comm.Call
	Wait comm.Wait // of a Barrier or Split, beside its Call
	Data []byte    // what the call sends to this rank
	// Of a goodbye: why the rank left, and after how many collectives.
	Cause       string
	Collectives int
}

// Slot is where frames queue for the calls that need them.
type Slot struct {
	Communicator string  // "" of a goodbye to all of them
	From         int     // a rank there
	Op           comm.Op // OpSend, OpRecv; OpBarrier for any collective, OpSync for a goodbye
	Tag          uint32
}

// node is a rank of the world: what its communicators share.
type node struct {
	links   []*gob.Encoder // by rank
	sending sync.Mutex     // of links
	memory  *cpu.Runtime
	open    sync.WaitGroup // communicators

	mu      sync.Mutex
	arrived *sync.Cond // there is a new frame
	frames  map[Slot][]frame
}

// world returns the communicators of size ranks, each pair of which shares a connection.
func world(size int, connect func() (net.Conn, net.Conn)) (comms []comm.Communicator) {
	nodes, ranks := make([]*node, size), make([]int, size)
	for rank := range nodes {
		n := &node{links: make([]*gob.Encoder, size), memory: cpu.New(), frames: map[Slot][]frame{}}
		n.arrived = sync.NewCond(&n.mu)
		nodes[rank], ranks[rank] = n, rank
		comms = append(comms, n.communicator("world", rank, ranks))
		for peer, other := range nodes[:rank+1] {
			a, b := connect()
			n.links[peer], other.links[rank] = gob.NewEncoder(a), gob.NewEncoder(b)
			go n.read(rank, peer, a)
			go other.read(peer, rank, b)
		}
		go func() { n.open.Wait(); n.memory.Close() }()
	}
	return comms
}

// read queues what comes from a peer until both have left the world, or it is lost.
func (n *node) read(rank, peer int, conn net.Conn) {
	defer conn.Close()
	leave := sync.OnceFunc(func() {
		n.open.Wait()
		n.send(peer, frame{Slot: Slot{From: rank, Op: comm.OpSync}, Cause: "it left the world"})
	})
	go leave()
	defer leave()
	for decoder, open := gob.NewDecoder(conn), true; open; {
		var f frame
		if err := decoder.Decode(&f); err != nil {
			f = frame{Slot: Slot{From: peer, Op: comm.OpSync}, Cause: err.Error()}
		}
		open = f.Slot.Communicator != ""
		n.mu.Lock()
		n.frames[f.Slot] = append(n.frames[f.Slot], f)
		n.arrived.Broadcast()
		n.mu.Unlock()
	}
}

func (n *node) send(to int, f frame) {
	n.sending.Lock()
	defer n.sending.Unlock()
	n.links[to].Encode(f) // read notices a lost connection
}

// worker is a rank of a communicator. It sends each call, with the bytes for the receiver,
// to the ranks that take part: to all for a collective, to the other end for a message. Then
// it waits for their calls, so every rank compares the same calls before it writes memory.
type worker struct {
	*node
	id    string // of the communicator, the same on all its ranks
	rank  int
	ranks []int // in the world

	busy        sync.Mutex // held by Work and Meet
	collectives int        // that are done
	left        error      // what Work and Meet return; under node.mu
}

func (n *node) communicator(id string, rank int, ranks []int) comm.Communicator {
	n.open.Add(1)
	check := &backend.Check{Backend: "wire", Rank: rank, WorldSize: len(ranks)}
	return backend.NewSerial(check, &worker{node: n, id: id, rank: rank, ranks: ranks})
}

// Leave implements backend.Worker.
func (w *worker) Leave(_ context.Context, cause error) {
	cause = cmp.Or(cause, comm.ErrClosed)
	w.mu.Lock()
	w.left = cause
	w.arrived.Broadcast()
	w.mu.Unlock()
	w.busy.Lock()
	defer w.busy.Unlock()
	for _, to := range w.ranks {
		w.send(to, frame{Slot: Slot{w.id, w.rank, comm.OpSync, 0}, Cause: cause.Error(), Collectives: w.collectives})
	}
	w.open.Done()
}

// Meet implements backend.Worker.
func (w *worker) Meet(wait comm.Wait) (comm.Communicator, error) {
	frames, err := w.do([]comm.Call{{Op: wait.Op}}, wait)
	if err != nil || wait.Op != comm.OpSplit {
		return nil, err
	}
	splits := make([]comm.Wait, len(frames))
	for rank, f := range frames {
		splits[rank] = f.Wait
	}
	for _, group := range backend.SplitGroups(splits) {
		rank := slices.Index(group, w.rank)
		for i := range group {
			group[i] = w.ranks[group[i]]
		}
		if rank >= 0 {
			return w.communicator(fmt.Sprint(w.id, "/", w.collectives, ".", wait.Color), rank, group), nil
		}
	}
	return nil, nil
}

// Work implements backend.Worker.
func (w *worker) Work(calls []comm.Call) error {
	_, err := w.do(calls, comm.Wait{})
	return err
}

// do sends all calls before it waits for one. It returns the frames of the last.
func (w *worker) do(calls []comm.Call, wait comm.Wait) (frames []frame, err error) {
	w.busy.Lock()
	defer w.busy.Unlock()
	for i := range calls {
		for _, slot := range w.slots(&calls[i]) {
			err = errors.Join(err, w.post(&calls[i], wait, slot))
		}
	}
	for i := 0; i < len(calls) && err == nil; i++ {
		if frames, err = w.await(&calls[i]); err == nil {
			err = w.finish(&calls[i], frames)
		}
	}
	return frames, err
}

// slots returns where a call finds what the ranks that take part in it send.
func (w *worker) slots(c *comm.Call) (slots []Slot) {
	if c.Op.Message() {
		return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag}}
	}
	for rank := range w.ranks {
		slots = append(slots, Slot{w.id, rank, comm.OpBarrier, 0})
	}
	return slots
}

// post sends a call to the rank of one of its slots.
func (w *worker) post(c *comm.Call, wait comm.Wait, slot Slot) (err error) {
	f, peer := frame{Slot: slot, Call: *c, Wait: wait}, slot.From
	f.Slot.From = w.rank
	if c.Op.Message() {
		f.Slot.Op = c.Op
	}
	if address, bytes, ok := c.SendPart(w.rank, peer); ok {
		f.Data = make([]byte, bytes)
		err = w.memory.CopyOut(f.Data, address)
	}
	w.mu.Lock()
	_, gone := w.bye(peer) // whatever it sent for this call was in flight when it left
	w.mu.Unlock()
	w.send(w.ranks[peer], f)
	return errors.Join(err, gone)
}

// await returns the frames of a call, by rank.
func (w *worker) await(c *comm.Call) ([]frame, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ; ; w.arrived.Wait() {
		frames, err, missing := make([]frame, len(w.ranks)), w.left, false
		for _, slot := range w.slots(c) {
			collectives, gone := w.bye(slot.From)
			if queue := w.frames[slot]; len(queue) == 0 {
				missing, err = true, errors.Join(err, gone)
			} else if frames[slot.From] = queue[0]; !c.Op.Message() && collectives <= w.collectives {
				err = errors.Join(err, gone)
			}
		}
		if err != nil {
			return nil, err
		} else if !missing {
			for _, slot := range w.slots(c) {
				w.frames[slot] = w.frames[slot][1:]
			}
			return frames, nil
		}
	}
}

// bye returns an error if a rank has left, and after how many collectives that was.
func (w *worker) bye(rank int) (collectives int, err error) {
	byes := slices.Concat(w.frames[Slot{w.id, rank, comm.OpSync, 0}], w.frames[Slot{"", w.ranks[rank], comm.OpSync, 0}])
	if len(byes) == 0 {
		return 0, nil
	}
	return byes[0].Collectives, fmt.Errorf("%w: rank %d: %s", comm.ErrPeerFailed, rank, byes[0].Cause)
}

// finish compares what the peers of a call have called, and puts what they sent in place.
func (w *worker) finish(c *comm.Call, frames []frame) (err error) {
	calls := make([]comm.Call, len(frames))
	for rank := range calls {
		calls[rank] = frames[rank].Call
	}
	if c.Op.Message() {
		err = backend.AgreeOnMessage(w.rank, c, c.Peer, &calls[c.Peer])
	} else {
		w.collectives++ // also if ranks disagree: the others wait on, and find the same
		err = backend.Agree(calls)
	}
	parts := make([]uintptr, len(frames))
	for rank, f := range frames {
		address, bytes, ok := c.RecvPart(w.rank, rank)
		if ok && err == nil && c.Op.Reduces() {
			address, err = w.memory.Allocate(bytes)
			defer w.memory.Deallocate(address)
			parts[rank] = address
		}
		if ok && err == nil {
			err = w.memory.CopyIn(address, f.Data)
		}
	}
	if result, bytes, ok := c.RecvPart(w.rank, w.rank); ok && err == nil && c.Op.Reduces() {
		err = w.memory.Reduce([]uintptr{result}, parts, bytes/c.DType.Size(), c.DType, c.Reduce)
	}
	return err
}
