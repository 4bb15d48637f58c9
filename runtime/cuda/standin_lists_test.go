package cuda

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	goruntime "runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/local"
	topk "github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// sharer is overHost whose ranks write lists into each other's memory: the kernels' source does so, run on the host,
// and Go takes them from there, as kernels of comm/p2p do on GPUs.
type sharer struct {
	overHost
	rt     *Runtime
	shared *int // lists that were gathered after a kernel wrote them
}

// listHead is struct shared_lists of kernels/shared.cuh.
type listHead struct {
	epoch             [256]uint64
	counts, notes     [2][8]uint64
	rank, ranks, room uint64
	memory            [8]uint64
	_                 uint32 // closed
}

type hostLists struct {
	s      sharer
	memory uintptr
	lists  []kernel.Entries
}

func (s sharer) ShareLists(ctx context.Context, n int) (backend.SharedLists, error) {
	ranks, room := s.WorldSize(), (n+3)/4*4
	bytes := 4096 + ranks*(2*8*room+16+8*room)
	memory, err := s.rt.Allocate(bytes)
	if err != nil {
		return nil, err
	}
	all := hostmem.Slice[byte](memory, bytes)
	for i := range all {
		all[i] = 0xff
	}
	h := listHead{rank: uint64(s.Rank()), ranks: uint64(ranks), room: uint64(room)}
	for b := range h.epoch {
		h.epoch[b] = 1
	}
	addresses := make([]uint64, ranks)
	addresses[s.Rank()] = uint64(memory)
	if err := errors.Join(s.AllGather(hostmem.AddrOf(&addresses[s.Rank()]), hostmem.Addr(addresses), 1, dtype.U64), s.Sync(ctx)); err != nil {
		return nil, err
	}
	copy(h.memory[:], addresses)
	hostmem.Slice[listHead](memory, 1)[0] = h
	l := &hostLists{s: s, memory: memory}
	at := memory + 4096 + uintptr(16*ranks*room)
	for range ranks {
		l.lists = append(l.lists, kernel.Entries{Idx: at + 16, Val: at + 16 + uintptr(4*room), N: n, Len: at})
		at += uintptr(16 + 8*room)
	}
	l.lists[h.rank].Shared = memory
	clear(hostmem.Slice[uint32](l.lists[h.rank].Len, 4))
	return l, s.Barrier(ctx)
}

func (l *hostLists) Lists() []kernel.Entries { return l.lists }
func (l *hostLists) Close() error            { return l.s.rt.Deallocate(l.memory) }

func (l *hostLists) Gather(own kernel.Entries) error {
	h := &hostmem.Slice[listHead](l.memory, 1)[0]
	list := l.lists[h.rank]
	if own.N > list.N || own.Idx != list.Idx || own.Val != list.Val ||
		own.Len != 0 && own.Len != list.Len || own.Shared != 0 && own.Shared != list.Shared {
		return errors.New("a list that is not the rank's own, nor its beginning")
	}
	epoch, room := h.epoch[0], int(h.room)
	place := func(memory, from uint64) []uint64 {
		return hostmem.Slice[uint64](uintptr(memory+4096+((epoch&1)*h.ranks+from)*h.room*8), room)
	}
	if own.Shared == 0 {
		n, head := own.N, hostmem.Slice[uint32](l.lists[h.rank].Len, 2)
		note := uint64(n)
		if own.Len != 0 {
			note = uint64(hostmem.Slice[uint32](own.Len, 1)[0])
			n = min(n, int(note))
		}
		if head[1] != 0 {
			note |= 1 << 31
		}
		for p := range h.ranks {
			for i := 0; i < n && p != h.rank; i++ {
				place(h.memory[p], h.rank)[i] = uint64(hostmem.Slice[uint32](own.Val, n)[i])<<32 | uint64(hostmem.Slice[uint32](own.Idx, n)[i])
			}
			if n%2 != 0 && p != h.rank { // two are taken together
				place(h.memory[p], h.rank)[n] = 0
			}
			theirs := &hostmem.Slice[listHead](uintptr(h.memory[p]), 1)[0]
			atomic.StoreUint64(&theirs.notes[epoch&1][h.rank], epoch<<32|note)
			atomic.StoreUint64(&theirs.counts[epoch&1][h.rank], epoch<<32|uint64(n))
		}
	} else {
		*l.s.shared++
	}
	for p := range h.ranks {
		if p == h.rank {
			continue
		}
		told, note := uint64(0), uint64(0)
		for told>>32 != epoch || note>>32 != epoch {
			if l.s.ctx.Err() != nil {
				return l.s.ctx.Err()
			}
			goruntime.Gosched()
			told, note = atomic.LoadUint64(&h.counts[epoch&1][p]), atomic.LoadUint64(&h.notes[epoch&1][p])
		}
		n, from, to := int(uint32(told)), place(uint64(l.memory), p), l.lists[p]
		copy(hostmem.Slice[uint32](to.Len, 4), []uint32{uint32(note) &^ (1 << 31), uint32(note) >> 31, 0, 0})
		for i := range min(n+n%2, room) {
			v := ^uint64(0)
			for v == ^uint64(0) { // the count may come before entries
				if l.s.ctx.Err() != nil {
					return l.s.ctx.Err()
				}
				goruntime.Gosched()
				v = atomic.SwapUint64(&from[i], ^uint64(0))
			}
			if i < n {
				hostmem.Slice[uint32](to.Idx, room)[i], hostmem.Slice[uint32](to.Val, room)[i] = uint32(v), uint32(v>>32)
			}
		}
	}
	for b := range h.epoch {
		h.epoch[b]++
	}
	return nil
}

// Steps whose lists are written into the other ranks' memory have the results of steps that gather them, and leave the same
// residuals, bit for bit.
func TestStepsWithSharedLists(t *testing.T) {
	if os.Getenv(standInVariable) == "" {
		t.Skip("needs the stand-in; see TestOnStandIns")
	}
	openStandIn(t)
	const ranks, n, steps = 2, 4096, 14 // each scale twice
	for i, pattern := range []string{topk.TopkA, topk.TopkA2, topk.TopkAopt, topk.Gaussiank, topk.Chunked, topk.Oktopk} {
		for j, density := range []float64{0.02, 0.2, 1} {
			if (i+j)%3 != 0 && os.Getenv("TUTTI_EXTENDED") == "" {
				continue
			}
			t.Run(pattern, func(t *testing.T) {
				shared := [ranks]int{}
				require.NoError(t, local.Run(t.Context(), ranks, func(ctx context.Context, c comm.Communicator) (err error) {
					rt, err := Open(c.Rank())
					if err != nil {
						return err
					}
					defer func() { err = errors.Join(err, rt.Close()) }()
					over := overHost{c, ctx}
					rng := rand.New(rand.NewPCG(uint64(c.Rank()), 17))
					var all [2]*topk.Reducer
					var tensors [2]*runtime.Tensor
					for i, c := range []comm.Communicator{over, sharer{over, rt, &shared[c.Rank()]}} {
						if all[i], err = topk.New(rt, c, n, topk.Config{Pattern: pattern, Density: density}); err != nil {
							return err
						}
						defer func() { err = errors.Join(err, all[i].Close()) }()
						if tensors[i], err = runtime.New(rt, dtype.F32, n); err != nil {
							return err
						}
						defer func() { err = errors.Join(err, tensors[i].Free()) }()
					}
					for step := range steps {
						values := make([]float32, n)
						for i := range values {
							values[i] = float32(rng.NormFloat64() * float64(1+step%7))
						}
						var got [2][][]float32
						for i, s := range all {
							to, err := tensors[i].Ptr()
							if err != nil {
								return err
							}
							if err := errors.Join(rt.CopyIn(to, hostmem.Bytes(values)), s.AllReduce(ctx, tensors[i])); err != nil {
								return err
							}
							residual, err := s.Residual()
							if err != nil {
								return err
							}
							for _, x := range []*runtime.Tensor{tensors[i], residual} {
								v, err := runtime.ToSlice[float32](x)
								if err != nil {
									return err
								}
								got[i] = append(got[i], v)
							}
						}
						require.Equal(t, got[0], got[1], "step %d", step)
					}
					return nil
				}))
				switch {
				case pattern == topk.Chunked:
					require.Zero(t, shared[0], "its kernel does not write lists there")
				case pattern == topk.Oktopk && density == 1:
					require.Zero(t, shared[0], "it sends all entries")
				case pattern == topk.Oktopk && density == 0.2:
					require.Greater(t, shared[0], steps, "some steps gather selected entries and sums")
				default:
					require.Equal(t, [ranks]int{steps, steps}, shared)
				}
			})
		}
	}
}
