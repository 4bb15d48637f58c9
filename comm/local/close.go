package local

import (
	"context"
	"github.com/tutti-go/tutti/internal/leak"
)

// Abort implements [backend.Backend].
func (e *endpoint) Abort(_ context.Context, cause error) {
	if e.world.failure.Load() == nil {
		e.world.abort(e, e.life.Broken(), cause)
	}
	e.drain()
}

// Release implements [backend.Backend].
func (e *endpoint) Release(context.Context) error {
	e.leakAlarm.Stop()
	e.depart()
	return nil
}

// depart takes the rank out of the world.
func (e *endpoint) depart() {
	if !e.gone.CompareAndSwap(false, true) {
		return
	}
	e.world.left.Add(1)
	e.world.checkLeft()
	e.world.checkMailboxes()
}

// leaked runs when a communicator was garbage collected without Close.
func (e *endpoint) leaked(mark *leak.Mark) {
	e.life.Forget()
	mark.Report()
	e.depart()
}
