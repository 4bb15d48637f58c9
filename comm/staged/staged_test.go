package staged_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/commtest"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/staged"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// apart is host memory that passes for that of a device.
type apart struct{ runtime.Runtime }

func (apart) Device() runtime.Device { return runtime.Device{Kind: "apart"} }

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
	calls := 0
	if testing.Short() {
		sizes = []int{3}
		calls = 4096
	}
	for _, k := range []struct {
		name          string
		memory, other runtime.Runtime
	}{{"of a device", device, host}, {"of the host", host, device}} {
		t.Run(k.name, func(t *testing.T) {
			commtest.Run(t, commtest.Backend{
				Name:  "staged",
				Sizes: sizes,
				Calls: calls,
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
