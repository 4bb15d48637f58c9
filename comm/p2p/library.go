package p2p

import (
	"sync"

	"github.com/tutti-go/tutti/runtime/cuda"
)

// library is the kernels, loaded once for all communicators of a runtime.
type library struct {
	users   int          // communicators; guarded by libraries
	load    func() error // loads the module once
	module  *cuda.Module // nil if loading failed
	kernels kernelSet    // may start early, if the GPU supports it
	late    kernelSet    // the same kernels, which never start early
}

// libraries are the libraries of all runtimes that have users.
var libraries = struct {
	sync.Mutex
	loaded map[*cuda.Runtime]*library // guarded by the lock, as users of each is
}{loaded: map[*cuda.Runtime]*library{}}

// openLibrary returns the kernels of a runtime. Each user must close them.
func openLibrary(rt *cuda.Runtime) (*library, error) {
	libraries.Lock()
	l := libraries.loaded[rt]
	if l == nil {
		l = &library{}
		l.load = sync.OnceValue(func() error { return l.loadModule(rt) })
		libraries.loaded[rt] = l
	}
	l.users++
	libraries.Unlock()
	return l, l.load()
}

func (l *library) loadModule(rt *cuda.Runtime) error {
	var err error
	l.module, err = rt.LoadModule(compressed)
	if err != nil {
		return err
	}
	l.late, err = load(l.module, false)
	if err != nil {
		return err
	}
	l.kernels, err = load(l.module, rt.StartsEarly())
	return err
}

// suited returns the kernels for a GPU, which may be shared with another rank.
func (l *library) suited(shared bool) *kernelSet {
	if shared {
		return &l.late // a kernel that starts early would occupy the GPU that the other rank needs
	}
	return &l.kernels
}

// close unloads the kernels after their last user has closed them.
func (l *library) close(rt *cuda.Runtime) error {
	libraries.Lock()
	defer libraries.Unlock()
	l.users--
	if l.users > 0 {
		return nil
	}
	delete(libraries.loaded, rt)
	if l.module == nil {
		return nil
	}
	return l.module.Close()
}
