package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// fail has the n-th of the next calls of the driver that free nothing fail, and those
// behind it, until it is called again with 0, which returns whether there were as many.
func (f *standIn) fail(status, n int) (came bool) {
	whatever := make([]byte, 1)
	left := f.Fail.Int(hostmem.Addr(whatever), uintptr(status), uintptr(-n))
	goruntime.KeepAlive(whatever)
	return left >= 0
}

// failCall has the n-th of the next calls of one function fail.
func (f *standIn) failCall(call string, status, n int) {
	name := append([]byte(call), 0)
	f.Fail.Call(hostmem.Addr(name), uintptr(status), uintptr(-n))
	goruntime.KeepAlive(name)
}

// programs are what users do, each of whom frees what it has allocated.
var programs = map[string]func(rt *Runtime) error{
	"memory": func(rt *Runtime) (err error) {
		const n = 64 * 64
		var blocks []uintptr
		for _, bytes := range []int{8 * n, 8 << 20} {
			var p uintptr
			if p, err = rt.Allocate(bytes); err != nil {
				break
			}
			blocks = append(blocks, p)
		}
		if err == nil {
			a, b := blocks[0], blocks[1]
			err = errors.Join(rt.Fill(a, n, dtype.F64, 1), rt.Fill(b, n, dtype.F32, 1), rt.Copy(b, a, n),
				rt.CopyStrided(b, []int{1, 64}, a, []int{64, 1}, []int{64, 64}, 4),
				rt.CopyIn(a, make([]byte, 100)), rt.CopyOut(make([]byte, 100), a),
				rt.Synchronize(context.Background()), rt.CheckPointer(a))
		}
		for _, p := range blocks {
			err = errors.Join(err, rt.Deallocate(p))
		}
		_, trimErr := rt.Trim()
		return errors.Join(err, trimErr)
	},
	"streams": func(rt *Runtime) error {
		p, err := rt.Allocate(100)
		if err != nil {
			return err
		}
		s, err := rt.NewStream(0)
		if err == nil {
			event, eventErr := rt.NewTimingEvent()
			if err = eventErr; err == nil {
				err = errors.Join(s.WaitFor(rt.Stream()), rt.CopyInAsync(s, p, make([]byte, 100)), rt.CopyOutAsync(s, make([]byte, 100), p),
					s.Record(event), rt.Stream().Wait(event), event.Synchronize(context.Background()),
					s.Synchronize(context.Background()), rt.CheckStream(s.Handle()), event.Close())
			}
			err = errors.Join(err, s.Close())
		}
		return errors.Join(err, rt.Deallocate(p))
	},
	"graph": func(rt *Runtime) error {
		p, err := rt.Allocate(100)
		if err != nil {
			return err
		}
		graph, err := rt.Stream().Capture(func() error { return rt.Fill(p, 10, dtype.F32, 1) })
		if err == nil {
			err = errors.Join(graph.Launch(rt.Stream()), graph.Close())
		}
		return errors.Join(err, rt.Deallocate(p))
	},
	"host copy": func(rt *Runtime) error {
		p, err := rt.Allocate(100)
		if err != nil {
			return err
		}
		copied, err := rt.NewHostCopy(100)
		if err == nil {
			err = copied.Post([]kernel.Span{{Ptr: p, Bytes: 100}})
			if err == nil {
				_, err = copied.Read(context.Background())
			}
			err = errors.Join(err, copied.Close())
		}
		return errors.Join(err, rt.Deallocate(p))
	},
	"shared": func(rt *Runtime) error {
		m, err := rt.AllocateShared(100)
		if err != nil {
			return err
		}
		fd, err := m.Export()
		if err == nil {
			other, importErr := rt.ImportShared(fd, m.Bytes())
			if err = importErr; err == nil {
				err = other.Close()
			}
			err = errors.Join(err, os.NewFile(uintptr(fd), "").Close())
		}
		return errors.Join(err, m.Close())
	},
	"module": func(rt *Runtime) error {
		text, err := ptx.ReadFile("kernels/memory.ptx.gz")
		if err != nil {
			return err
		}
		m, err := rt.LoadModule(text)
		if err != nil {
			return err
		}
		p, err := rt.Allocate(100)
		if err == nil {
			k, kernelErr := m.Kernel("fill_u64")
			if err = kernelErr; err == nil {
				err = k.Launch(rt.Stream(), Geometry{Block: Dim{X: 32}}, uint64(p), 10, 1)
			}
			err = errors.Join(err, rt.Deallocate(p))
		}
		return errors.Join(err, m.Close())
	},
	"kernels": func(rt *Runtime) error {
		p, err := rt.Allocate(1 << 20)
		if err != nil {
			return err
		}
		k := rt.Kernels()
		list := kernel.Entries{Idx: p, Val: p + 4096, N: 100, Len: p + 8192}
		err = errors.Join(k.Store(p, dtype.F32, p, 10, 2, 0), k.TopK(kernel.Source{X: p + 1<<16, N: 1000}, 100, list, 0),
			k.SumSquares(p, dtype.F32, 1000, p))
		return errors.Join(err, rt.Deallocate(p))
	},
	"another runtime": func(*Runtime) error {
		rt, err := Open(0)
		if err != nil {
			return err
		}
		return rt.Close()
	},
	"fork": func(rt *Runtime) error {
		b, err := rt.ForkStream()
		if err != nil {
			return err
		}
		p, err := b.Allocate(100)
		if err == nil {
			err = b.Deallocate(p)
		}
		return errors.Join(err, b.Close())
	},
	"word": func(rt *Runtime) error {
		w, err := rt.NewWord()
		if err != nil {
			return err
		}
		err = rt.Stream().Write(w, 1)
		w.Close()
		return err
	},
}

// If any call fails, its error arrives, nothing is lost, and the next use works, or is refused if the device is
// broken. Calls fail in three ways in turn, or with TUTTI_EXTENDED set each in all.
func TestStandInAnyCallFails(t *testing.T) {
	f := openStandIn(t)
	before := f.alive()
	for name, program := range programs {
		statuses := []Status{statusOutOfMemory, 400, 700}
		for i, status := range statuses {
			first, stride := 1+i, len(statuses)
			if os.Getenv("TUTTI_EXTENDED") != "" {
				first, stride = 1, 1
			}
			for n := first; ; n += stride {
				what := fmt.Sprintf("%s, call %d, status %d", name, n, status)
				rt := openRuntime(t, 0)
				f.fail(int(status), n)
				err := program(rt)
				if !f.fail(0, 0) {
					require.NoError(t, err, what)
					require.NoError(t, rt.Close(), what)
					require.Greater(t, n, 1, what)
					break
				}
				var e *Error
				if assert.ErrorAs(t, err, &e, what) {
					assert.Equal(t, status, e.Status, what)
				}
				if sticky[status] {
					f.Break.Call(uintptr(status), 0)
					assert.ErrorIs(t, program(rt), runtime.ErrBroken, what)
					assert.ErrorIs(t, rt.Close(), runtime.ErrBroken, what)
					f.Break.Call(0, 0)
				} else {
					assert.NoError(t, program(rt), what)
					assert.NoError(t, rt.Close(), what)
				}
				require.Equal(t, before, f.alive(), what)
			}
		}
	}
}
