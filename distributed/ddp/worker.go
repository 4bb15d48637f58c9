package ddp

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/tutti-go/tutti/comm/metered"
)

// worker is the communication worker of a [Gradients]: a goroutine that makes the exchanges of buckets,
// one after the other in the order in which they were given, so that all ranks make
// the same ones in the same order. Meanwhile the caller goes on with its backward
// pass. It is for where an exchange keeps the host: where that does the work, or waits
// for numbers of the device. A device with streams works asynchronously
// by itself otherwise.
type worker struct {
	queue chan *bucket // exchanges to make, with room for all buckets
	done  chan *bucket // exchanges that were made, or left out after one that failed
	open  int          // exchanges in flight, known to the caller's goroutine alone
	// failed: no other exchange is made, as the peers may be in the middle of one.
	failed atomic.Bool
}

// newWorker returns a worker for the exchanges of up to capacity buckets at a time, which f makes.
func newWorker(capacity int, f func(b *bucket) error) *worker {
	w := &worker{queue: make(chan *bucket, capacity), done: make(chan *bucket, capacity)}
	go func() {
		for job := range w.queue {
			if !w.failed.Load() {
				job.step.failed = f(job)
				w.failed.Store(job.step.failed != nil)
			}
			w.done <- job
		}
		close(w.done)
	}()
	return w
}

// add gives an exchange.
func (w *worker) add(job *bucket) {
	w.open++
	w.queue <- job
}

// look returns the error of an exchange that is done, without waiting.
func (w *worker) look() error {
	for w.open > 0 {
		select {
		case job := <-w.done:
			w.open--
			if job.step.failed != nil {
				return job.step.failed
			}
		default:
			return nil
		}
	}
	return nil
}

// breakEvery is the interval at which wait, whose context has ended, tries again to end a communicator's work: an
// exchange may submit its next call after each Sync that has ended one.
const breakEvery = 10 * time.Millisecond

// wait waits until all exchanges are done and returns the first error. When ctx
// ends before, it ends what the communicators have submitted, and with it the exchanges.
func (w *worker) wait(ctx context.Context, all []*metered.Communicator) error {
	var first error
	ended := ctx.Done()
	retry := (<-chan time.Time)(nil)
	for w.open > 0 {
		select {
		case job := <-w.done:
			w.open--
			if first == nil {
				first = job.step.failed
			}
			continue
		case <-ended:
		case <-retry:
		}
		ended = nil
		retry = time.After(breakEvery)
		for _, c := range all {
			_ = c.Sync(ctx) // the exchange says why it ended
		}
	}
	w.failed.Store(false)
	return first
}

// close ends the goroutine, when all exchanges are done.
func (w *worker) close() { close(w.queue) }
