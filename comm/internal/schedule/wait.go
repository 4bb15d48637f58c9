package schedule

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/poll"
	"github.com/tutti-go/tutti/internal/waiting"
)

// watch is the state of a wait. The zero watch begins a wait.
type watch struct {
	pace     poll.Pace         // of polling: spins, then sleeps
	moves    int               // number of moves since the wait has attended
	reminder *waiting.Reminder // of a wait in which nothing moves; nil before that has lasted
}

// attendMoves is the number of moves after which a wait attends that is not stalled, some milliseconds.
const attendMoves = 256

// attends reports whether it is time to receive control messages.
func (w *watch) attends() bool { return w.pace.Stalled() || w.moves >= attendMoves }

// goOn restarts the pace for the next event, which is as close as the first was.
func (w *watch) goOn() {
	w.pace = poll.Pace{Home: w.pace.Home}
	w.moves++
	w.stop()
}

// stop ends the reminders.
func (w *watch) stop() {
	if w.reminder != nil {
		w.reminder.Stop()
		w.reminder = nil
	}
}

// reminds reports whether it is time for a long wait to say what it waits for, and how long nothing has moved.
func (w *watch) reminds() (waited time.Duration, due bool) {
	if w.reminder == nil {
		w.reminder = waiting.Remind()
	}
	select {
	case <-w.reminder.C:
		return w.reminder.Next(), true
	default:
		return 0, false
	}
}

// wait waits until nothing is in flight, or ctx ends. op is the call that waits.
func (e *Engine) wait(ctx context.Context, op comm.Op) error {
	e.waiters.Add(1)
	defer e.waited()
	var w watch
	defer w.stop()
	for {
		if idle, err := e.drain(&w, op); err != nil || idle {
			return err
		}
		// The context is checked after the first polls, so that it costs nothing if the peers have arrived.
		if ctx.Err() != nil {
			return e.expire(ctx, op)
		}
		e.pause(&w)
	}
}

// waited ends a wait. Drive has left messages that arrived in the meantime to it, perhaps the last one of a rank when
// there was nothing more to wait for.
func (e *Engine) waited() {
	if e.waiters.Add(-1) == 0 && e.waiter != nil && (e.missed.Load() || e.inFlight.Load() > 0) {
		e.Drive()
	}
}

// pause pauses between two polls.
func (e *Engine) pause(w *watch) {
	switch {
	case e.looker != nil && e.looker.Moved():
		w.goOn()
	case e.waiter == nil, e.looker != nil && e.looker.Looks(w.pace.Stalled()):
		w.pace.Next()
	default:
		e.waiter.Await(w.pace.Block())
	}
}

// drain polls a few times and reports whether nothing is in flight.
func (e *Engine) drain(w *watch, op comm.Op) (idle bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	w.pace.Home = e.home
	progressed := false
	for moved, tries := true, w.pace.Polls(); moved && tries > 0 && e.inFlight.Load() > 0; tries-- {
		if moved, err = e.poll(w.pace.Stalled(), tries); err != nil {
			return false, err
		}
		progressed = progressed || moved
	}
	if progressed {
		w.goOn()
	}
	idle = e.inFlight.Load() == 0
	if idle || !w.attends() {
		return idle, nil
	}
	if w.pace.Long() {
		e.reportStall()
		e.sayCrowded(w)
	}
	w.moves = 0
	if err := e.attend(); err != nil {
		return false, e.fail(op, err)
	}
	return false, nil
}

// sayCrowded says ever less often what a wait waits for if messages lack receives: perhaps the program calls them in an
// order in which nobody can go on. The caller holds mu.
func (e *Engine) sayCrowded(w *watch) {
	waited, due := w.reminds()
	if !due {
		return
	}
	f := e.describe()
	if len(f.Messages) == 0 || len(e.crowded(f)) == 0 {
		return
	}
	if times, due := e.crowdings.Count(""); due {
		slog.Warn(e.Check.Backend+": a wait lasts, as messages lack receives",
			"rank", e.rank, "waits for", f.String(), "waited", waited, "times", times)
	}
}

// expire ends a wait whose context has ended. It holds no lock while it tells the launcher, which may be slow.
func (e *Engine) expire(ctx context.Context, op comm.Op) error {
	late, err := e.cutShort(ctx, op)
	if e.late != nil && len(late) > 0 {
		e.late(late)
	}
	return err
}

// cutShort ends the operations in flight, and returns the ranks for which the wait has waited until its deadline.
func (e *Engine) cutShort(ctx context.Context, op comm.Op) (late []int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for e.segment.due() { // lets the other ranks continue as well
		if _, err := e.poll(true, 1); err != nil {
			return nil, err
		}
	}
	if e.inFlight.Load() == 0 {
		return nil, nil
	}
	if err := e.attend(); err != nil {
		return nil, e.fail(op, err)
	}
	flight := e.describe()
	err = flight.Error(ctx)
	if errors.Is(err, comm.ErrTimeout) {
		late = e.latecomers(flight)
	}
	return late, e.fail(op, err)
}
