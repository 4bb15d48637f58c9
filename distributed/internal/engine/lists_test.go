package engine_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/internal/engine"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/sparsity"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// lister shares lists that nothing is written to. Its Gather fails, unless it gathers.
type lister struct {
	comm.Wrapped
	rt      runtime.Runtime
	refuses error
	gathers bool
	made    []int
	closed  int
}

type unwritten struct {
	l     *lister
	lists []kernel.Entries
}

func (l *lister) ShareLists(_ context.Context, n int) (backend.SharedLists, error) {
	if l.made = append(l.made, n); l.refuses != nil {
		return nil, l.refuses
	}
	u := &unwritten{l: l, lists: make([]kernel.Entries, l.WorldSize())}
	for r := range u.lists {
		p, err := l.rt.Allocate(16 + 8*n)
		if err != nil {
			return nil, err
		}
		if err := l.rt.Fill(p, 16+8*n, dtype.U8, 0); err != nil {
			return nil, err
		}
		u.lists[r] = kernel.Entries{Idx: p + 16, Val: p + 16 + uintptr(4*n), N: n, Len: p}
	}
	u.lists[l.Rank()].Shared = 1
	return u, nil
}

func (u *unwritten) Lists() []kernel.Entries { return u.lists }

func (u *unwritten) Gather(kernel.Entries) error {
	if u.l.gathers {
		return nil
	}
	return errors.New("no gather")
}

func (u *unwritten) Close() (err error) {
	u.l.closed++
	for _, l := range u.lists {
		err = errors.Join(err, u.l.rt.Deallocate(l.Len))
	}
	return err
}

// A step that fails when other ranks may have its entries cannot be made again: they may use either. Until then it can, and
// where no lists can be shared, they are gathered.
func TestAStepWithListsThatOthersHave(t *testing.T) {
	const n = 100
	for name, c := range map[string]struct {
		refuses error
		values  string
		asks    []int
		first   string
		second  error
	}{
		"lists":       {nil, sparsity.F32, []int{10}, "no gather", comm.ErrMismatch},
		"unsupported": {comm.ErrUnsupported, sparsity.F32, []int{10}, "", nil},
		"refused":     {errors.New("no lists"), sparsity.F32, []int{10, 10}, "no lists", errAny},
		"coded":       {nil, sparsity.I8, nil, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, base comm.Communicator) error {
				rt := cpu.New()
				l := &lister{Wrapped: comm.Wrap(base), rt: rt, refuses: c.refuses}
				s, err := engine.New(rt, l, n, engine.Config{Pattern: sparsity.TopkA, Density: 0.1, Values: c.values})
				if err != nil {
					return err
				}
				g, err := runtime.New(rt, dtype.F32, n)
				if err != nil {
					return err
				}
				if err := g.Fill(1); err != nil {
					return err
				}
				first, second := s.AllReduce(ctx, g), s.AllReduce(ctx, g)
				if c.first == "" {
					assert.NoError(t, errors.Join(first, second))
				} else {
					assert.ErrorContains(t, first, c.first)
					assert.ErrorContains(t, first, "rolled back")
				}
				switch {
				case c.second == errAny:
					assert.Error(t, second)
				case c.second != nil:
					assert.ErrorIs(t, second, c.second)
				}
				assert.Equal(t, c.asks, l.made)
				err = errors.Join(s.Close(), g.Free())
				assert.Equal(t, c.first == "no gather", l.closed == 1)
				return errors.Join(err, rt.Close())
			}))
		})
	}
}

var errAny = errors.New("any")

// counting is a runtime with a compute stream that counts the waits for it.
type counting struct {
	runtime.Runtime
	waits *int
}

func (c counting) Kernels() kernel.Kernels {
	k, _ := kernel.Lookup(c.Runtime)
	return k
}

func (c counting) Synchronize(ctx context.Context) error {
	*c.waits++
	return c.Runtime.Synchronize(ctx)
}

// Lists that one communicator did not have are requested from another. Lists of a closed one are freed when the
// kernels that write them are done.
func TestListsAfterRebind(t *testing.T) {
	const n, ranks = 100, 2
	var worlds [3][]comm.Communicator
	for i := range worlds {
		var err error
		worlds[i], err = local.New(ranks)
		require.NoError(t, err)
	}
	var all sync.WaitGroup
	for rank := range ranks {
		all.Go(func() {
			rt, waits := cpu.New(), 0
			device := counting{standin.NewOnStream(rt), &waits}
			lists := func(world int, refuses error) *lister {
				return &lister{Wrapped: comm.Wrap(standin.NewOrdered(t.Context(), worlds[world][rank])), rt: rt, refuses: refuses}
			}
			s, err := engine.New(device, lists(0, comm.ErrUnsupported), n, engine.Config{Pattern: sparsity.TopkA, Density: 0.1})
			assert.NoError(t, err)
			g, err := runtime.New(device, dtype.F32, n)
			assert.NoError(t, errors.Join(err, s.AllReduce(t.Context(), g)))
			second := lists(1, nil)
			assert.NoError(t, s.Rebind(second))
			assert.ErrorContains(t, s.AllReduce(t.Context(), g), "no gather")
			assert.Equal(t, []int{10}, second.made)
			assert.NoError(t, comm.CloseAll(worlds[1][rank], nil))
			before := waits
			assert.NoError(t, s.Rebind(lists(2, comm.ErrUnsupported)))
			assert.Equal(t, 1, second.closed)
			assert.Greater(t, waits, before, "kernels may write to the lists")
			assert.NoError(t, errors.Join(s.Close(), g.Free(), worlds[0][rank].Close(), worlds[2][rank].Close(), rt.Close()))
		})
	}
	all.Wait()
}

// Lists that have become too short are freed, unless steps were captured, whose graphs write to them: these stay until
// the reducer leaves the communicator.
func TestListsThatGraphsReferTo(t *testing.T) {
	const n = 100
	for _, captured := range []bool{false, true} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, base comm.Communicator) error {
			rt := cpu.New()
			l := &lister{Wrapped: comm.Wrap(base), rt: rt, gathers: true}
			s, err := engine.New(rt, l, n, engine.Config{Pattern: sparsity.TopkA, Density: 0.5,
				Schedule: engine.Schedule{Densities: []float64{0.1, 0.3}, StepsPerEpoch: 2}})
			if err != nil {
				return err
			}
			g, err := runtime.New(rt, dtype.F32, n)
			if err != nil {
				return err
			}
			for step := range 5 {
				if captured && step == 1 { // as a capture does
					rt.Freeze()
				}
				err = errors.Join(err, g.Fill(float64(step)), s.AllReduce(ctx, g))
				if captured && step == 1 {
					rt.Unfreeze()
				}
			}
			assert.Equal(t, []int{10, 30, 50}, l.made)
			want := 2
			if captured {
				want = 0
			}
			assert.Equal(t, want, l.closed, "captured %t", captured)
			err = errors.Join(err, s.Close(), g.Free())
			assert.Equal(t, 3, l.closed, "captured %t", captured)
			return errors.Join(err, rt.Close())
		}))
	}
}
