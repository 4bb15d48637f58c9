package runtimetest

import (
	"context"
	"errors"
	"sync"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

var lifecycleTests = []test{
	{"identity", testIdentity},
	{"synchronize", testSynchronize},
	{"closing twice", testCloseTwice},
	{"leak at close", testLeak},
	{"use after close", testUseAfterClose},
	{"close while others allocate", testCloseConcurrently},
}

func testIdentity(d *device) {
	assert.NotEmpty(d, d.Runtime.Name())
	device := d.Device()
	assert.NotEmpty(d, device.Kind)
	assert.GreaterOrEqual(d, device.Index, 0)
	assert.Equal(d, device, d.Device())
	assert.Equal(d, d.ComputeStream(), d.ComputeStream())
	if device.Kind == runtime.CPU {
		assert.Zero(d, d.ComputeStream(), "a CPU has no streams")
	}
}

func testSynchronize(d *device) {
	d.synchronize()
	require.NoError(d, d.Fill(d.allocate(4000), 1000, dtype.F32, 1))
	d.synchronize()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	assert.ErrorIs(d, d.Synchronize(ctx), context.Canceled)
	d.synchronize()
}

func testCloseTwice(d *device) {
	require.NoError(d, d.Close())
	require.NoError(d, d.Close())
}

func testLeak(d *device) {
	for _, size := range []int{100, 1 << 20} {
		d.block(size)
	}
	require.ErrorIs(d, d.Close(), runtime.ErrLeak)
	require.NoError(d, d.Close())
	s := d.Stats()
	assert.Zero(d, s.LiveBytes)
	assert.Zero(d, s.CachedBytes)
}

func testUseAfterClose(d *device) {
	ptr := d.block(64)
	require.ErrorIs(d, d.Close(), runtime.ErrLeak)

	data := make([]byte, 4)
	stride := []int{1}
	shape := []int{1}
	for name, use := range map[string]func() error{
		"Allocate":   func() error { _, err := d.Allocate(64); return err },
		"Allocate 0": func() error { _, err := d.Allocate(0); return err },
		"Deallocate": func() error { return d.Deallocate(ptr) },
		"CopyIn":     func() error { return d.CopyIn(ptr, data) },
		"CopyOut":    func() error { return d.CopyOut(data, ptr) },
		"Copy":       func() error { return d.Copy(ptr, ptr, 4) },
		"CopyStrided": func() error {
			return d.CopyStrided(ptr, stride, ptr, stride, shape, 4)
		},
		"Fill":        func() error { return d.Fill(ptr, 1, dtype.F32, 0) },
		"Synchronize": func() error { return d.Synchronize(context.Background()) },
		"tensor": func() error {
			_, err := runtime.New(d.Runtime, dtype.F32, 2)
			return err
		},
	} {
		assert.ErrorIs(d, use(), runtime.ErrClosed, name)
	}
	if p, ok := d.Runtime.(kernel.Provider); ok {
		assert.ErrorIs(d, p.Kernels().Scale(ptr, dtype.F32, 1, ptr), runtime.ErrClosed, "Scale")
	}
}

func testCloseConcurrently(d *device) {
	const workers = 4
	errs := make([]error, workers)
	started := make(chan struct{}, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for round := 0; errs[w] == nil; round++ {
				ptr, err := d.Allocate(1 << (round % 20))
				if err == nil {
					err = d.Deallocate(ptr)
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
	if err := d.Close(); err != nil && !errors.Is(err, runtime.ErrLeak) {
		d.Errorf("close: %v", err)
	}
	wg.Wait()
	for _, err := range errs {
		assert.ErrorIs(d, err, runtime.ErrClosed)
	}
}
