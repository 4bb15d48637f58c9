package p2p

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// hello is what a rank tells all others over the base communicator.
type hello struct {
	host   [16]byte // the same on all ranks of a machine
	bus    [16]byte // of the GPU
	name   [16]byte // of the socket
	secret [16]byte // what the socket wants to hear
	sizes  sizes
	bytes  int
	failed bool
	times  [2]time.Duration // of what is compared
}

// connect makes the ranks of base a world. It is collective: either all ranks
// get an endpoint or all get an error.
func connect(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, s sizes, limit time.Duration) (*endpoint, error) {
	b, err := newBootstrap(base, rt)
	if err != nil {
		return nil, err
	}
	e, err := b.connect(ctx, s, limit)
	return e, errors.Join(err, b.close())
}

// bootstrap exchanges small things over a base communicator.
type bootstrap struct {
	base comm.Communicator
	rt   *cuda.Runtime
	mem  runtime.Runtime // memory that base reaches
	own  bool            // mem is to be closed
}

func newBootstrap(base comm.Communicator, rt *cuda.Runtime) (*bootstrap, error) {
	if base.WorldSize() > maxRanks {
		return nil, fmt.Errorf("p2p: %w: %d ranks, %d at most", comm.ErrUnsupported, base.WorldSize(), maxRanks)
	}
	if r, ok := comm.As[comm.Reacher](base); ok && r.CheckDevice(runtime.Device{Kind: runtime.CPU}) != nil {
		return &bootstrap{base, rt, rt, false}, nil
	}
	return &bootstrap{base, rt, cpu.New(), true}, nil
}

func (b *bootstrap) close() error {
	if !b.own {
		return nil
	}
	return b.mem.Close()
}

// share returns what every rank passes.
func (b *bootstrap) share(ctx context.Context, own hello) ([]hello, error) {
	ranks, size := b.base.WorldSize(), int(unsafe.Sizeof(own))
	all := make([]hello, ranks)
	buf, err := b.mem.Allocate(size * ranks)
	if err != nil {
		return nil, err
	}
	mine := buf + uintptr(b.base.Rank()*size)
	err = errors.Join(
		b.mem.CopyIn(mine, hostmem.Bytes([]hello{own})),
		b.base.AllGather(mine, buf, size, dtype.U8),
		b.base.Sync(ctx))
	if err != nil {
		return nil, err // base may still write to buf, which is not given back
	}
	err = b.mem.CopyOut(hostmem.Bytes(all), buf)
	return all, errors.Join(err, b.mem.Deallocate(buf))
}

// agree returns err, or that another rank has one.
func (b *bootstrap) agree(ctx context.Context, err error) error {
	all, shareErr := b.share(ctx, hello{failed: err != nil})
	if err != nil {
		return err
	}
	if shareErr != nil {
		return shareErr
	}
	for rank, h := range all {
		if h.failed {
			return fmt.Errorf("p2p: %w: rank %d could not connect", comm.ErrPeerFailed, rank)
		}
	}
	return nil
}

func (b *bootstrap) connect(ctx context.Context, s sizes, limit time.Duration) (*endpoint, error) {
	rank, ranks := b.base.Rank(), b.base.WorldSize()
	own := hello{sizes: s}
	e, err := newEndpoint(b.rt, rank, ranks, s, limit)
	var door *door
	if err == nil {
		own.bytes = e.scratch.Bytes()
		own.host, err = hostIdentity()
		copy(own.bus[:], b.rt.Info().PCIBus)
		rand.Read(own.name[:])
		rand.Read(own.secret[:])
	}
	if err == nil {
		door, err = openDoor(own, e.scratch)
	}
	own.failed = err != nil
	// A rank that failed still takes part, so that the others hear of it.
	all, shareErr := b.share(ctx, own)
	if err == nil {
		err = shareErr
	}
	if err == nil {
		err = compatible(all, rank)
	}
	if err == nil {
		err = e.attachAll(ctx, all)
	}
	if err == nil && sharesGPU(all, rank) {
		// What starts early would take the place of a kernel that is waited for.
		e.kernels = e.lib.late
	}
	if shareErr == nil {
		err = b.agree(ctx, err)
	}
	if door != nil {
		err = errors.Join(err, door.close())
	}
	if err == nil {
		if err = e.loadAll(b.rt.Stream()); err == nil {
			err = b.rt.Synchronize(ctx)
		}
		err = b.agree(ctx, err)
	}
	if err != nil && e != nil {
		err = errors.Join(err, e.close())
		e = nil
	}
	return e, err
}

// compatible checks that the ranks can form a world.
func compatible(all []hello, rank int) error {
	for r, h := range all {
		switch {
		case h.failed:
			return fmt.Errorf("p2p: %w: rank %d has no memory that GPUs can share", comm.ErrPeerFailed, r)
		case h.host != all[rank].host:
			return fmt.Errorf("p2p: %w: ranks %d and %d are on different hosts", comm.ErrUnsupported, rank, r)
		case h.sizes != all[rank].sizes || h.bytes != all[rank].bytes:
			return fmt.Errorf("p2p: %w: ranks %d and %d have different options", comm.ErrMismatch, rank, r)
		}
	}
	return nil
}

// sharesGPU reports whether another rank is on the same GPU.
func sharesGPU(all []hello, rank int) bool {
	for r, h := range all {
		if r != rank && h.bus == all[rank].bus {
			return true
		}
	}
	return false
}

// attachAll fetches the memory of all peers.
func (e *endpoint) attachAll(ctx context.Context, all []hello) error {
	for peer, h := range all {
		if peer == e.rank {
			continue
		}
		if err := fetch(ctx, h, func(fd int) error { return e.attach(peer, fd) }); err != nil {
			return fmt.Errorf("p2p: memory of rank %d: %w", peer, err)
		}
	}
	return nil
}

// socketName is the abstract name of a rank's socket.
func (h *hello) socketName() string { return "@tutti-p2p-" + hex.EncodeToString(h.name[:]) }

// identity makes one of what identifies a machine.
func identity(parts ...string) (id [16]byte) {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	copy(id[:], h.Sum(nil))
	return id
}
