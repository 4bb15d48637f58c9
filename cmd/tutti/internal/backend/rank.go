package backend

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/machine"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/runtime"
)

// Rank is the environment in which the code of one rank runs.
type Rank struct {
	Comm comm.Communicator // to all ranks
	// Runtime owns memory that Comm can access.
	Runtime runtime.Runtime
	// Stream is the device queue that Comm submits to; nil if the host does every operation.
	Stream Stream
	// Compute is the device queue that Runtime submits to; nil if there is none.
	Compute ComputeStream
	// Location says where the rank runs: device, host name and process. It is "" if that is simply this host.
	Location string

	// HostRanks is the number of ranks in this process if they compute in host memory, and 0 for device memory.
	HostRanks int

	limit time.Duration // of each wait, 0 for none
}

// overdue is the cause of a context that a timeout ended.
type overdue struct{ limit time.Duration }

// Error names the flag that sets the timeout.
func (o overdue) Error() string {
	return fmt.Sprintf("--timeout %v", o.limit)
}

// Unwrap makes it a [context.DeadlineExceeded].
func (overdue) Unwrap() error { return context.DeadlineExceeded }

// withLimit returns ctx with a deadline after limit; 0 for none.
func withLimit(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if limit == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, limit, overdue{limit})
}

// bound returns c with waits that end after limit.
func bound(c comm.Communicator, limit time.Duration) comm.Communicator {
	return comm.Limit(c, limit, overdue{limit})
}

// Watch gives c, a communicator of GPUs, the limits of Comm. Its waits end after [Options.Timeout], and it aborts
// when ctx ends, because no context ends a copy from a device or a submission to a full queue.
func (r Rank) Watch(ctx context.Context, c comm.Communicator) comm.Communicator {
	context.AfterFunc(ctx, func() { comm.AbortAll(c, context.Cause(ctx)) })
	return bound(c, r.limit)
}

// WithoutPeerMemory returns the rank with the communicator below its peer-memory communicator.
func (r Rank) WithoutPeerMemory() Rank {
	if c, ok := comm.As[*nccl.Comm](r.Comm); ok {
		r.Comm = bound(c, r.limit)
	}
	return r
}

// Within returns ctx with the deadline of one wait. It is for collective calls that are not methods of a
// communicator, such as making another one.
func (r Rank) Within(ctx context.Context) (context.Context, context.CancelFunc) {
	return withLimit(ctx, r.limit)
}

// Fits returns an error if the host has too little memory for the given bytes of each rank in this process; without
// it the kernel would kill the process at the first write. remedy names the options to lower.
func (r Rank) Fits(backend, content string, bytes float64, remedy string) error {
	total, _ := machine.Memory() // 0 if not known
	available := float64(total)
	need := bytes * float64(r.HostRanks)
	if available == 0 || need <= available {
		return nil
	}
	return &OptionError{
		Backend: backend,
		Reason: fmt.Sprintf("%s of %s are %.1f GiB, this machine has %.1f GiB; lower %s",
			content, Counted(r.HostRanks, "rank"), need/(1<<30), available/(1<<30), remedy),
	}
}

// Reduce reduces values element by element over all ranks of r and returns the result. It is for the few numbers that
// a command collects from its ranks. It is collective.
func Reduce[T dtype.Element](ctx context.Context, r Rank, values []T, op comm.ReduceOp) (_ []T, err error) {
	tensor, err := runtime.FromSlice(r.Runtime, values)
	if err != nil {
		return nil, err
	}
	defer func() {
		err = errors.Join(err, tensor.Free())
	}()
	if err := distributed.AllReduce(ctx, r.Comm, tensor, op); err != nil {
		return nil, err
	}
	if err := r.Comm.Sync(ctx); err != nil {
		return nil, err
	}
	return runtime.ToSlice[T](tensor)
}

// Locations returns the Location of every rank, nil if they have none. It is collective.
func Locations(ctx context.Context, r Rank) (locations []string, err error) {
	if r.Location == "" {
		return nil, nil // on every rank: a backend has locations for all or none
	}
	all, err := distributed.AllGatherBytes(ctx, r.Runtime, r.Comm, []byte(r.Location))
	for _, location := range all {
		locations = append(locations, printable.Text(string(location)))
	}
	return locations, err
}
