package p2p

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/link"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// connect maps the ranks' memory into each other's GPUs, and returns the endpoint. Kernels wait for a peer for at most
// limit. It is collective: either all ranks get an endpoint or all get an error.
func connect(
	ctx context.Context, base comm.Communicator, rt *cuda.Runtime, s sizes, limit time.Duration, o order,
) (e *endpoint, table offloadTable, err error) {
	if base.WorldSize() > maxRanks {
		err := fmt.Errorf("p2p: %w: %d ranks, %d at most", comm.ErrUnsupported, base.WorldSize(), maxRanks)
		return nil, table, err
	}
	b, err := newBootstrap(base, rt)
	if err != nil {
		return nil, table, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	return b.connect(ctx, s, limit, o)
}

func (b *bootstrap) connect(
	ctx context.Context, s sizes, limit time.Duration, o order,
) (*endpoint, offloadTable, error) {
	stream := b.rt.Stream()
	lacks, probeErr := lackedBy(b.base)
	if o == fixed {
		lacks = allReductions() // in the order of the ranks
	}
	e, err := newEndpoint(ctx, b.rt, b.base.Rank(), b.base.WorldSize(), s, limit)
	var scratch *cuda.SharedMemory
	if err == nil {
		scratch = e.scratch
	}
	err = errors.Join(err, probeErr)
	h := hello{sizes: s, lacks: lacks}
	all, agreed, err := b.attachAll(ctx, h, scratch, err, func(peer int, m *cuda.SharedMemory) {
		e.peers[peer] = m
		e.parameters[0].world.scratch[peer] = uint64(m.Address())
	})
	var table offloadTable
	if agreed {
		e.multiprocessors = multiprocessors(all)
		e.kernels = *e.lib.suited(sharesGPU(all, b.base.Rank()))
		if err == nil {
			err = b.load(ctx, e, stream)
		}
		table, err = b.tabulate(ctx, all, err) // also after an error, so that the others learn of it
	}
	if err != nil && e != nil {
		return nil, table, errors.Join(err, e.discard(stream, backend.DeviceTimeout))
	}
	return e, table, err
}

// load loads an endpoint's kernels, and waits until they are loaded.
func (b *bootstrap) load(ctx context.Context, e *endpoint, stream *cuda.Stream) error {
	if err := e.loadAll(stream); err != nil {
		return err
	}
	return b.rt.Synchronize(ctx)
}

// tabulate makes the offload table, unless any rank passes an error.
func (b *bootstrap) tabulate(ctx context.Context, all []hello, err error) (offloadTable, error) {
	var buses [][16]byte
	for _, h := range all {
		buses = append(buses, h.bus)
	}
	links, err := b.agreeOn(ctx, hello{link: link.Slowest(b.rt.Info(), buses, busID)}, err)
	if err != nil {
		return offloadTable{}, err
	}
	return tableOf(all, links), nil
}

// busID is the PCI bus of a GPU in the form of a hello.
func busID(bus string) (id [16]byte) {
	copy(id[:], bus)
	return id
}

// compatible checks that the ranks can share memory.
func compatible(all []hello, rank int) error {
	if err := worst(all, nil); err != nil {
		return err
	}
	for r, h := range all {
		if h.host != all[rank].host {
			return fmt.Errorf("p2p: %w: ranks %d and %d are on different hosts", comm.ErrUnsupported, rank, r)
		}
		if h.sizes != all[rank].sizes || h.bytes != all[rank].bytes {
			return fmt.Errorf("p2p: %w: ranks %d and %d have different options", comm.ErrMismatch, rank, r)
		}
	}
	return nil
}

// multiprocessors returns the smallest number of multiprocessors that any rank has to itself. Ranks on one GPU share
// them.
func multiprocessors(all []hello) int {
	smallest := maxBlocks
	for _, h := range all {
		sharers := 0
		for _, peer := range all {
			if peer.bus == h.bus {
				sharers++
			}
		}
		smallest = min(smallest, max(h.multiprocessors/sharers, 1))
	}
	return smallest
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

// attachAll maps the memory of each rank into the GPUs of all others, and calls attach with the memory of each peer.
// err is the reason why this rank has no memory. agreed is true if all ranks have mapped all memory.
func (b *bootstrap) attachAll(
	ctx context.Context, h hello, memory *cuda.SharedMemory, err error, attach func(peer int, m *cuda.SharedMemory),
) (all []hello, agreed bool, _ error) {
	var server *fdServer
	if err == nil {
		server, err = b.offer(&h, memory)
	}
	// A rank that failed still takes part, so that the others learn of the failure.
	h.state = verdictOf(err)
	all, shareErr := b.share(ctx, h)
	err = errors.Join(err, shareErr)
	if err == nil {
		err = b.attachPeers(ctx, all, attach)
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

// offer serves this rank's memory to the others, and completes the hello that describes it.
func (b *bootstrap) offer(h *hello, memory *cuda.SharedMemory) (*fdServer, error) {
	if err := b.introduce(h, memory); err != nil {
		return nil, err
	}
	return serveMemory(*h, memory)
}

// attachPeers maps the memory of all other ranks, if all ranks can share it.
func (b *bootstrap) attachPeers(
	ctx context.Context, all []hello, attach func(peer int, m *cuda.SharedMemory),
) error {
	if err := compatible(all, b.base.Rank()); err != nil {
		return err
	}
	for peer, h := range all {
		if peer == b.base.Rank() {
			continue
		}
		if err := b.attach(ctx, peer, h, attach); err != nil {
			return err
		}
	}
	return nil
}

// introduce fills in the rank's identity and the memory that it shares.
func (b *bootstrap) introduce(h *hello, memory *cuda.SharedMemory) (err error) {
	gpu := b.rt.Info()
	h.bytes = memory.Bytes()
	h.bus = busID(gpu.PCIBus)
	h.multiprocessors = gpu.Multiprocessors
	rand.Read(h.name[:])
	rand.Read(h.secret[:])
	h.host, err = hostIdentity()
	return err
}

// attach maps the memory of a peer.
func (b *bootstrap) attach(ctx context.Context, peer int, h hello, attach func(peer int, m *cuda.SharedMemory)) error {
	err := fetch(ctx, h, func(fd int) error {
		m, err := b.rt.ImportShared(fd, h.bytes)
		if err != nil {
			return err
		}
		attach(peer, m)
		return nil
	})
	if err != nil {
		return fmt.Errorf("p2p: memory of rank %d: %w", peer, err)
	}
	return nil
}

// socketName is the abstract name of a rank's socket.
func (h *hello) socketName() string {
	return "@tutti-p2p-" + hex.EncodeToString(h.name[:])
}

// identity is a hash of strings that identify a machine.
func identity(parts ...string) (id [16]byte) {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	copy(id[:], h.Sum(nil))
	return id
}
