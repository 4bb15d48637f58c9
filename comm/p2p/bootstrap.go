package p2p

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/link"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// hello is a rank's message to all others over the base communicator. It holds no pointers, because it travels as
// bytes.
type hello struct {
	host   [16]byte // the same on all ranks of a machine
	bus    [16]byte // of the GPU
	name   [16]byte // of the socket
	secret [16]byte // that the socket expects

	sizes           sizes        // equal on all ranks
	bytes           int          // of the memory that the rank shares, equal on all ranks
	state           verdict      // whether the rank can take part
	multiprocessors int          // of the rank's GPU, which other ranks may share
	lacks           reductionSet // what the base lacks
	link            link.Kind    // the slowest link to another rank
}

// verdict is a rank's state after a step of the bootstrap; larger values are worse.
type verdict uint8

const (
	well    verdict = iota
	lacking         // comm.ErrUnsupported
	failed
)

func verdictOf(err error) verdict {
	switch {
	case err == nil:
		return well
	case errors.Is(err, comm.ErrUnsupported):
		return lacking
	}
	return failed
}

// worst returns the error of a rank whose local error is err, which may be nil, when the ranks are in these states.
func worst(all []hello, err error) error {
	rank := 0
	for r, h := range all {
		if h.state > all[rank].state {
			rank = r
		}
	}
	switch state := all[rank].state; {
	case state == verdictOf(err):
		return err
	case state == lacking:
		return fmt.Errorf("p2p: %w: rank %d cannot share memory", comm.ErrUnsupported, rank)
	case err == nil:
		return fmt.Errorf("p2p: %w: rank %d has failed", comm.ErrPeerFailed, rank)
	default: // the local error is less severe
		return fmt.Errorf("p2p: %w: rank %d has failed, and here: %v", comm.ErrPeerFailed, rank, err)
	}
}

// bootstrap exchanges small messages over a base communicator.
type bootstrap struct {
	base   comm.Communicator // carries the messages
	rt     *cuda.Runtime     // of the rank's GPU
	memory runtime.Runtime   // memory that base can access
	buf    uintptr           // room for a hello of each rank; 0 if base may still use it
}

// newBootstrap allocates the buffer of the exchanges. If that fails on a rank, the others wait until their contexts
// end.
func newBootstrap(base comm.Communicator, rt *cuda.Runtime) (*bootstrap, error) {
	b := &bootstrap{base: base, rt: rt, memory: rt}
	checker, ok := comm.As[backend.MemoryChecker](base)
	if !ok || checker.CheckDevice(runtime.Device{Kind: runtime.CPU}) == nil {
		b.memory = cpu.New()
	}
	buf, err := b.memory.Allocate(int(unsafe.Sizeof(hello{})) * base.WorldSize())
	if err != nil {
		return nil, errors.Join(err, b.closeMemory())
	}
	b.buf = buf
	return b, nil
}

// close frees the buffer, unless base may still use it.
func (b *bootstrap) close() error {
	if b.broken() {
		return nil
	}
	return errors.Join(b.memory.Deallocate(b.buf), b.closeMemory())
}

// closeMemory closes the runtime of the buffer, if it is not the communicator's.
func (b *bootstrap) closeMemory() error {
	if b.memory == runtime.Runtime(b.rt) {
		return nil
	}
	return b.memory.Close()
}

// broken reports whether an exchange has failed. While none has, everything submitted to the base before the last
// exchange is complete.
func (b *bootstrap) broken() bool {
	return b.buf == 0
}

// share returns the hello of each rank.
func (b *bootstrap) share(ctx context.Context, h hello) ([]hello, error) {
	if b.broken() {
		return nil, fmt.Errorf("p2p: %w: an exchange before has failed", comm.ErrBroken)
	}
	all := make([]hello, b.base.WorldSize())
	size := int(unsafe.Sizeof(h))
	buf := b.buf
	part := buf + uintptr(b.base.Rank()*size)
	b.buf = 0
	err := errors.Join(
		b.memory.CopyIn(part, hostmem.Bytes([]hello{h})),
		b.base.AllGather(part, buf, size, dtype.U8),
		b.base.Sync(ctx))
	if err != nil {
		return nil, err // base may still write to buf
	}
	b.buf = buf
	return all, b.memory.CopyOut(hostmem.Bytes(all), buf)
}

// agree returns an error on every rank if any rank passes one: the rank's own error, or one that names another rank.
// The kind is the same on all ranks: [comm.ErrUnsupported] on one rank is [comm.ErrUnsupported] on all.
func (b *bootstrap) agree(ctx context.Context, err error) error {
	_, err = b.agreeOn(ctx, hello{}, err)
	return err
}

// agreeOn is agree, and returns the hello of each rank.
func (b *bootstrap) agreeOn(ctx context.Context, h hello, err error) ([]hello, error) {
	h.state = verdictOf(err)
	all, shareErr := b.share(ctx, h)
	if shareErr != nil {
		return nil, errors.Join(err, shareErr)
	}
	return all, worst(all, err)
}
