package trees

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A tree comes to its bound and back, to its depth, to groups of the same ranks and of one, to communicators of one
// color, related or not, and to children that are used when their parents are closed.
func TestShape(t *testing.T) {
	const limit = 50
	for seed := range uint64(10) {
		root := &node{name: "world", ranks: []int{0, 1, 2}}
		tree := newTree(seed, 0, limit, root)
		parents, closed := map[*node]*node{}, map[*node]bool{}
		full, half, deep, single, all, orphans, sameColor := 0, 0, 0, 0, 0, 0, 0
		for range 2000 {
			s := tree.next()
			require.LessOrEqual(t, len(tree.open), limit)
			switch s.action {
			case split:
				for _, n := range s.children {
					parents[n] = s.nodes[0]
					require.Equal(t, s.nodes[0].depth+1, n.depth)
					_, color, _ := strings.Cut(n.name[strings.LastIndex(n.name, "/"):], ".")
					if slices.ContainsFunc(tree.open, func(o *node) bool { return o != n && strings.HasSuffix(o.name, "."+color) }) {
						sameColor++
					}
					if n.depth == deepest {
						deep++
					}
					switch len(n.ranks) {
					case 1:
						single++
					case len(root.ranks):
						all++
					}
				}
			case closing:
				closed[s.nodes[0]] = true
			case use:
				for _, n := range s.nodes {
					require.False(t, closed[n])
					if closed[parents[n]] {
						orphans++
					}
				}
			}
			if len(tree.open) == limit {
				full++
			}
			if full > 0 && len(tree.open) == limit/2 {
				half++
			}
		}
		seen := map[string]int{"full": full, "half": half, "deep": deep, "single": single, "all ranks": all,
			"orphans": orphans, "same color": sameColor}
		for name, times := range seen {
			assert.Greater(t, times, 5, "seed %d: %s", seed, name)
		}
	}
}

// shared is a communicator whose children have the place of another one's, as if they had its number: all that the
// rank has made have their turn in a list.
type shared struct {
	comm.Wrapped
	comm.Methods
	made *made
}

// made are the communicators that a rank has made, by number of ranks.
type made struct {
	mu    sync.Mutex
	comms map[int][]comm.Communicator
}

func share(c comm.Communicator, m *made) *shared {
	return &shared{comm.Wrap(c), comm.Methods{Do: func(call comm.Call) error { return call.Make(c) },
		Together: func(calls []comm.Call) error { return c.Group(calls...) }}, m}
}

// Split has the communicator of both ranks that was made before be the next one as well, now and then, if ranks have
// the same places in both.
func (s *shared) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := s.Communicator.Split(ctx, color, key)
	if c == nil || err != nil {
		return nil, err
	}
	s.made.mu.Lock()
	defer s.made.mu.Unlock()
	size := c.WorldSize()
	list := append(s.made.comms[size], c)
	s.made.comms[size] = list
	if n := len(list); size == 2 && n%4 == 0 && list[n-2].Rank() == c.Rank() {
		return share(list[n-2], s.made), c.Close()
	}
	return share(c, s.made), nil
}

// Close leaves a communicator open that another tree may use as well.
func (s *shared) Close() error { return nil }

// A play finds two communicators that are one, though both work.
func TestFindsSharedCommunicators(t *testing.T) {
	rt := cpu.New()
	play := func(wrap func(comm.Communicator) comm.Communicator) error {
		c := Config{Seed: 1, Workers: 1, Open: 60, Operations: 2000, Sum: dtype.I32}
		return local.Run(t.Context(), 2, func(ctx context.Context, world comm.Communicator) error {
			_, err := c.Play(ctx, wrap(world), rt)
			return err
		})
	}
	require.NoError(t, play(func(c comm.Communicator) comm.Communicator { return c }))
	err := play(func(c comm.Communicator) comm.Communicator {
		return share(c, &made{comms: map[int][]comm.Communicator{}})
	})
	assert.ErrorContains(t, err, "trees of seed 1: worker 0, step")
}
