// Package wire is a complete backend whose ranks share only network connections. Its test runs the conformance suite.
//
// The package is a Communicator and has no program that could begin with tutti.Run.
package wire

import (
	"cmp"
	"context"
	"encoding/gob"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// frame is the unit of data on a connection: a call, or a goodbye.
type frame struct {
	Slot  Slot         // its queue
	Call  comm.Call    // zero for a goodbye
	Wait  comm.Wait    // of a Barrier or Split, which have no other Call
	Data  []byte       // input of the call for this rank
	Cause string       // of a goodbye: the reason
	Done  map[Slot]int // of a goodbye: the number of calls that the rank has completed
}

// Slot is a queue of frames for the calls that need them.
type Slot struct {
	Communicator string  // "" of a goodbye to all communicators
	From         int     // a rank there
	Op           comm.Op // OpSend, OpRecv; OpBarrier for any collective, OpSync for a goodbye
	Tag          uint32  // of a message; 0 otherwise
}

// node is a rank of the world: the state that its communicators share.
type node struct {
	links   []*gob.Encoder   // by rank
	sending sync.Mutex       // held to send on links
	memory  *cpu.Runtime     // of all ranks; its owner closes it
	open    sync.WaitGroup   // number of open communicators
	arrived *sync.Cond       // signals a new frame; its lock guards frames
	frames  map[Slot][]frame // unused frames, the oldest first
}

// world returns the communicators of size ranks, with a connection between each pair.
func world(size int, memory *cpu.Runtime, connect func() (net.Conn, net.Conn)) (comms []comm.Communicator) {
	nodes := make([]*node, size)
	ranks := make([]int, size)
	for rank := range nodes {
		n := &node{
			links:   make([]*gob.Encoder, size),
			memory:  memory,
			arrived: sync.NewCond(&sync.Mutex{}),
			frames:  map[Slot][]frame{},
		}
		nodes[rank] = n
		ranks[rank] = rank
		comms = append(comms, n.communicator("world", rank, ranks))
		for peer, earlier := range nodes[:rank+1] {
			a, b := connect()
			n.links[peer] = gob.NewEncoder(a)
			earlier.links[rank] = gob.NewEncoder(b)
			go n.read(peer, a)
			go earlier.read(rank, b)
		}
		go func() {
			n.open.Wait()
			n.send(frame{Slot: Slot{From: rank, Op: comm.OpSync}, Cause: "it left the world"}, ranks...)
		}()
	}
	return comms
}

// read queues the frames of a peer until the peer leaves the world or is lost.
func (n *node) read(peer int, conn net.Conn) {
	defer conn.Close()
	for decoder, open := gob.NewDecoder(conn), true; open; {
		var f frame
		if err := decoder.Decode(&f); err != nil {
			f = frame{Slot: Slot{From: peer, Op: comm.OpSync}, Cause: err.Error()}
		}
		open = f.Slot.Communicator != ""
		n.arrived.L.Lock()
		n.frames[f.Slot] = append(n.frames[f.Slot], f)
		n.arrived.Broadcast()
		n.arrived.L.Unlock()
	}
}

func (n *node) send(f frame, to ...int) {
	n.sending.Lock()
	defer n.sending.Unlock()
	for _, rank := range to {
		n.links[rank].Encode(f) // read notices a lost connection
	}
}

// worker is a rank of a communicator. It sends each call, with the bytes for the receiver, to the ranks that take
// part: to all for a collective, to the other end for a message. Then it waits for their calls, so every rank
// compares the same calls before it writes memory.
type worker struct {
	*node
	id    string // of the communicator, the same on all its ranks
	rank  int    // in the communicator
	ranks []int  // in the world

	busy sync.Mutex   // held by Work and Collective; guards done
	done map[Slot]int // number of completed calls
}

func (n *node) communicator(id string, rank int, ranks []int) comm.Communicator {
	n.open.Add(1)
	w := &worker{
		node:  n,
		id:    id,
		rank:  rank,
		ranks: ranks,
		done:  map[Slot]int{},
	}
	return backend.NewSerial(
		&backend.Check{
			Backend:   "wire",
			Rank:      rank,
			WorldSize: len(ranks),
		},
		w,
	)
}

// Leave implements backend.Worker.
func (w *worker) Leave(_ context.Context, cause error) {
	bye := frame{
		Slot:  Slot{w.id, w.rank, comm.OpSync, 0},
		Cause: cmp.Or(cause, comm.ErrClosed).Error(),
	}
	w.send(bye, w.ranks[w.rank]) // ends Work and Collective
	w.busy.Lock()
	defer w.busy.Unlock()
	bye.Done = w.done
	w.send(bye, w.ranks...)
	w.open.Done()
}

// Collective implements backend.Worker.
func (w *worker) Collective(wait comm.Wait) (comm.Communicator, error) {
	splits, err := w.do([]comm.Call{{Op: wait.Op}}, wait)
	if err != nil || wait.Op != comm.OpSplit {
		return nil, err
	}
	for _, group := range backend.SplitGroups(splits) {
		if rank := slices.Index(group, w.rank); rank >= 0 {
			for i := range group {
				group[i] = w.ranks[group[i]]
			}
			id := fmt.Sprint(w.id, "/", w.done[Slot{w.id, w.rank, comm.OpBarrier, 0}], ".", wait.Color)
			return w.communicator(id, rank, group), nil
		}
	}
	return nil, nil
}

// Work implements backend.Worker.
func (w *worker) Work(calls []comm.Call) error {
	_, err := w.do(calls, comm.Wait{})
	return err
}

// do sends all calls before it waits for one. It returns the peers' waits that accompany the last call.
func (w *worker) do(calls []comm.Call, wait comm.Wait) (waits []comm.Wait, err error) {
	w.busy.Lock()
	defer w.busy.Unlock()
	for i := range calls {
		for _, slot := range w.slots(&calls[i]) {
			err = cmp.Or(err, w.post(&calls[i], wait, slot))
		}
	}
	for i := 0; i < len(calls) && err == nil; i++ {
		waits, err = w.finish(&calls[i])
	}
	return waits, err
}

// slots returns the queues in which a call finds the frames of the ranks that take part.
func (w *worker) slots(c *comm.Call) (slots []Slot) {
	if c.Op.Message() {
		return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag}}
	}
	for rank := range w.ranks {
		slots = append(slots, Slot{w.id, rank, comm.OpBarrier, 0})
	}
	return slots
}

// reverse returns the queue in which a slot's rank finds this rank's frames for the same calls.
func (w *worker) reverse(slot Slot) Slot {
	slot.From = w.rank
	if slot.Op.Message() {
		slot.Op = comm.OpSend + comm.OpRecv - slot.Op
	}
	return slot
}

// post sends a call to the rank of one of its slots.
func (w *worker) post(c *comm.Call, wait comm.Wait, slot Slot) (err error) {
	f := frame{
		Slot: w.reverse(slot),
		Call: *c,
		Wait: wait,
	}
	if address, bytes, ok := c.SendPart(w.rank, slot.From); ok {
		f.Data = make([]byte, bytes)
		err = w.memory.CopyOut(f.Data, address)
	}
	w.send(f, w.ranks[slot.From])
	return err
}

// await removes the ranks' frames for a call from its slots. Results are indexed by rank.
func (w *worker) await(c *comm.Call) (calls []comm.Call, waits []comm.Wait, data [][]byte, err error) {
	w.arrived.L.Lock()
	defer w.arrived.L.Unlock()
	slots := w.slots(c)
	missing := func(slot Slot) bool { return len(w.frames[slot]) == 0 }
	for err = w.bye(slots); err == nil && slices.ContainsFunc(slots, missing); err = w.bye(slots) {
		w.arrived.Wait()
	}
	if err != nil {
		return nil, nil, nil, err
	}
	calls = make([]comm.Call, len(w.ranks))
	waits = make([]comm.Wait, len(w.ranks))
	data = make([][]byte, len(w.ranks))
	for _, slot := range slots {
		f := w.frames[slot][0]
		calls[slot.From] = f.Call
		waits[slot.From] = f.Wait
		data[slot.From] = f.Data
		w.frames[slot] = w.frames[slot][1:]
		w.done[slot]++ // also if ranks disagree: the others continue and find the same error
	}
	return calls, waits, data, nil
}

// bye returns an error if this rank has left, or the error of a peer that left before completing its next call in a
// slot.
func (w *worker) bye(slots []Slot) error {
	for _, slot := range append(slots, Slot{From: w.rank}) {
		its := Slot{w.id, slot.From, comm.OpSync, 0}
		world := Slot{"", w.ranks[slot.From], comm.OpSync, 0}
		byes := slices.Concat(w.frames[its], w.frames[world])
		if len(byes) > 0 && byes[0].Done[w.reverse(slot)] <= w.done[slot] {
			return fmt.Errorf("%w: rank %d: %s", comm.ErrPeerFailed, slot.From, byes[0].Cause)
		}
	}
	return nil
}

// finish compares the calls of the peers and moves their data into place.
func (w *worker) finish(c *comm.Call) (waits []comm.Wait, err error) {
	calls, waits, data, err := w.await(c)
	if err == nil && c.Op.Message() {
		err = backend.AgreeOnMessage(w.rank, c, c.Peer, &calls[c.Peer])
	} else if err == nil {
		err = backend.Agree(calls)
	}
	parts := make([]uintptr, len(data))
	for rank, part := range data {
		address, bytes, ok := c.RecvPart(w.rank, rank)
		if ok && err == nil && c.Op.Reduces() {
			address, err = w.memory.Allocate(bytes)
			defer w.memory.Deallocate(address)
			parts[rank] = address
		}
		if ok && err == nil {
			err = w.memory.CopyIn(address, part)
		}
	}
	if result, bytes, ok := c.RecvPart(w.rank, w.rank); ok && err == nil && c.Op.Reduces() {
		err = w.memory.Reduce(
			[]uintptr{result},
			parts,
			bytes/c.DType.Size(),
			c.DType,
			c.Reduce,
		)
	}
	return waits, err
}
