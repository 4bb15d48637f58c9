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
	given chan *bucket
	done  chan *bucket
	open  int // given and not known to be done
	// failed: no other exchange is made, as the peers may be in the middle of one.
	failed atomic.Bool
}

// newWorker is for the exchanges of so many buckets at a time, which f makes.
func newWorker(most int, f func(b *bucket) error) *worker {
	b := &worker{given: make(chan *bucket, most), done: make(chan *bucket, most)}
	go func() {
		for of := range b.given {
			if !b.failed.Load() {
				of.step.failed = f(of)
				b.failed.Store(of.step.failed != nil)
			}
			b.done <- of
		}
		close(b.done)
	}()
	return b
}

// add gives an exchange.
func (b *worker) add(of *bucket) {
	b.open++
	b.given <- of
}

// look returns the error of an exchange that is done, without waiting.
func (b *worker) look() error {
	for b.open > 0 {
		select {
		case of := <-b.done:
			b.open--
			if of.step.failed != nil {
				return of.step.failed
			}
		default:
			return nil
		}
	}
	return nil
}

// breakEvery is how often wait tries to end a communicator's work.
const breakEvery = 10 * time.Millisecond

// wait waits until all exchanges are done and returns the first error. When ctx
// ends before, it ends what the communicators have submitted, and with it the exchanges.
func (b *worker) wait(ctx context.Context, all []*metered.Communicator) error {
	var first error
	over, again := ctx.Done(), (<-chan time.Time)(nil)
	for b.open > 0 {
		select {
		case of := <-b.done:
			b.open--
			if first == nil {
				first = of.step.failed
			}
			continue
		case <-over:
		case <-again:
		}
		over, again = nil, time.After(breakEvery)
		for _, c := range all {
			_ = c.Sync(ctx) // the exchange says why it ended
		}
	}
	b.failed.Store(false)
	return first
}

// close ends the goroutine, when all exchanges are done.
func (b *worker) close() { close(b.given) }
