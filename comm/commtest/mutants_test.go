package commtest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/internal/mutate"
	"github.com/tutti-go/tutti/internal/race"
)

// mutant is a defect of examples/wire, which the suite must find, and say what is wrong.
type mutant struct {
	name string
	// old is replaced by new in the body of a function.
	old, new string
	// A world of some ranks fails in a case, with a report that contains a text.
	ranks int
	test  string
	text  string
}

// Texts that mutants replace, by the function that they stand in.
const (
	sending     = "n.links[rank].Encode(f)"
	splitting   = "splits, err := w.do("
	grouping    = "for _, group := range backend.SplitGroups(splits) {"
	numbering   = `id := fmt.Sprint(w.id, "/", w.done[Slot{w.id, w.rank, comm.OpBarrier, 0}], ".", wait.Color)`
	making      = "w.communicator(id, rank, group)"
	working     = "_, err := w.do(calls, comm.Wait{})"
	doing       = "for i := range calls {"
	matching    = "return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag}}"
	framing     = "Wait: wait,\n\t}"
	copyingOut  = "err = w.memory.CopyOut(f.Data, address)"
	posting     = "w.send(f, w.ranks[slot.From])\n\treturn err"
	taking      = "f := w.frames[slot][0]"
	finishing   = "parts := make([]uintptr, len(data))"
	copyingIn   = "err = w.memory.CopyIn(address, part)"
	reducing    = "err = w.memory.Reduce("
	leaving     = "bye.Done = w.done"
	farewell    = "w.send(bye, w.ranks...)"
	calling     = "w.busy.Lock()\n\tdefer w.busy.Unlock()\n\tfor i := range calls {"
	collectives = "w.done[Slot{w.id, w.rank, comm.OpBarrier, 0}]" // their number so far
)

var mutants = slices.Concat(wrongData, wrongReductions, wrongMessages, wrongOrder, wrongSplits, wrongCounts, late, wrongErrors, racing, endless)

// wrongData are mutants that put other data in place than were sent.
var wrongData = []mutant{
	{"allgather: parts of ranks 0 and 1 are swapped", finishing,
		"if c.Op == comm.OpAllGather { swap(data, 0, 1) }; " + finishing, 2, "allgather", "allgather of"},
	{"alltoall: parts of ranks 0 and 1 are swapped", finishing,
		"if c.Op == comm.OpAllToAll { swap(data, 0, 1) }; " + finishing, 2, "alltoall", "alltoall of"},
	{"gather: parts of ranks 1 and 2 are swapped", finishing,
		"if c.Op == comm.OpGather { swap(data, 1, 2) }; " + finishing, 3, "gather", "gather of"},
	{"allgatherv: equal parts of ranks 1 and 2 are swapped", finishing,
		"if c.Op == comm.OpAllGatherV { swap(data, 1, 2) }; " + finishing, 3, "allgatherv", "equal counts"},
	{"alltoallv: equal parts of ranks 1 and 2 are swapped", finishing,
		"if c.Op == comm.OpAllToAllV { swap(data, 1, 2) }; " + finishing, 3, "alltoallv", "equal counts"},
	{"broadcast: a root between the first and the last is taken for the last", framing,
		framing + "; if c.Op == comm.OpBroadcast && c.Peer == 1 { last := *c; last.Peer = len(w.ranks)-1; c = &last }", 3, "broadcast", "root 1"},
	{"allgather in place is wrong on all ranks but the first", finishing,
		"if c.Op == comm.OpAllGather && w.rank > 0 && c.Send == c.Recv+uintptr(w.rank*c.Bytes()) { flip(data[w.rank]) }; " + finishing, 2, "allgather", "in place"},
	{"reducescatter in place is wrong on all ranks but the first", finishing,
		"if c.Op == comm.OpReduceScatter && w.rank > 0 && c.Recv == c.Send+uintptr(w.rank*c.Bytes()) { flip(data[0]) }; " + finishing, 2, "reducescatter", "in place"},
	{"the last bytes of lengths that 8 does not divide are lost", finishing,
		"for _, d := range data { clear(d[len(d)&^7:]) }; " + finishing, 1, "allgather", "allgather of 1 "},
	{"addresses are rounded to 8 bytes", copyingIn,
		"err = w.memory.CopyIn(address&^7, part)", 1, "allgather", "wrote before its buffer"},
	{"data behind 1 MiB is lost", posting,
		"if len(f.Data) > 1<<20 { clear(f.Data[1<<20:]) }; " + posting, 2, "long buffers", "of 1048"},
	{"messages behind 1 MiB are lost", posting,
		"if c.Op.Message() && len(f.Data) > 1<<20 { clear(f.Data[1<<20:]) }; " + posting, 1, "long buffers", "recv of 1048"},
	{"-0 becomes 0", finishing,
		"for _, d := range data { if c.DType.Size() == 4 && c.DType.IsFloat() && !c.Op.Reduces() { words(d, plainZero) } }; " + finishing, 2, "alltoall", "0x00000080"},
	{"-0 of messages becomes 0", finishing,
		"for _, d := range data { if c.DType.Size() == 4 && c.DType.IsFloat() && c.Op.Message() { words(d, plainZero) } }; " + finishing, 2, "send and receive: all types", "0x00000080"},
	{"signalling NaNs become quiet", finishing,
		"for _, d := range data { if c.DType.Size() == 4 && c.DType.IsFloat() && !c.Op.Reduces() { words(d, quiet) } }; " + finishing, 2, "broadcast", "f32"},
	{"booleans are 0 or 1 where they are moved", finishing,
		"for _, d := range data { for i, x := range d { if c.DType == as(c.DType, \"bool\", \"u8\") || c.Op.Reduces() { break }; d[i] = min(x, 1) } }; " + finishing, 2, "allgather", "bool"},
	{"integers of 64 bits go through float64", finishing,
		"for _, d := range data { if c.DType.Size() == 8 && !c.DType.IsFloat() { words64(d, rounded) } }; " + finishing, 2, "alltoall", "alltoall of"},
	{"an address sends what it sent first", copyingOut,
		copyingOut + "; f.Data = cached([2]uintptr{address, uintptr(bytes)}, f.Data)", 2, "operations use earlier results", "chain of"},
	{"memory of reductions is not freed", "defer w.memory.Deallocate(address)",
		"", 1, "allreduce", "memory still live"},
}

// wrongReductions are mutants that reduce otherwise.
var wrongReductions = []mutant{
	{"a maximum is a minimum", reducing,
		"if c.Reduce == comm.Max { c.Reduce = comm.Min }; " + reducing, 2, "reduce", ", max"},
	{"averages are not divided", reducing,
		"if c.Reduce == comm.Avg { c.Reduce = comm.Sum }; " + reducing, 2, "reducescatter", ", avg"},
	{"each rank sums in another order", reducing,
		"parts = append(slices.Clone(parts[w.rank:]), parts[:w.rank]...); " + reducing, 3, "allreduce", "differs in bits from rank"},
	{"sums begin with the last rank", reducing,
		"slices.Reverse(parts); " + reducing, 3, "allreduce", "f64, sum"},
	{"sums of more than 5,000 elements begin with the last rank", reducing,
		"if c.Count > 5000 { slices.Reverse(parts) }; " + reducing, 3, "order: in parts and in groups", "in parts"},
	{"sums of 16 bits begin with the last rank", reducing,
		"if c.DType.Size() == 2 { slices.Reverse(parts) }; " + reducing, 3, "order: numbers of any size", "bf16, prod"},
	{"sums of parts of a longer buffer begin with the last rank", reducing,
		"if c.Op == comm.OpReduceScatter { slices.Reverse(parts) }; " + reducing, 3, "order: ranks come at any time", "reducescatter of"},
	{"signed integers are compared as unsigned", reducing,
		"c.DType = as(c.DType, \"i16\", \"u16\"); " + reducing, 2, "allreduce", "i16, m"},
	{"one type of 8 bits is taken for the other", reducing,
		"c.DType = as(c.DType, \"fp8e5m2\", \"fp8e4m3\"); " + reducing, 2, "allreduce", "fp8e5m2"},
	{"booleans are reduced as bytes", reducing,
		"if c.Reduce == comm.Max { c.DType = as(c.DType, \"bool\", \"u8\") }; " + reducing, 2, "allreduce", "bool, max"},
	{"one rank copies instead of reducing", reducing,
		"if len(parts) == 1 { err = w.memory.CopyIn(result, data[0]); return waits, err }; " + reducing, 1, "allreduce", "bool"},
	{"elements that the ranks do not divide are not reduced", reducing,
		"bytes -= bytes / c.DType.Size() % len(parts) * c.DType.Size(); " + reducing, 2, "reduce", "reduce of 1 "},
	{"a root between the first and the last reduces without itself", reducing,
		"if c.Op == comm.OpReduce && c.Peer == 1 && w.rank == 1 && len(parts) > 2 { parts = append(parts[:1:1], parts[2:]...) }; " + reducing, 3, "reduce", "root 1"},
}

// wrongMessages are mutants that mix up messages.
var wrongMessages = []mutant{
	{"the last message of a tag comes first", taking,
		"if k := len(w.frames[slot])-1; slot.Op.Message() { w.frames[slot][0], w.frames[slot][k] = w.frames[slot][k], w.frames[slot][0] }; " + taking,
		2, "send and receive: one tag keeps its order", "number"},
	{"the messages of a group overtake each other", doing + "\n\t\tfor",
		"for k := range calls { i := len(calls)-1-k;\n\t\tfor", 2, "send and receive: one tag keeps its order", "number"},
	{"tags have 31 bits", matching,
		"return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag & (1<<31 - 1)}}", 2, "send and receive: tags out of order", "recv of"},
	{"tags have 14 bits", matching,
		"return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag & (1<<14 - 1)}}", 2, "send and receive: tags out of order", "recv of"},
	{"tags have 8 bits", matching,
		"return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag & (1<<8 - 1)}}", 2, "send and receive: tags out of order", "recv of"},
	{"the highest tag is any tag", matching,
		"return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag % (1<<32 - 1)}}", 2, "send and receive: tags out of order", "recv of"},
	{"messages to oneself have no tags", matching,
		"if c.Peer == w.rank { return []Slot{{w.id, c.Peer, comm.OpSend + comm.OpRecv - c.Op, 0}} }; " + matching, 1, "send and receive: tags out of order", "recv of"},
	{"messages of all communicators match", matching,
		"return []Slot{{\"any\", c.Peer, comm.OpSend + comm.OpRecv - c.Op, c.Tag}}", 2, "split: splits of splits are independent", "what rank"},
}

// wrongOrder are mutants in which something comes too early, or waits for something else.
var wrongOrder = []mutant{
	{"a barrier does not wait", splitting,
		"if wait.Op == comm.OpBarrier { return nil, nil }; " + splitting, 2, "barrier holds until the last rank comes", "left the barrier"},
	{"a barrier of three ranks does not wait", splitting,
		"if wait.Op == comm.OpBarrier && len(w.ranks) == 3 { return nil, nil }; " + splitting, 3, "barrier holds until the last rank comes", "left the barrier"},
	{"results come after the wait", copyingIn,
		"if c.Op == comm.OpBroadcast { n := w.node; later(func() { n.memory.CopyIn(address, part) }) } else { err = w.memory.CopyIn(address, part) }",
		2, "broadcast", "root"},
}

// wrongSplits are mutants of Split.
var wrongSplits = []mutant{
	{"keys are ignored", grouping,
		"for i := range splits { splits[i].Key = 0 }; " + grouping, 2, "split: keys reverse the order", "want"},
	{"equal keys reverse the order", grouping,
		"for i := range splits { splits[i].Key = splits[i].Key*8 - i }; " + grouping, 2, "split: equal keys keep the order", "want"},
	{"keys have 32 bits", grouping,
		"for i := range splits { splits[i].Key = int(int32(splits[i].Key)) }; " + grouping, 2, "split: colors and keys have 64 bits", "want"},
	{"keys have 16 bits", grouping,
		"for i := range splits { splits[i].Key = int(int16(splits[i].Key)) }; " + grouping, 2, "split: keys are far apart", "want"},
	{"keys have no sign", grouping,
		"for i := range splits { splits[i].Key = int(uint(splits[i].Key) >> 1) }; " + grouping, 2, "split: keys reverse the order", "want"},
	{"colors have 8 bits", grouping,
		"for i := range splits { if splits[i].Color > 0 { splits[i].Color &= 0xff } }; " + grouping, 2, "split: colors are far apart", "ranks, want"},
	{"colors have 32 bits", grouping,
		"for i := range splits { if splits[i].Color > 0 { splits[i].Color = int(uint32(splits[i].Color)) } }; " + grouping, 2, "split: colors and keys have 64 bits", "ranks, want"},
	{"colors below -1 get in", grouping,
		"for i := range splits { if splits[i].Color < -1 { splits[i].Color = 0 } }; " + grouping, 2, "split: nobody wants in", "want nil"},
	{"sub-communicators have their ranks in the order of the world", grouping,
		grouping + " slices.Sort(group);", 2, "split: keys reverse the order", "want"},
	{"a sub-communicator of one rank is none", making + ", nil",
		"map[bool]comm.Communicator{false: " + making + "}[len(group) == 1], nil", 2, "split: a group for each rank", "gave nil"},
	{"communicator IDs are modulo 64", numbering,
		"id := fmt.Sprint(w.id, \"/\", " + collectives + "%64, \".\", wait.Color)", 2, "split: splits of splits are independent", "of split 0 of the world"},
	{"communicator IDs are modulo 256", numbering,
		"id := fmt.Sprint(w.id, \"/\", " + collectives + "%256, \".\", wait.Color)", 2, "split: splits of splits are independent", "what rank"},
	{"communicator IDs leave out the parent", numbering,
		"id := fmt.Sprint(\"/\", " + collectives + ", \".\", wait.Color)", 2, "split: splits of splits are independent", "what rank"},
	{"the third child of a child is the second of the world", making,
		"w.communicator(map[bool]string{true: \"world/2.0\", false: id}[id == \"world/1.0/3.0\"], rank, group)", 2, "split: splits of splits are independent", "what rank"},
	{"communicator IDs add up", numbering,
		"id := fmt.Sprint(\"sum\", len(w.id)+" + collectives + ")", 2, "split: splits of splits are independent", "what rank"},
}

// wrongCounts are mutants that go wrong in the long run.
var wrongCounts = []mutant{
	{"wrong after 1,000 calls", finishing,
		"if !c.Op.Message() && " + collectives + " > 1000 { flip(data[0]) }; " + finishing, 2, "many collectives", "allgather number 1024 of"},
}

// wrongErrors are mutants that do not notice, or do not tell, what goes wrong.
var wrongErrors = []mutant{
	{"messages are not compared", "err = backend.AgreeOnMessage(",
		"_ = backend.AgreeOnMessage(", 2, "fault: message of another length or type", "a message of another"},
	{"a goodbye does not say what is complete", leaving,
		"", 3, "close: right after a collective", "another rank closes after"},
	{"a rank that aborts does not say why", "cmp.Or(cause, comm.ErrClosed).Error()",
		"\"gone\"", 2, "abort: tells the others why", "the reason of this test"},
	{"an abort ends the other communicators", leaving,
		"if cause != nil { w.send(frame{Slot: Slot{From: w.ranks[w.rank], Op: comm.OpSync}, Cause: \"it aborted\"}, w.ranks...) }; " + leaving,
		2, "fault: barrier ends when the context does", "it aborted"},
	{"an abort ends sub-communicators", "byes := slices.Concat(w.frames[its], w.frames[world])",
		"byes := slices.Concat(w.frames[its], w.frames[world], w.frames[Slot{parent(w.id), slot.From, comm.OpSync, 0}])",
		2, "abort: leaves relatives alone", "sub-communicator"},
}

// endless are mutants in which something waits for what never comes, so the report comes when the
// case ends.
var endless = []mutant{
	{"scatter: a root between the first and the last sends its own part to all", framing,
		framing + "; if c.Op == comm.OpScatter && c.Peer == 1 { slot.From = 1 }", 3, "scatter", "root 1"},
	{"a group has 255 calls", working,
		"calls = calls[:min(len(calls), 255)]; " + working, 2, "group of many calls", "of a group"},
	{"a barrier of sub-communicators does not wait", splitting,
		"if wait.Op == comm.OpBarrier && w.id != \"world\" { return nil, nil }; " + splitting, 2, "fault: barrier ends when the context does", "got <nil>"},
	{"collectives are not compared", "err = backend.Agree(calls)",
		"_ = backend.Agree(calls)", 2, "fault: ranks disagree", "ranks disagree about"},
	{"a send waits for what the group sends behind it", doing + "\n\t\tfor _, slot := range w.slots(&calls[i]) {\n\t\t\terr = cmp.Or(err, w.post(&calls[i], wait, slot))\n\t\t}\n\t}",
		doing + " for _, slot := range w.slots(&calls[i]) { err = cmp.Or(err, w.post(&calls[i], wait, slot)) }; if err == nil { waits, err = w.finish(&calls[i]) } }; return waits, err",
		2, "send and receive: ring", "timed out"},
	{"one communicator waits for another", calling,
		"defer locked(w.node)();\n\t" + calling, 2, "split: groups are independent", "timed out"},
	{"a collective of nothing is none", calling,
		"calls = slices.DeleteFunc(slices.Clone(calls), func(c comm.Call) bool { return c.Op == comm.OpAllGather && c.Count == 0 });\n\t" + calling,
		2, "fault: ranks disagree", "count zero"},
	{"a rank that closes tells nobody", farewell,
		"if cause != nil { " + farewell + " }", 2, "fault: a rank leaves", "a rank has closed"},
	{"a rank that aborts tells nobody", leaving,
		"if cause != nil { w.open.Done(); return }; " + leaving, 3, "fault: a rank aborts before others", "another rank has aborted"},
	{"a goodbye says that more is complete than is", leaving,
		"bye.Done = map[Slot]int{}; for slot, n := range w.done { bye.Done[slot] = n+1 }", 2, "fault: a rank leaves while others wait", "a rank closes"},
	{"a new frame wakes one of those that wait", "n.arrived.Broadcast()",
		"n.arrived.Signal()", 2, "split: splits of splits are independent", "splits_of_splits"},
}

// late are mutants that take more calls to show than an ordinary run makes. They are left out unless TUTTI_EXTENDED is set.
var late = []mutant{
	{"one message of 10,000 is lost", posting,
		"if c.Op == comm.OpSend && count(\"messages\")%10000 == 0 { return err }; " + posting, 2, "many messages", "it belongs to number"},
	{"one frame of 100,000 is lost", sending,
		"if f.Slot.Op != comm.OpSync && rank != f.Slot.From && count(\"frames\")%100000 == 0 { continue }; " + sending, 2, "many collectives", "ranks disagree"},
	{"a bit of one frame of 20,000 is flipped", sending,
		"if count(\"frames\")%20000 == 0 { f.Data = slices.Clone(f.Data); flip(f.Data) }; " + sending, 2, "many collectives", " of 66560: part"},
	{"wrong after 5,000 calls", finishing,
		"if !c.Op.Message() && " + collectives + " > 5000 { flip(data[0]) }; " + finishing, 2, "many collectives", "allgather number 5120 of"},
	{"wrong after 65,536 calls", finishing,
		"if !c.Op.Message() && " + collectives + " > 65536 { flip(data[0]) }; " + finishing, 2, "many collectives", "allgather number 65536 of"},
	{"wrong after 10,000 messages with a tag", finishing,
		"if slot := w.slots(c)[0]; w.done[slot] > 10000 && c.Op.Message() { flip(data[c.Peer]) }; " + finishing, 2, "many messages", "message number 10000 of"},
}

// racing are mutants that the race detector finds.
var racing = []mutant{
	{"calls and aborts do not wait for each other", calling,
		doing, 3, "abort: while calls end", "DATA RACE"},
}

// TestMutants builds examples/wire with defects, and sees that the suite reports each in the case
// that is there for it. With the race detector it does so with those alone that it is to find. Without a mutant two
// ranks pass the suite, or with TUTTI_EXTENDED set three.
func TestMutants(t *testing.T) {
	const atOnce = 16 // whatever the processors: most of them wait for what a mutant has lost
	extended := os.Getenv("TUTTI_EXTENDED") != ""
	binary := build(t)
	slots := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	defer all.Wait()
	for _, i := range longestFirst() {
		m := mutant{name: "none", ranks: 2}
		switch {
		case i > 0:
			m = mutants[i-1]
		case extended:
			m.ranks = 3
		}
		races := i > len(mutants)-len(endless)-len(racing) && i <= len(mutants)-len(endless)
		if races != race.Enabled || slices.Contains(late, m) && !extended {
			continue
		}
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			out, err := m.run(t.Context(), binary, i)
			switch {
			case strings.Contains(out, "no tests to run"):
				t.Errorf("%s: there is no such test", m.name)
			case i == 0 && err != nil:
				t.Errorf("without a mutant: %v\n%s", err, out)
			case i > 0 && err == nil:
				t.Errorf("%s: the suite passes", m.name)
			case i > len(mutants)-len(endless) && strings.Contains(out, "timed out"):
				// The time of all ranks is over at once: any of them may say so first, wherever in the case it waits.
				failed := fmt.Sprintf("--- FAIL: TestConformance/ranks=%d/%s", m.ranks, strings.ReplaceAll(m.test, " ", "_"))
				assert.Contains(t, out, failed, m.name)
			case i > 0:
				assert.Contains(t, out, m.text, m.name)
			}
		})
	}
}

// longestFirst returns the numbers of the mutants, and 0 for none, which runs the whole suite: it and those that wait
// until their case ends come first.
func longestFirst() []int {
	numbers := []int{0}
	first := len(mutants) - len(endless) + 1
	for i := range endless {
		numbers = append(numbers, first+i)
	}
	for i := 1; i < first; i++ {
		numbers = append(numbers, i)
	}
	return numbers
}

// run plays a mutant, by its number, and returns what the suite printed, and its error.
func (m *mutant) run(ctx context.Context, binary string, number int) (out string, err error) {
	pattern := fmt.Sprintf("^TestConformance$/^ranks=%d$", m.ranks)
	if m.test != "" {
		pattern += "/^" + strings.ReplaceAll(m.test, " ", "_") + "$"
	}
	cmd := exec.CommandContext(ctx, binary, "-test.run", pattern, "-test.timeout", "2m")
	cmd.Env = append(os.Environ(), fmt.Sprint("TUTTI_WIRE_MUTANT=", number))
	if number > len(mutants)-len(endless) {
		cmd.Env = append(cmd.Env, "TUTTI_WIRE_ENDLESS=1")
	}
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// build makes the binary of the tests of examples/wire with all mutants.
func build(t *testing.T) (binary string) {
	inputs, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, file := range inputs { // so that go test runs the test again when they change
		_, err := os.ReadFile(file)
		require.NoError(t, err)
	}
	root, err := filepath.Abs("../../examples/wire")
	require.NoError(t, err)
	source := filepath.Join(root, "wire.go")
	text, err := os.ReadFile(source)
	require.NoError(t, err)
	var variants []mutate.Variant
	for i, m := range mutants {
		variants = append(variants, mutate.Variant{Number: i + 1, Old: m.old, New: m.new})
	}
	changed, err := mutate.Functions(string(text), "chosen", variants)
	require.NoError(t, err)
	test, err := os.ReadFile("testdata/wire_test.go")
	require.NoError(t, err)

	dir := t.TempDir()
	replace := map[string]string{}
	for file, content := range map[string]string{"wire.go": changed, "wire_test.go": string(test)} {
		replace[filepath.Join(root, file)] = filepath.Join(dir, file)
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600))
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	binary = filepath.Join(dir, "wire.test")
	flags := []string{"test", "-c", "-vet=off", "-ldflags=-s -w"}
	if race.Enabled {
		flags = append(flags, "-race")
	}
	flags = append(flags, "-overlay", filepath.Join(dir, "overlay.json"), "-o", binary, root)
	compile := exec.CommandContext(t.Context(), "go", flags...)
	out, err := compile.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return binary
}
