package p2p

import (
	"errors"
	"sync"

	"github.com/tutti-go/tutti/runtime/cuda"
)

// library is the kernels, loaded once for all communicators of a runtime.
type library struct {
	users   int
	load    func() error
	modules []*cuda.Module
	kernels kernelSet // in the forms that start early, where the GPU supports it
	late    kernelSet // in the others
}

var libraries = struct {
	sync.Mutex
	of map[*cuda.Runtime]*library
}{of: map[*cuda.Runtime]*library{}}

// openLibrary returns the kernels of a runtime. Each user closes them.
func openLibrary(rt *cuda.Runtime) (*library, error) {
	libraries.Lock()
	l := libraries.of[rt]
	if l == nil {
		l = &library{}
		l.load = sync.OnceValue(func() error { return l.loadModules(rt) })
		libraries.of[rt] = l
	}
	l.users++
	libraries.Unlock()
	return l, l.load()
}

func (l *library) loadModules(rt *cuda.Runtime) error {
	all, err := l.loadModule(rt, "p2p")
	if err != nil {
		return err
	}
	if l.late, err = load(all, nil); err != nil {
		return err
	}
	l.kernels = l.late
	if !startsEarly(rt) {
		return nil
	}
	dependent, err := l.loadModule(rt, "p2p.sm_90")
	if err != nil {
		return err
	}
	l.kernels, err = load(all, dependent)
	return err
}

func (l *library) loadModule(rt *cuda.Runtime, name string) (*cuda.Module, error) {
	text, err := readPTX(name)
	if err != nil {
		return nil, err
	}
	m, err := rt.LoadModule(text)
	if err == nil {
		l.modules = append(l.modules, m)
	}
	return m, err
}

// startsEarly reports whether the GPU and the driver support launches that start early, also
// in graphs: compute capability 9.0 and CUDA 12.3.
func startsEarly(rt *cuda.Runtime) bool {
	major, minor, err := cuda.DriverVersion()
	return err == nil && rt.Info().Major >= 9 && (major > 12 || major == 12 && minor >= 3)
}

// close unloads the kernels when their last user closes them.
func (l *library) close(rt *cuda.Runtime) error {
	libraries.Lock()
	defer libraries.Unlock()
	if l.users--; l.users > 0 {
		return nil
	}
	delete(libraries.of, rt)
	var errs []error
	for _, m := range l.modules {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
