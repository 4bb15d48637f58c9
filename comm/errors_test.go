package comm_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime"
)

func TestOpErrorText(t *testing.T) {
	cause := fmt.Errorf("%w: count -1 is negative", comm.ErrArgument)
	for want, err := range map[string]*comm.OpError{
		"mpi: allreduce on rank 3: invalid argument: count -1 is negative": {Backend: "mpi", Op: "allreduce", Rank: 3, Err: cause},
		"nccl: init: invalid argument: count -1 is negative":               {Backend: "nccl", Op: "init", Rank: -1, Err: cause},
		"sync on rank 0: invalid argument: count -1 is negative":           {Op: "sync", Err: cause},
	} {
		assert.EqualError(t, err, want)
		assert.ErrorIs(t, err, comm.ErrArgument)
	}
}

func TestContextError(t *testing.T) {
	expired, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	assert.ErrorIs(t, comm.ContextError(expired), comm.ErrTimeout)
	assert.ErrorIs(t, comm.ContextError(expired), context.DeadlineExceeded)

	why := errors.New("the user pressed a key")
	canceled, stop := context.WithCancelCause(t.Context())
	stop(why)
	assert.ErrorIs(t, comm.ContextError(canceled), comm.ErrCanceled)
	assert.ErrorIs(t, comm.ContextError(canceled), why)
	assert.NotErrorIs(t, comm.ContextError(canceled), comm.ErrTimeout)
}

// The four sentinels that runtimes and communicators share are one each. A
// communicator that is closed or broken is another thing than a runtime that is.
func TestSentinelsOfRuntimesAndCommunicators(t *testing.T) {
	for of, same := range map[error]error{
		runtime.ErrArgument: comm.ErrArgument, runtime.ErrUnsupported: comm.ErrUnsupported,
		runtime.ErrDevice: comm.ErrDevice, runtime.ErrUnavailable: comm.ErrUnavailable,
	} {
		assert.ErrorIs(t, &comm.OpError{Op: "sync", Err: fmt.Errorf("cuda:0: %w", of)}, same)
		assert.ErrorIs(t, fmt.Errorf("cuda:0: %w", same), of)
	}
	for of, other := range map[error]error{runtime.ErrClosed: comm.ErrClosed, runtime.ErrBroken: comm.ErrBroken} {
		assert.NotErrorIs(t, of, other)
		assert.NotErrorIs(t, other, of)
	}
}
