package schedule

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
)

// quiet is a wire that carries nothing, and knows which rank is gone.
type quiet struct {
	gone atomic.Int32 // a rank; none if it is negative
}

var errUnplugged = errors.New("unplugged")

func (*quiet) Post(int, *Message)                       { panic("a message") }
func (*quiet) Flush() error                             { return nil }
func (*quiet) Poll(done []Done, _ Hint) ([]Done, error) { return done, nil }
func (*quiet) Abandon() int                             { return 0 }
func (*quiet) Tell(int, bool, []byte) bool              { return true }
func (*quiet) Hear(int) ([]byte, error)                 { return nil, nil }
func (*quiet) Told() (bool, error)                      { return true, nil }

func (w *quiet) Gone(rank int) error {
	if int(w.gone.Load()) == rank {
		return errUnplugged
	}
	return nil
}

// newSharing returns engines of ranks that share memory, and nothing else. begun is called in every round of a rank.
func newSharing(w *quiet, size int, begun func(rank int)) []*Engine {
	w.gone.Store(-1)
	memory := hostmem.Bytes(make([]uint64, SegmentBytes(size)/8+1))
	engines := make([]*Engine, size)
	for r := range engines {
		check := backend.Check{Backend: "quiet", Rank: r, WorldSize: size}
		engines[r] = New(Config{Check: check, Wire: w, MaxTag: 1 << 62})
		engines[r].Share(memory, func() { begun(r) })
	}
	return engines
}

// reduceOver has an engine do a reduction, and wait for it.
func reduceOver(ctx context.Context, e *Engine, c comm.Call) error {
	if err := e.Submit(c); err != nil {
		return err
	}
	return e.Wait(ctx, comm.OpSync)
}

var extended = os.Getenv("TUTTI_EXTENDED") != ""

// TestSharedReductions: what goes over the segment in one round or by blocks has the bits of the order contract. Every
// second case is in place, or with TUTTI_EXTENDED set each case is also in place.
func TestSharedReductions(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for _, size := range []int{2, 5} {
		engines := newSharing(&quiet{}, size, func(int) {})
		for i, v := range []struct {
			dt  dtype.DType
			red reductions.Op
		}{{dtype.F32, comm.Sum}, {dtype.F16, comm.Avg}, {dtype.U8, comm.Max}, {dtype.F64, comm.Prod}} {
			block := shortBlock / v.dt.Size()
			for j, count := range []int{1, 100, block - 1, block + 1, 2*block + 70} {
				for k, op := range []comm.Op{comm.OpAllReduce, comm.OpReduce, comm.OpReduceScatter} {
					for _, inPlace := range []bool{false, true} {
						if chosen := (i+j+k)%2 > 0; inPlace != chosen && !extended {
							continue
						}
						name := fmt.Sprint(size, v.dt, v.red, count, op, inPlace)
						checkShared(ctx, t, name, engines, op, v.dt, v.red, count, inPlace)
					}
				}
			}
		}
	}
}

// With many ranks the longest block is no power of two, and blocks of whole elements are to fit it. Those with many
// elements are left out unless TUTTI_EXTENDED is set: [TestBlocksFit] has their blocks.
func TestSharedReductionsOfManyRanks(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for _, v := range []struct {
		size, count int
		dt          dtype.DType
		op          comm.Op
	}{
		{48, 699048, dtype.F32, comm.OpAllReduce},
		{24, 699048, dtype.F64, comm.OpAllReduce},
		{240, 273, dtype.F64, comm.OpReduceScatter},
	} {
		if v.size < 100 && !extended {
			continue
		}
		engines := newSharing(&quiet{}, v.size, func(int) {})
		checkShared(ctx, t, fmt.Sprint(v), engines, v.op, v.dt, comm.Sum, v.count, false)
	}
}

// Blocks are whole elements, no longer than there is room for, and none is empty. Results are aligned.
func TestBlocksFit(t *testing.T) {
	for size := 2; size <= 300; size++ {
		s := segment{size: size}
		require.Zero(t, s.maxBlock()%cacheLine)
		for _, dt := range []dtype.DType{dtype.U8, dtype.F16, dtype.F32, dtype.F64} {
			for _, count := range []int{1, 255, 4117, 699048, 2446675, 1 << 26} {
				for _, to := range []int{everybody, nobody} {
					blocks, block := s.blocksOf(count, dt.Size(), to)
					require.GreaterOrEqual(t, blocks*block, count)
					require.Less(t, (blocks-1)*block, count)
					bytes := block * dt.Size()
					if to == nobody {
						bytes *= size
					}
					if block > 1 {
						require.LessOrEqual(t, bytes, s.maxBlock(), "%d ranks, %d of %v", size, count, dt)
					}
				}
			}
		}
	}
}

func checkShared(ctx context.Context, t *testing.T, name string, engines []*Engine, op comm.Op, dt dtype.DType,
	red reductions.Op, count int, inPlace bool) {
	t.Helper()
	size := len(engines)
	periods := make([][]byte, size)
	for r := range periods {
		periods[r] = reference.Rough(dt, red, r, size)
	}
	want := reference.NewOrdered(dt, red, periods...)
	root := size - 1
	sent := count
	if op == comm.OpReduceScatter {
		sent *= size
	}
	var ranks sync.WaitGroup
	for r, e := range engines {
		ranks.Go(func() {
			buffer := func(bytes int) []byte { return hostmem.Bytes(make([]uint64, bytes/8+1))[:bytes] }
			given := reference.Tile(periods[r], 0, sent*dt.Size())
			send := buffer(len(given))
			copy(send, given)
			first := 0
			if op == comm.OpReduceScatter {
				first = r * count
			}
			var recv []byte
			if inPlace {
				recv = send[first*dt.Size():][:count*dt.Size()]
			} else {
				recv = buffer(count * dt.Size())
			}
			c := comm.Call{Op: op, DType: dt, Reduce: red, Count: count, Peer: root, Send: hostmem.Addr(send), Recv: hostmem.Addr(recv)}
			if op != comm.OpReduce {
				c.Peer = 0
			}
			assert.NoError(t, reduceOver(ctx, e, c), name)
			if op != comm.OpReduce || r == root {
				assert.NoError(t, want.Check(recv, first), "%s: rank %d", name, r)
			}
			if !inPlace {
				assert.Equal(t, given, send, name)
			}
		})
	}
	ranks.Wait()
}

// dead is what a rank panics with that is killed.
type dead struct{}

// TestKilledInBlocks has a rank end at every point of a long reduction, in the middle of what it writes to its slot.
// Unless it had begun the last round, all others fail and name it; otherwise all have the result.
func TestKilledInBlocks(t *testing.T) {
	const size, victim, blocks = 3, 2, 4
	count := blocks * shortBlock / dtype.F32.Size()
	for lives := range blocks + 2 { // rounds that the rank begins
		w := &quiet{}
		began := 0
		engines := newSharing(w, size, func(rank int) {
			if rank != victim {
				return
			}
			if began++; began == lives {
				panic(dead{})
			}
		})
		values := [size][]float32{}
		reduce := func(rank int) error {
			values[rank] = make([]float32, count)
			for i := range values[rank] {
				values[rank][i] = float32(i%1000 + rank)
			}
			p := hostmem.Addr(values[rank])
			return reduceOver(t.Context(), engines[rank], comm.AllReduceCall(p, p, count, dtype.F32, comm.Sum))
		}
		var ranks sync.WaitGroup
		for r := range size {
			ranks.Go(func() {
				if r == victim {
					defer endRank(t, w, engines[r])
					if lives == 0 {
						return
					}
				}
				err := reduce(r)
				if lives <= blocks {
					assert.ErrorIs(t, err, comm.ErrPeerFailed)
					assert.ErrorContains(t, err, "rank 2 is gone: unplugged")
					return
				}
				assert.NoError(t, err)
				for i, got := range values[r] {
					if want := float32(3*(i%1000) + 3); got != want {
						t.Errorf("rank %d: element %d is %v, want %v", r, i, got, want)
						return
					}
				}
			})
		}
		ranks.Wait()
	}
}

// endRank is the end of a rank that is killed: it has written a part of what belongs to its next round.
func endRank(t *testing.T, w *quiet, e *Engine) {
	if p := recover(); p != nil {
		require.Equal(t, dead{}, p)
		e.segment.seen = 0 // the rank has ended before it looked
		for !e.segment.complete() {
			time.Sleep(time.Millisecond) // or it had not begun to write
		}
		next := e.segment.slots[(e.segment.round+1)%2][e.rank]
		part := hostmem.Slice[byte](next.operands(), e.segment.capacity-cacheLine)
		for i := range part {
			part[i] = 0xee
		}
	}
	w.gone.Store(int32(e.rank))
}
