package model

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

//go:embed testdata/litmus.txt
var litmusText string

// litmus is a test of the memory model: a program, and whether a result is allowed.
type litmus struct {
	program
	name      string
	allowed   bool
	result    [][]term // of which one is asked for
	registers map[string]int
}

// term is a condition of a result: a register of a thread, or the last value of a location
// (thread -1).
type term struct {
	thread, at int
	not        bool
	val        uint64
}

// parseLitmus reads a line: name | verdict | results | threads; see testdata/litmus.txt.
func parseLitmus(line string) (l *litmus, err error) {
	defer func() {
		if e := recover(); e != nil {
			err = fmt.Errorf("%s: %v", line, e)
		}
	}()
	parts := strings.Split(line, "|")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	l = &litmus{name: parts[0], allowed: parts[1] == "allowed", registers: map[string]int{}}
	l.first = map[int]uint64{}
	l.buffers = true
	l.program.registers = 16
	for _, field := range parts[3:] {
		at, code, _ := strings.Cut(field, ":")
		if at == "first" {
			for _, s := range strings.Fields(code) {
				name, v, _ := strings.Cut(s, "=")
				l.first[l.loc("%s", name)] = number(v)
			}
			continue
		}
		var p place
		if _, err := fmt.Sscanf(at, "%d.%d", &p.gpu, &p.cta); err != nil {
			return nil, err
		}
		l.parseThread(l.thread(p), code)
	}
	for _, alternative := range strings.Split(parts[2], " or ") {
		var terms []term
		for _, s := range strings.Fields(alternative) {
			name, v, _ := strings.Cut(s, "=")
			t := term{thread: -1, not: strings.HasSuffix(name, "!"), val: number(v)}
			name = strings.TrimSuffix(name, "!")
			if thread, reg, ok := strings.Cut(name, ":"); ok {
				t.thread = int(number(thread))
				t.at = l.register(t.thread, reg)
			} else {
				t.at = l.loc("%s", name)
			}
			terms = append(terms, t)
		}
		l.result = append(l.result, terms)
	}
	return l, nil
}

func number(s string) uint64 {
	v, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		panic(err)
	}
	return v
}

func (l *litmus) register(thread int, name string) int {
	key := fmt.Sprint(thread, name)
	if _, ok := l.registers[key]; !ok {
		l.registers[key] = len(l.registers)
		if len(l.registers) > l.program.registers {
			panic("too many registers")
		}
	}
	return l.registers[key]
}

// parseThread reads the instructions of a thread.
func (l *litmus) parseThread(t int, code string) {
	labels := map[string]int{}
	var jumps []string
	for _, text := range strings.Split(code, ";") {
		f := strings.Fields(strings.ReplaceAll(text, ",", " "))
		if len(f) == 0 {
			continue
		}
		if len(f) == 1 && strings.HasSuffix(f[0], ":") {
			labels[strings.TrimSuffix(f[0], ":")] = len(l.code[t])
			continue
		}
		in := instr{text: strings.TrimSpace(text), loc: none}
		words := strings.Split(f[0], ".")
		for _, w := range words[1:] {
			if i := slices.Index([]string{"weak", "relaxed", "acquire", "release", "acq_rel", "sc"}, w); i >= 0 {
				in.order = order(i)
			}
			if i := slices.Index([]string{"cta", "gpu", "sys"}, w); i >= 0 {
				in.scope = scope(i)
			}
		}
		value := func(s string) func(r []uint64) uint64 {
			if s[0] == 'r' {
				i := l.register(t, s)
				in.uses = append(in.uses, i)
				return func(r []uint64) uint64 { return r[i] }
			}
			v := number(s)
			return func([]uint64) uint64 { return v }
		}
		jump := ""
		switch words[0] {
		case "ld":
			in.op, in.dst, in.loc = load, l.register(t, f[1]), l.loc("%s", f[2])
		case "await": // until it is, or is not, a value
			v, is := value(f[4]), f[3] == "="
			in.op, in.dst, in.loc = load, l.register(t, f[1]), l.loc("%s", f[2])
			in.cond = func(r []uint64, got uint64) bool { return (got == v(r)) == is }
		case "st":
			in.op, in.loc, in.val = store, l.loc("%s", f[1]), value(f[2])
		case "fence":
			in.op = fenced
		case "mov":
			in.op, in.dst, in.val = assign, l.register(t, f[1]), value(f[2])
		case "add":
			a, b := value(f[2]), value(f[3])
			in.op, in.dst, in.val = assign, l.register(t, f[1]), func(r []uint64) uint64 { return a(r) + b(r) }
		case "beq", "bne":
			a, b := value(f[1]), value(f[2])
			in.op, jump = branch, f[3]
			in.cond = func(r []uint64, _ uint64) bool { return (a(r) == b(r)) == (words[0] == "beq") }
		case "goto":
			in.op, jump, in.cond = branch, f[1], func([]uint64, uint64) bool { return true }
		case "atom", "red":
			if words[0] == "red" {
				f = slices.Insert(f, 1, fmt.Sprint("r_", len(l.code[t])))
			}
			dst, a := l.register(t, f[1]), value(f[3])
			in.op, in.dst, in.loc = atomic, dst, l.loc("%s", f[2])
			switch words[len(words)-1] {
			case "add":
				in.val = func(r []uint64) uint64 { return r[dst] + a(r) }
			case "sub":
				in.val = func(r []uint64) uint64 { return r[dst] - a(r) }
			case "exch":
				in.val = a
			case "cas":
				in.val = value(f[4])
				in.cond = func(r []uint64, v uint64) bool { return v == a(r) }
			default:
				panic(f[0])
			}
		case "bar": // of all threads of the block that name it so often
			in.op, in.n = signals, 0
			in.dst = int(number(f[1]))
			earlier := 0
			for _, i := range l.code[t] {
				if i.op == signals && i.dst == in.dst {
					earlier++
				}
			}
			in.loc = 1000*(100*l.places[t].gpu+l.places[t].cta) + 10*in.dst + earlier
			l.emit(t, in)
			jumps = append(jumps, "")
			in.op = waits
			if words[2] == "arrive" {
				continue
			}
		default:
			panic(f[0])
		}
		l.emit(t, in)
		jumps = append(jumps, jump)
	}
	for i, label := range jumps {
		if label != "" {
			to, ok := labels[label]
			if !ok {
				panic("no label " + label)
			}
			l.code[t][i].jump = to
		}
	}
}

// run returns whether the result is allowed.
func (l *litmus) run(t *testing.T) bool {
	for i := range l.code { // a barrier is complete when all have come that name it
		for j := range l.code[i] {
			if w := &l.code[i][j]; w.op == waits {
				for _, code := range l.code {
					for _, in := range code {
						if in.op == signals && in.loc == w.loc {
							w.n++
						}
					}
				}
			}
		}
	}
	x := l.explore(200000, func(_ *explorer, s *state) string {
		for _, terms := range l.result {
			if l.holds(s, terms) {
				return "allowed"
			}
		}
		return ""
	})
	require.False(t, x.over, "too many executions")
	if x.bad != nil && x.bad.what != "allowed" {
		t.Fatal(x.bad)
	}
	return x.bad != nil
}

func (l *litmus) holds(s *state, terms []term) bool {
	for _, term := range terms {
		if term.thread >= 0 {
			if (s.tasks[term.thread].regs[term.at] == term.val) == term.not {
				return false
			}
			continue
		}
		ok, written := false, false
		for _, w := range s.atLoc[term.at] {
			if e := &s.events[w]; e.kind == write {
				written = true
				ok = ok || (e.val == term.val) != term.not && s.consistent(term.at, w)
			}
		}
		if !written {
			ok = (l.first[term.at] == term.val) != term.not
		}
		if !ok {
			return false
		}
	}
	return true
}

// The checker gives the verdicts that were published.
func TestLitmus(t *testing.T) {
	n := 0
	for line := range strings.Lines(litmusText) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		n++
		l, err := parseLitmus(line)
		require.NoError(t, err)
		t.Run(l.name, func(t *testing.T) {
			require.Equal(t, l.allowed, l.run(t), "%s", line)
		})
	}
	require.GreaterOrEqual(t, n, 60)
	t.Logf("%d litmus tests", n)
}
