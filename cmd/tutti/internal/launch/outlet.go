package launch

import (
	"bytes"
	"io"
	"sync"
	"time"
)

// Bounds of the output that waits for a reader.
const (
	runningRoom = 1 << 20  // bytes; beyond this, ranks wait for the reader
	endingRoom  = 64 << 20 // bytes; beyond this, lines of ranks that are told to end are lost
)

// outlet writes to a stream whose reader may have stopped, such as a pager or a terminal. Ranks wait for the reader.
// The launcher's messages do not, and neither does the end of the job.
type outlet struct {
	stream io.Writer // written to by one goroutine alone, without mu

	mu      sync.Mutex // guards the fields below; taken alone
	changed sync.Cond  // of mu; signalled when a field below changes
	queue   [][]byte   // unwritten text, in order
	waiting int        // bytes in queue and in the current write
	ending  bool       // ranks are told to end, so Write does not wait
	closed  bool       // nothing is written any more
	lost    int        // dropped bytes of the ranks' output
	read    time.Time  // time of the reader's last read
}

// newOutlet begins to write to a stream.
func newOutlet(stream io.Writer) *outlet {
	o := &outlet{stream: stream}
	o.changed.L = &o.mu
	go o.pump()
	return o
}

// pump writes queued text until the outlet is closed. The stream's owner handles errors of the stream.
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

// Write queues lines of ranks. It waits for room, except while ranks are told to end.
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

// note is an [io.Writer] for the launcher's messages, which never wait.
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

// keepWaiting sets whether ranks wait for the reader. They do not while they are told to end.
func (o *outlet) keepWaiting(waits bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ending = !waits
	o.changed.Broadcast()
}

// room returns how many bytes may wait. The caller holds mu.
func (o *outlet) room() int {
	if o.ending {
		return endingRoom
	}
	return runningRoom
}

// close waits until all text is written, or until the reader has read nothing for the limit. It returns the number of
// bytes that the reader has not taken.
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

// wake makes waiting calls check again.
func (o *outlet) wake() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.changed.Broadcast()
}
