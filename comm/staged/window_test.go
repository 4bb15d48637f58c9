package staged_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/internal/hosttest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/race"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/internal/reference"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// commons is the memory that ranks in this process share.
type commons struct {
	none bool // they share none

	mu     sync.Mutex          // guards what follows
	memory [][]byte            // by call of ShareMemory; guarded by mu
	mapped int                 // times that a rank has some; guarded by mu
	parts  map[string]*commons // of sub-communicators, by Split and color; guarded by mu
}

// sharing is a communicator whose ranks share memory.
type sharing struct {
	comm.Wrapped
	commons *commons
	calls   *int // of ShareMemory
	splits  *int
}

func newSharing(c comm.Communicator, m *commons) sharing {
	return sharing{comm.Wrap(c), m, new(int), new(int)}
}

func (s sharing) ShareMemory(ctx context.Context, bytes int) ([]byte, error) {
	if err := s.Barrier(ctx); err != nil || s.commons.none {
		return nil, err
	}
	s.commons.mu.Lock()
	defer s.commons.mu.Unlock()
	if *s.calls == len(s.commons.memory) {
		s.commons.memory = append(s.commons.memory, make([]byte, bytes))
	}
	s.commons.mapped++
	*s.calls++
	return s.commons.memory[*s.calls-1], nil
}

func (s sharing) UnshareMemory([]byte) {
	s.commons.mu.Lock()
	defer s.commons.mu.Unlock()
	s.commons.mapped--
}

func (s sharing) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	child, err := s.Wrapped.Split(ctx, color, key)
	*s.splits++
	if child == nil {
		return nil, err
	}
	s.commons.mu.Lock()
	defer s.commons.mu.Unlock()
	name := fmt.Sprint(*s.splits, color)
	if s.commons.parts[name] == nil {
		if s.commons.parts == nil {
			s.commons.parts = map[string]*commons{}
		}
		s.commons.parts[name] = &commons{}
	}
	return newSharing(child, s.commons.parts[name]), err
}

// leftMapped is how often memory is mapped, in sub-communicators too.
func (c *commons) leftMapped() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.mapped
	for _, part := range c.parts {
		n += part.leftMapped()
	}
	return n
}

// windowed makes ranks whose allreduces go through windows of their devices, in commons.
func windowed(t testing.TB, m *commons, host runtime.Runtime, devices ...runtime.Runtime) []comm.Communicator {
	t.Helper()
	world, err := local.New(len(devices))
	require.NoError(t, err)
	for i, c := range world {
		world[i], err = staged.New(newSharing(c, m), devices[i], host)
		require.NoError(t, err)
	}
	return world
}

// sameDevice is a device for each rank.
func sameDevice(d runtime.Runtime, ranks int) []runtime.Runtime {
	all := make([]runtime.Runtime, ranks)
	for i := range all {
		all[i] = d
	}
	return all
}

// TestWindows: allreduces through a window follow the order contract, in any number of pieces, in place or not.
func TestWindows(t *testing.T) {
	const piece = 4096
	staged.SmallWindows(t, piece)
	for _, ranks := range []int{2, 3, 5} {
		host := hosttest.NewRuntime(t)
		device := hosttest.NewDevice(hosttest.NewRuntime(t))
		shared := &commons{}
		world := windowed(t, shared, host, sameDevice(device, ranks)...)
		require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
			for _, dt := range dtype.All() {
				for _, op := range reductions.All() {
					if !op.Defined(dt) {
						continue
					}
					for _, n := range []int{1, 63, piece, 5*piece + 77} {
						for _, inPlace := range []bool{false, true} {
							if err := checkAllReduce(ctx, c, device, dt, op, n, inPlace); err != nil {
								return fmt.Errorf("%v of %d %v, in place %v: %w", op, n, dt, inPlace, err)
							}
						}
					}
				}
			}
			return nil
		}), "%d ranks", ranks)
		assert.Positive(t, device.Counts().Reductions)
		assert.Equal(t, ranks, device.Counts().Opened, "windows are opened once")
		assert.Zero(t, device.Counts().Open)
		assert.Zero(t, shared.leftMapped())
	}
}

// checkAllReduce compares an allreduce with an independent one.
func checkAllReduce(
	ctx context.Context,
	c comm.Communicator,
	memory runtime.Runtime,
	dt dtype.DType,
	op comm.ReduceOp,
	n int,
	inPlace bool,
) error {
	bytes := n * dt.Size()
	inputs := make([][]byte, c.WorldSize())
	for rank := range inputs {
		inputs[rank] = reference.Rough(dt, op, rank, len(inputs))
	}
	send, err := memory.Allocate(bytes)
	if err != nil {
		return err
	}
	recv := send
	if !inPlace {
		if recv, err = memory.Allocate(bytes); err != nil {
			return err
		}
	}
	mine := reference.Tile(inputs[c.Rank()], 0, bytes)
	copy(hostmem.Slice[byte](send, bytes), mine)
	if err := errors.Join(c.AllReduce(send, recv, n, dt, op), c.Sync(ctx)); err != nil {
		return err
	}
	err = reference.NewOrdered(dt, op, inputs...).Check(hostmem.Slice[byte](recv, bytes), 0)
	if !inPlace {
		if string(hostmem.Slice[byte](send, bytes)) != string(mine) {
			err = errors.Join(err, errors.New("what was sent has changed"))
		}
		err = errors.Join(err, memory.Deallocate(recv))
	}
	return errors.Join(err, memory.Deallocate(send))
}

// TestWindowConformance: communicators with windows are communicators.
func TestWindowConformance(t *testing.T) {
	staged.SmallWindows(t, 512)
	host := cpu.New()
	device := hosttest.NewDevice(cpu.New())
	shared := &commons{}
	t.Cleanup(func() {
		assert.Zero(t, device.Counts().Open)
		assert.Positive(t, device.Counts().Reductions)
		assert.Zero(t, shared.leftMapped())
		assert.NoError(t, host.Close())
		assert.NoError(t, device.Close())
	})
	commtest.Run(t, commtest.Backend{
		Name:  "staged",
		Sizes: []int{3},
		Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
			inner := &commons{}
			err := comm.Run(ctx, windowed(t, inner, host, sameDevice(device, size)...),
				func(ctx context.Context, c comm.Communicator) error {
					return body(ctx, commtest.Rank{Comm: c, Runtime: device})
				})
			shared.mu.Lock()
			defer shared.mu.Unlock()
			shared.mapped += inner.leftMapped()
			return err
		},
	})
}

// TestWindowsRefused: where a rank has no window, no rank has, and results are the same.
func TestWindowsRefused(t *testing.T) {
	staged.SmallWindows(t, 512)
	const ranks = 3
	for name, refuse := range map[string]func(m *commons, devices []runtime.Runtime){
		"a device without windows": func(_ *commons, devices []runtime.Runtime) { devices[1] = apart{devices[1].(*hosttest.Device).Runtime} },
		"a device that cannot": func(_ *commons, devices []runtime.Runtime) {
			devices[2].(*hosttest.Device).Failure = runtime.ErrUnsupported
		},
		"no memory": func(m *commons, _ []runtime.Runtime) { m.none = true },
	} {
		t.Run(name, func(t *testing.T) {
			host := hosttest.NewRuntime(t)
			memory := hosttest.NewRuntime(t)
			shared := &commons{}
			devices := make([]runtime.Runtime, ranks)
			all := make([]*hosttest.Device, ranks)
			for i := range devices {
				all[i] = hosttest.NewDevice(memory)
				devices[i] = all[i]
			}
			refuse(shared, devices)
			world := windowed(t, shared, host, devices...)
			require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
				for range 3 {
					if err := checkAllReduce(ctx, c, memory, dtype.F32, comm.Sum, 5000, false); err != nil {
						return err
					}
				}
				return nil
			}))
			for _, device := range all {
				assert.Zero(t, device.Counts().Open)
				assert.Zero(t, device.Counts().Reductions)
				assert.LessOrEqual(t, device.Counts().Opened, 1, "it is tried once")
			}
			assert.Zero(t, shared.leftMapped())
		})
	}
}

// TestWindowsDisagree: ranks whose numbers of elements differ find it out.
func TestWindowsDisagree(t *testing.T) {
	staged.SmallWindows(t, 512)
	for _, other := range []int{1, 999, 1001, 4000} {
		host := hosttest.NewRuntime(t)
		device := hosttest.NewDevice(hosttest.NewRuntime(t))
		shared := &commons{}
		world := windowed(t, shared, host, sameDevice(device, 2)...)
		err := comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
			n := 1000
			if c.Rank() == 1 {
				n = other
			}
			x := hosttest.Allocate(t, device.Runtime.(*cpu.Runtime), 8*n)
			return errors.Join(c.AllReduce(x, x, n, dtype.F64, comm.Sum), c.Sync(ctx))
		})
		assert.ErrorIs(t, err, comm.ErrMismatch, "1000 and %d elements", other)
		assert.Zero(t, device.Counts().Open)
		assert.Zero(t, shared.leftMapped())
	}
}

// TestWindowAllocations: the pieces of a call allocate nothing.
func TestWindowAllocations(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	staged.SmallWindows(t, 4096)
	host := hosttest.NewRuntime(t)
	device := hosttest.NewDevice(hosttest.NewRuntime(t))
	world := windowed(t, &commons{}, host, sameDevice(device, 2)...)
	const few, many, rounds, tries = 1000, 50_000, 20, 5
	allocs := map[int]float64{}
	require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
		x := hosttest.Allocate(t, device.Runtime.(*cpu.Runtime), 4*many)
		var err error
		for _, n := range []int{many, few, many} { // the first for what grows
			step := func() { err = errors.Join(err, c.AllReduce(x, x, n, dtype.F32, comm.Max), c.Sync(ctx)) }
			if c.Rank() == 1 {
				for range tries * (rounds + 1) { // AllocsPerRun has one more
					step()
				}
				continue
			}
			least := testing.AllocsPerRun(rounds, step) // goroutines that sleep in the base allocate at times
			for range tries - 1 {
				least = min(least, testing.AllocsPerRun(rounds, step))
			}
			allocs[n] = least
		}
		return err
	}))
	const pieces = 8 // of the long call
	assert.Less(t, allocs[many]-allocs[few], float64(pieces-1), "elements, and allocations: %v", allocs)
}
