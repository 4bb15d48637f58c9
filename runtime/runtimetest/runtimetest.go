// Package runtimetest is the conformance suite of [runtime.Runtime]: whoever
// writes a runtime, in this module or outside it, runs it from a test.
//
//	func TestConformance(t *testing.T) {
//		runtimetest.Run(t, func(t *testing.T) runtime.Runtime { return mydevice.New() })
//	}
//
// The suite never looks at device memory itself: data goes in by CopyIn and out by CopyOut, so it serves devices whose
// memory the host cannot address. Interfaces that a runtime implements beyond the contract ([runtime.Freezer],
// [kernel.Provider], [window.Opener]) are found by type assertion and tested, too.
//
// Results are compared with plain Go programs that share no code with any
// runtime, but for those of codecs, which are compared with package cpu's. Random inputs come from a fixed
// seed, which failures name.
package runtimetest

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Seed starts every random number generator of the suite.
const Seed = 20260101

// Run runs the suite. open makes a new runtime; it may skip the test, when a
// device is missing for instance. The suite closes every runtime it opened,
// and has several open at once.
func Run(t *testing.T, open func(t *testing.T) runtime.Runtime) {
	t.Helper()
	k, err := kernel.Lookup(cpu.New())
	require.NoError(t, err)
	RunCodecs(t, open, hostCodecs{k})
}

// RunCodecs is Run with other codecs to compare results with.
func RunCodecs(t *testing.T, open func(t *testing.T) runtime.Runtime, reference Codecs) {
	t.Helper()
	for _, group := range []struct {
		name  string
		tests []test
	}{
		{"memory", memoryTests},
		{"lifecycle", lifecycleTests},
		{"copy", copyTests},
		{"tensor", tensorTests},
		{"kernels", kernelTests},
		{"windows", windowTests},
	} {
		t.Run(group.name, func(t *testing.T) {
			for _, test := range group.tests {
				t.Run(test.name, func(t *testing.T) {
					d := newDevice(t, open, reference)
					if group.name == "kernels" {
						d.Kernels = d.kernels()
					}
					test.run(d)
				})
			}
		})
	}
}

// test is one test of the suite; each gets its own runtime.
type test struct {
	name string
	run  func(d *device)
}

// device is a runtime under test and what the tests need to work with it.
type device struct {
	*testing.T
	runtime.Runtime
	kernel.Kernels // in the tests of kernels
	open           func(t *testing.T) runtime.Runtime
	rng            *rand.Rand
	reference      Codecs
	cleanups       *cleanups
}

// cleanups run at the end of a test in reverse order. [testing.T.Cleanup] would record the stack for each of the
// hundred thousand arrays of the suite.
type cleanups struct {
	calls []func()
}

// run goes on with the remaining calls if one ends the test.
func (c *cleanups) run() {
	last := len(c.calls) - 1
	if last < 0 {
		return
	}
	call := c.calls[last]
	c.calls = c.calls[:last]
	defer c.run()
	call()
}

// attach has the test of d run its cleanups.
func (d *device) attach(t *testing.T) {
	d.T = t
	d.cleanups = &cleanups{}
	t.Cleanup(d.cleanups.run)
}

// Cleanup has the end of the test call f.
func (d *device) Cleanup(f func()) { d.cleanups.calls = append(d.cleanups.calls, f) }

// Helper does nothing: failures come with the calls that led there, and marking a function takes longer than most
// comparisons.
func (*device) Helper() {}

// fail ends the test with the calls that led there.
func (d *device) fail(format string, args ...any) {
	require.FailNow(d, fmt.Sprintf(format, args...))
}

func newDevice(t *testing.T, open func(t *testing.T) runtime.Runtime, reference Codecs) *device {
	t.Helper()
	rt := open(t)
	require.NotNil(t, rt)
	t.Cleanup(func() {
		require.NoError(t, rt.Close(), "closing the runtime after the test")
		if t.Failed() {
			t.Logf("seed %d", Seed)
		}
	})
	d := &device{
		Runtime:   rt,
		open:      open,
		rng:       rand.New(rand.NewPCG(Seed, 0)),
		reference: reference,
	}
	d.attach(t)
	return d
}

// Name is the test's; both embedded types have one.
func (d *device) Name() string {
	return d.T.Name()
}

// block returns memory that the test frees.
func (d *device) block(bytes int) uintptr {
	ptr, err := d.Allocate(bytes)
	require.NoError(d, err, "allocate %d bytes", bytes)
	return ptr
}

// allocate returns memory that the end of the test frees.
func (d *device) allocate(bytes int) uintptr {
	ptr := d.block(bytes)
	d.Cleanup(func() { require.NoError(d, d.Deallocate(ptr)) })
	return ptr
}

// upload returns device memory that holds data.
func (d *device) upload(data []byte) uintptr {
	ptr := d.allocate(len(data))
	require.NoError(d, d.CopyIn(ptr, data))
	return ptr
}

// download returns the content of device memory.
func (d *device) download(ptr uintptr, bytes int) []byte {
	data := make([]byte, bytes)
	require.NoError(d, d.CopyOut(data, ptr))
	return data
}

func (d *device) synchronize() {
	require.NoError(d, d.Synchronize(context.Background()))
}

func (d *device) randomBytes(n int) []byte {
	data := make([]byte, n)
	whole := n &^ 7
	for i := 0; i < whole; i += 8 {
		binary.NativeEndian.PutUint64(data[i:], d.rng.Uint64())
	}
	for i := whole; i < n; i++ {
		data[i] = byte(d.rng.Uint32())
	}
	return data
}

// subtest runs f as a subtest, with a name made like by Sprintf. The
// runtime is shared.
func (d *device) subtest(f func(d *device), format string, args ...any) {
	d.T.Run(fmt.Sprintf(format, args...), func(t *testing.T) {
		sub := *d
		sub.attach(t)
		f(&sub)
	})
}
