package p2p

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/link"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/reductions"
)

// The largest call of each kind that stays here, in elements, for worlds of two to eight ranks: written down by
// hand, beside the table.
func TestWhatStaysOverPeerMemory(t *testing.T) {
	const all = -1 // of any size
	for _, c := range []struct {
		op     comm.Op
		dt     dtype.DType
		reduce comm.ReduceOp
		// Elements of a piece for two, three, four, five and eight ranks over NVLink, and for two over PCIe.
		nvlink [5]int
		pcie   int
	}{
		{comm.OpAllReduce, dtype.F32, comm.Sum, [5]int{all, 2 << 20, 2 << 20, 256 << 10, 256 << 10}, 256},
		{comm.OpAllReduce, dtype.F32, comm.Avg, [5]int{all, 2 << 20, 2 << 20, 256 << 10, 256 << 10}, 256},
		{comm.OpAllReduce, dtype.F64, comm.Sum, [5]int{all, 1 << 20, 1 << 20, 128 << 10, 128 << 10}, 128},
		{comm.OpAllReduce, dtype.BF16, comm.Sum, [5]int{all, 4 << 20, 4 << 20, 512 << 10, 512 << 10}, 512},
		{comm.OpAllReduce, dtype.F32, comm.Min, [5]int{all, 64 << 10, 64 << 10, 24 << 10, 24 << 10}, 256},
		{comm.OpAllReduce, dtype.I64, comm.Sum, [5]int{all, 32 << 10, 32 << 10, 12 << 10, 12 << 10}, 128},
		{comm.OpAllReduce, dtype.FP8E5M2, comm.Sum, [5]int{1 << 20, 256 << 10, 256 << 10, 96 << 10, 96 << 10}, 1 << 10},
		{comm.OpAllReduce, dtype.Bool, comm.Max, [5]int{1 << 20, 256 << 10, 256 << 10, 96 << 10, 96 << 10}, 1 << 10},
		{comm.OpReduceScatter, dtype.F32, comm.Sum, [5]int{all, 21845, 16 << 10, 4915, 3 << 10}, 128},
		{comm.OpReduceScatter, dtype.U8, comm.Sum, [5]int{512 << 10, 87381, 64 << 10, 19660, 12 << 10}, 512},
		{comm.OpAllGather, dtype.F32, comm.Sum, [5]int{all, 21845, 16 << 10, 4915, 3 << 10}, 128},
		{comm.OpAllToAll, dtype.I16, comm.Sum, [5]int{all, 43690, 32 << 10, 9830, 6 << 10}, 256},
		{comm.OpBroadcast, dtype.I8, comm.Sum, [5]int{all, 256 << 10, 256 << 10, 96 << 10, 96 << 10}, 1 << 10},
		{comm.OpReduce, dtype.F32, comm.Sum, [5]int{}, 0},
		{comm.OpSend, dtype.F32, comm.Sum, [5]int{}, 0},
		{comm.OpGather, dtype.F32, comm.Sum, [5]int{}, 0},
	} {
		check := func(kind link.Kind, ranks, want int) {
			t.Helper()
			table := newOffloadTable(kind, ranks, reductionSet{})
			x := comm.Call{Op: c.op, DType: c.dt, Reduce: c.reduce}
			sizes := []int{want}
			if want == all {
				sizes = []int{1, 1 << 20, 1 << 40}
			}
			for _, x.Count = range sizes {
				if x.Count > 0 { // an empty call needs no base
					assert.True(t, table.has(&x), "%v, %d ranks, %v", kind, ranks, x)
				}
			}
			if x.Count++; want != all {
				assert.False(t, table.has(&x), "%v, %d ranks, %v", kind, ranks, x)
			}
		}
		for i, ranks := range []int{2, 3, 4, 5, 8} {
			check(link.NVLink, ranks, c.nvlink[i])
		}
		check(link.PCIe, 2, c.pcie)
		check(link.Unknown, 2, c.pcie)
		check(link.NVLink, 1, 0)
		if c.nvlink != [5]int{} {
			check(link.SameGPU, 5, all)
		}
	}
}

// Each world has a row. More ranks, or a slower link, never raise a limit, and a row is found by the first that fits.
func TestOffloadRowsAreInOrder(t *testing.T) {
	atMost := func(a, b offloadRow) bool { return a.sums <= b.sums && a.bytes <= b.bytes && a.general <= b.general }
	for kind := link.Unknown; kind <= link.SameGPU; kind++ {
		for ranks := 2; ranks <= maxRanks; ranks++ {
			row := rowFor(kind, ranks)
			require.Positive(t, min(row.sums, row.bytes, row.general), "%v, %d ranks", kind, ranks)
			require.Equal(t, kind, row.link)
			if ranks > 2 {
				require.True(t, atMost(row, rowFor(kind, ranks-1)), "%v, %d ranks", kind, ranks)
			}
			if kind > link.Unknown {
				require.True(t, atMost(rowFor(kind-1, ranks), row), "%v, %d ranks", kind, ranks)
			}
		}
		assert.Zero(t, rowFor(kind, 1), "one rank copies by its base")
	}
	used := map[offloadRow]bool{}
	for kind := link.Unknown; kind <= link.SameGPU; kind++ {
		for ranks := 2; ranks <= maxRanks; ranks++ {
			used[rowFor(kind, ranks)] = true
		}
	}
	assert.Len(t, used, len(offloadRows))
}

// largestCalls returns a function that makes calls of a class on pieces of this size.
func largestCalls(c int) func(bytes int) []comm.Call {
	return map[class]func(bytes int) []comm.Call{
		wholeSums: func(bytes int) []comm.Call {
			return []comm.Call{comm.AllReduceCall(0, 0, bytes/4, dtype.F32, comm.Sum)}
		},
		wholeBytes: func(bytes int) []comm.Call {
			return []comm.Call{
				comm.AllReduceCall(0, 0, bytes, dtype.FP8E4M3, comm.Sum),
				comm.AllReduceCall(0, 0, bytes, dtype.Bool, comm.Min),
			}
		},
		wholeGeneral: func(bytes int) []comm.Call {
			return []comm.Call{
				comm.AllReduceCall(0, 0, bytes/4, dtype.F32, comm.Max),
				comm.AllReduceCall(0, 0, bytes/2, dtype.I16, comm.Sum),
				comm.BroadcastCall(0, bytes, dtype.U8, 0),
			}
		},
		partBytes: func(bytes int) []comm.Call {
			return []comm.Call{comm.ReduceScatterCall(0, 0, bytes, dtype.I8, comm.Sum)}
		},
		partGeneral: func(bytes int) []comm.Call {
			return []comm.Call{
				comm.ReduceScatterCall(0, 0, bytes/4, dtype.F32, comm.Sum),
				comm.ReduceScatterCall(0, 0, bytes/8, dtype.U64, comm.Prod),
				comm.AllGatherCall(0, 0, bytes, dtype.U8),
				comm.AllToAllCall(0, 0, bytes, dtype.U8),
			}
		},
	}[class(c)]
}

// Bounds that nobody measured are those of one step: the largest calls of theirs go through no ring.
func TestUnmeasuredSizesGoInOneStep(t *testing.T) {
	for kind := link.Unknown; kind <= link.SameGPU; kind++ {
		for ranks := 2; ranks <= maxRanks; ranks++ {
			p, names := named(ranks, defaults(ranks))
			for class, bytes := range newOffloadTable(kind, ranks, reductionSet{}).limit {
				if bytes == unlimited {
					continue
				}
				calls := largestCalls(class)(bytes)
				require.NotEmpty(t, calls)
				for _, x := range calls {
					want := []string{"pair", "add", "reduce", "move"}
					if class == int(wholeSums) && ranks > 2 && kind == link.NVLink {
						want = []string{"twice"} // measured, or derived for it
					}
					assert.Contains(t, want, names[p.plan(&x).kernel], "%v, %d ranks, %v", kind, ranks, x)
				}
			}
		}
	}
}

// All ranks make one table: of the slowest link that any of them sees, and of what any base lacks.
func TestRanksAgreeOnTheTable(t *testing.T) {
	bases := make([]hello, 4)
	bases[1].lacks.add(dtype.F16, comm.Prod)
	bases[3].lacks.add(dtype.I16, comm.Sum)
	for seen := link.Unknown; seen <= link.SameGPU; seen++ {
		links := []hello{{link: link.SameGPU}, {link: link.NVLink}, {link: seen}, {link: link.SameGPU}}
		table := tableOf(bases, links)
		row := rowFor(min(seen, link.NVLink), 4)
		assert.Equal(t, row.sums, table.limit[wholeSums], "%v", seen)
		for _, dt := range dtype.All() {
			for _, op := range reductions.All() {
				lacked := dt == dtype.F16 && op == comm.Prod || dt == dtype.I16 && op == comm.Sum
				x := comm.AllReduceCall(0, 0, 1<<40, dt, op)
				assert.Equal(t, lacked && op.Defined(dt), table.has(&x), "%v", x)
				x.Op = comm.OpReduce
				assert.Equal(t, lacked, table.lacked(&x), "%v", x)
			}
		}
		x := comm.AllReduceCall(0, 0, 1, dtype.F32, comm.ReduceOp(77))
		x.Op = comm.OpReduce
		assert.False(t, table.has(&x))
	}
}

// A limit in bytes fits what calls of any number of bytes are compared with.
func TestPiecesOfALimit(t *testing.T) {
	for ranks := 2; ranks <= maxRanks; ranks++ {
		assert.Equal(t, math.MaxInt, piece(unlimited, ranks), fmt.Sprint(ranks))
		assert.LessOrEqual(t, ranks*piece(1<<20, ranks), 1<<20)
		assert.Greater(t, ranks*(piece(1<<20, ranks)+1), 1<<20)
	}
}
