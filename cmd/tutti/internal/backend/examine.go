package backend

import (
	"context"

	"github.com/tutti-go/tutti/comm"
)

// Examine returns body on a communicator that is examined as the environment asks for
// ([comm.Examine]), and whose calls are compared between the ranks ([comm.Checked]) also
// if check is set.
func Examine(check bool, body func(context.Context, Rank) error) func(context.Context, Rank) error {
	return func(ctx context.Context, r Rank) error {
		examined := func(ctx context.Context, c comm.Communicator) error {
			return comm.Examine(ctx, r.Runtime, c, func(ctx context.Context, c comm.Communicator) error {
				r.Comm = c
				return body(ctx, r)
			})
		}
		if !check {
			return examined(ctx, r.Comm)
		}
		k, err := comm.NewChecked(r.Comm, r.Runtime)
		if err != nil {
			return err
		}
		return comm.Run(ctx, []comm.Communicator{k}, examined)
	}
}
