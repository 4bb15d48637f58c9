package p2p

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cuda"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// named returns a planner whose kernels are made up.
func named(ranks int, s sizes) (*planner, map[*function]string) {
	p := &planner{sizes: s, ranks: ranks}
	names := map[*function]string{}
	for family, name := range familyNames {
		for _, dt := range dtype.All() {
			k := &function{Kernel: new(cuda.Kernel)}
			p.kernels.byType[family][dt] = k
			names[k] = name
		}
	}
	p.kernels.move, p.kernels.moveRing = &function{}, &function{}
	names[p.kernels.move], names[p.kernels.moveRing] = "move", "move_ring"
	return p, names
}

// The structs have the size and the offsets of those in kernels/p2p.cu.
func TestParametersAreLaidOutAsTheKernelsReadThem(t *testing.T) {
	assert.EqualValues(t, 56, unsafe.Sizeof(layout{}))
	assert.EqualValues(t, 136, unsafe.Sizeof(worldParameters{}))
	assert.EqualValues(t, 112, unsafe.Sizeof(callParameters{}))
	assert.EqualValues(t, 248, unsafe.Sizeof(launchParameters{}))
	assert.EqualValues(t, 40, unsafe.Sizeof(watch{}))
	assert.EqualValues(t, 32, unsafe.Offsetof(watch{}.epoch))
}

// Requirements of every plan, for any operation: its data fits into its place of the scratch memory, all ranks write
// what the others wait for, and differently aligned buffers make no difference that a peer would see.
func TestPlans(t *testing.T) {
	const seed = 3
	rng := rand.New(rand.NewPCG(seed, 0))
	for ranks := 1; ranks <= maxRanks; ranks++ {
		for _, s := range []sizes{defaults(ranks), small(ranks)} {
			p, names := named(ranks, s)
			at, _ := s.layout(ranks)
			for range 2000 {
				x := randomStep(rng, ranks, 64<<20)
				p.multiprocessors = []int{0, 1, 14, 108, 132}[rng.IntN(5)]
				l, off := p.planOf(x, 1<<30, 2<<30), p.planOf(x, 1<<30+4, 2<<30+8)
				require.Equal(t, [2]int{l.blocks, l.width}, [2]int{off.blocks, off.width}, "seed %d: %v", seed, x)
				require.LessOrEqual(t, l.blocks, s.blocks, "%v", x)
				require.LessOrEqual(t, l.width, maxWidth, "%v", x)
				if p.multiprocessors > 0 { // all blocks find room at once
					require.LessOrEqual(t, l.blocks*l.width, p.multiprocessors*maxWidth, "%v", x)
				}
				require.Positive(t, l.blocks*l.width, "%v", x)
				packs := uint64(packsOf(int(l.call.bytes)))
				peers := uint64(ranks - 1)
				worded := words(x.dt)
				switch name := names[l.kernel]; name {
				case "ring", "move_ring":
					require.Equal(t, name, names[off.kernel], "%v", x)
					require.LessOrEqual(t, l.blocks*l.width/lineWidth, int(at.lines), "%v", x)
				case "twice":
					require.Equal(t, name, names[off.kernel], "%v", x)
					require.LessOrEqual(t, 2*peers*packs*packBytes, at.wordsSize, "%v", x)
					// Every rank has a piece, of which the last may be shorter.
					require.Greater(t, l.call.total, peers*l.call.bytes, "%v", x)
					require.LessOrEqual(t, l.call.total, (peers+1)*l.call.bytes, "%v", x)
				case "move":
					require.Equal(t, name, names[off.kernel], "%v", x)
					require.LessOrEqual(t, peers*(packs+1)*2*packBytes, at.taggedSize, "%v", x)
				case "pair", "add":
					require.Equal(t, "reduce", names[off.kernel], "%v", x)
					require.True(t, worded && sums(x.op) && (name == "pair") == (ranks == 2), "%v", x)
					require.LessOrEqual(t, peers*packs*packBytes, at.wordsSize, "%v", x)
				case "reduce":
					require.Equal(t, name, names[off.kernel], "%v", x)
					if worded {
						require.LessOrEqual(t, peers*packs*packBytes, at.wordsSize, "%v", x)
					} else {
						require.LessOrEqual(t, peers*packs*2*packBytes, at.taggedSize, "%v", x)
					}
				default:
					t.Fatalf("seed %d: %v has no kernel", seed, x)
				}
			}
		}
	}
}

// The parts of the scratch memory follow each other, behind the state and the flags.
func TestScratchMemory(t *testing.T) {
	for ranks := 1; ranks <= maxRanks; ranks++ {
		s := defaults(ranks)
		at, bytes := s.layout(ranks)
		flags := 4096 + 2*maxLines*maxRanks*8
		assert.LessOrEqual(t, uint64(flags), at.words)
		assert.Equal(t, at.words+2*at.wordsSize, at.tagged)
		assert.Equal(t, at.tagged+2*at.taggedSize, at.ring)
		assert.Less(t, bytes, 256<<20, "%d ranks", ranks)
		assert.LessOrEqual(t, int(at.lines), maxLines)
	}
}

// A kernel of every kind leaves room for another communicator's, whose ranks may have come to it in the
// opposite order.
func TestPlansLeaveRoom(t *testing.T) {
	for _, multiprocessors := range []int{5, 14, 64, 108, 114, 128, 132, 148} {
		for ranks := 2; ranks <= maxRanks; ranks++ {
			p := planner{sizes: defaults(ranks), ranks: ranks, multiprocessors: multiprocessors}
			p.kernels.i8 = pieces{&function{}, &function{}}
			plans := []plan{p.barrier(), p.list(nil, 0, kernel.Entries{N: 10 << 20})}
			for bytes := 64; bytes <= 1<<30; bytes *= 4 {
				for _, x := range []comm.Call{
					comm.AllReduceCall(0, 0, bytes/4, dtype.F32, comm.Sum),
					comm.AllReduceCall(4, 0, bytes, dtype.I8, comm.Max),
					comm.ReduceScatterCall(0, 0, bytes/4, dtype.F32, comm.Sum),
					comm.AllGatherCall(0, 0, bytes, dtype.U8),
					comm.AllToAllCall(0, 0, bytes/ranks, dtype.U8),
					comm.BroadcastCall(0, bytes, dtype.U8, 0),
				} {
					plans = append(plans, p.plan(&x))
				}
				rounded, ok := p.rounded(kernel.Source{X: 1 << 20, N: bytes / 4}, 1<<30, kernel.CodecI8, comm.Sum)
				require.True(t, ok)
				assert.LessOrEqual(t, rounded.blocks, 2*(multiprocessors-4), "a multiprocessor has two of them")
			}
			for _, l := range plans {
				assert.LessOrEqual(t, l.blocks*l.width, (multiprocessors-4)*maxWidth,
					"%d multiprocessors, %d ranks, %+v", multiprocessors, ranks, l)
			}
		}
	}
	for _, ranks := range []int{2, 4, 8} { // of GPUs with 132, on which four were always left
		p := planner{sizes: defaults(ranks), ranks: ranks, multiprocessors: 132}
		assert.Equal(t, 128, p.planned(comm.AllReduceCall(0, 0, 1<<28, dtype.F32, comm.Sum)).blocks)
	}
}

// An allreduce of no rounded values has a plan, which nobody launches.
func TestPlanOfNoRoundedValues(t *testing.T) {
	for ranks := 2; ranks <= maxRanks; ranks++ {
		p := planner{sizes: defaults(ranks), ranks: ranks, kernels: kernelSet{i8: pieces{&function{}, &function{}}}}
		_, ok := p.rounded(kernel.Source{}, 0, kernel.CodecI8, comm.Sum)
		assert.True(t, ok)
		_, ok = p.rounded(kernel.Source{}, 0, kernel.CodecI8, comm.Max)
		assert.False(t, ok, "as of others")
	}
}

// Operations on rounded values have tiles for each block: at least as many as all blocks and rounds have of a rank's
// share.
func TestPlansOfRounded(t *testing.T) {
	for ranks := 2; ranks <= maxRanks; ranks++ {
		p := planner{sizes: defaults(ranks), ranks: ranks, kernels: kernelSet{i8: pieces{&function{}, &function{}}}}
		for _, count := range []int{1, 511, 513, 1 << 20, 5 << 20, 26_214_400, 400 << 20} {
			p.multiprocessors = 14 * (count % 2)
			l, ok := p.rounded(kernel.Source{X: 1 << 20, N: count}, 1<<30, kernel.CodecI8, comm.Avg)
			require.True(t, ok)
			tiles := (int(l.call.bytes)/4 + tileValues - 1) / tileValues
			assert.Positive(t, l.call.tiles, "%d ranks, %d values", ranks, count)
			assert.LessOrEqual(t, int(l.call.tiles), p.roundedRoom(l.blocks), "%d ranks, %d values", ranks, count)
			assert.LessOrEqual(t, l.blocks, tiles)
			if p.multiprocessors > 0 {
				assert.LessOrEqual(t, l.blocks, 2*p.multiprocessors) // of which each has room for two blocks
			}
			assert.Equal(t, min(int(l.call.tiles)*lineWidth, roundedWidth), l.width)
			assert.EqualValues(t, 1, l.call.aligned, "whatever the length, %d", count)
			want := p.kernels.i8.ragged
			if (count+ranks-1)/ranks%4 == 0 {
				want = p.kernels.i8.packed
			}
			assert.Same(t, want, l.kernel, "%d values of %d ranks", count, ranks)
			for _, src := range []kernel.Source{
				{X: 1<<20 + 4},
				{X: 1 << 20, Grad: 1<<21 + 4, DType: dtype.F32},
				{X: 1 << 20, Grad: 1<<21 + 4, DType: dtype.BF16},
			} {
				src.N = count
				ragged, ok := p.rounded(src, 1<<30, kernel.CodecI8, comm.Avg)
				require.True(t, ok)
				assert.Zero(t, ragged.call.aligned, "%+v", src)
			}
			assert.Equal(t, float32(1)/float32(ranks), l.call.factor)
			for dt, supported := range map[dtype.DType]bool{
				dtype.F32: true, dtype.F16: true, dtype.BF16: true, dtype.F64: false,
			} {
				src := kernel.Source{X: 1 << 20, N: count, Grad: 1 << 21, DType: dt, Take: true}
				added, ok := p.rounded(src, 1<<30, kernel.CodecI8, comm.Avg)
				require.Equal(t, supported, ok, "%v", dt)
				if ok { // ranks whose buffers differ wait for each other
					assert.Equal(t, l.blocks, added.blocks)
					assert.Equal(t, l.width, added.width)
					assert.Equal(t, l.call.tiles, added.call.tiles)
				}
				src.Keep = 1 << 22
				_, ok = p.rounded(src, 1<<30, kernel.CodecI8, comm.Avg)
				assert.False(t, ok, "what aborts midway keeps nothing")
			}
		}
	}
}
