package sparse_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// lister shares lists that nothing is written to. Its Gather fails.
type lister struct {
	comm.Wrapped
	rt      runtime.Runtime
	refuses error
	made    []int
	closed  int
}

type unwritten struct {
	l     *lister
	lists []runtime.Entries
}

func (l *lister) ShareLists(_ context.Context, n int) (comm.SharedLists, error) {
	if l.made = append(l.made, n); l.refuses != nil {
		return nil, l.refuses
	}
	u := &unwritten{l: l, lists: make([]runtime.Entries, l.WorldSize())}
	for r := range u.lists {
		p, err := l.rt.Allocate(16 + 8*n)
		if err != nil {
			return nil, err
		}
		u.lists[r] = runtime.Entries{Idx: p + 16, Val: p + 16 + uintptr(4*n), N: n, Len: p}
	}
	u.lists[l.Rank()].Shared = 1
	return u, nil
}

func (u *unwritten) Lists() []runtime.Entries     { return u.lists }
func (u *unwritten) Gather(runtime.Entries) error { return errors.New("no gather") }
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
		"lists":       {nil, sparse.F32, []int{10}, "no gather", comm.ErrMismatch},
		"unsupported": {comm.ErrUnsupported, sparse.F32, []int{10}, "", nil},
		"refused":     {errors.New("no lists"), sparse.F32, []int{10, 10}, "no lists", errAny},
		"coded":       {nil, sparse.I8, nil, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, base comm.Communicator) error {
				rt := cpu.New()
				l := &lister{Wrapped: comm.Wrap(base), rt: rt, refuses: c.refuses}
				s, err := sparse.New(rt, l, n, sparse.Config{Pattern: sparse.TopkA, Density: 0.1, Values: c.values})
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
