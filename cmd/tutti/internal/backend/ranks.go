package backend

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
)

// runRanks runs body for ranks whose communicators do not know of each other's
// failures, each in a goroutine of its own, and returns the joined errors. When
// one fails, the context of all ends, and so do their waits. The ranks have
// guards.
func runRanks(ctx context.Context, ranks []Rank, body func(context.Context, Rank) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	errs := make([]error, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() {
			errs[i] = runRank(ctx, r, body)
			if errs[i] != nil {
				cancel(fmt.Errorf("%w: rank %d: %w", comm.ErrPeerFailed, r.Comm.Rank(), errs[i]))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
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
