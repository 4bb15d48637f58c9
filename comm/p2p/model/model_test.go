// Package model checks what spins in comm/p2p: it goes through all executions of models of the
// protocols of kernels/p2p.cu under the axioms of the PTX memory model. It has tests only.
//
// # Checker
//
// An execution is a graph: reads, writes, fences and synchronization, which write each read reads,
// and a coherence order of each location. explore_test.go makes every one once: it lets threads go
// on, has each read take every write that there is, or one that comes later, and drops what
// contradicts axioms_test.go. The axioms are those of the PTX ISA's chapter on memory consistency,
// as "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS 2019) puts them: scopes
// and moral strength, observation order, release and acquire patterns, base causality with barriers
// and the synchronization of CUDA's streams, a partial coherence order, Fence-SC order, atomicity,
// SC per location, causality, no thin air. TestLitmus compares verdicts with published ones.
//
// A violation is a wrong value, or a wait at a location whose last value it cannot go on with, while
// nothing else goes on: schedulers are fair, and the last value of a location is read in the end.
//
// # Simplifications
//
//   - A wait is one read of a value that fits. The reads before it order nothing, and taking a read
//     out of a consistent execution leaves it consistent, because no axiom asks for more than
//     the absence of something, and no relation shrinks when a read is added.
//   - Reads that decide something read what is written before or beside them, not what depends on
//     them: waits and branches are control dependencies of all that follows, and no thin air covers
//     those, as in Dat3M's model: a GPU does not publish stores that are speculative. Reads that decide
//     nothing, those of chunks and epochs, are judged in each complete execution one by one, each
//     without the others and with every write, later ones included.
//   - Words of a vector are separate accesses, as PTX says. Two stand for all: a thread's words
//     are treated alike, and words interact only through the grid boundary, barriers and flags.
//   - Values are constants: a sum that is passed on is right if what it is made of is.
//   - Where split is set, each value of a flag has a separate location. A read of a later value
//     orders more than one of the value waited for, so this allows more executions, not fewer.
//   - One line stands for all rings: lines share no memory. A line's lanes are as many as words.
//
// # The grid boundary
//
// PTX orders a grid behind the one before it in the stream, but relaxed reads do not synchronize,
// so nothing in PTX orders a rank's clears before what a peer writes after it has read a later
// word of that rank. The model therefore takes a grid's start and its end, of every thread, for a
// fence.acq_rel.sys. GPUs complete a grid by writing back at system scope what it wrote, before
// the next grid starts; the host and peers may read it then without another fence. CUDA
// promises this of a stream's end to whoever waits for it. TestBoundaryIsNeeded lists what fails without this,
// and the mutant "fences instead of the boundary" shows the two fences of PTX that would replace it.
// Operations by tags alone with pieces of one size, and rings alone, do not need it.
//
// # Argument of two places and four slots
//
// A rank at epoch e has heard every peer in e-1, and a peer sends in e-1 after its kernel of e-2
// has ended. So two places are enough. A line that fills round k of a ring has heard round k-2 of
// every peer, whose teller was through with round k-3. So three slots are enough, and the fourth
// lets a line run ahead.
//
// # Argument of ascending dispatch
//
// Block b of a rank waits for blocks b of its peers, for no other and for no block of its own
// rank. If every GPU starts blocks in ascending order, then of the blocks that have not ended
// the first is running on every rank, or starts next, so it ends. TestDispatch checks this for
// every room for blocks, and that one GPU with another order may hang. PTX does not promise the
// order; where all blocks find room at once, it does not matter.
//
// # Bounds
//
// Two and three ranks, two words, three and four epochs, rings of up to six rounds; what holds of
// more ranks and rounds is inferred. Arithmetic, addresses, and the numbers of threads are not
// modelled: the tests of comm/p2p that run kernels on the host cover those. An epoch's tag recurs
// after 2^32-2 operations: a word that was last written exactly that long ago would be taken for
// new. No test covers that.
package model

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The text that the models copy from the kernels is still there. If this fails, change the model first.
func TestModelledText(t *testing.T) {
	data, err := os.ReadFile("../kernels/p2p.cu")
	require.NoError(t, err)
	source := string(data)
	shared, err := os.ReadFile("../../../runtime/cuda/kernels/shared.cuh")
	require.NoError(t, err)
	start, err := os.ReadFile("../../../runtime/cuda/kernels/tutti.cuh")
	require.NoError(t, err)
	require.Regexp(t, `void start_behind\(\).*griddepcontrol.wait(.|\n)*void start\(\)(.|\n)*start_behind\(\);(.|\n)*griddepcontrol.launch_dependents`, string(start))
	for _, text := range []string{
		"((epoch & 1) * ranks + from) * room * 8", "store_system((u64 *)(own->memory[p] + place) + at", "->notes[epoch & 1][own->rank], shared_lists::told(epoch, ",
		"->counts[epoch & 1][own->rank], shared_lists::told(epoch, ",
	} {
		require.Contains(t, string(shared), text)
	}
	for _, text := range []string{
		"ring_slots = 4",
		"at.words + (epoch & 1) * at.words_size",
		"at.tagged + (epoch & 1) * at.tagged_size",
		"(2 * stage + (o.epoch & 1)) * w.places.lines + l.index) * ring_slots + round % ring_slots",
		"(u64)tag << 32 | v.word[0]",
		"if ((u32)next == 0) next += 2;",
		"return o.epoch << 20 | (round + 1);",
		"st.release.sys.global.b64",
		"ld.acquire.sys.global.b64",
		"st.relaxed.sys.global.v4.b32",
		"atom.relaxed.gpu.global.cas.b32",
		"fence.acq_rel.sys;",
		"ld.relaxed.sys.global.v4.b32",
		"if (now >= count(o, round)) break;",
		"if (n == 0 && thread_index() == 0) W::put(to, pack{{0, 0, 0, 0}}, o.tag(o));",
	} {
		require.Contains(t, source, text)
	}
	for _, order := range [][]string{
		{"void pair_up", "start();", "from + (u64)(first", "begin(w)", "W::put(", "advance(w, o);", "await("},
		{"void advance", "barrier();", "store64(&own->epoch[b], next)"},
		{"bool patient", "load32(&own->broken)", "load64(&own->gone[p])", "o.epoch >= gone >> 8", "set_once(&own->broken) == 0", "if (!told) leave(w, o.epoch, peer)", "store32(&w.host->rank", "fence_system();", "store32(&w.host->told, 1);"},
		{"void move_ring(", "fill(", "hear(", "collect(", "warp_barrier()", "tell("},
		{"void ring(", "fill(", "hear(w, c, o, l, 0", "reduce_round", "hear(w, c, o, l, 1", "collect(", "warp_barrier()", "tell(w, o, l, 0", "tell(w, o, l, 1"},
		{"void receive(", "start_behind();", "begin(w)", "load64(&own->counts[epoch & 1][peer])", "load64(&own->notes[epoch & 1][peer])", "count >> 32 == (u32)epoch && note >> 32 == (u32)epoch", "barrier();", "store64(&own->epoch[b], epoch + 1)", "await(", "a.take("},
		{"bool hear", "all_lanes(here)", "warp_barrier()"},
	} {
		rest := source
		for _, text := range order {
			_, after, ok := strings.Cut(rest, text)
			require.True(t, ok, "%q behind %q", text, order)
			rest = after
		}
	}
}
