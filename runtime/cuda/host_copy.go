package cuda

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/runtime/kernel"
)

// hostCopy is a [kernel.HostCopy]: pinned memory, and an event after its copy.
type hostCopy struct {
	rt   *Runtime // owns the device memory
	mem  []byte   // pinned; nil after Close
	done *Event   // recorded after the last copy
}

// NewHostCopy implements [kernel.AsyncCopier]. These copies have their own stream: they wait neither for other copies
// nor for kernels that were launched after them.
func (r *Runtime) NewHostCopy(bytes int) (kernel.HostCopy, error) {
	if bytes < 1 {
		return nil, r.argument("a copy of %d bytes", bytes)
	}
	mem, err := r.AllocatePinned(bytes)
	if err != nil {
		return nil, err
	}
	done, err := r.NewEvent()
	if err != nil {
		return nil, errors.Join(err, r.FreePinned(mem))
	}
	return &hostCopy{
		rt:   r,
		mem:  mem,
		done: done,
	}, nil
}

func (n *hostCopy) Post(spans []kernel.Span) error {
	bytes := 0
	for _, s := range spans {
		if s.Ptr == 0 || s.Bytes < 0 || s.Bytes > len(n.mem)-bytes {
			return n.rt.argument("%d bytes at %#x, behind %d of a copy of %d", s.Bytes, s.Ptr, bytes, len(n.mem))
		}
		bytes += s.Bytes
	}
	if bytes != len(n.mem) {
		return n.rt.argument("spans of %d bytes for a copy of %d", bytes, len(n.mem))
	}
	stream, err := n.rt.toHost.get(n.rt)
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

func (n *hostCopy) Ready() (bool, error) {
	return n.done.Done()
}

func (n *hostCopy) Read(ctx context.Context) ([]byte, error) {
	err := ctx.Err()
	if err == nil {
		err = n.done.Synchronize(ctx)
	}
	return n.mem, err
}

func (n *hostCopy) Close() error {
	if n.mem == nil || n.rt.usable() != nil {
		return nil // the runtime's Close has freed it
	}
	if err := n.rt.await(func() bool {
		return !n.rt.pending(n.rt.drv.sym.EventQuery, n.done.handle)
	}); err != nil {
		return err
	}
	mem := n.mem
	n.mem = nil
	return errors.Join(n.done.Close(), n.rt.FreePinned(mem))
}
