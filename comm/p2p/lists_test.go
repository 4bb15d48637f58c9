package p2p

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// gathered is a world that gathers shared lists again and again.
type gathered struct {
	*emulated
	room  int
	lists [][][]byte  // by step and rank: the length, the indices, the values
	got   [][]uintptr // by step and rank, where the lists of all ranks are copied to
}

// Launches of a step: the list becomes what it is, goes to the peers, those of all ranks are gathered, and
// copied from where the next step writes.
const launchesOfList = 4

// newGathered makes one of some steps, each of which gathers lists of random lengths. Nothing but these keeps the
// ranks in step.
func newGathered(seed uint64, ranks, steps, room int, limit time.Duration) *gathered {
	rng := rand.New(rand.NewPCG(seed, 3))
	e := &emulated{planner: planner{sizes: small(ranks), ranks: ranks}, seed: seed, first: 1}
	w := &gathered{emulated: e, room: room}
	launch := w.begin(launchesOfList*steps, limit)
	copies := &function{Kernel: new(cuda.Kernel)}
	w.names[copies] = "copy_bytes"
	first := []uint64{1, 1<<32 - 2}[rng.IntN(2)]
	heads, memory := make([]listHead, ranks), make([]uintptr, ranks)
	for r := range ranks {
		var bytes int
		heads[r], bytes = newListHead(r, ranks, room)
		memory[r] = w.allocate(bytes)
		copy(w.at(memory[r], bytes), slices.Repeat([]byte{0xff}, bytes))
	}
	for r := range ranks {
		for p, m := range memory {
			heads[r].memory[p] = uint64(m)
		}
		for b := range heads[r].epoch {
			heads[r].epoch[b] = first
		}
		*at[listHead](w.emulated, memory[r]) = heads[r]
	}
	copying := func(from, to uintptr, n int) plan {
		call := callParameters{send: uint64(from), recv: uint64(to), bytes: uint64(n)}
		return plan{kernel: copies, blocks: 1, width: lineWidth, call: call}
	}
	for i := range steps {
		w.lists, w.got = append(w.lists, make([][]byte, ranks)), append(w.got, make([]uintptr, ranks))
		for r := range ranks {
			lists := heads[r].lists(memory[r], room)
			region := lengthBytes + 8*int(heads[r].room)
			list := make([]byte, region)
			for j := range list[lengthBytes:] {
				list[lengthBytes+j] = byte(rng.Uint32())
			}
			for j := range room { // of an index
				list[lengthBytes+4*j+3] &= 0x7f
			}
			own, length := lists[r], []int{0, room, rng.IntN(room + 1), room + 1 + rng.IntN(9)}[rng.IntN(4)]
			switch {
			case rng.IntN(5) == 0: // longer than the room, which nobody may write beyond
				own.N = 3 * room
				if length > room {
					own.Len = 0
					length = own.N
				}
			case rng.IntN(3) == 0 && length <= room: // known to the host
				own.N, own.Len = length, 0
			}
			copy(hostmem.Slice[uint32](hostmem.Addr(list), 2), []uint32{uint32(length), rng.Uint32N(2)})
			w.lists[i][r] = list
			from, to := w.allocate(region), w.allocate(region*ranks)
			copy(w.at(from, region), list)
			w.got[i][r] = to
			post, receive := w.list(w.kernels.post, memory[r], own), w.list(w.kernels.receive, memory[r], own)
			for _, p := range []*plan{&post, &receive} {
				p.blocks = 1 + rng.IntN(3)
				p.width = lineWidth * (1 + rng.IntN(2))
			}
			fill := copying(from, lists[r].Len, region)
			save := copying(lists[0].Len, to, region*ranks)
			for j, p := range []plan{fill, post, receive, save} {
				launch(r, launchesOfList*i+j, p)
			}
		}
	}
	return w
}

// check compares what a rank has gathered in its first steps.
func (w *gathered) check(rank, steps int) error {
	room := (w.room + 3) / 4 * 4
	for i, lists := range w.lists[:steps] {
		at := w.got[i][rank]
		for from, want := range lists {
			n := min(int(hostmem.Slice[uint32](hostmem.Addr(want), 1)[0]), w.room)
			got := w.at(at, len(want))
			values := lengthBytes + 4*room
			for _, part := range [][2]int{{0, 8}, {lengthBytes, lengthBytes + 4*n}, {values, values + 4*n}} {
				if string(got[part[0]:part[1]]) != string(want[part[0]:part[1]]) {
					return fmt.Errorf("seed %d, step %d: rank %d has another list of %d entries from rank %d",
						w.seed, i, rank, n, from)
				}
			}
			at += uintptr(len(want))
		}
	}
	return nil
}

// complete runs a world whose ranks all come to the end, and abort one in which a rank aborts in the middle.
func (w *gathered) complete(t *testing.T, e *emulator) error {
	err := w.run(t, e)
	for r := 0; r < w.ranks && err == nil; r++ {
		if told := at[watch](w.emulated, w.watch[r]); told.told != 0 {
			return fmt.Errorf("seed %d: rank %d aborted: %+v", w.seed, r, *told)
		}
		err = w.check(r, len(w.lists))
	}
	return err
}

func (w *gathered) abort(t *testing.T, e *emulator) error {
	rng := rand.New(rand.NewPCG(w.seed, 2))
	head := at[imageHead](w.emulated, imageBase)
	head.abortRank, head.abortAfter = rng.Uint64N(head.ranks), 1+rng.Uint64N(4*head.ranks*uint64(len(w.lists)))
	if err := w.run(t, e); err != nil {
		return err
	}
	for r := range w.ranks {
		told := at[watch](w.emulated, w.watch[r])
		if told.told == 0 {
			if err := w.check(r, len(w.lists)); err != nil {
				return err
			}
			continue
		}
		first := uint32(head.abortRank)
		if told.peer == told.rank || told.operation != uint32(comm.OpAllGather) ||
			r != int(first) && told.reason>>8 != first+1 {
			return fmt.Errorf("seed %d: rank %d tells %+v, and rank %d was asked", w.seed, r, *told, first)
		}
	}
	return nil
}

var emulations = []struct {
	name              string
	flags             []string
	most, steps, room int
}{
	{"fast", nil, maxRanks, 12, 900},
	{"race detector", []string{"-fsanitize=thread", "-g"}, 4, 6, 300},
}

// Lists are gathered bit for bit, from step to step, on the host; and a rank that aborts tells the others.
func TestEmulatedLists(t *testing.T) {
	seed := emulatorSeed(t)
	for _, c := range emulations {
		t.Run(c.name, func(t *testing.T) {
			emulator, err := buildEmulator(t, ".", c.flags...)
			require.NoError(t, err)
			for ranks := 2; ranks <= c.most; ranks++ {
				require.NoError(t, newGathered(seed, ranks, c.steps, c.room, time.Minute).complete(t, emulator))
				require.NoError(t, newGathered(seed+1, ranks, c.steps, c.room, time.Hour).abort(t, emulator))
			}
		})
	}
}

// TestEmulatedMutantsOfLists is [TestEmulatedMutants] for lists.
func TestEmulatedMutantsOfLists(t *testing.T) {
	if os.Getenv("TUTTI_EXTENDED") == "" {
		t.Skip("compiles for minutes; set TUTTI_EXTENDED")
	}
	seed := emulatorSeed(t)
	for _, m := range []struct{ name, from, to string }{
		{"one place", "((epoch & 1) * ranks + from) * room * 8", "from * room * 8"},
		{"one count for both places", "counts[epoch & 1]", "counts[0]"},
		{"counts without an epoch", "count >> 32 == (u32)epoch &&", "count &&"},
		{"notes without an epoch", "&& note >> 32 == (u32)epoch", "&& note"},
		{"no clear", "store(from, ~0ull, ~0ull);", ""},
		{"the first entry of two tells for both", "v.word[0] != ~0ull && v.word[1] != ~0ull", "v.word[0] != ~0ull"},
		{"an odd list without its filler", "if (n % 2) put(n, 0, 0);", ""},
		{"a block counts up its own word only", "b < max_share_blocks; b += threads() * blocks()) store64(&own", "b == block(); b += blocks()) store64(&own"},
		{"no barrier behind the counts", "(u32)note;\n  }\n  barrier();", "(u32)note;\n  }"},
	} {
		t.Run(m.name, func(t *testing.T) {
			dir := t.TempDir()
			changed := 0
			for _, from := range []string{"kernels/", "testdata/", "../../runtime/cuda/kernels/shared.cuh"} {
				files, err := filepath.Glob(from + strings.Repeat("*", strings.Count(from, "/")%2))
				require.NoError(t, err)
				to := filepath.Join(dir, strings.Split(strings.TrimPrefix(from, "../../runtime/cuda/"), "/")[0])
				require.NoError(t, os.MkdirAll(to, 0o700))
				for _, f := range files {
					text, err := os.ReadFile(f)
					require.NoError(t, err)
					if name := filepath.Base(f); name == "p2p.cu" || name == "shared.cuh" {
						changed += strings.Count(string(text), m.from)
						text = []byte(strings.ReplaceAll(string(text), m.from, m.to))
					}
					require.NoError(t, os.WriteFile(filepath.Join(to, filepath.Base(f)), text, 0o600))
				}
			}
			require.Positive(t, changed)
			emulator, err := buildEmulator(t, dir, "-fsanitize=thread", "-g")
			for i := uint64(0); err == nil && i < 30; i++ {
				err = newGathered(seed+i, 2+int(i%2), 8, 300, 3*time.Second).complete(t, emulator)
			}
			require.Error(t, err)
			t.Logf("%.300v", err)
		})
	}
}
