package main

import (
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
)

// progress does everything that can be done now. Each rank works on the group in
// front of its queue.
func (w *world) progress() {
	for w.failure == nil {
		for _, c := range w.ranks {
			for len(c.queue) > 0 && !slices.ContainsFunc(c.queue[0], func(p *pending) bool { return !p.done }) {
				c.queue = c.queue[1:]
				w.announce()
			}
		}
		if !w.collective() && !w.message() {
			break
		}
	}
	for _, c := range w.ranks {
		for r, gone := range w.ranks {
			if gone.closed && c.next(func(p *pending) bool { return !p.Op.Message() || p.Peer == r }) != nil {
				w.fail(fmt.Errorf("%w: rank %d has left", comm.ErrPeerFailed, r))
			}
		}
	}
}

// next is the first call of the front group that is not done and matches.
func (c *Communicator) next(match func(p *pending) bool) *pending {
	if len(c.queue) == 0 {
		return nil
	}
	for _, p := range c.queue[0] {
		if !p.done && match(p) {
			return p
		}
	}
	return nil
}

// message does one send whose receive is there.
func (w *world) message() bool {
	for src, c := range w.ranks {
		for dest, d := range w.ranks {
			for _, tag := range tags(c) {
				s := c.next(func(p *pending) bool { return p.Op == comm.OpSend && p.Peer == dest && p.Tag == tag })
				r := d.next(func(p *pending) bool { return p.Op == comm.OpRecv && p.Peer == src && p.Tag == tag })
				if s == nil || r == nil {
					continue
				}
				if s.Count != r.Count || s.DType != r.DType {
					w.fail(fmt.Errorf("%w: rank %d: %v; rank %d: %v", comm.ErrMismatch, src, s.Call, dest, r.Call))
					return false
				}
				w.copy(r.Recv, s.Send, s.Bytes())
				s.done, r.done = true, true
				return true
			}
		}
	}
	return false
}

// tags lists the tags of what a rank has to send.
func tags(c *Communicator) []uint32 {
	var all []uint32
	c.next(func(p *pending) bool {
		if p.Op == comm.OpSend {
			all = append(all, p.Tag)
		}
		return false
	})
	return all
}

// collective does the collective that every rank has come to, if there is one.
func (w *world) collective() bool {
	calls := make([]*pending, len(w.ranks))
	for r, c := range w.ranks {
		if calls[r] = c.next(func(p *pending) bool { return !p.Op.Message() }); calls[r] == nil {
			return false
		}
	}
	for r, p := range calls {
		first := calls[0]
		if p.String() != first.String() || p.Op == comm.OpAllGatherV && !slices.Equal(p.RecvCounts, first.RecvCounts) {
			w.fail(fmt.Errorf("%w: rank 0: %v %v; rank %d: %v %v", comm.ErrMismatch, first.Call, first.RecvCounts, r, p.Call, p.RecvCounts))
			return false
		}
	}
	if calls[0].Op == comm.OpSplit {
		w.split(calls)
	} else if calls[0].Op.MovesData() {
		w.perform(calls)
	}
	for _, p := range calls {
		p.done = true
	}
	return w.failure == nil
}

// perform moves what a collective moves: a block from each rank to each, or the
// reduction of the blocks.
func (w *world) perform(calls []*pending) {
	root := calls[0].Peer
	for to, p := range calls {
		if p.Op.HasRoot() && p.Op != comm.OpBroadcast && p.Op != comm.OpScatter && to != root {
			continue
		}
		size := p.DType.Size()
		var sources []uintptr
		for from, q := range calls {
			send, recv, n := 0, 0, p.Count // where the block is, and its length, in elements
			switch p.Op {
			case comm.OpAllGather, comm.OpGather:
				recv = from * n
			case comm.OpAllToAll:
				send, recv = to*n, from*n
			case comm.OpScatter, comm.OpReduceScatter:
				send = to * n
			case comm.OpAllGatherV:
				recv, n = p.RecvDispls[from], p.RecvCounts[from]
			case comm.OpAllToAllV:
				send, recv, n = q.SendDispls[to], p.RecvDispls[from], p.RecvCounts[from]
				if sent := q.SendCounts[to]; sent != n {
					w.fail(fmt.Errorf("%w: rank %d sends %d elements, rank %d receives %d", comm.ErrMismatch, from, sent, to, n))
					return
				}
			}
			source := q.Send + uintptr(send*size)
			sources = append(sources, source)
			if !p.Op.Reduces() && (from == root || p.Op != comm.OpBroadcast && p.Op != comm.OpScatter) {
				w.copy(p.Recv+uintptr(recv*size), source, n*size)
			}
		}
		if p.Op.Reduces() && (p.Op != comm.OpAllReduce || to == 0) {
			w.fail(w.memory.Reduce(destinations(calls, to), sources, p.Count, p.DType, p.Reduce))
		}
	}
}

// destinations are where the reduction that rank to takes part in ends. That of
// an allreduce ends everywhere at once, as it may be in place.
func destinations(calls []*pending, to int) []uintptr {
	if calls[to].Op != comm.OpAllReduce {
		return []uintptr{calls[to].Recv}
	}
	var all []uintptr
	for _, p := range calls {
		all = append(all, p.Recv)
	}
	return all
}

func (w *world) copy(dst, src uintptr, bytes int) {
	if dst != src && bytes > 0 {
		w.fail(w.memory.Copy(dst, src, bytes))
	}
}

// split makes a world for each color.
func (w *world) split(calls []*pending) {
	members := map[int][]*pending{}
	for _, p := range calls {
		if p.color >= 0 {
			members[p.color] = append(members[p.color], p)
		}
	}
	for _, group := range members {
		slices.SortStableFunc(group, func(a, b *pending) int { return a.key - b.key })
		for i, c := range newWorld(len(group), w.memory).ranks {
			group[i].child = c
		}
	}
}
