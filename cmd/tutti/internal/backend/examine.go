package backend

import (
	"context"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/instrument"
)

// Examine returns body on a communicator that is examined as the environment asks for
// ([instrument.Run]), and whose calls are compared between the ranks ([checked.Communicator]) also
// if check is set.
func Examine(check bool, body func(context.Context, Rank) error) func(context.Context, Rank) error {
	return func(ctx context.Context, r Rank) error {
		examined := func(ctx context.Context, c comm.Communicator) error {
			return instrument.Run(ctx, r.Runtime, c, func(ctx context.Context, c comm.Communicator) error {
				r.Comm = c
				return body(ctx, r)
			})
		}
		if !check {
			return examined(ctx, r.Comm)
		}
		k, err := checked.New(ctx, r.Comm, r.Runtime)
		if err != nil {
			return err
		}
		return comm.Run(ctx, []comm.Communicator{k}, examined)
	}
}
