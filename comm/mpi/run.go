package mpi

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
)

// Run initializes MPI, runs body for this process's rank as [comm.Run] does, and finalizes
// MPI. An error of body ends the waits of the other ranks with [comm.ErrPeerFailed]. MPI is not
// finalized then, because that would wait for them: exit with a non-zero status, which makes
// the launcher end the job.
func Run(ctx context.Context, body func(ctx context.Context, c comm.Communicator) error) error {
	world, err := Init(ctx)
	if err != nil {
		return err
	}
	err = comm.Run(ctx, []comm.Communicator{world}, body)
	if err != nil && world.WorldSize() > 1 {
		return err
	}
	return errors.Join(err, Finalize(ctx))
}
