package nccl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	goruntime "runtime"
	"slices"
	"sync"
	"unsafe"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// uniqueID is an ncclUniqueId: what the ranks of a new communicator share.
type uniqueID [128]byte

// config is ncclConfig_t as of NCCL 2.18. The library reads as much as the
// size and version fields say, so newer ones accept it.
type config struct {
	size       uintptr
	magic      uint32
	version    uint32
	blocking   int32
	cgaCluster int32
	minCTAs    int32
	maxCTAs    int32
	_          uintptr // netName: not set
	splitShare int32
	_          int32
}

// The values that ncclConfig_t starts with: the magic number of its
// initializer, and "not set".
const (
	configMagic = 0xcafebeef
	undefined   = math.MinInt32
)

// Option changes how a communicator is made.
type Option func(*options)

type options struct {
	minCTAs, maxCTAs int
	oneProcess       bool // all ranks are goroutines of this process
}

// WithCTAs bounds the number of thread blocks (CTAs) that a collective may
// occupy, and so the multiprocessors it takes away from compute that runs
// beside it. Zero leaves a bound to NCCL. All ranks pass the same.
func WithCTAs(minimum, maximum int) Option {
	return func(o *options) { o.minCTAs, o.maxCTAs = minimum, maximum }
}

// config makes NCCL's configuration, on the heap, so that its address may be
// passed on.
func (o options) config(blocking bool) *config {
	mode := int32(0)
	if blocking {
		mode = 1
	}
	bound := func(n int) int32 {
		if n <= 0 {
			return undefined
		}
		return int32(n)
	}
	return &config{
		size:       unsafe.Sizeof(config{}),
		magic:      configMagic,
		version:    oldest,
		blocking:   mode,
		cgaCluster: undefined,
		minCTAs:    bound(o.minCTAs),
		maxCTAs:    bound(o.maxCTAs),
		splitShare: undefined,
	}
}

func collect(opts []Option) (o options) {
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// InProcess makes one communicator per runtime, for the goroutines of this
// process: number i is rank i of len(runtimes), on runtimes[i].
func InProcess(ctx context.Context, runtimes []*cuda.Runtime, opts ...Option) ([]*Comm, error) {
	lib, err := open()
	if err != nil {
		return nil, err
	}
	if len(runtimes) == 0 || slices.Contains(runtimes, nil) {
		return nil, fmt.Errorf("nccl: %w: no runtimes, or one is nil", comm.ErrArgument)
	}
	id, err := lib.newID()
	if err != nil {
		return nil, err
	}
	// The failure of one ends the wait of the others for it.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	comms := make([]*Comm, len(runtimes))
	var first error
	var once sync.Once
	var wg sync.WaitGroup
	for rank, rt := range runtimes {
		wg.Go(func() {
			o := collect(opts)
			o.oneProcess = true
			c, err := lib.join(ctx, rt, id, rank, len(runtimes), o)
			if err != nil {
				once.Do(func() { first = err })
				cancel(err)
				return
			}
			comms[rank] = c
		})
	}
	wg.Wait()
	if first == nil {
		return comms, nil
	}
	errs := []error{first}
	for _, c := range comms {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return nil, errors.Join(errs...)
}

// From makes a communicator of the ranks of base, each on its own rt, and is
// collective on base. The unique id travels over base, which may be any
// communicator (MPI, local, another NCCL) and stays open.
func From(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, opts ...Option) (*Comm, error) {
	if base == nil || rt == nil {
		return nil, fmt.Errorf("nccl: %w: base communicator or runtime is nil", comm.ErrArgument)
	}
	lib, err := open()
	var id uniqueID
	if err == nil && base.Rank() == 0 {
		id, err = lib.newID()
	}
	// A rank without NCCL still takes part, so that the others hear of it.
	id, failed, shareErr := shareID(ctx, base, rt, id, err != nil)
	switch {
	case err != nil:
		return nil, err
	case shareErr != nil:
		return nil, fmt.Errorf("nccl: sharing the unique id: %w", shareErr)
	case failed > 0:
		return nil, fmt.Errorf("nccl: %w: %d of %d ranks cannot use NCCL", comm.ErrPeerFailed, failed, base.WorldSize())
	}
	return lib.join(ctx, rt, id, base.Rank(), base.WorldSize(), collect(opts))
}

// shareID broadcasts rank 0's id over base and counts the ranks that failed.
func shareID(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, id uniqueID, failed bool) (uniqueID, int, error) {
	mem := memory(base, rt)
	const flag = len(id) // an int32 behind the id
	buf, err := mem.Allocate(flag + dtype.I32.Size())
	if err != nil {
		return id, 0, err
	}
	id, count, err := exchangeID(ctx, base, mem, buf, id, failed)
	if err != nil {
		return id, 0, err // base may still write to buf: it is not given back
	}
	err = mem.Deallocate(buf)
	if host, ok := mem.(*cpu.Runtime); ok {
		err = errors.Join(err, host.Close())
	}
	return id, count, err
}

// exchangeID is shareID on given memory.
func exchangeID(ctx context.Context, base comm.Communicator, mem runtime.Runtime, buf uintptr, id uniqueID, failed bool) (uniqueID, int, error) {
	const flag = len(id)
	message := append(id[:], 0, 0, 0, 0)
	if failed {
		message[flag] = 1
	}
	if err := mem.CopyIn(buf, message); err != nil {
		return id, 0, err
	}
	if err := mem.Synchronize(ctx); err != nil {
		return id, 0, err
	}
	if err := base.AllReduce(buf+uintptr(flag), buf+uintptr(flag), 1, dtype.I32, comm.Sum); err != nil {
		return id, 0, err
	}
	if err := base.Broadcast(buf, len(id), dtype.U8, 0); err != nil {
		return id, 0, err
	}
	if err := base.Sync(ctx); err != nil {
		return id, 0, err
	}
	if err := mem.CopyOut(message, buf); err != nil {
		return id, 0, err
	}
	copy(id[:], message)
	return id, int(message[flag]) | int(message[flag+1])<<8, nil
}

// newID asks NCCL for a unique id.
func (l *library) newID() (uniqueID, error) {
	id := new(uniqueID)
	result := l.sym.GetUniqueID.Call(hostmem.Addr(id[:]))
	goruntime.KeepAlive(id)
	if s := Status(int32(result)); s != statusSuccess {
		return *id, l.newError(l.sym.GetUniqueID, s, 0)
	}
	return *id, nil
}

// join makes rank's communicator; all ranks call it with the same id.
func (l *library) join(ctx context.Context, rt *cuda.Runtime, id uniqueID, rank, size int, o options) (*Comm, error) {
	cfg := o.config(false)
	control, err := l.create(ctx, rt, 0, l.sym.InitRankConfig, func(cell uintptr) uintptr {
		return callInitRank(l.sym.InitRankConfig, cell, size, &id, rank, hostmem.AddrOf(cfg))
	})
	goruntime.KeepAlive(cfg)
	if err != nil {
		return nil, &comm.OpError{Backend: "nccl", Op: "init", Rank: rank, Err: err}
	}
	return newComm(ctx, l, rt, control, o)
}

// FromEnv makes a communicator of the processes that a launcher started
// (torchrun, Open MPI's or MPICH's mpirun, srun), each on its own rt; see
// [rendezvous.FromEnv] for the variables. rank 0's unique id travels over TCP.
func FromEnv(ctx context.Context, rt *cuda.Runtime, opts ...Option) (*Comm, error) {
	if rt == nil {
		return nil, fmt.Errorf("nccl: %w: runtime is nil", comm.ErrArgument)
	}
	lib, err := open()
	if err != nil {
		return nil, err
	}
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	var id uniqueID
	var own []byte // nothing, if rank 0 cannot make an id: so the others hear of it
	var failed error
	if job.Rank == 0 {
		if id, failed = lib.newID(); failed == nil {
			own = id[:]
		}
	}
	payload, err := job.Broadcast(ctx, own)
	switch {
	case failed != nil:
		return nil, failed
	case err != nil:
		return nil, err
	case len(payload) != len(id):
		return nil, fmt.Errorf("nccl: %w: rank 0 sent no unique id but %d bytes", comm.ErrPeerFailed, len(payload))
	}
	copy(id[:], payload)
	return lib.join(ctx, rt, id, job.Rank, job.WorldSize, collect(opts))
}
