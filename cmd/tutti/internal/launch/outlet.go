package launch

import (
	"bytes"
	"io"
	"sync"
	"time"
)

// Bounds of what waits for a reader of the output.
const (
	runningRoom = 1 << 20  // bytes, beyond which ranks wait for the reader
	endingRoom  = 64 << 20 // bytes, beyond which lines are lost that ranks write when they are told to end
)

// outlet writes to a stream whose reader may have stopped to read, as a pager or a terminal does: ranks wait for it,
// but the launcher's own lines do not, and neither does the end.
type outlet struct {
	stream io.Writer // written to by one goroutine alone, without mu

	mu      sync.Mutex // guards what follows; taken alone
	changed sync.Cond  // of mu: something below has
	queue   [][]byte   // what is not written, in order
	waiting int        // bytes in queue, and of what is being written
	ending  bool       // Write does not wait
	closed  bool       // nothing is written any more
	lost    int        // bytes
	read    time.Time  // when the reader last took something
}

// newOutlet begins to write to a stream.
func newOutlet(stream io.Writer) *outlet {
	o := &outlet{stream: stream}
	o.changed.L = &o.mu
	go o.pump()
	return o
}

// pump writes what comes, until the outlet is closed. An error of the stream is for its owner to tell.
func (o *outlet) pump() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		for len(o.queue) == 0 && !o.closed {
			o.changed.Wait()
		}
		if o.closed {
			return
		}
		text := o.queue[0]
		o.queue = o.queue[1:]
		o.mu.Unlock()
		_, _ = o.stream.Write(text)
		o.mu.Lock()
		o.waiting -= len(text)
		o.read = time.Now()
		o.changed.Broadcast()
	}
}

// Write queues lines of ranks, when there is room.
func (o *outlet) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.waiting >= o.room() && !o.ending && !o.closed {
		o.changed.Wait()
	}
	if o.closed || o.waiting >= o.room() {
		o.lost += len(p)
		return len(p), nil
	}
	o.add(p)
	return len(p), nil
}

// add queues text. The caller holds mu.
func (o *outlet) add(text []byte) {
	if o.waiting == 0 {
		o.read = time.Now() // the reader's time begins
	}
	o.queue = append(o.queue, bytes.Clone(text))
	o.waiting += len(text)
	o.changed.Broadcast()
}

// note is an [io.Writer] for the launcher's own lines, which wait for nobody.
type note struct{ *outlet }

// Write implements [io.Writer].
func (n note) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closed {
		n.add(p)
	}
	return len(p), nil
}

// keepWaiting says whether ranks wait for the reader: not while they are told to end.
func (o *outlet) keepWaiting(waits bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ending = !waits
	o.changed.Broadcast()
}

// room is how many bytes may wait. The caller holds mu.
func (o *outlet) room() int {
	if o.ending {
		return endingRoom
	}
	return runningRoom
}

// close waits until all is written, or until the reader has read nothing for so long, and returns how many bytes it has
// not taken.
func (o *outlet) close(limit time.Duration) (lost int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.waiting > 0 {
		idle := time.Since(o.read)
		if idle >= limit {
			break
		}
		timer := time.AfterFunc(limit-idle, o.wake)
		o.changed.Wait()
		timer.Stop()
	}
	o.closed = true
	o.changed.Broadcast()
	return o.lost + o.waiting
}

// wake has waits look again.
func (o *outlet) wake() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.changed.Broadcast()
}
