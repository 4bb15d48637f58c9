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
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// hello is what a rank tells all others over the base communicator.
type hello struct {
	host            [16]byte // the same on all ranks of a machine
	bus             [16]byte // of the GPU
	name            [16]byte // of the socket
	secret          [16]byte // that the socket expects
	sizes           sizes
	bytes           int
	state           verdict
	multiprocessors int
	times           [2]float64 // seconds of a call here and on the base
}

// verdict is how a rank fares, the worse the greater.
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

// connect maps the ranks' memory into each other's GPUs. It is collective: either all ranks
// get an endpoint or all get an error.
func connect(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, s sizes, limit time.Duration) (e *endpoint, err error) {
	if base.WorldSize() > maxRanks {
		return nil, fmt.Errorf("p2p: %w: %d ranks, %d at most", comm.ErrUnsupported, base.WorldSize(), maxRanks)
	}
	b, err := newBootstrap(base, rt)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	return b.connect(ctx, s, limit)
}

// bootstrap exchanges small messages over a base communicator.
type bootstrap struct {
	base comm.Communicator
	rt   *cuda.Runtime
	mem  runtime.Runtime // memory that base reaches
	buf  uintptr         // a hello of each rank; 0 if base may still use it
}

// newBootstrap allocates the buffer of the exchanges. A rank that fails even in that leaves
// the others waiting until their contexts end.
func newBootstrap(base comm.Communicator, rt *cuda.Runtime) (*bootstrap, error) {
	b := &bootstrap{base: base, rt: rt, mem: rt}
	if r, ok := comm.As[backend.MemoryChecker](base); !ok || r.CheckDevice(runtime.Device{Kind: runtime.CPU}) == nil {
		b.mem = cpu.New()
	}
	var err error
	b.buf, err = b.mem.Allocate(int(unsafe.Sizeof(hello{})) * base.WorldSize())
	return b, err
}

func (b *bootstrap) close() (err error) {
	if b.broken() {
		return nil
	}
	err = b.mem.Deallocate(b.buf)
	if b.mem != runtime.Runtime(b.rt) {
		err = errors.Join(err, b.mem.Close())
	}
	return err
}

// broken reports whether an exchange has failed. As long as none has, everything that was
// submitted to the base before the last one is done.
func (b *bootstrap) broken() bool { return b.buf == 0 }

// share returns what each rank passes.
func (b *bootstrap) share(ctx context.Context, own hello) ([]hello, error) {
	ranks, size, buf := b.base.WorldSize(), int(unsafe.Sizeof(own)), b.buf
	if b.broken() {
		return nil, fmt.Errorf("p2p: %w: an exchange before has failed", comm.ErrBroken)
	}
	all := make([]hello, ranks)
	mine := buf + uintptr(b.base.Rank()*size)
	b.buf = 0
	err := errors.Join(
		b.mem.CopyIn(mine, hostmem.Bytes([]hello{own})),
		b.base.AllGather(mine, buf, size, dtype.U8),
		b.base.Sync(ctx))
	if err != nil {
		return nil, err // base may still write to buf
	}
	b.buf = buf
	return all, b.mem.CopyOut(hostmem.Bytes(all), buf)
}

// agree returns an error on every rank if any rank passes one: the rank's own, or one that
// names another rank. All ranks get the same kind: [comm.ErrUnsupported] on one is that on all.
func (b *bootstrap) agree(ctx context.Context, err error) error {
	all, shareErr := b.share(ctx, hello{state: verdictOf(err)})
	if shareErr != nil {
		return errors.Join(err, shareErr)
	}
	return worst(all, err)
}

// worst is the error of a rank, given its own, which may be nil, and the state of all ranks.
func worst(all []hello, own error) error {
	first := 0
	for rank, h := range all {
		if h.state > all[first].state {
			first = rank
		}
	}
	switch state := all[first].state; {
	case state == verdictOf(own):
		return own
	case state == lacking:
		return fmt.Errorf("p2p: %w: rank %d cannot share memory", comm.ErrUnsupported, first)
	case own == nil:
		return fmt.Errorf("p2p: %w: rank %d has failed", comm.ErrPeerFailed, first)
	default: // no error of the kind that the own one is
		return fmt.Errorf("p2p: %w: rank %d has failed, and here: %v", comm.ErrPeerFailed, first, own)
	}
}

func (b *bootstrap) connect(ctx context.Context, s sizes, limit time.Duration) (*endpoint, error) {
	rank, ranks, stream := b.base.Rank(), b.base.WorldSize(), b.rt.Stream()
	e, err := newEndpoint(ctx, b.rt, rank, ranks, s, limit)
	var scratch *cuda.SharedMemory
	if err == nil {
		scratch = e.scratch
	}
	all, agreed, err := b.attachAll(ctx, hello{sizes: s}, scratch, err, func(peer int, m *cuda.SharedMemory) {
		e.peers[peer] = m
		e.parameters[0].world.scratch[peer] = uint64(m.Address())
	})
	if agreed {
		e.multiprocessors = multiprocessors(all)
		e.kernels = *e.lib.suited(sharesGPU(all, rank))
		if err == nil {
			err = e.loadAll(stream)
		}
		if err == nil {
			err = b.rt.Synchronize(ctx)
		}
		err = b.agree(ctx, err)
	}
	if err != nil && e != nil {
		return nil, errors.Join(err, e.discard(stream, backend.DeviceTimeout))
	}
	return e, err
}

// compatible checks that the ranks can share memory.
func compatible(all []hello, rank int) error {
	if err := worst(all, nil); err != nil {
		return err
	}
	for r, h := range all {
		switch {
		case h.host != all[rank].host:
			return fmt.Errorf("p2p: %w: ranks %d and %d are on different hosts", comm.ErrUnsupported, rank, r)
		case h.sizes != all[rank].sizes || h.bytes != all[rank].bytes:
			return fmt.Errorf("p2p: %w: ranks %d and %d have different options", comm.ErrMismatch, rank, r)
		}
	}
	return nil
}

// multiprocessors is how many each rank has to itself, at least. Ranks on one GPU share them.
func multiprocessors(all []hello) int {
	least := maxBlocks
	for _, h := range all {
		on := 0
		for _, other := range all {
			if other.bus == h.bus {
				on++
			}
		}
		least = min(least, max(h.multiprocessors/on, 1))
	}
	return least
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

// attachAll maps the memory that each rank passes into the GPUs of all others, and has attach called with that of each peer. err
// is why this rank has none. agreed says that all ranks have mapped all of it.
func (b *bootstrap) attachAll(ctx context.Context, own hello, memory *cuda.SharedMemory, err error, attach func(peer int, m *cuda.SharedMemory)) (all []hello, agreed bool, _ error) {
	var server *fdServer
	if err == nil {
		own.bytes = memory.Bytes()
		own.host, err = hostIdentity()
		copy(own.bus[:], b.rt.Info().PCIBus)
		own.multiprocessors = b.rt.Info().Multiprocessors
		rand.Read(own.name[:])
		rand.Read(own.secret[:])
	}
	if err == nil {
		server, err = serveMemory(own, memory)
	}
	// A rank that failed still takes part, so that the others learn of it.
	own.state = verdictOf(err)
	all, shareErr := b.share(ctx, own)
	if err = errors.Join(err, shareErr); err == nil {
		err = compatible(all, b.base.Rank())
	}
	for peer, h := range all {
		if peer == b.base.Rank() || err != nil {
			continue
		}
		err = fetch(ctx, h, func(fd int) error {
			m, err := b.rt.ImportShared(fd, own.bytes)
			if err == nil {
				attach(peer, m)
			}
			return err
		})
		if err != nil {
			err = fmt.Errorf("p2p: memory of rank %d: %w", peer, err)
		}
	}
	if shareErr == nil {
		err = b.agree(ctx, err)
	}
	agreed = err == nil
	if server != nil {
		err = errors.Join(err, server.close())
	}
	return all, agreed, err
}

// socketName is the abstract name of a rank's socket.
func (h *hello) socketName() string { return "@tutti-p2p-" + hex.EncodeToString(h.name[:]) }

// identity is a hash of strings that identify a machine.
func identity(parts ...string) (id [16]byte) {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	copy(id[:], h.Sum(nil))
	return id
}
