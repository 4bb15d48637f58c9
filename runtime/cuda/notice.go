package cuda

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/runtime"
)

// notice is a [runtime.Notice]: pinned memory, and an event behind its copy.
type notice struct {
	rt   *Runtime
	mem  []byte
	done *Event
}

// NewNotice implements [runtime.Noticer]. Copies of notices have a stream of their own:
// they wait neither for others nor for kernels that were launched after them.
func (r *Runtime) NewNotice(bytes int) (runtime.Notice, error) {
	if bytes < 1 {
		return nil, r.argument("a notice of %d bytes", bytes)
	}
	mem, err := r.AllocatePinned(bytes)
	if err != nil {
		return nil, err
	}
	done, err := r.NewEvent()
	if err != nil {
		return nil, errors.Join(err, r.FreePinned(mem))
	}
	return &notice{rt: r, mem: mem, done: done}, nil
}

func (n *notice) Post(spans []runtime.Span) error {
	bytes := 0
	for _, s := range spans {
		if s.Ptr == 0 || s.Bytes < 0 || s.Bytes > len(n.mem)-bytes {
			return n.rt.argument("%d bytes at %#x, behind %d of a notice of %d", s.Bytes, s.Ptr, bytes, len(n.mem))
		}
		bytes += s.Bytes
	}
	if bytes != len(n.mem) {
		return n.rt.argument("spans of %d bytes for a notice of %d", bytes, len(n.mem))
	}
	stream, err := n.rt.notices.get(n.rt)
	if err != nil {
		return err
	}
	if err := stream.WaitFor(n.rt.compute); err != nil {
		return err
	}
	mem := n.mem
	for _, s := range spans {
		if err := n.rt.CopyOutAsync(stream, mem[:s.Bytes], s.Ptr); err != nil {
			return err
		}
		mem = mem[s.Bytes:]
	}
	return stream.Record(n.done)
}

func (n *notice) Ready() (bool, error) { return n.done.Done() }

func (n *notice) Read(ctx context.Context) ([]byte, error) {
	err := ctx.Err()
	if err == nil {
		err = n.done.Synchronize(ctx)
	}
	return n.mem, err
}

func (n *notice) Close() error {
	if n.mem == nil || n.rt.usable() != nil {
		return nil // the runtime's Close has freed it
	}
	if err := n.rt.await(func() bool { return !n.rt.pending(n.rt.drv.sym.EventQuery, n.done.handle) }); err != nil {
		return err
	}
	mem := n.mem
	n.mem = nil
	return errors.Join(n.done.Close(), n.rt.FreePinned(mem))
}
