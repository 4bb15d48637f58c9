package local

import (
	"sort"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostops"
)

const (
	// inlineTraffic is the number of bytes read and written up to which a
	// collective is done by the last rank to arrive: handing a part of it to
	// another core would take longer.
	inlineTraffic = 64 << 10
	// chunkTraffic is the number of bytes read and written by one chunk: small
	// enough to balance the load and to stay in a core's cache, large enough
	// that claiming it costs nothing.
	chunkTraffic = 512 << 10
	// streamBytes is the size of the output, of all ranks together, from which
	// on stores bypass the caches: that of a large last-level cache, which has
	// to hold the inputs as well.
	streamBytes = 24 << 20
	// maxChunks is what a claim can count.
	maxChunks = 1<<16 - 1
	// blockElements is what chunks are a multiple of, so that their borders
	// fall on cache lines if the buffers do.
	blockElements = 64
)

// plan is how the work of a collective is cut. Work is a sequence of rows, one
// after the other: elements that share their sources and destinations. Chunks
// cut the whole sequence into equal parts.
type plan struct {
	size      int   // bytes per element
	row       int   // elements per row, where all are equal
	ends      []int // ends of the rows, where not
	uneven    bool
	total     int // elements
	step      int // elements per chunk
	chunks    int
	streaming bool
}

// prepare cuts the work of the slot's collective for that many workers.
func (s *slot) prepare(workers int) {
	c, n, p := &s.calls[0], len(s.calls), &s.plan
	p.size, p.row, p.uneven = c.dt.Size(), c.count, false
	rows, sources, destinations := 1, 1, 1
	switch c.op {
	case comm.OpAllReduce:
		sources, destinations = n, n
	case comm.OpBroadcast:
		destinations = n
	case comm.OpReduce:
		sources = n
	case comm.OpAllGather:
		rows, destinations = n, n
	case comm.OpAllGatherV:
		destinations = n
		p.unevenRows()
		p.addRows(s.extras[0].list(recvCounts, n))
	case comm.OpReduceScatter:
		rows, sources = n, n
	case comm.OpAllToAll:
		rows = n * n
	case comm.OpAllToAllV:
		p.unevenRows()
		for r := range s.extras {
			p.addRows(s.extras[r].list(recvCounts, n))
		}
	case comm.OpGather, comm.OpScatter:
		rows = n
	}
	if !p.uneven {
		p.total = rows * p.row
	}
	p.cut(sources, destinations, workers)
}

// unevenRows starts a list of rows of different lengths.
func (p *plan) unevenRows() {
	p.ends, p.uneven, p.total = p.ends[:0], true, 0
}

func (p *plan) addRows(lengths []int) {
	for _, l := range lengths {
		p.total += l
		p.ends = append(p.ends, p.total)
	}
}

// cut chooses the chunks for rows with that many sources and destinations.
func (p *plan) cut(sources, destinations, workers int) {
	bytes := p.total * p.size
	p.streaming = bytes*destinations >= streamBytes
	traffic := bytes * (sources + destinations)
	p.step, p.chunks = p.total, 1
	if p.total == 0 {
		p.chunks = 0
	}
	if traffic <= inlineTraffic || workers == 1 && traffic <= chunkTraffic {
		return
	}
	chunks := (traffic + chunkTraffic - 1) / chunkTraffic
	chunks = (chunks + workers - 1) / workers * workers // nobody waits for the last one
	chunks = min(chunks, maxChunks)
	p.step = (p.total + chunks - 1) / chunks
	p.step = (p.step + blockElements - 1) / blockElements * blockElements
	p.chunks = (p.total + p.step - 1) / p.step
}

// locate returns the row that element at of the whole sequence lies in, and
// where that row starts and ends.
func (p *plan) locate(at int) (row, start, end int) {
	if !p.uneven {
		row = at / p.row
		return row, row * p.row, (row + 1) * p.row
	}
	row = sort.SearchInts(p.ends, at+1)
	if row > 0 {
		start = p.ends[row-1]
	}
	return row, start, p.ends[row]
}

// scratch is working memory of one goroutine that executes chunks.
type scratch struct {
	src, dst []uintptr
}

// execute does one chunk of a collective.
func (s *slot) execute(chunk int, w *scratch) {
	p := &s.plan
	at := chunk * p.step
	end := min(at+p.step, p.total)
	for at < end {
		row, rowStart, rowEnd := p.locate(at)
		n := min(rowEnd, end) - at
		s.move(row, at-rowStart, n, w)
		at += n
	}
}

// move does n elements of a row, from element offset on.
func (s *slot) move(row, offset, n int, w *scratch) {
	c, ranks, size := &s.calls[0], len(s.calls), s.plan.size
	at := uintptr(offset * size)            // within the row
	rowAt := uintptr(row*c.count*size) + at // within a buffer of WorldSize rows
	root := &s.calls[c.peer]
	dst := w.dst[:0]
	var src uintptr
	switch c.op {
	case comm.OpAllReduce:
		for r := range s.calls {
			dst = append(dst, s.calls[r].recv+at)
		}
		s.combine(dst, at, n, w)
		return
	case comm.OpReduce:
		s.combine(append(dst, root.recv+at), at, n, w)
		return
	case comm.OpReduceScatter:
		s.combine(append(dst, s.calls[row].recv+at), rowAt, n, w)
		return
	case comm.OpBroadcast:
		src = root.send + at
		for r := range s.calls {
			dst = append(dst, s.calls[r].recv+at)
		}
	case comm.OpAllGather:
		src = s.calls[row].send + at
		for r := range s.calls {
			dst = append(dst, s.calls[r].recv+rowAt)
		}
	case comm.OpAllGatherV:
		src = s.calls[row].send + at
		for r := range s.calls {
			displ := s.extras[r].list(recvDispls, ranks)[row]
			dst = append(dst, s.calls[r].recv+uintptr(displ*size)+at)
		}
	case comm.OpAllToAll:
		to, from := row/ranks, row%ranks
		src = s.calls[from].send + uintptr(to*c.count*size) + at
		dst = append(dst, s.calls[to].recv+uintptr(from*c.count*size)+at)
	case comm.OpAllToAllV:
		to, from := row/ranks, row%ranks
		sendAt := s.extras[from].list(sendDispls, ranks)[to]
		recvAt := s.extras[to].list(recvDispls, ranks)[from]
		src = s.calls[from].send + uintptr(sendAt*size) + at
		dst = append(dst, s.calls[to].recv+uintptr(recvAt*size)+at)
	case comm.OpGather:
		src = s.calls[row].send + at
		dst = append(dst, root.recv+rowAt)
	case comm.OpScatter:
		src = root.send + rowAt
		dst = append(dst, s.calls[row].recv+at)
	}
	for _, d := range dst {
		if d != src { // in place
			hostops.Copy(d, src, n*size, s.plan.streaming)
		}
	}
}

// combine reduces n elements, which lie at the same place of every rank's
// send buffer, into all of dst.
func (s *slot) combine(dst []uintptr, at uintptr, n int, w *scratch) {
	src := w.src[:0]
	for r := range s.calls {
		src = append(src, s.calls[r].send+at)
	}
	c := &s.calls[0]
	hostops.Reduce(dst, src, n, c.dt, c.reduce, s.plan.streaming)
}
