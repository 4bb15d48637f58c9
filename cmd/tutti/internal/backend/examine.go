package backend

import (
	"context"
	"errors"

	"github.com/tutti-go/tutti/comm"
)

// Examine returns body on a communicator whose calls are compared between the ranks
// ([comm.Checked]), if check or the environment asks for it, and recorded
// ([comm.Recorder]), if the environment does.
func Examine(check bool, body func(context.Context, Rank) error) func(context.Context, Rank) error {
	return func(ctx context.Context, r Rank) error {
		var c comm.Communicator
		var err error
		if check {
			c, err = comm.NewChecked(r.Comm, r.Runtime)
		} else {
			c, err = comm.CheckFromEnv(r.Comm, r.Runtime)
		}
		if err != nil {
			return err
		}
		bare := r.Comm
		r.Comm = comm.RecordFromEnv(c)
		err = body(ctx, r)
		if r.Comm != bare {
			// A record ends with the error.
			err = errors.Join(err, r.Comm.(comm.Ender).End(err))
		}
		return err
	}
}
