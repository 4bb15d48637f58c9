package cuda

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// captureGlobal is CU_STREAM_CAPTURE_MODE_GLOBAL, PyTorch's: while one goes on, a call that may disturb a capture
// ends it, whatever its thread.
const captureGlobal = 0

// A framework's capture goes on while the runtime makes and frees memory, modules, streams, events and runtimes, on
// other threads and on the one that captures.
func TestGrowthBesideForeignCaptures(t *testing.T) {
	rt := openGPU(t)
	text, err := ptx.ReadFile("kernels/memory.ptx.gz")
	require.NoError(t, err)
	foreign, err := rt.get(rt.drv.sym.StreamCreate, streamNonBlocking, 0)
	require.NoError(t, err)
	for name, grow := range growth(rt, text) {
		t.Run(name, func(t *testing.T) {
			var graph uintptr
			require.NoError(t, rt.Current(func() error {
				sym := &rt.drv.sym
				require.Zero(t, sym.StreamBeginCapture.Int(foreign, captureGlobal))
				grown := make(chan error)
				go func() { grown <- grow() }()
				assert.NoError(t, <-grown)
				assert.NoError(t, grow(), "on the thread that captures")
				assert.Zero(t, sym.StreamEndCapture.Int(foreign, hostmem.AddrOf(&graph)), "the capture had ended")
				if graph != 0 {
					assert.Zero(t, sym.GraphDestroy.Int(graph))
				}
				return nil
			}))
		})
	}
	require.NoError(t, rt.free(rt.drv.sym.StreamDestroy, foreign))
}

// growth returns calls that make something of each kind, and free it.
func growth(rt *Runtime, text []byte) map[string]func() error {
	closed := func(c interface{ Close() error }, err error) error {
		if err != nil {
			return err
		}
		return c.Close()
	}
	slab := func() error {
		p, err := rt.Allocate(slabBytes + 1)
		if err != nil {
			return err
		}
		err = rt.Deallocate(p)
		_, trimErr := rt.Trim()
		return errors.Join(err, trimErr)
	}
	return map[string]func() error{
		"memory": slab,
		"mapping": func() error {
			p, err := rt.AllocateMapping(slabBytes)
			if err != nil {
				return err
			}
			return rt.ReleaseMapping(p)
		},
		"pinned memory": func() error {
			b, err := rt.AllocatePinned(1 << 20)
			if err != nil {
				return err
			}
			return rt.FreePinned(b)
		},
		"shared memory": func() error {
			m, err := rt.AllocateShared(1)
			if err != nil {
				return err
			}
			fd, err := m.Export()
			if err != nil {
				return errors.Join(err, m.Close())
			}
			err = closed(rt.ImportShared(fd, m.Bytes()))
			return errors.Join(err, os.NewFile(uintptr(fd), "memory").Close(), m.Close())
		},
		"module": func() error {
			m, err := rt.LoadModule(text)
			if err != nil {
				return err
			}
			_, err = m.Kernel("fill_u64")
			return errors.Join(err, m.Close())
		},
		"stream": func() error { return closed(rt.NewStream(0)) },
		"events": func() error {
			start, err := rt.NewTimingEvent()
			if err != nil {
				return err
			}
			stream := rt.Stream()
			err = errors.Join(stream.Record(start), stream.Synchronize(context.Background()))
			if err == nil {
				_, err = start.Since(start)
			}
			return errors.Join(err, start.Close())
		},
		"word": func() error {
			w, err := rt.NewWord()
			if err != nil {
				return err
			}
			w.Close()
			return nil
		},
		"wrapped memory": func() error {
			p, err := rt.Allocate(4)
			if err != nil {
				return err
			}
			_, err = rt.WrapTensor(p, dtype.F32, []int{1}, nil, func() {})
			_, _, infoErr := rt.MemoryInfo()
			return errors.Join(err, infoErr, rt.Deallocate(p))
		},
		"fork": func() error {
			fork, err := rt.ForkStream()
			if err != nil {
				return err
			}
			return fork.Close()
		},
		"runtime with kernels": func() error {
			other, err := Open(0)
			if err != nil {
				return err
			}
			other.Kernels()
			return errors.Join(other.sparse.err, other.Close())
		},
	}
}
