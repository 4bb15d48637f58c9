package tcp

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm/internal/schedule"
)

const (
	// recordBytes is the most that a TLS record carries.
	recordBytes = 16 << 10
	// chunkBytes is the most payload of a frame.
	chunkBytes = 128 << 10
	// flushBytes is how much is collected before it goes to the socket, inlineBytes how much
	// a goroutine sends that is not the writer.
	flushBytes  = 128 << 10
	inlineBytes = 32 << 10
	// maxAnswers bounds what TLS answers a peer, as often as that asks, while it waits to be sent. Frames of
	// this rank are bounded by the peer's credit.
	maxAnswers = 1 << 20
)

// link is the socket under the TLS of a lane. What TLS writes is collected, so that several
// records go out by one system call, and sealing never waits for the network.
type link struct {
	net.Conn
	direct bool // until it is under a lane, nothing is collected
	dry    bool // Read has nothing: its caller must not wait. Of the lane's reader alone.
	socket syscall.RawConn
	try    func(fd uintptr) bool // one attempt to send pending
	sent   int                   // what it sent
	failed error
	pair   *pair // of the lane

	sealing atomic.Bool // what TLS writes is of frames, and no answer

	mu      sync.Mutex
	answers int    // bytes of out that answer the peer; guarded by mu
	out     []byte // collected; guarded by mu
	pending []byte // what flush is sending
	spare   []byte // its memory
}

func newLink(conn net.Conn) *link {
	l := &link{Conn: conn, direct: true}
	if c, ok := conn.(syscall.Conn); ok {
		l.socket, _ = c.SyscallConn()
	}
	l.try = func(fd uintptr) bool {
		l.sent, l.failed = trySend(fd, l.pending)
		return true
	}
	tune(l.socket)
	return l
}

// Read implements [net.Conn]. Whatever comes is a sign of life: on a slow link a frame takes longer than [Config.Silence].
func (l *link) Read(b []byte) (int, error) {
	if l.dry {
		return 0, os.ErrDeadlineExceeded // TLS goes on behind such an error
	}
	n, err := l.Conn.Read(b)
	if n > 0 && l.pair != nil {
		l.pair.heard.Store(l.pair.node.ticks.Load())
	}
	return n, err
}

// Write implements [net.Conn].
func (l *link) Write(b []byte) (int, error) {
	if l.direct {
		return l.Conn.Write(b)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.sealing.Load() {
		l.answers += len(b)
	}
	if l.answers > maxAnswers {
		return 0, errors.New("it asks for more answers than it reads")
	}
	l.out = append(l.out, b...)
	return len(b), nil
}

// flush sends what was collected: all of it, or, if it is not to wait, what the socket takes.
// One goroutine flushes at a time.
func (l *link) flush(wait bool) (empty bool, err error) {
	for {
		if len(l.pending) == 0 {
			l.mu.Lock()
			l.out, l.spare = l.spare[:0], l.out
			l.answers = 0
			l.mu.Unlock()
			if l.pending = l.spare; len(l.pending) == 0 {
				return true, nil
			}
		}
		n := 0
		if wait {
			n, err = l.Conn.Write(l.pending)
		} else if l.socket != nil {
			l.sent = 0
			if err = l.socket.Write(l.try); err == nil {
				n, err = l.sent, l.failed
			}
		}
		l.pending = l.pending[n:]
		if err != nil || !wait && len(l.pending) > 0 {
			return false, err
		}
	}
}

// listener makes links of the connections that it accepts.
type listener struct{ net.Listener }

// Accept implements [net.Listener].
func (l listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newLink(conn), nil
}

// kind is the kind of a frame.
type kind uint8

const (
	frameMessage kind = iota + 1 // announces a message, and carries its beginning
	frameData                    // a part of one
	frameGrant                   // the receive of a message is there: the rest may come
	frameControl                 // an engine's control message
	frameBeat                    // nothing but a sign of life, or credit
	frameBye                     // the last frame of a lane, if the sender has left
	frameSeen                    // all frames up to the goodbye have been seen
)

// header precedes every frame. The fields after credit depend on the kind.
type header struct {
	kind   kind
	report bool   // of a control message
	length int    // of the payload
	credit uint64 // that the receiver of messages gives back
	id     uint64 // the communicator; of data and grants the number of the message
	tag    uint64 // of a message; of data the offset
	total  uint64 // length of a message
	eager  uint64 // of a message: bytes that come without a grant
}

const headerBytes = 48

func (h *header) put(b []byte) {
	clear(b[:headerBytes])
	b[0] = byte(h.kind)
	if h.report {
		b[1] = 1
	}
	binary.LittleEndian.PutUint32(b[4:], uint32(h.length))
	for i, v := range [...]uint64{h.credit, h.id, h.tag, h.total, h.eager} {
		binary.LittleEndian.PutUint64(b[8+8*i:], v)
	}
}

func (h *header) get(b []byte) {
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	*h = header{kind(b[0]), b[1] != 0, int(binary.LittleEndian.Uint32(b[4:])), word(1), word(2), word(3), word(4), word(5)}
}

// stuck, or three times [Config.Silence], is how long nothing of what was sent on a connection may be acknowledged by the other side's kernel. Signs of
// life go over the first of a pair's connections. Another one that carries nothing any more is not to hold the ranks up until the
// kernel's last retransmission, some 15 minutes later. One that starves beside others on a slow link, or loses five packets in a row, gets
// through before that.
var stuck = time.Minute

// lane is one of the connections of a pair.
type lane struct {
	*pair
	index  int
	link   *link
	secure net.Conn      // TLS over the link
	wake   chan struct{} // the writer
	first  chan error    // the connector has read the first byte of head
	byed   bool          // has sent its last frame
	left   bool          // the other rank has said goodbye here; of the reader alone
	taking *incoming     // of the frame that is being read

	// Locks, in the order in which they are taken, before that of the pair.
	writing  sync.Mutex // held while frames are collected and sent
	sealing  sync.Mutex // held while a message's memory is read
	touching sync.Mutex // held while a message's memory is written

	frame [recordBytes]byte // being written: a header, and as much of its payload as fits
	head  [headerBytes]byte // being read
	lost  [recordBytes]byte // where payloads go that nobody wants
}

func newLane(p *pair, index int, conn *tls.Conn) *lane {
	l := conn.NetConn().(*link)
	l.pair, l.direct = p, false
	bound(l.socket, max(stuck, 3*time.Duration(p.node.patience)*p.node.tick))
	return &lane{pair: p, index: index, link: l, secure: conn, wake: make(chan struct{}, 1), first: make(chan error, 1)}
}

// write sends what there is: as the writer, or inline a little of it, without waiting.
func (l *lane) write(inline bool) {
	if inline {
		if !l.writing.TryLock() {
			l.rouse()
			return
		}
	} else {
		l.writing.Lock()
	}
	defer l.writing.Unlock()
	select {
	case <-l.dead:
		return
	default:
	}
	for sealed := 0; ; {
		n, err := l.seal()
		sealed += n
		done, full := n == 0, inline && sealed > inlineBytes
		if err == nil && (done || full || sealed >= flushBytes) {
			var empty bool
			empty, err = l.link.flush(!inline)
			if err == nil && (full || !empty) {
				l.rouse()
				return
			}
			if !inline {
				sealed = 0
			}
		}
		if err != nil {
			l.fail(err)
		}
		if done || err != nil {
			return
		}
	}
}

// rouse has the writer look.
func (l *lane) rouse() { poke(l.wake) }

// writer sends until the pair is gone.
func (l *lane) writer() {
	for {
		select {
		case <-l.wake:
			l.write(false)
		case <-l.dead:
			return
		}
	}
}

// seal collects the next frame, and returns its length, 0 if there is none.
func (l *lane) seal() (n int, err error) {
	l.sealing.Lock()
	defer l.sealing.Unlock()
	var f sending
	if !l.next(l, &f) {
		return 0, nil
	}
	l.link.sealing.Store(true)
	defer l.link.sealing.Store(false)
	f.header.put(l.frame[:])
	first := copy(l.frame[headerBytes:], f.payload)
	_, err = l.secure.Write(l.frame[:headerBytes+first])
	if rest := f.payload[first:]; err == nil && len(rest) > 0 {
		_, err = l.secure.Write(rest)
	}
	if err == nil {
		l.sealed(&f)
	}
	return headerBytes + len(f.payload), err
}

// reader receives until the connection ends.
func (l *lane) reader() {
	err := <-l.first
	if err == nil {
		err = l.receive(1)
	}
	l.fail(err)
}

// receive receives frames until the connection ends. The first at bytes of head have been read.
func (l *lane) receive(at int) error {
	var h header
	for ; ; at = 0 {
		if _, err := io.ReadFull(l.secure, l.head[at:]); err != nil {
			return err
		}
		h.get(l.head[:])
		if err := l.arrived(l, &h); err != nil {
			return err
		}
	}
}

// check returns why a frame is none that the other rank sends on this lane at this point, whatever the state of its
// messages.
func (l *lane) check(h *header) error {
	lane := l.index == 0 || h.kind == frameBye
	if h.kind == frameData {
		lane = l.index > 0 || len(l.lanes) == 1
	}
	length := h.length <= chunkBytes
	switch {
	case h.kind == frameControl:
		length = h.length == schedule.ControlBytes
	case h.kind == frameData:
		length = length && h.length > 0
	case h.kind != frameMessage:
		length = h.length == 0
	}
	switch {
	case h.kind < frameMessage || h.kind > frameSeen:
		return fmt.Errorf("a frame of kind %d", h.kind)
	case !length:
		return fmt.Errorf("a frame of kind %d with %d bytes", h.kind, h.length)
	case !lane:
		return fmt.Errorf("a frame of kind %d on lane %d of %d", h.kind, l.index, len(l.lanes))
	case l.left && h.kind != frameBeat && h.kind != frameSeen:
		return fmt.Errorf("a frame of kind %d behind a goodbye", h.kind)
	}
	return nil
}

// payload reads n bytes of a message into memory, to nowhere if in is nil or dropped. A read that
// waits is one of a byte into memory of the lane's own, since the message may be dropped
// meanwhile. What is there already of the byte's record is read with touching held, and no more is waited for: a peer
// may end a record where it likes.
func (l *lane) payload(in *incoming, to []byte, n int) error {
	for at := 0; at < n; {
		if _, err := io.ReadFull(l.secure, l.head[:1]); err != nil {
			return err
		}
		l.touching.Lock()
		into := l.lost[:min(n-at, recordBytes)]
		if in != nil && !in.dropped.Load() {
			into = to[at:]
		}
		into[0] = l.head[0]
		more, err := 0, error(nil)
		if len(into) > 1 {
			l.link.dry = true
			more, err = l.secure.Read(into[1:])
			l.link.dry = false
		}
		l.touching.Unlock()
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		at += 1 + more
	}
	return nil
}
