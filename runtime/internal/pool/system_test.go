package pool

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	errNoMemory = errors.New("the test has no memory left")
	errStuck    = errors.New("stuck")
)

// fakeSystem hands out addresses without memory behind them, which a pool never
// touches, and watches what happens to them. Addresses are handed out again.
type fakeSystem struct {
	mu     sync.Mutex
	limit  int             // bytes that may be mapped at a time
	next   uintptr         // first address never handed out
	mapped map[uintptr]int // what is handed out, and its length
	bytes  int             // the sum of these
	unused map[int][]uintptr
	calls  int  // of Map
	fences int  // calls of Fence
	stuck  bool // Unmap fails
	quiet  bool // no call is allowed now
	noises int  // calls while quiet
	// pending is what waiting for a fence does, nil for nothing.
	pending func() error
}

func newFakeSystem(limit int) *fakeSystem {
	return &fakeSystem{limit: limit, next: 7 * Granule, mapped: make(map[uintptr]int), unused: make(map[int][]uintptr)}
}

// enter locks the system for a call.
func (s *fakeSystem) enter() (leave func()) {
	s.mu.Lock()
	if s.quiet {
		s.noises++
	}
	return s.mu.Unlock
}

func (s *fakeSystem) Map(bytes int) (Mapping, error) {
	defer s.enter()()
	s.calls++
	if bytes > s.limit-s.bytes {
		return Mapping{}, errNoMemory
	}
	addr := s.next
	if again := s.unused[bytes]; len(again) > 0 {
		addr, s.unused[bytes] = again[len(again)-1], again[:len(again)-1]
	} else {
		s.next += uintptr(bytes+Granule-1) / Granule * Granule
	}
	s.mapped[addr] = bytes
	s.bytes += bytes
	return Mapping{Addr: addr, Handle: ^addr, Bytes: bytes}, nil
}

func (s *fakeSystem) Unmap(m Mapping) error {
	defer s.enter()()
	if s.stuck {
		return errStuck
	}
	if s.mapped[m.Addr] != m.Bytes || m.Handle != ^m.Addr {
		return errors.New("no such mapping")
	}
	delete(s.mapped, m.Addr)
	s.bytes -= m.Bytes
	s.unused[m.Bytes] = append(s.unused[m.Bytes], m.Addr)
	return nil
}

func (s *fakeSystem) Fence() (wait func() error) {
	defer s.enter()()
	s.fences++
	if s.pending == nil {
		return func() error { return nil }
	}
	return s.pending
}

// setQuiet says whether calls are allowed from here on.
func (s *fakeSystem) setQuiet(quiet bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.quiet = quiet
}

// configs are the two ways in which the runtimes configure a pool.
var configs = map[string]Config{
	"host":   {SlabBytes: Granule, PageBytes: 4096, Colors: 16},
	"device": {SlabBytes: 8 * Granule, PageBytes: Granule},
}

// eachConfig runs a test with a pool and a system of each configuration, and
// sees that all memory goes back at the end.
func eachConfig(t *testing.T, limit int, test func(t *testing.T, p *Pool, s *fakeSystem)) {
	for name, c := range configs {
		t.Run(name, func(t *testing.T) {
			p, s := newTestPool(t, c, limit)
			test(t, p, s)
		})
	}
}

func newTestPool(t *testing.T, c Config, limit int) (*Pool, *fakeSystem) {
	s := newFakeSystem(limit)
	c.Name, c.System = "test", s
	p := New(c)
	t.Cleanup(func() {
		assert.NoError(t, p.Close())
		assert.Empty(t, s.mapped, "all memory goes back to the system")
	})
	return p, s
}

func allocate(t *testing.T, p *Pool, bytes int) uintptr {
	t.Helper()
	ptr, err := p.Allocate(bytes)
	require.NoError(t, err)
	return ptr
}

func free(t *testing.T, p *Pool, ptrs ...uintptr) {
	t.Helper()
	for _, ptr := range ptrs {
		require.NoError(t, p.Deallocate(ptr))
	}
}
