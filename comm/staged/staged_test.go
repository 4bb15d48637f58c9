package staged_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/dtype"
	_ "github.com/tutti-go/tutti/internal/heaptest"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// apart is host memory that counts as a device's.
type apart struct{ runtime.Runtime }

func (apart) Device() runtime.Device { return runtime.Device{Kind: "apart"} }

// pinning is a device that pins memory of the host.
type pinning struct {
	apart
	mu    sync.Mutex
	bytes map[uintptr]int // of what is pinned; guarded by mu
	ever  int             // the most bytes at a time, of both ranks; guarded by mu
}

func (p *pinning) AllocatePinned(bytes int) ([]byte, error) {
	address, err := p.Allocate(bytes)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes[address] = bytes
	total := 0
	for _, n := range p.bytes {
		total += n
	}
	p.ever = max(p.ever, total)
	return hostmem.Slice[byte](address, bytes), nil
}

func (p *pinning) FreePinned(memory []byte) error {
	address := hostmem.Addr(memory)
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.bytes[address]; !ok {
		return runtime.ErrForeignPointer
	}
	delete(p.bytes, address)
	return p.Deallocate(address)
}

// CopyOut implements [runtime.Runtime]: to pinned memory only.
func (p *pinning) CopyOut(dst []byte, src uintptr) error { return p.copy(dst, p.apart.CopyOut, src) }

// CopyIn implements [runtime.Runtime]: from pinned memory only.
func (p *pinning) CopyIn(dst uintptr, src []byte) error {
	return p.copy(src, func(src []byte, dst uintptr) error { return p.apart.CopyIn(dst, src) }, dst)
}

func (p *pinning) copy(host []byte, copyBytes func([]byte, uintptr) error, device uintptr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	address := hostmem.Addr(host)
	for begin, bytes := range p.bytes {
		if begin <= address && address+uintptr(len(host)) <= begin+uintptr(bytes) {
			return copyBytes(host, device)
		}
	}
	return errors.New("a copy of memory that is not pinned")
}

// onDevice is a communicator that reaches what passes for the memory of a device.
type onDevice struct{ comm.Wrapped }

func (onDevice) CheckDevice(d runtime.Device) error {
	if d.Kind != "apart" {
		return comm.ErrDevice
	}
	return nil
}

func (c onDevice) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	child, err := c.Wrapped.Split(ctx, color, key)
	if child == nil {
		return nil, err
	}
	return onDevice{comm.Wrap(child)}, err
}

func TestStaged(t *testing.T) {
	host := cpu.New()
	device := apart{cpu.New()}
	t.Cleanup(func() { assert.NoError(t, host.Close()); assert.NoError(t, device.Runtime.Close()) })
	sizes := []int{1, 3}
	if testing.Short() {
		sizes = []int{3}
	}
	many := sizes[len(sizes)-1:]
	for _, k := range []struct {
		name          string
		memory, other runtime.Runtime
		sizes         []int
	}{{"of a device", device, host, sizes}, {"of the host", host, device, many}} {
		t.Run(k.name, func(t *testing.T) {
			commtest.Run(t, commtest.Backend{
				Name:  "staged",
				Sizes: k.sizes,
				Run: func(ctx context.Context, size int, body func(context.Context, commtest.Rank) error) error {
					world, err := local.New(size)
					if err != nil {
						return err
					}
					for i, c := range world {
						if k.other == device {
							c = onDevice{comm.Wrap(c)}
						}
						if world[i], err = staged.New(c, k.memory, k.other); err != nil {
							return err
						}
					}
					return comm.Run(ctx, world, func(ctx context.Context, c comm.Communicator) error {
						return body(ctx, commtest.Rank{Comm: c, Runtime: k.memory})
					})
				},
			})
		})
	}
	alone, err := local.New(1)
	require.NoError(t, err)
	c, err := staged.New(alone[0], device, host)
	require.NoError(t, err)
	assert.NoError(t, comm.CheckDevice(c, device.Device()))
	assert.ErrorIs(t, comm.CheckDevice(c, host.Device()), comm.ErrDevice)
	_, err = staged.New(c, host, host)
	assert.ErrorIs(t, err, comm.ErrDevice)
	assert.NoError(t, c.Close())
}

// TestPinned: calls are staged in memory that the device has pinned, which grows with them and is freed.
func TestPinned(t *testing.T) {
	host := cpu.New()
	device := &pinning{apart: apart{cpu.New()}, bytes: map[uintptr]int{}}
	world, err := local.New(2)
	require.NoError(t, err)
	for i, c := range world {
		world[i], err = staged.New(c, device, host)
		require.NoError(t, err)
	}
	const most = 1000
	require.NoError(t, comm.Run(t.Context(), world, func(ctx context.Context, c comm.Communicator) error {
		x, err := device.Allocate(4 * most)
		if err != nil {
			return err
		}
		for _, n := range []int{1, most, 10} {
			if err := device.Fill(x, n, dtype.F32, float64(1+c.Rank())); err != nil {
				return err
			}
			if err := c.AllReduce(x, x, n, dtype.F32, comm.Sum); err != nil {
				return err
			}
			if err := c.Sync(ctx); err != nil {
				return err
			}
			for i, v := range hostmem.Slice[float32](x, n) {
				assert.Equal(t, float32(3), v, "element %d of %d", i, n)
			}
		}
		return device.Deallocate(x)
	}))
	assert.GreaterOrEqual(t, device.ever, 2*4*most)
	assert.Less(t, device.ever, 3*4*most, "an allreduce of a rank is in place on the host")
	assert.Empty(t, device.bytes, "pinned memory is left")
	require.NoError(t, host.Close())
	require.NoError(t, device.Runtime.Close())
}
