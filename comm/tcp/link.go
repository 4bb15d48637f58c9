package tcp

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
)

const (
	// recordBytes is the most that a TLS record carries.
	recordBytes = 16 << 10
	// chunkBytes is the most payload of a frame.
	chunkBytes = 128 << 10
	// parallelChunkBytes is the same for pairs with several lanes for one message.
	parallelChunkBytes = 64 << 10
	// flushBytes is how much is collected before it goes to the socket, inlineBytes how much
	// a goroutine sends that is not the writer.
	flushBytes  = 128 << 10
	inlineBytes = 32 << 10
	// maxAnswers bounds what TLS answers a peer, as often as that asks, while it waits to be sent. Frames of
	// this rank are bounded by the peer's credit.
	maxAnswers = 1 << 20
)

// link is the socket under the TLS of a lane. TLS's writes are collected, so that several records go out by one system
// call, and sealing never waits for the network.
type link struct {
	net.Conn
	pair        *pair // of the lane; nil before there is one
	direct      bool  // until it is under a lane, nothing is collected
	nonblocking bool  // Read has nothing: its caller must not wait. Of the lane's reader alone.

	framing atomic.Bool // what TLS writes is of frames, and no answer

	mu        sync.Mutex // guards answers and collected
	answers   int        // bytes of collected that answer the peer; guarded by mu
	collected *buffer    // what TLS has written since the last flush, nil for nothing; guarded by mu

	// Of flush, guarded by the lane's writing.
	socket  syscall.RawConn       // nil of a connection that is none of the system's
	try     func(fd uintptr) bool // one attempt to send pending
	sent    int                   // what it sent
	failed  error                 // why it did not
	pending []byte                // what flush is sending
	memory  *buffer               // of pending; nil for none
}

// buffer is memory of a link that has something to send. A rank with a thousand connections sends over a few of
// them at a time.
type buffer struct{ bytes []byte }

var buffers = sync.Pool{New: func() any { return new(buffer) }}

func newLink(conn net.Conn) *link {
	l := &link{Conn: conn, direct: true}
	// Not of any syscall.Conn: one that embeds the system's may change what it reads and writes.
	switch conn := conn.(type) {
	case *net.TCPConn:
		l.socket, _ = conn.SyscallConn()
	case *net.UnixConn:
		l.socket, _ = conn.SyscallConn()
	}
	l.try = func(fd uintptr) bool {
		l.sent, l.failed = trySend(fd, l.pending)
		return true
	}
	tune(l.socket)
	return l
}

// Read implements [net.Conn]. Any data is a sign of life: on a slow link a frame takes longer than [Config.Silence].
func (l *link) Read(b []byte) (int, error) {
	if l.nonblocking {
		return 0, os.ErrDeadlineExceeded // TLS goes on behind such an error
	}
	n, err := l.Conn.Read(b)
	if n > 0 && l.pair != nil {
		l.pair.lastReceived.Store(l.pair.node.ticks.Load())
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
	if !l.framing.Load() {
		l.answers += len(b)
	}
	if l.answers > maxAnswers {
		return 0, errors.New("it asks for more answers than it reads")
	}
	if l.collected == nil {
		l.collected = buffers.Get().(*buffer)
	}
	l.collected.bytes = append(l.collected.bytes, b...)
	return len(b), nil
}

// flush sends what was collected: all of it, or, if it is not to wait, what the socket takes.
// Called by lane.write, with writing held.
func (l *link) flush(wait bool) (empty bool, err error) {
	for l.take() {
		n, err := l.send(wait)
		l.pending = l.pending[n:]
		if err != nil {
			return false, err
		}
		if !wait && len(l.pending) > 0 {
			return false, nil
		}
	}
	return true, nil
}

// take makes what was collected pending, unless something is, and reports whether there is anything.
func (l *link) take() bool {
	if len(l.pending) > 0 {
		return true
	}
	if l.memory != nil {
		l.memory.bytes = l.memory.bytes[:0]
		buffers.Put(l.memory)
		l.memory = nil
		l.pending = nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.collected == nil {
		return false
	}
	l.memory = l.collected
	l.collected = nil
	l.answers = 0
	l.pending = l.memory.bytes
	return len(l.pending) > 0
}

// send sends what is pending, or, if it is not to wait, what the socket takes of it.
func (l *link) send(wait bool) (n int, err error) {
	if wait {
		return l.Conn.Write(l.pending)
	}
	if l.socket == nil {
		return 0, nil
	}
	l.sent = 0
	if err := l.socket.Write(l.try); err != nil {
		return 0, err
	}
	return l.sent, l.failed
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
