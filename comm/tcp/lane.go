package tcp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"github.com/tutti-go/tutti/comm/internal/schedule"
)

// flow is what lanes and tracks have in common.
type flow struct {
	saidGoodbye  bool      // it has sent its last frame; guarded by pair.mu
	heardGoodbye bool      // it has got the peer's last frame; of who reads alone
	reading      *incoming // of the frame whose payload is being read, or nil; guarded by pair.mu
}

// lane is one of the connections of a pair, which chooses what each of them sends next (pair.choose).
type lane struct {
	pair   *pair         // to which it belongs
	index  int           // in pair.lanes
	link   *link         // the socket below secure
	secure net.Conn      // TLS over the link
	wake   chan struct{} // gets a value when the writer has something to do
	first  chan error    // gets a value when the connector has read the first byte of head

	flow

	// See locks.go.
	writing sync.Mutex
	sealing sync.Mutex
	filling sync.Mutex

	head [headerBytes]byte // being read; of the reader alone
}

// records have memory for a header and as much of its payload as fits, and for payloads that nobody wants. A rank with
// a thousand lanes writes to a few of them at a time.
var records = sync.Pool{New: func() any { return new([recordBytes]byte) }}

func newLane(p *pair, index int, conn *tls.Conn) *lane {
	l := conn.NetConn().(*link)
	l.pair = p
	l.direct = false
	limitStuck(l.socket, p.node.stuckTime())
	return &lane{
		pair:   p,
		index:  index,
		link:   l,
		secure: conn,
		wake:   make(chan struct{}, 1),
		first:  make(chan error, 1),
	}
}

// carriesParts reports whether parts of messages go over the lane: none has that beside a track, and on a long link,
// which has many, the first one has other things to carry.
func (l *lane) carriesParts() bool {
	return l.pair.track.Load() == nil && (l.index > 0 || len(l.pair.lanes) <= parallelLanes)
}

// wakeWriter has the writer look for frames.
func (l *lane) wakeWriter() { notify(l.wake) }

// write sends what there is: as the writer, or inline a little of it, without waiting. Called with the
// engine's lock or no lock held.
func (l *lane) write(inline bool) {
	if !inline {
		l.writing.Lock()
	} else if !l.writing.TryLock() {
		l.wakeWriter()
		return
	}
	defer l.writing.Unlock()
	select {
	case <-l.pair.dead:
		return
	default:
	}
	for sealed := 0; ; {
		n, err := l.seal()
		if err != nil {
			l.pair.failAsync(err)
			return
		}
		sealed += n
		done := n == 0
		full := inline && sealed > inlineBytes
		if !done && !full && sealed < flushBytes {
			continue
		}
		empty, err := l.link.flush(!inline)
		if err != nil {
			l.pair.failAsync(err)
			return
		}
		if full || !empty {
			l.wakeWriter()
			return
		}
		if done {
			return
		}
		if !inline {
			sealed = 0
		}
	}
}

// writer sends until the pair is closed.
func (l *lane) writer() {
	for {
		select {
		case <-l.wake:
			l.write(false)
		case <-l.pair.dead:
			return
		}
	}
}

// seal collects the next frame, and returns its length, 0 if there is none. Called by write, with writing held.
func (l *lane) seal() (n int, err error) {
	l.sealing.Lock()
	defer l.sealing.Unlock()
	var f outFrame
	if !l.pair.next(l, &f) {
		return 0, nil
	}
	l.link.framing.Store(true)
	defer l.link.framing.Store(false)
	frame := records.Get().(*[recordBytes]byte)
	defer records.Put(frame)
	f.header.put(frame[:])
	first := copy(frame[headerBytes:], f.payload)
	_, err = l.secure.Write(frame[:headerBytes+first])
	if err == nil && first < len(f.payload) {
		_, err = l.secure.Write(f.payload[first:])
	}
	if err != nil {
		return 0, err
	}
	l.pair.sealed(&f)
	return headerBytes + len(f.payload), nil
}

// reader receives until the connection ends.
func (l *lane) reader() {
	err := <-l.first
	if err == nil {
		err = l.readFrames(1)
	}
	l.pair.fail(err)
}

// readFrames receives frames until the connection ends. Some bytes of the first header have been read.
func (l *lane) readFrames(begun int) error {
	var h header
	for {
		if _, err := io.ReadFull(l.secure, l.head[begun:]); err != nil {
			return err
		}
		begun = 0
		h.get(l.head[:])
		if err := l.pair.receiveFrame(l, &h); err != nil {
			return err
		}
	}
}

// check returns why a frame is none that the peer sends on this lane at this point, whatever the state of its
// messages. Called by pair.receiveFrame, of the reader.
func (l *lane) check(h *header) error {
	switch {
	case h.kind < frameAnnouncement || h.kind > frameGoodbyeAck:
		return fmt.Errorf("a frame of kind %d", h.kind)
	case !h.hasLength():
		return fmt.Errorf("a frame of kind %d with %d bytes", h.kind, h.length)
	case !l.carries(h.kind):
		return fmt.Errorf("a frame of kind %d on lane %d of %d", h.kind, l.index, len(l.pair.lanes))
	case l.heardGoodbye && h.kind != frameBeat && h.kind != frameGoodbyeAck:
		return fmt.Errorf("a frame of kind %d behind a goodbye", h.kind)
	}
	return nil
}

// hasLength reports whether frames of the kind may have such a payload.
func (h *header) hasLength() bool {
	switch h.kind {
	case frameAnnouncement:
		return h.length <= chunkBytes
	case framePart:
		return h.length > 0 && h.length <= chunkBytes
	case frameControl:
		return h.length == schedule.ControlBytes
	}
	return h.length == 0
}

// carries reports whether frames of a kind go over the lane.
func (l *lane) carries(k kind) bool {
	switch k {
	case framePart:
		return l.carriesParts()
	case frameGoodbye:
		return true
	}
	return l.index == 0
}

// payload reads n bytes of a message into target, to nowhere if in is nil or dropped. A read that waits is one of a
// byte into memory of the lane's own, since the message may be dropped meanwhile. The part of the byte's record that is
// there already is read with filling held, and no more is waited for: a peer may end a record where it likes. Called by
// pair.receiveFrame.
func (l *lane) payload(in *incoming, target []byte, n int) error {
	for got := 0; got < n; {
		if _, err := io.ReadFull(l.secure, l.head[:1]); err != nil {
			return err
		}
		buffered, err := l.fill(in, target, got, n)
		if err != nil {
			return err
		}
		got += 1 + buffered
	}
	return nil
}

// fill puts the byte that has come, and what is buffered behind it, in its place.
func (l *lane) fill(in *incoming, target []byte, got, n int) (buffered int, err error) {
	l.filling.Lock()
	defer l.filling.Unlock()
	var memory []byte
	if in != nil && !in.dropped.Load() {
		memory = target[got:]
	} else {
		discard := records.Get().(*[recordBytes]byte)
		defer records.Put(discard)
		memory = discard[:min(n-got, recordBytes)]
	}
	memory[0] = l.head[0]
	if len(memory) == 1 {
		return 0, nil
	}
	l.link.nonblocking = true
	buffered, err = l.secure.Read(memory[1:])
	l.link.nonblocking = false
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil
	}
	return buffered, err
}
