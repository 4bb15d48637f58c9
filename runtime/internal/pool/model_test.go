package pool

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/runtime"
)

const modelSeed = 31

// model is what a pool should have handed out.
type model struct {
	t      *testing.T
	pool   *Pool
	system *fakeSystem
	rng    *rand.Rand
	blocks []modelBlock
}

type modelBlock struct {
	ptr     uintptr
	size    int
	mapping bool // the block has a separate mapping
}

// add allocates a block and sees that it lies in mapped memory, apart from all
// others.
func (m *model) add() {
	size := 1 + m.rng.IntN(1<<m.rng.IntN(25))
	b := modelBlock{size: size, mapping: m.rng.IntN(8) == 0}
	if b.mapping {
		var err error
		b.ptr, err = m.pool.AllocateMapping(size)
		require.NoError(m.t, err)
	} else {
		b.ptr = allocate(m.t, m.pool, size)
	}
	require.Zero(m.t, b.ptr%alignment, "seed %d", modelSeed)
	for _, other := range m.blocks {
		if b.ptr < other.ptr+uintptr(other.size) && other.ptr < b.ptr+uintptr(b.size) {
			m.t.Fatalf("seed %d: %d bytes at %#x overlap %d bytes at %#x", modelSeed, b.size, b.ptr, other.size, other.ptr)
		}
	}
	inside := false
	for addr, bytes := range m.system.mapped {
		inside = inside || b.ptr >= addr && b.ptr+uintptr(b.size) <= addr+uintptr(bytes)
	}
	require.True(m.t, inside, "seed %d: %d bytes at %#x are not mapped", modelSeed, b.size, b.ptr)
	m.blocks = append(m.blocks, b)
}

// remove gives a block back, after a try with a pointer into it.
func (m *model) remove() {
	i := m.rng.IntN(len(m.blocks))
	b := m.blocks[i]
	if inside := m.rng.IntN(b.size); inside > 0 {
		require.ErrorIs(m.t, m.pool.Deallocate(b.ptr+uintptr(inside)), runtime.ErrForeignPointer, "seed %d", modelSeed)
	}
	if b.mapping && m.rng.IntN(2) == 0 {
		require.NoError(m.t, m.pool.Release(b.ptr), "seed %d", modelSeed)
		require.NotContains(m.t, m.system.mapped, b.ptr&^(Granule-1), "seed %d", modelSeed)
	} else {
		free(m.t, m.pool, b.ptr)
	}
	require.Error(m.t, m.pool.Deallocate(b.ptr), "seed %d: a second time", modelSeed)
	m.blocks[i] = m.blocks[len(m.blocks)-1]
	m.blocks = m.blocks[:len(m.blocks)-1]
}

func (m *model) checkStats() {
	s := m.pool.Stats()
	asked := 0
	for _, b := range m.blocks {
		asked += b.size
	}
	require.Equal(m.t, int64(len(m.blocks)), s.LiveBlocks)
	require.GreaterOrEqual(m.t, s.LiveBytes, int64(asked))
	require.GreaterOrEqual(m.t, s.PeakBytes, s.LiveBytes)
	require.LessOrEqual(m.t, s.LiveBytes+s.CachedBytes, int64(m.system.bytes), "seed %d", modelSeed)
}

// TestRandomUse compares a pool with the model over many random steps.
func TestRandomUse(t *testing.T) {
	eachConfig(t, 1<<40, func(t *testing.T, p *Pool, s *fakeSystem) {
		m := &model{t: t, pool: p, system: s, rng: rand.New(rand.NewPCG(modelSeed, 0))}
		for range 1000 {
			switch {
			case m.rng.IntN(200) == 0:
				_, err := p.Trim()
				require.NoError(t, err)
			case len(m.blocks) == 0 || len(m.blocks) < 100 && m.rng.IntN(2) == 0:
				m.add()
			default:
				m.remove()
			}
			m.checkStats()
		}
		for len(m.blocks) > 0 {
			m.remove()
		}
		assert.Zero(t, p.Stats().LiveBytes)
	})
}

// hammer allocates and frees from several goroutines until each got an error
// that ends it. Its result waits for that.
func hammer(p *Pool, ends error) (wait func(t *testing.T)) {
	const workers = 4
	errs := make([]error, workers)
	var wg sync.WaitGroup
	started := make(chan struct{}, workers)
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(modelSeed, uint64(w)))
			for round := 0; errs[w] == nil; round++ {
				allocate, giveBack := p.Allocate, p.Deallocate
				if rng.IntN(8) == 0 { // memory that goes back to the system at once
					allocate, giveBack = p.AllocateMapping, p.Release
				}
				ptr, err := allocate(1 + rng.IntN(1<<rng.IntN(24)))
				if err == nil {
					err = giveBack(ptr)
				}
				if err == nil && rng.IntN(8) == 0 {
					_, err = p.Trim()
				}
				errs[w] = err
				if round == 0 {
					started <- struct{}{}
				}
			}
		})
	}
	for range workers {
		<-started
	}
	return func(t *testing.T) {
		wg.Wait()
		for _, err := range errs {
			require.ErrorIs(t, err, ends, "seed %d", modelSeed)
		}
	}
}

// TestFreezeAndCloseWait: once Freeze or Close has returned, nothing reaches the
// system, not even a call that began before.
func TestFreezeAndCloseWait(t *testing.T) {
	for name, test := range map[string]struct {
		stop func(p *Pool) error
		ends error
	}{
		"freeze": {func(p *Pool) error { p.Freeze(); return nil }, runtime.ErrFrozen},
		"close":  {(*Pool).Close, runtime.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				p, s := newTestPool(t, configs["host"], 1<<40)
				wait := hammer(p, test.ends)
				if err := test.stop(p); !errors.Is(err, runtime.ErrLeak) {
					require.NoError(t, err)
				}
				s.setQuiet(true)
				wait(t)
				require.Zero(t, s.noises, "seed %d: calls of the system after the end", modelSeed)
				s.setQuiet(false)
				p.Unfreeze()
			}
		})
	}
}
