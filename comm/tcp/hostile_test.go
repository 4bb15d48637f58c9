package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// stream is one direction of a connection in memory, which takes whatever is written to it.
type stream struct {
	mu      sync.Mutex
	changed sync.Cond
	data    []byte // guarded by mu
	closed  bool   // guarded by mu
}

func newStream() *stream {
	s := new(stream)
	s.changed.L = &s.mu
	return s
}

func (s *stream) Read(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.data) == 0 {
		if s.closed {
			return 0, io.EOF
		}
		s.changed.Wait()
	}
	n := copy(b, s.data)
	s.data = s.data[n:]
	return n, nil
}

func (s *stream) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, net.ErrClosed
	}
	s.data = append(s.data, b...)
	s.changed.Broadcast()
	return len(b), nil
}

func (s *stream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.changed.Broadcast()
	return nil
}

// line is one end of a connection in memory. Its deadlines never pass.
type line struct {
	in, out *stream
}

func newLine() (*line, *line) {
	there, back := newStream(), newStream()
	return &line{there, back}, &line{back, there}
}

func (c *line) Read(b []byte) (int, error)       { return c.in.Read(b) }
func (c *line) Write(b []byte) (int, error)      { return c.out.Write(b) }
func (c *line) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *line) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *line) SetDeadline(time.Time) error      { return nil }
func (c *line) SetReadDeadline(time.Time) error  { return nil }
func (c *line) SetWriteDeadline(time.Time) error { return nil }

func (c *line) Close() error {
	_ = c.in.Close()
	return c.out.Close()
}

// testTLS is what the ranks of these tests know.
var testTLS = sync.OnceValue(func() *tls.Config {
	conf, err := store.TLS([]byte("a secret of tests"), "comm/tcp")
	if err != nil {
		panic(err)
	}
	return conf
})

// secured returns the ends of connections whose handshakes are done.
func secured(t *testing.T, count int) (servers, clients []*tls.Conn) {
	for range count {
		here, there := newLine()
		server, client := tls.Server(newLink(here), testTLS()), tls.Client(newLink(there), testTLS())
		done := make(chan error)
		go func() { done <- client.HandshakeContext(t.Context()) }()
		require.NoError(t, server.HandshakeContext(t.Context()))
		require.NoError(t, <-done)
		servers, clients = append(servers, server), append(clients, client)
	}
	return servers, clients
}

// newTestNode is a rank of a world that is not connected yet.
func newTestNode(rank, size int) *node {
	n := &node{rank: rank, size: size, tick: time.Second, patience: 10, stop: make(chan struct{}), wires: map[uint64]*wire{}}
	for r := range size {
		n.pairs = append(n.pairs, newPair(n, r))
	}
	return n
}

// attach makes connections the lanes of a pair, as the connector does, and has change look at each before it is used.
func (p *pair) attach(conns []*tls.Conn, change func(l *lane, conn *tls.Conn)) {
	p.credit = newCredit(minWindow)
	for i, conn := range conns {
		l := newLane(p, i, conn)
		p.lanes = append(p.lanes, l)
		if change != nil {
			change(l, conn)
		}
		go func() {
			_, err := io.ReadFull(l.secure, l.head[:1])
			l.first <- err
		}()
	}
}

// world starts a node whose pairs have lanes.
func (n *node) world() comm.Communicator {
	all := make([]int, n.size)
	for r := range all {
		all[r] = r
	}
	c, err := n.communicator(1, n.rank, all)
	if err != nil {
		panic(err)
	}
	n.start()
	return c
}

// intruder is rank 1 of a world of two, and says whatever a test wants on its lanes.
type intruder struct {
	lanes []*tls.Conn
}

// newIntruder returns rank 0 of a world, and the rank that it is exposed to.
func newIntruder(t *testing.T, lanes int) (comm.Communicator, *intruder) {
	victim := newTestNode(0, 2)
	servers, clients := secured(t, lanes)
	victim.pairs[1].attach(servers, nil)
	for _, c := range clients {
		go io.Copy(io.Discard, c) //nolint:errcheck // until it is closed
	}
	in := &intruder{clients}
	t.Cleanup(func() {
		in.close()
		time.Sleep(time.Second) // of a bubble: what sends now and then notices
	})
	return victim.world(), in
}

func (in *intruder) close() {
	for _, l := range in.lanes {
		_ = l.NetConn().Close()
	}
}

// frame returns a frame as bytes.
func frame(h header, payload []byte) []byte {
	b := make([]byte, headerBytes, headerBytes+len(payload))
	h.put(b)
	return append(b, payload...)
}

// send sends a part of a frame in a TLS record.
func (in *intruder) send(t *testing.T, lane int, bytes []byte) {
	t.Helper()
	_, err := in.lanes[lane].Write(bytes)
	require.NoError(t, err)
	synctest.Wait()
}

const hostileTag = 9<<1 | 1 // of a user's message with the tag 9

// announce announces a message of n bytes to a receive of bytes with the tag 9.
func (in *intruder) announce(t *testing.T, n int) {
	head := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(n)), 9<<32|uint64(dtype.U8))
	in.send(t, 0, frame(header{kind: frameAnnouncement, communicator: 1, tag: hostileTag, total: 16, eager: 16, length: 16}, head))
	in.send(t, 0, frame(header{kind: frameAnnouncement, communicator: 1, tag: hostileTag, total: uint64(n)}, nil))
}

// A part of a message that comes a second time, on another lane, is not written into memory that the caller has got back.
func TestPartTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, in := newIntruder(t, 3)
		const n = 8192
		memory := make([]byte, n)
		require.NoError(t, c.Recv(hostmem.Addr(memory), n, dtype.U8, 1, 9))
		in.announce(t, n)
		part := frame(header{kind: framePart, message: 2, length: n}, bytes.Repeat([]byte{2}, n))
		in.send(t, 1, part[:headerBytes+2])
		_, _ = in.lanes[2].Write(part) // refused as soon as its header is read, perhaps before all of it is written
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := c.Sync(ctx)
		require.ErrorIs(t, err, comm.ErrPeerFailed)
		assert.ErrorContains(t, err, "twice")
		for i := range memory {
			memory[i] = 77 // the caller's again
		}
		_, _ = in.lanes[1].Write(part[headerBytes+2:])
		synctest.Wait()
		assert.Equal(t, bytes.Repeat([]byte{77}, n), memory)
		require.NoError(t, c.Close())
	})
}

// Deadlines hold, and Abort gives the memory back, whatever part of a frame or of a record a peer stops at.
func TestStalledFrame(t *testing.T) {
	const n = 64 << 10
	part := frame(header{kind: framePart, message: 2, length: n}, make([]byte, n))
	alert := []byte{21, 3, 3, 0, 19, 1} // the beginning of a record
	for name, stall := range map[string]func(t *testing.T, in *intruder){
		"in a header":                 func(t *testing.T, in *intruder) { in.send(t, 1, part[:7]) },
		"behind a header":             func(t *testing.T, in *intruder) { in.send(t, 1, part[:headerBytes]) },
		"behind a byte":               func(t *testing.T, in *intruder) { in.send(t, 1, part[:headerBytes+1]) },
		"behind a record with a byte": func(t *testing.T, in *intruder) { in.send(t, 1, part[:headerBytes]); in.send(t, 1, part[:1]) },
		"behind records":              func(t *testing.T, in *intruder) { in.send(t, 1, part[:headerBytes+n/2]) },
		"before the last byte":        func(t *testing.T, in *intruder) { in.send(t, 1, part[:len(part)-1]) },
		"in a record": func(t *testing.T, in *intruder) {
			in.send(t, 1, part[:headerBytes+2])
			in.raw(t, 1, []byte{23, 3, 3, 1, 0, 9})
		},
		"in an alert behind a byte":    func(t *testing.T, in *intruder) { in.send(t, 1, part[:headerBytes+1]); in.raw(t, 1, alert) },
		"in an alert together with it": func(t *testing.T, in *intruder) { in.together(t, 1, part[:headerBytes+2], alert) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, in := newIntruder(t, 3)
				memory := make([]byte, n)
				require.NoError(t, c.Recv(hostmem.Addr(memory), n, dtype.U8, 1, 9))
				in.announce(t, n)
				stall(t, in)
				go func() {
					for beat := frame(header{kind: frameBeat}, nil); ; time.Sleep(300 * time.Millisecond) {
						if _, err := in.lanes[0].Write(beat); err != nil {
							return
						}
					}
				}()
				began := time.Now()
				time.AfterFunc(time.Minute, in.close) // so that a failure ends
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				require.ErrorIs(t, c.Sync(ctx), comm.ErrTimeout)
				assert.Less(t, time.Since(began), 2*time.Second+10*time.Millisecond)
				for i := range memory {
					memory[i] = 77
				}
				_, _ = in.lanes[1].Write(part[:n])
				synctest.Wait()
				assert.Equal(t, bytes.Repeat([]byte{77}, n), memory)
				require.NoError(t, c.Close())
				assert.LessOrEqual(t, time.Since(began), 10*time.Second)
			})
		})
	}
}

// raw sends bytes beneath TLS.
func (in *intruder) raw(t *testing.T, lane int, bytes []byte) {
	t.Helper()
	_, err := in.lanes[lane].NetConn().Write(bytes)
	require.NoError(t, err)
	synctest.Wait()
}

// together sends a record, and bytes beneath TLS that come with it.
func (in *intruder) together(t *testing.T, lane int, record, bytes []byte) {
	t.Helper()
	l := in.lanes[lane].NetConn().(*link)
	l.direct = false
	_, err := in.lanes[lane].Write(record)
	require.NoError(t, err)
	l.direct = true
	in.raw(t, lane, append(l.collected.bytes, bytes...))
}

// A message without the head that its receive expects is an error, and not what the memory had before.
func TestFalseHead(t *testing.T) {
	const tag = 9
	head := func(count, dt uint64, bytes int) []byte {
		b := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, count), tag<<32^dt)
		return append(b, make([]byte, bytes)...)
	}
	const u8 = uint64(dtype.U8)
	for name, message := range map[string][]byte{
		"nothing":              {},
		"a half":               head(8, u8, 0)[:8],
		"all but a byte":       head(8, u8, 0)[:15],
		"no data":              head(8, u8, 0),
		"a byte less":          head(8, u8, 7),
		"a byte more":          head(8, u8, 9),
		"no type":              head(8, uint64(dtype.Invalid), 8),
		"zeros":                head(0, 0, 8),
		"a type beyond a byte": head(8, u8+256, 8),
		"another type":         head(8, uint64(dtype.I8), 8),
		"another tag":          head(8, u8|1<<32, 8),
		"another count":        head(7, u8, 8),
		"a count of a sign":    head(1<<63, u8, 8),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, in := newIntruder(t, 1)
				memory := make([]byte, 8)
				defer runtime.KeepAlive(memory) // the communicator has its address alone
				require.NoError(t, c.Recv(hostmem.Addr(memory), 8, dtype.U8, 1, 9))
				n := uint64(len(message))
				in.send(t, 0, frame(header{kind: frameAnnouncement, communicator: 1, tag: hostileTag, total: n, eager: n, length: int(n)}, message))
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				require.ErrorIs(t, c.Sync(ctx), comm.ErrMismatch)
				require.NoError(t, c.Close())
			})
		})
	}
}

// A control message of anything aborts the communicator, with a reason, or says nothing.
func TestFalseControl(t *testing.T) {
	const kinds, calls = 0, 1 // words
	control := func(change func(words []uint64, b []byte)) []byte {
		words := make([]uint64, schedule.ControlBytes/8)
		b := hostmem.Bytes(words)
		change(words, b)
		return bytes.Clone(b)
	}
	for name, c := range map[string]struct {
		message []byte
		reason  string
	}{
		"a lost rank":        {control(func(w []uint64, _ []byte) { w[kinds] = 4 }), "a control message that is none"},
		"another kind":       {control(func(w []uint64, _ []byte) { w[kinds] = 1 << 40 }), "a control message that is none"},
		"no such call":       {control(func(w []uint64, _ []byte) { w[5] = 3 }), "a control message that is none"},
		"the last number":    {control(func(w []uint64, _ []byte) { w[calls], w[5] = 1<<64-1, 1<<64-1 }), "a control message that is none"},
		"passed, not called": {control(func(w []uint64, _ []byte) { w[kinds], w[2] = 1, 1 }), "a control message that is none"},
		"a failure with escapes": {control(func(w []uint64, b []byte) {
			w[kinds] = 2
			text := "\x1b[2J\xff\nreally"
			w[len(w)-60] = uint64(copy(b[len(b)-472:], text))
		}), `rank 1 aborted: \x1b[2J\xff\nreally`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				peer, in := newIntruder(t, 1)
				in.send(t, 0, frame(header{kind: frameControl, communicator: 1, length: len(c.message), report: c.message[0] == 0}, c.message))
				err := peer.Barrier(t.Context())
				require.ErrorIs(t, err, comm.ErrPeerFailed)
				assert.ErrorContains(t, err, c.reason)
				require.NoError(t, peer.Close())
			})
		})
	}
}
