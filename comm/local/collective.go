package local

import (
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/fixedpoint"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/reductions"
)

// agree checks that all ranks called the same thing as that collective, before any of their
// memory is touched. Calls without lists take a look at each.
func (w *world) agree(s *slot, seq uint64) error {
	agreed := true
	for r := range s.calls {
		agreed = agreed && s.calls[0].agrees(&s.calls[r]) && !s.calls[r].listed
	}
	if agreed {
		return s.agreeOnSums()
	}
	for r := range s.calls {
		c := s.calls[r].call()
		if s.calls[r].listed {
			s.extras[r].give(&c, w.size)
		}
		w.agreeing[r] = c
	}
	err := backend.Agree(w.agreeing)
	if err != nil {
		return fmt.Errorf("%w (collective #%d)", err, seq+1)
	}
	return s.agreeOnSums()
}

// prepare cuts the work of the slot's collective for the workers of its world.
func (s *slot) prepare(w *world) {
	c := &s.calls[0]
	n := len(s.calls)
	p := &s.plan
	p.size = c.dt.Size()
	p.row = c.count
	p.uneven = false
	block := max(blockBytes/p.size, 1)
	rows := 1
	sources := 1
	destinations := 1
	switch c.op {
	case comm.OpAllReduce:
		sources = n
		destinations = n
		if c.reduce == reductions.FixedPoint {
			block = fixedpoint.Block
			p.unevenRows(w.ends)
			s.addSums()
		}
	case comm.OpBroadcast:
		destinations = n
	case comm.OpReduce:
		sources = n
	case comm.OpAllGather:
		rows = n
		destinations = n
	case comm.OpAllGatherV:
		destinations = n
		p.unevenRows(w.ends)
		p.addRows(s.extras[0].list(recvCounts, n))
	case comm.OpReduceScatter:
		rows = n
		sources = n
	case comm.OpAllToAll:
		rows = n * n
	case comm.OpAllToAllV:
		p.unevenRows(w.ends)
		for r := range s.extras {
			p.addRows(s.extras[r].list(recvCounts, n))
		}
	case comm.OpGather, comm.OpScatter:
		rows = n
	}
	if p.uneven {
		w.ends = p.ends
	} else {
		p.total = rows * p.row
	}
	p.cut(sources, destinations, block, w.workers, w.inline)
	if c.op == comm.OpAllReduce && c.reduce != reductions.FixedPoint && s.inPlace() {
		p.streaming = false // what is written was just read, and is in the cache
	}
}

// inPlace reports whether all ranks' results go where their data is.
func (s *slot) inPlace() bool {
	for r := range s.calls {
		if s.calls[r].send != s.calls[r].recv {
			return false
		}
	}
	return true
}

// execute does one chunk of a collective.
func (s *slot) execute(chunk int, w *scratch) {
	p := &s.plan
	next := chunk * p.step
	end := min(next+p.step, p.total)
	for next < end {
		row, rowStart, rowEnd := p.locate(next)
		n := min(rowEnd, end) - next
		s.move(row, next-rowStart, n, w)
		next += n
	}
}

// move does n elements of a row, from element offset on.
func (s *slot) move(row, offset, n int, w *scratch) {
	c := &s.calls[0]
	ranks := len(s.calls)
	size := s.plan.size
	column := uintptr(offset * size)            // within the row
	rowAt := uintptr(row*c.count*size) + column // within a buffer of WorldSize rows
	root := &s.calls[c.peer]
	dst := w.dst[:0]
	var src uintptr
	switch c.op {
	case comm.OpAllReduce:
		if c.reduce == reductions.FixedPoint {
			s.sumFixed(row, offset, n, w)
			return
		}
		for r := range s.calls {
			dst = append(dst, s.calls[r].recv+column)
		}
		s.combine(dst, column, n, w)
		return
	case comm.OpReduce:
		s.combine(append(dst, root.recv+column), column, n, w)
		return
	case comm.OpReduceScatter:
		s.combine(append(dst, s.calls[row].recv+column), rowAt, n, w)
		return
	case comm.OpBroadcast:
		src = root.send + column
		for r := range s.calls {
			dst = append(dst, s.calls[r].recv+column)
		}
	case comm.OpAllGather:
		src = s.calls[row].send + column
		for r := range s.calls {
			dst = append(dst, s.calls[r].recv+rowAt)
		}
	case comm.OpAllGatherV:
		src = s.calls[row].send + column
		for r := range s.calls {
			displ := s.extras[r].list(recvDispls, ranks)[row]
			dst = append(dst, s.calls[r].recv+uintptr(displ*size)+column)
		}
	case comm.OpAllToAll:
		to := row / ranks
		from := row % ranks
		src = s.calls[from].send + uintptr(to*c.count*size) + column
		dst = append(dst, s.calls[to].recv+uintptr(from*c.count*size)+column)
	case comm.OpAllToAllV:
		to := row / ranks
		from := row % ranks
		sendAt := s.extras[from].list(sendDispls, ranks)[to]
		recvAt := s.extras[to].list(recvDispls, ranks)[from]
		src = s.calls[from].send + uintptr(sendAt*size) + column
		dst = append(dst, s.calls[to].recv+uintptr(recvAt*size)+column)
	case comm.OpGather:
		src = s.calls[row].send + column
		dst = append(dst, root.recv+rowAt)
	case comm.OpScatter:
		src = root.send + rowAt
		dst = append(dst, s.calls[row].recv+column)
	}
	for _, d := range dst {
		if d != src { // in place
			hostops.Copy(d, src, n*size, s.plan.streaming)
		}
	}
}

// combine reduces n elements, which lie at the same place of every rank's
// send buffer, into all of dst.
func (s *slot) combine(dst []uintptr, column uintptr, n int, w *scratch) {
	src := w.src[:0]
	for r := range s.calls {
		src = append(src, s.calls[r].send+column)
	}
	c := &s.calls[0]
	hostops.Reduce(dst, src, n, c.dt, c.reduce, s.plan.streaming)
}

// takeScratch returns working memory that nobody else uses. It is kept for
// the next time, so that a rank whose goroutines wait one at a time allocates
// it once.
func (e *endpoint) takeScratch() *scratch {
	if s := e.scratch.Swap(nil); s != nil {
		return s
	}
	n := e.world.size
	return &scratch{
		src:  make([]uintptr, 0, n),
		dst:  make([]uintptr, 0, n),
		sums: make([]*fixedpoint.Sum, 0, n),
	}
}

func (e *endpoint) returnScratch(s *scratch) { e.scratch.Store(s) }

// split makes the worlds that the ranks of a Split asked for.
func (w *world) split(s *slot) {
	splits := make([]comm.Wait, w.size)
	for r := range s.extras {
		splits[r] = s.extras[r].split.Wait
	}
	for _, ranks := range backend.SplitGroups(splits) {
		child := newWorld(len(ranks), w.seats) // as many ranks as before
		child.run = w.run
		for i, r := range ranks {
			if e := child.ranks[i]; !s.extras[r].split.child.CompareAndSwap(nil, e) {
				s.extras[r].split.forsake(e, w.failure.Load().errorFor(w.ranks[r]))
			}
		}
	}
	for r := range s.extras {
		s.extras[r].split = nil
	}
}
