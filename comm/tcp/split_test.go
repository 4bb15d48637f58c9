package tcp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	goruntime "runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/networktest"
)

// splitAll splits a communicator by one color, several times.
func splitAll(ctx context.Context, c comm.Communicator, times, color int) (made []comm.Communicator, err error) {
	for range times {
		child, err := c.Split(ctx, color, c.Rank())
		if err != nil {
			return nil, err
		}
		made = append(made, child)
	}
	return made, nil
}

// hears sees that messages sent around the ring on each communicator, first to last, arrive on the same one when
// they are received last to first, with one tag.
func hears(ctx context.Context, comms []comm.Communicator) error {
	sent, got := make([]int32, len(comms)), make([]int32, len(comms))
	for i, c := range comms {
		sent[i] = int32(100*i + c.Rank())
		if err := c.Send(hostmem.Addr(sent[i:]), 1, dtype.I32, (c.Rank()+1)%c.WorldSize(), 7); err != nil {
			return err
		}
	}
	for i := len(comms) - 1; i >= 0; i-- {
		c := comms[i]
		before := (c.Rank() + c.WorldSize() - 1) % c.WorldSize()
		if err := errors.Join(c.Recv(hostmem.Addr(got[i:]), 1, dtype.I32, before, 7), c.Sync(ctx)); err != nil {
			return err
		}
		if want := int32(100*i + before); got[i] != want {
			return fmt.Errorf("communicator %d of %d got %d, want %d", i, len(comms), got[i], want)
		}
	}
	goruntime.KeepAlive(sent)
	return nil
}

// Children of the world and of its first child, with one color, are different communicators: none gets the messages
// of another one, and one that closes leaves the others alone.
func TestChildrenAndGrandchildren(t *testing.T) {
	for _, color := range []int{0, 1, math.MaxInt} {
		require.NoError(t, run(soon(t), 2, nil, func(ctx context.Context, world comm.Communicator) error {
			children, err := splitAll(ctx, world, 8, color)
			if err != nil {
				return err
			}
			all := append([]comm.Communicator{world}, children...)
			for _, child := range children[:2] {
				grandchildren, err := splitAll(ctx, child, 16, color)
				if err != nil {
					return err
				}
				all = append(all, grandchildren...)
			}
			for len(all) > 1 {
				if err := hears(ctx, all); err != nil {
					return err
				}
				half := len(all) / 2
				for _, c := range all[half:] {
					if err := c.Close(); err != nil {
						return err
					}
				}
				all = all[:half]
			}
			return nil
		}), "color %d", color)
	}
}

// A communicator whose first rank numbers it as another rank might, or as one that is open, is refused, and its parent
// aborts on all ranks.
func TestForgedNumbers(t *testing.T) {
	for name, forge := range map[string]func(c comm.Communicator){
		"another rank's": func(c comm.Communicator) { tcp.Propose(c, 7*uint64(c.WorldSize())+1) },
		"the world's":    func(c comm.Communicator) { tcp.Propose(c, 0) },
		"in use":         func(c comm.Communicator) { tcp.Propose(c, uint64(c.WorldSize())) },
	} {
		t.Run(name, func(t *testing.T) {
			comms := open(t, 3, nil)
			errs := make([]error, len(comms))
			require.NoError(t, comm.Run(soon(t), comms, func(ctx context.Context, c comm.Communicator) error {
				kept, err := c.Split(ctx, 0, c.Rank())
				if err != nil {
					return err
				}
				parent, err := c.Split(ctx, 0, c.Rank())
				if err != nil {
					return err
				}
				if c.Rank() == 0 {
					forge(c)
				}
				_, errs[c.Rank()] = parent.Split(ctx, 0, c.Rank())
				if err := errors.Join(parent.Close(), hears(ctx, []comm.Communicator{c, kept})); err != nil {
					return err
				}
				return kept.Close()
			}))
			for _, err := range errs {
				require.ErrorIs(t, err, comm.ErrMismatch)
			}
		})
	}
}

// TestWorldsAreNamed: the ranks of a world have a name in flight records that no other world has, whosever its store is,
// unless the process has a name.
func TestWorldsAreNamed(t *testing.T) {
	name := func(c comm.Communicator) string {
		named, ok := comm.As[interface{ RunName() string }](c)
		require.True(t, ok)
		return named.RunName()
	}
	seen := map[string]bool{}
	for _, size := range []int{1, 1, 3, 3} {
		ranks := open(t, size, over(new(networktest.Pipes)))
		first := tcp.Run(ranks[0])
		assert.NotEmpty(t, first)
		assert.False(t, seen[first])
		seen[first] = true
		for _, c := range ranks {
			assert.Equal(t, first, tcp.Run(c))
			assert.NotEmpty(t, name(c))
		}
		t.Run("of a launcher", func(t *testing.T) {
			t.Setenv(env.Run, "of the launcher")
			assert.Equal(t, "of the launcher", name(ranks[0]))
		})
		var all sync.WaitGroup
		for _, c := range ranks {
			all.Go(func() {
				child, err := c.Split(t.Context(), 0, 0)
				if assert.NoError(t, err) {
					assert.Equal(t, first, tcp.Run(child))
					assert.NoError(t, child.Close())
				}
				assert.NoError(t, c.Close())
			})
		}
		all.Wait()
	}
}
