package p2p

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/cc"
	"github.com/tutti-go/tutti/internal/elements"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// imageBase is where testdata/emulator.cpp maps an image.
const imageBase = 1 << 36

// imageHead and imageLaunch are structs of testdata/emulator.cpp.
type imageHead struct {
	ranks, launches, seed uint64
	abortRank, abortAfter uint64
}
type imageLaunch struct {
	name          [16]byte
	blocks, width uint32
	launch        launchParameters
}

// emulated is a world whose kernels run on the host: its memory, as the emulator has it.
type emulated struct {
	planner
	names  map[*function]string
	memory []byte
	seed   uint64
	steps  []step
	wanted [][][]byte
	recvs  [][]uintptr // by step and rank
	first  uint64      // epoch
	watch  []uintptr
}

// namedKernels is the kernels without a GPU, and their names.
func namedKernels() (k kernelSet, names map[*function]string) {
	names = map[*function]string{}
	add := func(name string) *function {
		x := &function{Kernel: new(cuda.Kernel)}
		names[x] = name
		return x
	}
	for _, dt := range dtype.All() {
		for family, name := range familyNames {
			if exists(dt, family) {
				k.byType[family][dt] = add(name + "_" + elements.Name(dt))
			}
		}
	}
	k.move = add("move")
	k.moveRing = add("move_ring")
	k.i8 = pieces{add("rounded_i8"), add("ragged_i8")}
	k.fp8 = pieces{add("rounded_e4m3"), add("ragged_e4m3")}
	k.post, k.receive = add("post_list"), add("receive_lists")
	return k, names
}

// newEmulated makes a world that runs random steps.
func newEmulated(t *testing.T, seed uint64, ranks, steps, most int, limit time.Duration) *emulated {
	rng := rand.New(rand.NewPCG(seed, 1))
	w := &emulated{planner: planner{sizes: small(ranks), ranks: ranks}, seed: seed}
	w.first = []uint64{1, 1<<32 - uint64(rng.IntN(steps)+1), 1<<40 + 7}[rng.IntN(3)]
	for i := range steps {
		s := randomStep(rng, ranks, most)
		if i < 3 { // through rings, with reductions and without, and in two stages
			s.operation = []comm.Op{comm.OpAllReduce, comm.OpAllGather, comm.OpAllReduce}[i]
			s.dt = dtype.F32
			s.op = comm.Sum
			s.inPlace = false
			s.count = 14 << 10 / 4
			s.sendAt = 0
			s.recvAt = 0
			if i == 0 {
				s.dt = dtype.I32
			}
		}
		w.steps = append(w.steps, s)
	}
	w.wanted = reference(t, ranks, w.steps)
	launch := w.begin(steps, limit)
	for i, s := range w.steps {
		ns, nr := s.lengths(ranks)
		esize := s.dt.Size()
		blocks, width := 1+rng.IntN(4), lineWidth*(1+rng.IntN(3))
		w.recvs = append(w.recvs, make([]uintptr, ranks))
		for r := range ranks {
			bytes := max(ns, nr)*esize + 2*guard
			send, recv := w.allocate(bytes+guard), w.allocate(bytes+guard)
			for _, b := range []uintptr{send, recv} {
				region := w.at(b, bytes+guard)
				for j := range region {
					region[j] = untouched
				}
			}
			skew := uintptr(r * int(s.seed%3) * 4) // so that ranks' buffers are aligned differently
			send, recv = send+guard+uintptr(s.sendAt)%256+skew, recv+guard+uintptr(s.recvAt)%256+skew
			if s.inPlace {
				sendOff, recvOff := s.offset(r)
				send, recv = recv+uintptr(sendOff), recv+uintptr(recvOff)
			}
			copy(w.at(send, ns*esize), s.input(r, ns))
			w.recvs[i][r] = recv
			p := w.planOf(s, send, s.told(r, recv))
			p.blocks, p.width = blocks, width
			launch(r, i, p)
		}
	}
	return w
}

// begin allocates the memory of the ranks, with this number of launches each, and returns functions that set them.
func (w *emulated) begin(steps int, limit time.Duration) (launch func(rank, i int, p plan)) {
	w.kernels, w.names = namedKernels()
	launches := w.allocate(int(unsafe.Sizeof(imageHead{})) + w.ranks*steps*int(unsafe.Sizeof(imageLaunch{})))
	head := at[imageHead](w, launches)
	*head = imageHead{ranks: uint64(w.ranks), launches: uint64(steps), seed: w.seed}
	l, size := w.layout(w.ranks)
	worlds := make([]worldParameters, w.ranks)
	for r := range w.ranks {
		worlds[r].rank, worlds[r].ranks, worlds[r].places = uint32(r), uint32(w.ranks), l
		scratch := w.allocate(size)
		for b := range maxBlocks {
			binary.NativeEndian.PutUint64(w.at(scratch+uintptr(8*b), 8), w.first)
		}
		words := w.at(scratch+uintptr(l.words), 2*int(l.wordsSize))
		copy(words, bytes.Repeat([]byte{0xff}, len(words)))
		w.watch = append(w.watch, w.allocate(4096))
		worlds[r].host = uint64(w.watch[r])
		at[watch](w, w.watch[r]).limit = int64(limit)
		for p := range w.ranks {
			worlds[p].scratch[r] = uint64(scratch)
		}
	}
	return func(rank, i int, p plan) {
		e := imageLaunch{
			blocks: uint32(p.blocks),
			width:  uint32(p.width),
			launch: launchParameters{worlds[rank], p.call},
		}
		if copy(e.name[:], w.names[p.kernel]) == len(e.name) {
			panic("a name is too long")
		}
		*at[imageLaunch](w, launches+unsafe.Sizeof(imageHead{})+uintptr(rank*steps+i)*unsafe.Sizeof(e)) = e
	}
}

// allocate returns the address of n bytes, aligned to 256.
func (w *emulated) allocate(n int) uintptr {
	a := len(w.memory)
	w.memory = append(w.memory, make([]byte, (n+255)/256*256)...)
	return imageBase + uintptr(a)
}

func (w *emulated) at(a uintptr, n int) []byte { return w.memory[a-imageBase:][:n] }

// at is what lies at an address, until the next allocate.
func at[T any](w *emulated, a uintptr) *T {
	b := w.at(a, int(unsafe.Sizeof(*new(T))))
	return &hostmem.Slice[T](hostmem.Addr(b), 1)[0]
}

// run runs the emulator, and takes over the memory that it leaves.
func (w *emulated) run(t *testing.T, e *emulator) error {
	t.Helper()
	file := filepath.Join(t.TempDir(), "image")
	require.NoError(t, os.WriteFile(file, w.memory, 0o600))
	out, err := e.run(file)
	if strings.Contains(out, "unexpected memory mapping") {
		t.Skipf("ThreadSanitizer does not run on this kernel: %s", out)
	}
	if err != nil {
		return fmt.Errorf("seed %d: %w: %s", w.seed, err, out)
	}
	w.memory, err = os.ReadFile(file)
	return err
}

// emulator is a program that runs images. Its process runs one after the other, and ends with this
// one, or when an image fails.
type emulator struct {
	program string
	cmd     *exec.Cmd // nil: none runs
	images  io.Writer
	answers *bufio.Reader
	errors  bytes.Buffer
}

// run runs an image, within two minutes. If it fails, it returns what the program wrote.
func (e *emulator) run(file string) (out string, err error) {
	if e.cmd == nil {
		cmd := exec.Command(e.program)
		cmd.Env = append(os.Environ(), "TSAN_OPTIONS=halt_on_error=1 exitcode=66")
		e.errors.Reset()
		cmd.Stderr = &e.errors
		images, failed := cmd.StdinPipe()
		answers, err := cmd.StdoutPipe()
		if err = errors.Join(failed, err); err == nil {
			err = cmd.Start()
		}
		if err != nil {
			return "", err
		}
		e.cmd, e.images, e.answers = cmd, images, bufio.NewReader(answers)
	}
	limit := time.AfterFunc(2*time.Minute, func() { _ = e.cmd.Process.Kill() })
	defer limit.Stop()
	_, err = fmt.Fprintln(e.images, file)
	if answer, ended := e.answers.ReadString('\n'); err == nil && ended == nil && answer == "done\n" {
		return "", nil
	}
	err = cmp.Or(e.cmd.Wait(), err, io.ErrUnexpectedEOF)
	e.cmd = nil
	return e.errors.String(), err
}

// emulators are the emulators of this process, by program.
var emulators = map[string]*emulator{}

// complete runs a world whose ranks all come to the end.
func (w *emulated) complete(t *testing.T, e *emulator) error {
	err := w.run(t, e)
	for r := 0; r < w.ranks && err == nil; r++ {
		if at[watch](w, w.watch[r]).told != 0 {
			return fmt.Errorf("seed %d: rank %d aborted", w.seed, r)
		}
		err = w.check(r, len(w.steps))
	}
	return err
}

// abort runs a world in which a rank aborts in the middle, which tells the others.
func (w *emulated) abort(t *testing.T, e *emulator) error {
	rng := rand.New(rand.NewPCG(w.seed, 2))
	head := at[imageHead](w, imageBase)
	head.abortRank, head.abortAfter = rng.Uint64N(head.ranks), 1+rng.Uint64N(200*head.ranks*head.launches)
	first := uint32(head.abortRank)
	if err := w.run(t, e); err != nil {
		return err
	}
	origin := *at[watch](w, w.watch[first])
	for r := range w.ranks {
		done := len(w.steps)
		if told := at[watch](w, w.watch[r]); told.told != 0 {
			done = 0
			for e := w.first; e != told.epoch; e++ {
				if uint32(e) > 1 || e < 2 { // those are skipped, but for the first
					done++
				}
			}
			reason := uint32(reasonAsked)
			if told.rank != first {
				reason = (first+1)<<8 | origin.peer + 1
			}
			if done >= len(w.steps) || told.rank != uint32(r) ||
				told.peer == told.rank || told.peer >= uint32(w.ranks) ||
				comm.Op(told.operation) != w.steps[done].operation ||
				told.reason != reason || told.epoch < origin.epoch {
				return fmt.Errorf("seed %d: rank %d tells %+v", w.seed, r, *told)
			}
		}
		if err := w.check(r, done); err != nil {
			return err
		}
	}
	return nil
}

// kernelOf is the name of a step's kernel.
func (w *emulated) kernelOf(i int) string {
	e := at[imageLaunch](w, imageBase+unsafe.Sizeof(imageHead{})+uintptr(i)*unsafe.Sizeof(imageLaunch{}))
	return strings.TrimRight(string(e.name[:]), "\x00")
}

// check compares the first steps' results on a rank with what they should be.
func (w *emulated) check(rank, steps int) error {
	for i, s := range w.steps[:steps] {
		want, recv := w.wanted[i][rank], w.recvs[i][rank]
		if around := w.at(recv-1, len(want)+2); !s.inPlace && (around[0] != untouched || around[len(want)+1] != untouched) {
			return fmt.Errorf("seed %d, step %d, %v: rank %d wrote beside its buffer", w.seed, i, s, rank)
		}
		if err := s.compare(rank, w.at(recv, len(want)), want); err != nil {
			return fmt.Errorf("seed %d, step %d: %w", w.seed, i, err)
		}
	}
	return nil
}

// buildEmulator compiles testdata/emulator.cpp, with the constants of this package compared, and
// the kernels that lie in a folder.
func buildEmulator(t *testing.T, dir string, flags ...string) (*emulator, error) {
	t.Helper()
	all := append([]string{
		"-std=c++17", "-O0", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-w",
		"-I../../runtime/cuda/kernels", "-lpthread",
	}, flags...)
	source := filepath.Join(dir, "testdata/emulator.cpp")
	program, err := cc.Build(t, "g++ clang++-16", source, sharedConstants(), all...)
	if emulators[program] == nil {
		emulators[program] = &emulator{program: program}
	}
	return emulators[program], err
}

// sharedConstants is assertions in C++ that structs and constants are those of the kernels.
func sharedConstants() string {
	var lines []string
	equal := func(c string, v any) {
		lines = append(lines, fmt.Sprintf("static_assert(%s == %v, \"%s is not what Go has\");\n", c, v, c))
	}
	names := map[string]string{
		"launch.world":    "w",
		"launch.call":     "c",
		"call.operation":  "code",
		"watch.operation": "code",
	}
	for name, v := range map[string]any{
		"layout":       layout{},
		"watch":        watch{},
		"world":        worldParameters{},
		"call":         callParameters{},
		"launch":       launchParameters{},
		"shared_lists": listHead{},
	} {
		typ := reflect.TypeOf(v)
		equal(fmt.Sprintf("sizeof(%s)", name), typ.Size())
		for i := range typ.NumField() {
			f := typ.Field(i)
			field := names[name+"."+f.Name]
			if field == "" {
				for _, r := range f.Name {
					if unicode.IsUpper(r) {
						field += "_"
					}
					field += string(unicode.ToLower(r))
				}
			}
			equal(fmt.Sprintf("offsetof(%s, %s)", name, field), f.Offset)
		}
	}
	for name, v := range map[string]int{
		"max_ranks":              maxRanks,
		"max_blocks":             maxBlocks,
		"max_width":              maxWidth,
		"rounded_width":          roundedWidth,
		"max_lines":              maxLines,
		"ring_slots":             ringSlots,
		"warp_size":              lineWidth,
		"sizeof(pack)":           packBytes,
		"sentinel32::size":       packBytes,
		"sentinel64::size":       packBytes,
		"tagged::size":           2 * packBytes,
		"sum":                    elements.Sum,
		"product":                elements.Product,
		"minimum":                elements.Minimum,
		"maximum":                elements.Maximum,
		"average":                elements.Average,
		"signed_minimum":         elements.SignedMinimum,
		"signed_maximum":         elements.SignedMaximum,
		"any":                    elements.Any,
		"::all":                  elements.All,
		"grad_none":              gradNone,
		"grad_f32":               gradF32,
		"grad_f16":               gradF16,
		"grad_bf16":              gradBF16,
		"asked":                  reasonAsked,
		"timed_out":              reasonTimedOut,
		"max_sharers":            maxRanks,
		"max_share_blocks":       maxShareBlocks,
		"shared_head":            sharedHead,
		"sizeof(launched)":       int(unsafe.Sizeof(imageLaunch{})),
		"offsetof(image, first)": int(unsafe.Sizeof(imageHead{})),
		"base":                   imageBase,
	} {
		equal(name, v)
	}
	slices.Sort(lines) // the cache of programs goes by the text
	const head = "sizeof(state) <= flags_at && flags_at + 8 * stages * max_lines * max_ranks <= %d"
	return strings.Join(lines, "") + fmt.Sprintf("static_assert("+head+", \"the head is too small\");\n", headBytes)
}

// emulatorSeed is what the tests below draw from; TUTTI_TEST_SEED sets it.
func emulatorSeed(t *testing.T) uint64 {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("TUTTI_TEST_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("seed %d", seed)
	return seed
}

// TestEmulated runs the kernels on the host, with pauses before their stores: worlds of two to
// eight ranks get the bits of package local, each rank with room for one block; and a rank that
// aborts in the middle leaves right results behind on every rank, up to where the rank says.
func TestEmulated(t *testing.T) {
	seed := emulatorSeed(t)
	for _, c := range []struct {
		name        string
		flags       []string
		worlds      []int
		steps, size int
	}{
		{"fast", nil, []int{2, 3, maxRanks, 4, 5, 6, 7}, 120, 20 << 10},
		{"race detector", []string{"-fsanitize=thread", "-g"}, []int{2, 3, 4}, 24, 12 << 10},
	} {
		switch {
		case testing.Short():
			c.worlds, c.steps = c.worlds[:2], c.steps/2
		case os.Getenv("TUTTI_EXTENDED") == "":
			c.worlds = c.worlds[:3]
		}
		t.Run(c.name, func(t *testing.T) {
			emulator, err := buildEmulator(t, ".", c.flags...)
			require.NoError(t, err)
			ran := map[string]bool{}
			for _, ranks := range c.worlds {
				t.Run(fmt.Sprint(ranks, " ranks"), func(t *testing.T) {
					w := newEmulated(t, seed, ranks, c.steps/ranks, c.size, time.Minute)
					for i := range w.steps {
						ran[w.kernelOf(i)] = true
					}
					require.NoError(t, w.complete(t, emulator))
				})
				t.Run(fmt.Sprint(ranks, " ranks, aborted"), func(t *testing.T) {
					require.NoError(t, newEmulated(t, seed+1, ranks, c.steps/ranks, c.size/ranks, time.Hour).abort(t, emulator))
				})
			}
			t.Logf("%v ran", slices.Sorted(maps.Keys(ran)))
			for _, name := range []string{"ring_i32", "move_ring", "twice_f32"} {
				require.True(t, ran[name], name)
			}
		})
	}
}

// TestEmulatedMutants changes the text of the kernels, and sees that the runs above or the
// compiler find each change. It compiles for minutes; set TUTTI_EXTENDED.
func TestEmulatedMutants(t *testing.T) {
	if os.Getenv("TUTTI_EXTENDED") == "" {
		t.Skip("compiles for minutes; set TUTTI_EXTENDED")
	}
	seed := emulatorSeed(t)
	for _, m := range []struct{ name, from, to string }{
		{"no clear", "store(from, pack{{~0u, ~0u, ~0u, ~0u}});", ""},
		{"the first word tells for all", "return v.word[0] != ~0u && v.word[1] != ~0u && v.word[2] != ~0u && v.word[3] != ~0u;", "return v.word[0] != ~0u;"},
		{"a payload like the sentinel", "v.word[i] == ~0u ? ~1u : v.word[i]", "v.word[i]"},
		{"one place of words", "(epoch & 1) * at.words_size", "0"},
		{"one place of tagged words", "(epoch & 1) * at.tagged_size", "0"},
		{"half of a tagged pack tells for all", "&& v.half[1].word[0] >> 32 == tag &&\n           v.half[1].word[1] >> 32 == tag", ""},
		{"tags without an epoch", "return (u32)o.epoch;", "return 7;"},
		{"the tag zero", "if ((u32)next == 0) next += 2;", ""},
		{"no barrier before the epoch is counted up", "DEVICE void advance(const world &w, const operation &o) {\n  barrier();", "DEVICE void advance(const world &w, const operation &o) {"},
		{"a block counts up its own word only", "b = block() + thread() * blocks(); b < max_blocks; b += threads() * blocks())", "b = block(); b == block(); b += blocks())"},
		{"flags told relaxed", "release64(flag_at", "store64(flag_at"},
		{"flags heard relaxed", "now = acquire64(flag);", "now = load64(flag);"},
		{"no warp barrier after the flags", "l.alive = all_lanes(here);\n  warp_barrier();", "l.alive = all_lanes(here);"},
		{"no warp barrier before the flags", "warp_barrier();\n    if (fills) tell", "all_lanes(true);\n    if (fills) tell"},
		{"two slots", "round % ring_slots", "round % 2"},
		{"another number of slots than Go has", "ring_slots = 4", "ring_slots = 3"},
		{"flags without an epoch", "return o.epoch << 20 | (round + 1);", "return round + 1;"},
		{"a rank that sends nothing does not say so", "if (n == 0 && thread_index() == 0)", "if (false)"},
		{"a second stage in the place of the first", "W::place(w.places, o.epoch) + (w.ranks - 1) * p.size;", "W::place(w.places, o.epoch);"},
		{"a rank that aborts does not tell its peers", "if (!told) leave(w, o.epoch, peer);", ""},
		{"a field of the host's moved", "  u32 abort;\n  u32 told;", "  u32 told;\n  u32 abort;"},
	} {
		t.Run(m.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, folder := range []string{"kernels", "testdata"} {
				files, err := os.ReadDir(folder)
				require.NoError(t, err)
				require.NoError(t, os.Mkdir(filepath.Join(dir, folder), 0o700))
				for _, f := range files {
					text, err := os.ReadFile(filepath.Join(folder, f.Name()))
					require.NoError(t, err)
					if f.Name() == "p2p.cu" {
						require.Contains(t, string(text), m.from)
						text = []byte(strings.ReplaceAll(string(text), m.from, m.to))
					}
					require.NoError(t, os.WriteFile(filepath.Join(dir, folder, f.Name()), text, 0o600))
				}
			}
			emulator, err := buildEmulator(t, dir, "-fsanitize=thread", "-g")
			for i := uint64(0); err == nil && i < 30; i++ {
				err = newEmulated(t, seed+i, 2+int(i%3), 12, 16<<10, 3*time.Second).complete(t, emulator)
				if err == nil {
					err = newEmulated(t, seed+i, 2+int(i%3), 12, 8<<10, 3*time.Second).abort(t, emulator)
				}
			}
			require.Error(t, err)
			t.Logf("%.300v", err)
		})
	}
}
