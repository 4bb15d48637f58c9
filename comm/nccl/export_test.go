package nccl

import "github.com/tutti-go/tutti/internal/dl"

// WithoutNewerCalls runs f as if NCCL were version 2.18, without the calls that
// came later.
func WithoutNewerCalls(f func()) error {
	lib, err := open()
	if err != nil {
		return err
	}
	saved := lib.sym
	defer func() { lib.sym = saved }()
	s := &lib.sym
	for _, fn := range []*dl.Func{&s.Shrink, &s.AllToAll, &s.Gather, &s.Scatter, &s.WindowRegister, &s.WindowDeregister} {
		*fn = dl.Func{}
	}
	f()
	return nil
}
