package backend

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// run is [comm.Run] for ranks whose communicators do not know of each other's
// failures: when one fails, the context of all ends, and so do their waits. The ranks
// have guards.
func run(ctx context.Context, ranks []Rank, body func(context.Context, Rank) error) error {
	comms, of := make([]comm.Communicator, len(ranks)), make(map[comm.Communicator]Rank)
	for i, r := range ranks {
		comms[i], of[r.Comm] = r.Comm, r
	}
	return comm.Run(ctx, comms, func(ctx context.Context, c comm.Communicator) error { return runRank(ctx, of[c], body) })
}

// runRank runs body and sees to it that nothing outlives ctx.
func runRank(ctx context.Context, r Rank, body func(context.Context, Rank) error) error {
	returned := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-ctx.Done():
			abandon(ctx, r.guard, returned)
		case <-returned:
		}
	})
	err := body(ctx, r)
	ended := ctx.Err() != nil
	close(returned)
	watch.Wait()
	if ended && errors.Is(err, comm.ErrBroken) {
		// The watcher broke it, unless the body's own wait was first; what ended
		// the context says why.
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	if err != nil {
		// What the body left behind waits for peers that may never come.
		over, cancel := context.WithCancel(ctx)
		cancel()
		r.guard.abort(over)
	}
	return err
}

// abandonEvery is how often abandon looks.
const abandonEvery = 20 * time.Millisecond

// abandon ends what a rank's communicators have submitted, also those that it
// makes or uses later, so that its goroutine, which may be in a call that no
// context ends (a copy from a device, a submission to a full queue), comes back.
func abandon(ctx context.Context, g *guard, returned <-chan struct{}) {
	for {
		g.abort(ctx)
		select {
		case <-returned:
			return
		case <-time.After(abandonEvery):
		}
	}
}
