package local

import (
	"fmt"
	"strings"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
)

// kind is what a rank called.
type kind uint8

const (
	barrier kind = iota
	split
	allReduce
	broadcast
	reduce
	allGather
	allGatherV
	reduceScatter
	allToAll
	allToAllV
	gather
	scatter
	send
	recv
)

// kindInfo is what the package knows of one kind.
type kindInfo struct {
	name             string
	data             bool // has a count and a type
	reduces, hasRoot bool
}

var kinds = [...]kindInfo{
	barrier:       {name: "barrier"},
	split:         {name: "split"},
	allReduce:     {name: "allreduce", data: true, reduces: true},
	broadcast:     {name: "broadcast", data: true, hasRoot: true},
	reduce:        {name: "reduce", data: true, reduces: true, hasRoot: true},
	allGather:     {name: "allgather", data: true},
	allGatherV:    {name: "allgatherv"},
	reduceScatter: {name: "reducescatter", data: true, reduces: true},
	allToAll:      {name: "alltoall", data: true},
	allToAllV:     {name: "alltoallv"},
	gather:        {name: "gather", data: true, hasRoot: true},
	scatter:       {name: "scatter", data: true, hasRoot: true},
	send:          {name: "send", data: true},
	recv:          {name: "recv", data: true},
}

func (k kind) isMessage() bool { return k >= send }

// call is one rank's arguments of an operation. It is 32 bytes, so that those
// of two ranks share a cache line.
type call struct {
	send, recv uintptr
	count      int
	root       int32
	kind       kind
	dt         dtype.DType
	op         comm.ReduceOp
}

// agrees reports whether two ranks called the same collective.
func (c *call) agrees(o *call) bool {
	return c.count == o.count && c.root == o.root && c.kind == o.kind && c.dt == o.dt && c.op == o.op
}

// String describes the call as errors do, such as "allreduce of 4 f32, sum".
func (c *call) String() string {
	info := &kinds[c.kind]
	var b strings.Builder
	b.WriteString(info.name)
	switch {
	case info.data:
		fmt.Fprintf(&b, " of %d %v", c.count, c.dt)
	case c.dt.Valid():
		fmt.Fprintf(&b, " of %v", c.dt)
	}
	if info.reduces {
		fmt.Fprintf(&b, ", %v", c.op)
	}
	if info.hasRoot {
		fmt.Fprintf(&b, ", root %d", c.root)
	}
	return b.String()
}

// details are arguments that only some collectives have.
type details struct {
	lists [4][]int // of a V-collective: see the constants below
	split *splitCall
}

// The lists of details and extra. AllGatherV has the first two only.
const (
	sendCounts = iota
	sendDispls
	recvCounts
	recvDispls
)

// extra holds a copy of details: the lists one after the other. It keeps its
// memory when it is used again.
type extra struct {
	ints  []int
	split *splitCall
}

func (x *extra) set(d *details) {
	x.ints = x.ints[:0]
	for _, l := range d.lists {
		x.ints = append(x.ints, l...)
	}
	x.split = d.split
}

// list returns one of the lists, of n entries each.
func (x *extra) list(which, n int) []int { return x.ints[which*n:][:n] }

// agree checks that all ranks called the same thing, before any of their
// memory is touched.
func (s *slot) agree() error {
	first := &s.calls[0]
	for r := range s.calls {
		if !first.agrees(&s.calls[r]) {
			return s.disagreement()
		}
	}
	switch first.kind {
	case allGatherV:
		return s.agreeOnCounts()
	case allToAllV:
		return s.agreeOnMatrix()
	}
	return nil
}

// disagreement names the ranks behind each variant of the call.
func (s *slot) disagreement() error {
	var variants []string
	callers := map[string][]int{}
	for r := range s.calls {
		text := s.calls[r].String()
		if callers[text] == nil {
			variants = append(variants, text)
		}
		callers[text] = append(callers[text], r)
	}
	for i, text := range variants {
		variants[i] = fmt.Sprintf("%s called %s", ranksText(callers[text]), text)
	}
	return fmt.Errorf("%w: %s", comm.ErrMismatch, strings.Join(variants, ", "))
}

func (s *slot) agreeOnCounts() error {
	n := len(s.calls)
	want := s.extras[0].list(sendCounts, n)
	for r := range s.extras {
		for i, got := range s.extras[r].list(sendCounts, n) {
			if got != want[i] {
				return fmt.Errorf("%w: %v, where rank 0 passed counts[%d] = %d, rank %d passed %d",
					comm.ErrMismatch, &s.calls[0], i, want[i], r, got)
			}
		}
	}
	return nil
}

func (s *slot) agreeOnMatrix() error {
	n := len(s.calls)
	for from := range s.extras {
		for to, sent := range s.extras[from].list(sendCounts, n) {
			if want := s.extras[to].list(recvCounts, n)[from]; sent != want {
				return fmt.Errorf("%w: %v, where rank %d sends %d elements to rank %d, which receives %d",
					comm.ErrMismatch, &s.calls[0], from, sent, to, want)
			}
		}
	}
	return nil
}

// ranksText returns "rank 3" or "ranks 0, 2, 3".
func ranksText(ranks []int) string {
	var b strings.Builder
	b.WriteString("rank")
	if len(ranks) > 1 {
		b.WriteString("s")
	}
	for i, r := range ranks {
		if i > 0 {
			b.WriteString(",")
		}
		fmt.Fprintf(&b, " %d", r)
	}
	return b.String()
}
