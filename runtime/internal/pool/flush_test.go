package pool

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/runtime"
)

var errPending = errors.New("the work goes on")

// beginTrim begins a Trim that waits for the system's work, which is over when
// end is called. That returns what Trim did.
func beginTrim(p *Pool, s *fakeSystem) (end func() (int64, error)) {
	waiting, over := make(chan struct{}), make(chan struct{})
	s.pending = func() error {
		close(waiting)
		<-over
		return nil
	}
	var released int64
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		released, err = p.Trim()
	}()
	<-waiting
	return func() (int64, error) {
		close(over)
		<-done
		s.pending = nil
		return released, err
	}
}

// isMapped reports whether the memory of a block is the pool's.
func (s *fakeSystem) isMapped(ptr uintptr) bool {
	_, ok := s.mapped[ptr&^(Granule-1)]
	return ok
}

// While a flush waits for the system, everything else goes on, and what was in
// use meanwhile stays: the wait did not cover that.
func TestAFlushHoldsNothingUp(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, s *fakeSystem) {
		var ptrs []uintptr
		for _, size := range []int{10 * p.largestClass, 20 * p.largestClass, 64, 4096} {
			ptrs = append(ptrs, allocate(t, p, size))
		}
		free(t, p, ptrs...)
		used, unused, live, unusedSmall := ptrs[0], ptrs[1], ptrs[2], ptrs[3]
		end := beginTrim(p, s)

		require.Equal(t, used, allocate(t, p, 10*p.largestClass), "the cache is there")
		free(t, p, used)
		require.Equal(t, live, allocate(t, p, 64))
		fresh := allocate(t, p, 30*p.largestClass)
		p.Freeze()
		p.Unfreeze()
		assert.Positive(t, p.Stats().CachedBytes)

		released, err := end()
		require.NoError(t, err)
		assert.GreaterOrEqual(t, released, int64(20*p.largestClass+4096))
		assert.Equal(t, 1, s.fences, "one wait for all mappings")
		for ptr, stays := range map[uintptr]bool{used: true, live: true, fresh: true, unused: false, unusedSmall: false} {
			assert.Equal(t, stays, s.isMapped(ptr), "%#x", ptr)
		}
		free(t, p, live, fresh)
	})
}

// Freeze and Close do not wait for a flush that waits, which then leaves the
// memory alone.
func TestAFlushIsOvertaken(t *testing.T) {
	eachConfig(t, 1<<30, func(t *testing.T, p *Pool, s *fakeSystem) {
		ptr := allocate(t, p, 10*p.largestClass)
		free(t, p, ptr)
		end := beginTrim(p, s)
		p.Freeze()
		released, err := end()
		require.NoError(t, err)
		assert.Zero(t, released)
		p.Unfreeze()
		require.Equal(t, ptr, allocate(t, p, 10*p.largestClass))
		free(t, p, ptr)

		end = beginTrim(p, s)
		require.NoError(t, p.Close())
		assert.Empty(t, s.mapped)
		s.setQuiet(true)
		released, err = end()
		require.NoError(t, err)
		assert.Zero(t, released)
		assert.Zero(t, s.noises)
	})
}

func TestWorkThatDoesNotEndKeepsTheCache(t *testing.T) {
	const limit = 64 << 20
	eachConfig(t, limit, func(t *testing.T, p *Pool, s *fakeSystem) {
		ptr := allocate(t, p, 40<<20)
		free(t, p, ptr)
		before := p.Stats()
		s.pending = func() error { return errPending }
		for range 2 {
			_, err := p.Allocate(60 << 20)
			require.ErrorIs(t, err, runtime.ErrOutOfMemory)
			require.ErrorIs(t, err, errNoMemory)
			require.ErrorIs(t, err, errPending)
			assert.ErrorContains(t, err, "the cache could not be freed: the work goes on")
		}
		_, err := p.Trim()
		require.ErrorIs(t, err, errPending)
		assert.Equal(t, before, p.Stats())
		assert.Equal(t, ptr, allocate(t, p, 40<<20), "the cache can be used")
		free(t, p, ptr)
		s.pending = nil
		free(t, p, allocate(t, p, 60<<20))
	})
}

func TestWithoutACacheNothingIsWaitedFor(t *testing.T) {
	p, s := newTestPool(t, configs["device"], 64<<20)
	ptr := allocate(t, p, 40<<20)
	_, err := p.Allocate(40 << 20)
	require.ErrorIs(t, err, runtime.ErrOutOfMemory)
	_, err = p.Trim()
	require.NoError(t, err)
	assert.Zero(t, s.fences)
	free(t, p, ptr)
}

func TestReleaseBypassesTheCache(t *testing.T) {
	p, s := newTestPool(t, configs["device"], 1<<30)
	mapping := func() uintptr {
		ptr, err := p.AllocateMapping(Granule)
		require.NoError(t, err)
		return ptr
	}
	ptr, small := mapping(), allocate(t, p, 64)
	require.NoError(t, p.Release(ptr))
	assert.False(t, s.isMapped(ptr))
	assert.ErrorIs(t, p.Release(ptr), runtime.ErrForeignPointer, "it is gone")
	err := p.Release(small)
	require.ErrorIs(t, err, runtime.ErrArgument)
	assert.ErrorContains(t, err, "test: release 0x")
	require.NoError(t, p.Release(0))

	// Where it cannot go back at once, it is not handed out again either.
	later := map[string]func(ptr uintptr){
		"pending work": func(ptr uintptr) {
			s.pending = func() error { return errPending }
			require.NoError(t, p.Release(ptr))
			s.pending = nil
		},
		"frozen": func(ptr uintptr) {
			p.Freeze()
			require.NoError(t, p.Release(ptr))
			p.Unfreeze()
		},
	}
	for name, release := range later {
		ptr := mapping()
		release(ptr)
		require.True(t, s.isMapped(ptr), name)
		assert.ErrorIs(t, p.Release(ptr), runtime.ErrDoubleFree, name)
		assert.ErrorIs(t, p.Deallocate(ptr), runtime.ErrDoubleFree, name)
		other := mapping()
		assert.NotEqual(t, ptr, other, name)
		released, err := p.Trim()
		require.NoError(t, err)
		assert.EqualValues(t, Granule, released, name)
		assert.False(t, s.isMapped(ptr), name)
		free(t, p, other)
	}
	assert.EqualValues(t, 1, p.Stats().LiveBlocks)
	free(t, p, small)
	require.NoError(t, p.Close())
	assert.ErrorIs(t, p.Release(ptr), runtime.ErrClosed)
}
