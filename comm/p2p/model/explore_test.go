package model

import (
	"fmt"
	"slices"
	"strings"
)

type opcode uint8

const (
	load   opcode = iota // dst = [loc]; with a condition: wait until it holds
	store                // [loc] = val
	atomic               // dst = [loc]; [loc] = val, with dst the old value; if cond holds of it
	fenced
	signals
	waits  // until this number have signalled
	look   // a load whose value decides nothing: judged when the execution is complete
	assign // dst = val
	branch // to another instruction, if cond holds
	assert // cond
)

// instr is one instruction of a thread. The functions are given its registers.
type instr struct {
	op    opcode
	order order
	scope scope
	loc   int
	at    func(r []uint64) int // unless nil: the location, one of locs
	locs  []int
	val   func(r []uint64) uint64
	cond  func(r []uint64, v uint64) bool
	uses  []int // registers
	dst   int
	n     int  // of waits: how many signals
	free  bool // of signals: they order nothing
	jump  int
	text  string
	or    func(loc int, v uint64) bool // unless nil, of a wait: writes that end it as well, in other executions
}

// program is what the checker explores: threads, and the first values of locations.
type program struct {
	places    []place
	code      [][]instr
	names     []string // of locations
	first     map[int]uint64
	registers int
	buffers   bool // loads may read from what is written later
}

// loc returns the location of that name.
func (p *program) loc(format string, args ...any) int {
	name := fmt.Sprintf(format, args...)
	if i := slices.Index(p.names, name); i >= 0 {
		return i
	}
	p.names = append(p.names, name)
	return len(p.names) - 1
}

func (p *program) thread(at place) int {
	p.places = append(p.places, at)
	p.code = append(p.code, nil)
	return len(p.places) - 1
}

func (p *program) emit(t int, i instr) { p.code[t] = append(p.code[t], i) }

// task is where a thread of a state is.
type task struct {
	pc      int
	regs    []uint64
	pending []int // by register: the load that has no value yet, none
	asleep  bool  // the load at pc reads nothing that was written so far
	known   int   // 0, or one more than the accesses of the location that it does not read
}

// state is an execution that goes on.
type state struct {
	*graph
	tasks []task
	late  []late
}

// late is a load that reads from what is written later.
type late struct{ event, known, task, reg int }

func (s *state) copy() *state {
	c := &state{graph: s.graph.copy(), tasks: slices.Clone(s.tasks), late: slices.Clone(s.late)}
	for i := range c.tasks {
		c.tasks[i].regs = slices.Clone(c.tasks[i].regs)
		c.tasks[i].pending = slices.Clone(c.tasks[i].pending)
	}
	return c
}

// violation is what an execution does that it should not.
type violation struct {
	what string
	s    *state
}

// explorer goes through all executions of a program, each once.
type explorer struct {
	*program
	later    [][]set // by thread and instruction: the locations that may be written from there on
	complete func(x *explorer, s *state) string
	bad      *violation // the first one
	ends     int        // complete executions
	leaves   int
	most     int // leaves, 0: any number
	over     bool
}

// explore returns the first violation that it finds: an assertion, a wait that may last forever, or an error of
// complete about an execution that has ended.
func (p *program) explore(most int, complete func(x *explorer, s *state) string) *explorer {
	x := &explorer{program: p, complete: complete, most: most}
	s := &state{graph: &graph{places: p.places, atLoc: make([][]int, len(p.names))}}
	for _, code := range p.code {
		may := make([]set, len(code)+1)
		for i := len(code) - 1; i >= 0; i-- {
			may[i] = may[i+1]
			if in := &code[i]; in.op == store || in.op == atomic {
				for _, l := range in.locs {
					may[i].add(l)
				}
				if in.at == nil {
					may[i].add(in.loc)
				}
			}
		}
		if slices.ContainsFunc(code, func(in instr) bool { return in.op == branch }) {
			for i := range may {
				may[i] = may[0]
			}
		}
		x.later = append(x.later, may)
		t := task{regs: make([]uint64, p.registers), pending: make([]int, p.registers)}
		for r := range t.pending {
			t.pending[r] = none
		}
		s.tasks = append(s.tasks, t)
	}
	x.run(s)
	return x
}

func (x *explorer) report(s *state, format string, args ...any) {
	if x.bad == nil {
		x.bad = &violation{fmt.Sprintf(format, args...), s}
	}
}

// ready returns the instruction of a thread that can be executed.
func (x *explorer) ready(s *state, t int) *instr {
	k := &s.tasks[t]
	if k.asleep || k.pc >= len(x.code[t]) {
		return nil
	}
	in := &x.code[t][k.pc]
	for _, r := range in.uses {
		if k.pending[r] != none {
			return nil
		}
	}
	if in.op == waits {
		n := 0
		for i := range s.events {
			if e := &s.events[i]; e.kind == signal && e.loc == in.loc {
				n++
			}
		}
		if n < in.n {
			return nil
		}
	}
	return in
}

// run goes through what a state can become.
func (x *explorer) run(s *state) {
	for x.bad == nil && !x.over {
		moved := false
		branching := none
		for t := range s.tasks {
			for in := x.ready(s, t); in != nil; in = x.ready(s, t) {
				if in.op == load || in.op == atomic {
					if branching == none {
						branching = t
					}
					break
				}
				moved = true
				if !x.step(s, t, in) {
					return
				}
				if len(s.late) > 0 && x.resolve(s) {
					return
				}
			}
		}
		if moved {
			continue
		}
		if branching == none {
			x.leaf(s)
			return
		}
		x.choose(s, branching)
		return
	}
}

func (x *explorer) location(in *instr, regs []uint64) int {
	if in.at != nil {
		return in.at(regs)
	}
	return in.loc
}

// step executes an instruction that reads nothing.
func (x *explorer) step(s *state, t int, in *instr) bool {
	k := &s.tasks[t]
	k.pc++
	e := event{thread: t, order: in.order, scope: in.scope, from: unread, other: none}
	switch in.op {
	case store:
		e.kind, e.loc, e.val = write, x.location(in, k.regs), in.val(k.regs)
		s.append(e)
		x.wake(s, e.loc, e.val)
	case fenced:
		e.kind = fence
		if in.order == sequential {
			x.place(s, e)
			return false
		}
		s.append(e)
	case signals, waits:
		e.kind, e.loc, e.free = signal, in.loc, in.free
		if in.op == waits {
			e.kind = wait
		}
		s.append(e)
	case look:
		e.kind, e.loc, e.val = read, x.location(in, k.regs), in.val(k.regs) // what it should read
		s.append(e)
	case assign:
		k.regs[in.dst] = in.val(k.regs)
	case branch:
		if in.cond(k.regs, 0) {
			k.pc = in.jump
		}
	case assert:
		if !in.cond(k.regs, 0) {
			x.report(s, "%s", in.text)
			return false
		}
	}
	return true
}

// place appends a fence.sc at each place of Fence-SC order.
func (x *explorer) place(s *state, e event) {
	for i := len(s.fences); i >= 0; i-- {
		c := s.copy()
		f := c.append(e)
		c.fences = slices.Insert(c.fences[:len(c.fences)-1], i, f)
		if i == len(s.fences) || c.close() && x.coherent(c) {
			x.run(c)
		}
	}
}

func (x *explorer) coherent(s *state) bool {
	for l := range s.atLoc {
		if !s.consistent(l, none) {
			return false
		}
	}
	return true
}

// wake lets loads that wait for a value see the one that is written now.
func (x *explorer) wake(s *state, loc int, val uint64) {
	for t := range s.tasks {
		k := &s.tasks[t]
		if !k.asleep {
			continue
		}
		in := &x.code[t][k.pc]
		if x.location(in, k.regs) == loc && (in.op == atomic || in.cond == nil || in.cond(k.regs, val)) {
			k.asleep = false
		}
	}
}

// choose lets a thread's load read each write that it can, and then none so far.
func (x *explorer) choose(s *state, t int) {
	in := &x.code[t][s.tasks[t].pc]
	loc := x.location(in, s.tasks[t].regs)
	all := s.atLoc[loc]
	from := func(w int, v uint64) {
		if in.op == load && in.cond != nil && !in.cond(s.tasks[t].regs, v) {
			return
		}
		c := s.copy()
		k := &c.tasks[t]
		e := event{kind: read, thread: t, order: in.order, scope: in.scope, loc: loc, from: w, other: none, val: v}
		writes := false
		if in.op == atomic {
			writes = in.cond == nil || in.cond(k.regs, v)
			if e.order == release || e.order == acquireRelease && !writes {
				e.order = relaxed
			} else if e.order == acquireRelease {
				e.order = acquire
			}
		}
		r := c.append(e)
		k.regs[in.dst], k.pending[in.dst] = v, none
		k.pc++
		k.known = 0
		if writes {
			e.kind, e.from, e.other, e.val = write, unread, r, in.val(k.regs)
			e.order = in.order
			if in.order == acquire {
				e.order = relaxed
			} else if in.order == acquireRelease {
				e.order = release
			}
			c.events[r].other = c.append(e)
			x.wake(c, loc, e.val)
		}
		if !c.consistent(loc, none) {
			return
		}
		if len(c.late) == 0 || !x.resolve(c) {
			x.run(c)
		}
	}
	if s.tasks[t].known == 0 {
		from(initial, x.first[loc])
	}
	for _, w := range all[max(s.tasks[t].known-1, 0):] {
		if s.events[w].kind == write {
			from(w, s.events[w].val)
		}
	}
	if x.bad != nil || x.over {
		return
	}
	k := &s.tasks[t]
	if x.buffers && in.op == load && in.cond == nil {
		// It reads from a later write; what does not depend on it goes on.
		r := s.append(event{kind: read, thread: t, order: in.order, scope: in.scope, loc: loc, from: unread, other: none})
		s.late = append(s.late, late{r, len(s.atLoc[loc]), t, in.dst})
		k.pending[in.dst] = r
		k.pc++
		k.known = 0
		x.run(s)
		return
	}
	if !x.written(s, t, loc) && !(in.op == load && in.cond != nil && x.starves(s, loc, []int{t})) {
		return
	}
	k.asleep, k.known = true, len(all)+1
	x.run(s)
}

// written reports whether another thread may still write a location.
func (x *explorer) written(s *state, t, loc int) bool {
	for o := range s.tasks {
		if o != t && x.later[o][min(s.tasks[o].pc, len(x.code[o]))].has(loc) {
			return true
		}
	}
	return false
}

// starves reports whether the last value of a location may be one that none of the threads
// that wait at it can go on with.
func (x *explorer) starves(s *state, loc int, waiting []int) bool {
	fails := func(v uint64) bool {
		for _, t := range waiting {
			in := &x.code[t][s.tasks[t].pc]
			if in.op != load || in.cond == nil || in.cond(s.tasks[t].regs, v) {
				return false
			}
		}
		return true
	}
	last := true
	for _, w := range s.atLoc[loc] {
		if s.events[w].kind == write {
			last = false
			if fails(s.events[w].val) && s.consistent(loc, w) {
				return true
			}
		}
	}
	return last && fails(x.first[loc])
}

// resolve lets late loads read from the writes that are new to them. True: it has gone on with
// all that can become of the state.
func (x *explorer) resolve(s *state) bool {
	for i := range s.late {
		l := &s.late[i]
		r := s.events[l.event]
		all := s.atLoc[r.loc]
		for l.known < len(all) {
			w := all[l.known]
			l.known++
			if s.events[w].kind != write || w == r.other {
				continue
			}
			c := s.copy()
			c.events[l.event].from, c.events[l.event].val = w, s.events[w].val
			k := &c.tasks[l.task]
			if k.pending[l.reg] == l.event {
				k.regs[l.reg], k.pending[l.reg] = s.events[w].val, none
			}
			c.late = slices.Delete(c.late, i, i+1)
			if c.close() && x.coherent(c) && !(len(c.late) > 0 && x.resolve(c)) {
				x.run(c)
			}
			if !x.resolve(s) {
				x.run(s)
			}
			return true
		}
	}
	return false
}

// leaf judges a state in which nothing can go on.
func (x *explorer) leaf(s *state) {
	x.leaves++
	if x.most > 0 && x.leaves > x.most {
		x.over = true
		return
	}
	if len(s.late) > 0 {
		return // the executions in which these loads have values are others
	}
	waiting := map[int][]int{}
	done := true
	for t := range s.tasks {
		k := &s.tasks[t]
		done = done && k.pc >= len(x.code[t])
		if k.asleep {
			in := &x.code[t][k.pc]
			if in.or != nil && slices.ContainsFunc(s.events, func(e event) bool { return e.kind == write && in.or(e.loc, e.val) }) {
				return
			}
			l := x.location(in, k.regs)
			waiting[l] = append(waiting[l], t)
		}
	}
	if done {
		x.ends++
		if what := x.complete(x, s); what != "" {
			x.report(s, "%s", what)
		}
		return
	}
	for l, ts := range waiting {
		if !x.starves(s, l, ts) {
			return // a fair scheduler lets one of them go on
		}
	}
	what := []string{}
	for l, ts := range waiting {
		what = append(what, fmt.Sprintf("threads %v wait at %s", ts, x.names[l]))
	}
	slices.Sort(what)
	x.report(s, "nothing goes on: %s", strings.Join(what, ", "))
}

// unexpected returns a look that may read another value than it should, "" if none may. Each is
// judged without the others: fewer reads leave more executions consistent.
func (x *explorer) unexpected(s *state) string {
	for r := range s.events {
		e := &s.events[r]
		if e.kind != read || e.from != unread {
			continue
		}
		c := s.graph.copy()
		possible := false
		for _, w := range append([]int{initial}, s.atLoc[e.loc]...) {
			val := x.first[e.loc]
			if w != initial {
				if s.events[w].kind != write {
					continue
				}
				val = s.events[w].val
			}
			if val == e.val && possible {
				continue
			}
			c.events[r].from = w
			if e.order != weak && !c.close() || !c.consistent(e.loc, none) {
				continue
			}
			if val != e.val {
				return fmt.Sprintf("thread %d reads %#x from %s, not %#x", e.thread, val, x.names[e.loc], e.val)
			}
			possible = true
		}
		if !possible {
			return fmt.Sprintf("thread %d cannot read %#x from %s", e.thread, e.val, x.names[e.loc])
		}
	}
	return ""
}

func (v *violation) String() string {
	var b strings.Builder
	b.WriteString(v.what)
	for i, e := range v.s.events {
		fmt.Fprintf(&b, "\n%4d thread %d %v %v order %d scope %d loc %d val %#x from %d", i, e.thread, v.s.places[e.thread],
			[]string{"read", "write", "fence", "signal", "wait"}[e.kind], e.order, e.scope, e.loc, e.val, e.from)
	}
	return b.String()
}
