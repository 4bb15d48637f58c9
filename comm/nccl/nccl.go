package nccl

import (
	"context"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"slices"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// Option changes how a communicator is made.
type Option func(*options)

type options struct {
	minCTAs    int      // 0 leaves it to NCCL
	maxCTAs    int      // 0 leaves it to NCCL
	oneProcess bool     // all ranks are goroutines of this process
	name       string   // name of the communicator, the same on all its ranks
	run        string   // names the world in flight records, also communicators split from it; set by join
	session    *session // nil if the ranks cannot tell each other of an abort
}

// WithCTAs bounds the number of thread blocks (CTAs) of a collective, and thereby the multiprocessors that it takes
// from concurrent computation. Zero leaves a bound to NCCL. All ranks must pass the same bounds.
func WithCTAs(minimum, maximum int) Option {
	return func(o *options) {
		o.minCTAs = minimum
		o.maxCTAs = maximum
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
	server := store.NewServer(store.Options{})
	// If one rank fails, the others stop waiting for it.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	comms := make([]*Comm, len(runtimes))
	var mu sync.Mutex // guards errs
	var errs []error  // in their order in time
	var wg sync.WaitGroup
	for rank, rt := range runtimes {
		wg.Go(func() {
			o := collect(opts)
			o.oneProcess = true
			o.session = &session{client: server.Local(fmt.Sprint("rank ", rank))}
			c, err := lib.join(ctx, rt, id, rank, len(runtimes), o)
			if err == nil {
				comms[rank] = c
				return
			}
			mu.Lock()
			errs = append(errs, err)
			mu.Unlock()
			cancel(err)
		})
	}
	wg.Wait()
	if len(errs) == 0 {
		return comms, nil
	}
	errs = []error{firstCause(errs)}
	for _, c := range comms {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return nil, errors.Join(errs...)
}

// firstCause returns the first of some errors that does not follow from another rank's, or the first one if all do. The
// errors of a canceled context are all alike, and those of ranks that heard of them first follow.
func firstCause(errs []error) error {
	follows := []error{comm.ErrPeerFailed, comm.ErrCanceled}
	for n := len(follows); n > 0; n-- {
		i := slices.IndexFunc(errs, func(err error) bool {
			is := func(sentinel error) bool { return errors.Is(err, sentinel) }
			return !slices.ContainsFunc(follows[:n], is)
		})
		if i >= 0 {
			return errs[i]
		}
	}
	return errs[0]
}

// From makes a communicator of the ranks of base, each on its own rt. It is collective on base, which may be any
// communicator (MPI, local, another NCCL) and stays open. The unique id is broadcast over base.
func From(ctx context.Context, base comm.Communicator, rt *cuda.Runtime, opts ...Option) (*Comm, error) {
	if base == nil || rt == nil {
		return nil, fmt.Errorf("nccl: %w: base communicator or runtime is nil", comm.ErrArgument)
	}
	lib, err := open()
	var id uniqueID
	if err == nil && base.Rank() == 0 {
		id, err = lib.newID()
	}
	var kept *store.Client
	// A rank without NCCL still takes part, so that the others learn of it.
	all, shareErr := shareID(ctx, base, rt, err != nil, func(oneHost bool) []byte {
		var invitation []byte
		if base.WorldSize() > 1 {
			kept, invitation = invite(oneHost)
		}
		return append(id[:], invitation...)
	})
	switch {
	case err != nil:
	case shareErr != nil:
		err = fmt.Errorf("nccl: sharing the unique id: %w", shareErr)
	case all.failed > 0:
		err = fmt.Errorf("nccl: %w: %d of %d ranks cannot use NCCL", comm.ErrPeerFailed, all.failed, base.WorldSize())
	}
	if err != nil {
		if kept != nil {
			err = errors.Join(err, kept.Close())
		}
		return nil, err
	}
	copy(id[:], all.payload)
	o := collect(opts)
	o.oneProcess = all.oneProcess
	o.session = invited(ctx, kept, all.payload[len(id):], base.Rank())
	return lib.join(ctx, rt, id, base.Rank(), base.WorldSize(), o)
}

// join makes rank's communicator; all ranks call it with the same id. NCCL does not tell a rank that another one cannot
// begin, so the ranks are a group before.
func (l *library) join(ctx context.Context, rt *cuda.Runtime, id uniqueID, rank, size int, o options) (*Comm, error) {
	o.run = id.run()
	m := o.enroll(ctx, rank, size)
	var c *Comm
	err := m.step(ctx, func(ctx context.Context) error {
		control, err := l.begin(ctx, rt, id, rank, size, o)
		if err != nil {
			return &comm.OpError{
				Backend: "nccl",
				Op:      "init",
				Rank:    rank,
				Err:     m.withdraw(err),
			}
		}
		c, err = newComm(ctx, control, m, o)
		return err
	})
	return c, err
}

// begin makes the control communicator of a rank, unless ctx has ended: NCCL may make it at once.
func (l *library) begin(
	ctx context.Context, rt *cuda.Runtime, id uniqueID, rank, size int, o options,
) (*native, error) {
	if ctx.Err() != nil {
		return nil, waitError(ctx)
	}
	cfg := o.config(false)
	defer goruntime.KeepAlive(cfg)
	return l.create(ctx, creation{
		rt:     rt,
		shares: o.sharesProcess(size),
		fn:     l.sym.InitRankConfig,
		call: func(cell uintptr) uintptr {
			return callInitRank(l.sym.InitRankConfig, cell, size, &id, rank, hostmem.AddrOf(cfg))
		},
	})
}

// FromEnv makes a communicator of the processes of a launcher (tutti launch, torchrun, Open MPI's or MPICH's mpirun,
// srun), each on its own rt; see [rendezvous.FromEnv] for the variables. Rank 0 sends the unique id over the job's
// store.
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
	kv, err := job.Shared(ctx)
	if err != nil {
		return nil, err
	}
	o := collect(opts)
	o.session = &session{client: kv, shared: true}
	var c *Comm
	err = joinWithID(ctx, job, kv, lib.newID, func(ctx context.Context, id uniqueID, number string) (err error) {
		o.name = number
		c, err = lib.join(ctx, rt, id, job.Rank, job.WorldSize, o)
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// joinWithID calls join with a unique id that rank 0 makes once all ranks of a job have arrived, and with this
// communicator's number in the job.
func joinWithID(ctx context.Context, job rendezvous.Job, kv *store.Client, newID func() (uniqueID, error),
	join func(ctx context.Context, id uniqueID, number string) error) error {
	const purpose = "nccl"
	var id uniqueID
	var number string
	err := job.Round(ctx, kv, purpose, func(ctx context.Context, round string) (err error) {
		number = round
		key := "nccl/id/" + number
		if job.Rank > 0 {
			id, err = receiveID(ctx, kv, key)
			return err
		}
		// NCCL does not say which rank is missing, and cannot retry.
		for _, arrival := range job.Arrivals(purpose, number) {
			if _, err := kv.Get(ctx, arrival); err != nil {
				return err
			}
		}
		if id, err = sendID(ctx, kv, key, newID); err != nil {
			return err
		}
		defer kv.Drop(key) // by then all ranks have joined, or never will
		return join(ctx, id, number)
	})
	if err != nil || job.Rank == 0 {
		return err
	}
	return join(ctx, id, number)
}

// sendID makes a unique id for the ranks that wait for a key.
func sendID(ctx context.Context, kv *store.Client, key string, newID func() (uniqueID, error)) (uniqueID, error) {
	id, err := newID()
	if err != nil {
		kv.Post(key, nil) // tells the others
		return id, err
	}
	return id, kv.Set(ctx, key, id[:])
}

// receiveID waits for the unique id of rank 0.
func receiveID(ctx context.Context, kv *store.Client, key string) (id uniqueID, err error) {
	sent, err := kv.Get(ctx, key)
	if err != nil {
		return id, err
	}
	if len(sent) != len(id) {
		return id, fmt.Errorf("nccl: %w: rank 0 sent no unique id but %d bytes", comm.ErrPeerFailed, len(sent))
	}
	copy(id[:], sent)
	return id, nil
}
