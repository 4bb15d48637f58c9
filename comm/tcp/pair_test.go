package tcp

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// script is a connection that says what it is told to, and hears everything.
type script struct {
	net.Conn
	io.Reader
}

func (s script) Read(b []byte) (int, error)  { return s.Reader.Read(b) }
func (s script) Write(b []byte) (int, error) { return len(b), nil }
func (s script) Close() error                { return nil }

// newEarly is a pair of a node without connections, and the communicator 1 of its two ranks.
func newEarly(window int) (*pair, *wire) {
	n := &node{size: 2, wires: map[uint64]*wire{}}
	n.pairs = []*pair{newPair(n, 0), newPair(n, 1)}
	p := n.pairs[1]
	p.credit = newCredit(window)
	p.lanes = []*lane{{pair: p, link: newLink(script{}), secure: script{}, wake: make(chan struct{}, 1)}}
	w := n.newWire(1, 0, []int{0, 1})
	n.wires[1] = w
	return p, w
}

// slow is a connection that carries at most 1 KiB in a tick of its node.
type slow struct {
	*pair
	io.Reader
}

func (s slow) Read(b []byte) (int, error) {
	s.beat(s.node.ticks.Add(1), 2)
	return s.Reader.Read(b[:min(len(b), 1<<10)])
}

// A link that needs many times the silence for a frame is slow, and not dead.
func TestSlowLink(t *testing.T) {
	p, w := newEarly(1 << 20)
	frame := make([]byte, headerBytes+chunkBytes)
	h := header{kind: frameAnnouncement, length: chunkBytes, communicator: 1, total: chunkBytes, eager: chunkBytes}
	h.put(frame)
	l := newLane(p, 0, tls.Client(newLink(script{Reader: slow{p, bytes.NewReader(frame)}}), nil))
	l.secure, p.lanes = script{Reader: bufio.NewReader(l.link)}, []*lane{l} // without encryption
	require.ErrorIs(t, l.readFrames(0), io.EOF)
	require.NoError(t, p.gone)
	require.Len(t, earlyMessages(w), 1)
	assert.Equal(t, chunkBytes, earlyMessages(w)[0].got)
	p.beat(p.node.ticks.Add(2), 2)
	assert.ErrorContains(t, p.gone, "nothing has come from it")
}

// A peer that has said nothing yet may be connecting to others. It is lost for its silence when all ranks are connected.
func TestSilenceWhileConnecting(t *testing.T) {
	p, _ := newEarly(1 << 20)
	p.beat(p.node.ticks.Add(100), 2)
	require.NoError(t, p.gone)
	p.node.countSilence()
	p.beat(p.node.ticks.Add(1), 2)
	require.NoError(t, p.gone)
	p.beat(p.node.ticks.Add(1), 2)
	assert.ErrorContains(t, p.gone, "nothing has come from it")
}

// forgetful is a connection that makes its pair forget a communicator at the n-th request for the beginning of
// something.
type forgetful struct {
	*pair
	io.Reader
	at   int
	then func()
}

func (f *forgetful) Read(b []byte) (int, error) {
	if len(b) == 1 {
		if f.at--; f.at == 0 {
			f.then()
		}
	}
	return f.Reader.Read(b[:min(len(b), 1<<10)])
}

// Memory that was returned is not written by a frame that is being read, be it all of its message or a part of it.
func TestForgetAFrame(t *testing.T) {
	for _, total := range []int{4 << 10, 8 << 10} {
		for at := 1; at <= 3; at++ {
			p, w := newEarly(1 << 20)
			into, frame := make([]byte, total), bytes.Repeat([]byte{7}, headerBytes+4<<10)
			h := header{kind: frameAnnouncement, length: 4 << 10, communicator: 1, total: uint64(total), eager: 4 << 10}
			h.put(frame)
			p.post(w, 1, posted{1, 0, hostmem.Addr(into), total})
			var then []byte
			l := p.lanes[0]
			l.secure = script{Reader: &forgetful{p, bytes.NewReader(frame), at, func() {
				p.forget(w, 1)
				then = bytes.Clone(into)
			}}}
			require.ErrorIs(t, l.readFrames(0), io.EOF)
			require.NotNil(t, then)
			assert.Equal(t, then, into, "%d bytes, %d", total, at)
			assert.Empty(t, w.done)
		}
	}
}

// Short messages that wait for their receives do not keep the memory of long ones that came and went.
func TestEarlyMemory(t *testing.T) {
	const window, long = 1 << 20, 3 << 18
	p, w := newEarly(window)
	into := make([]byte, long)
	come := func(tag uint64, n int) {
		h := header{kind: frameAnnouncement, length: n, communicator: 1, tag: tag, total: uint64(n), eager: uint64(n)}
		in, to, err := p.accept(&p.lanes[0].flow, &h)
		require.NoError(t, err)
		require.Len(t, to, n)
		p.arrived(in, &h)
	}
	for i := range uint64(300) {
		come(i, 8)
		come(1000, long)
		p.post(w, 1, posted{1, 1000, hostmem.Addr(into), long})
		p.credit.used = (8 + messageBytes) * int(i+1) // its sender has the credit back
	}
	held := 0
	for in := range w.matchers[1].messages.All {
		held += cap(*in.room)
	}
	assert.Len(t, earlyMessages(w), 300)
	assert.LessOrEqual(t, held, 2*8*300)
}

// A message is announced behind long ones that nobody receives yet: its receiver may wait for it first.
func TestBehindLongMessages(t *testing.T) {
	const window, long = 1 << 20, 4 << 20
	p, w := newEarly(window)
	memory := make([]byte, long)
	defer runtime.KeepAlive(memory) // the pair has its address alone
	for tag := range uint64(8) {
		p.send(w, int(tag), tag, hostmem.Addr(memory), long)
	}
	p.send(w, 8, 9, hostmem.Addr(memory), 4)
	var announced []uint64
	for f := (outFrame{}); p.next(p.lanes[0], &f); p.sealed(&f) {
		if f.header.kind == frameAnnouncement {
			announced = append(announced, f.header.tag)
		}
	}
	assert.Equal(t, []uint64{0, 1, 2, 3, 4, 5, 6, 7, 9}, announced)
}

// Messages without data are bounded as well: who has no credit for an announcement waits for it, and who announces
// without is refused.
func TestAnnouncementsAreBounded(t *testing.T) {
	const window, most = 1 << 20, 1 << 20 / messageBytes
	p, w := newEarly(window)
	announced := func() (n int) {
		for f := (outFrame{}); p.next(p.lanes[0], &f); n++ {
			assert.Equal(t, frameAnnouncement, f.header.kind)
			p.sealed(&f)
		}
		return n
	}
	for range 2 * most {
		p.send(w, 0, 7, 0, 0)
	}
	assert.Equal(t, most, announced())
	_, _, err := p.accept(&p.lanes[0].flow, &header{kind: frameBeat, credit: 10 * messageBytes})
	require.NoError(t, err)
	assert.Equal(t, 10, announced())

	p, w = newEarly(window)
	come := func() error {
		_, _, err := p.accept(&p.lanes[0].flow, &header{kind: frameAnnouncement, communicator: 1, tag: 7})
		return err
	}
	for range most {
		require.NoError(t, come())
	}
	assert.Len(t, earlyMessages(w), most)
	require.ErrorContains(t, come(), "for which it has no credit")
	assert.True(t, p.post(w, 1, posted{1, 7, 0, 0}), "the sender may wait for the credit")
	var f outFrame
	require.True(t, p.next(p.lanes[0], &f))
	assert.Equal(t, header{kind: frameBeat, credit: messageBytes}, f.header)
	require.NoError(t, come())
}

// Any frame gives credit back, also a control message, and none returns more than was taken.
func TestCreditOfEveryFrame(t *testing.T) {
	p, _ := newEarly(1 << 20)
	p.credit.available = 0
	p.outbox.announced = 1
	p.state = leaving
	come := func(h header) error {
		p.lanes[0].secure = script{Reader: bytes.NewReader(frame(h, make([]byte, h.length)))}
		return p.lanes[0].readFrames(0)
	}
	for i, h := range []header{{kind: frameBeat}, {kind: frameControl, length: schedule.ControlBytes}, {kind: frameGrant, message: 1}, {kind: frameGoodbyeAck}} {
		h.credit = 100
		require.ErrorIs(t, come(h), io.EOF)
		assert.Equal(t, 100*(i+1), p.credit.available)
	}
	for _, credit := range []uint64{1<<20 - 399, math.MaxUint64} {
		require.ErrorContains(t, come(header{kind: frameBeat, credit: credit}), "credit")
		assert.Equal(t, 400, p.credit.available)
	}
}

// A frame that no rank sends at its place is an error that says what is wrong with it, and changes nothing.
func TestFramesAreChecked(t *testing.T) {
	const n = 3 * chunkBytes
	data := header{kind: framePart, message: 1, length: chunkBytes}
	change := func(h header, f func(h *header)) header {
		f(&h)
		return h
	}
	for name, c := range map[string]struct {
		lane   int
		frames []header
		reason string
	}{
		"no kind":              {0, []header{{}}, "kind 0"},
		"another kind":         {0, []header{{kind: frameGoodbyeAck + 1}}, "kind 8"},
		"a long frame":         {1, []header{change(data, func(h *header) { h.length = chunkBytes + 1 })}, "kind 2 with 131073 bytes"},
		"a beat with bytes":    {0, []header{{kind: frameBeat, length: 1}}, "with 1 bytes"},
		"a short control":      {0, []header{{kind: frameControl, length: schedule.ControlBytes - 1}}, "kind 4 with"},
		"data on lane 0":       {0, []header{data}, "lane 0 of 5"},
		"a message on lane 1":  {1, []header{{kind: frameAnnouncement, communicator: 1}}, "lane 1 of 5"},
		"a grant on lane 1":    {1, []header{{kind: frameGrant, message: 1}}, "lane 1 of 5"},
		"a grant for nothing":  {0, []header{{kind: frameGrant, message: 1}}, "a grant for message 1"},
		"a grant for number 0": {0, []header{{kind: frameGrant}}, "a grant for message 0"},
		"an answer to nothing": {0, []header{{kind: frameGoodbyeAck}}, "goodbye that nobody"},
		"two goodbyes":         {1, []header{{kind: frameGoodbye}, {kind: frameGoodbye}}, "behind a goodbye"},
		"data after a goodbye": {1, []header{{kind: frameGoodbye}, data}, "behind a goodbye"},
		"the offset":           {1, []header{change(data, func(h *header) { h.offset = 1 })}, "131072 bytes at 1 of"},
		"the end":              {1, []header{change(data, func(h *header) { h.offset = n })}, "bytes at 393216 of"},
		"an offset of a sign":  {1, []header{change(data, func(h *header) { h.offset = 1 << 63 })}, "of a message of 393216"},
		"no length":            {1, []header{change(data, func(h *header) { h.length = 0 })}, "kind 2 with 0 bytes"},
		"a byte less":          {1, []header{change(data, func(h *header) { h.length-- })}, "131071 bytes at 0 of"},
		"twice":                {1, []header{data, data}, "131072 bytes at 0 of a message of 393216 twice"},
		"too much":             {0, []header{{kind: frameAnnouncement, communicator: 1, total: 1 << 31}}, "for which it has no credit"},
		"more early than all":  {0, []header{{kind: frameAnnouncement, communicator: 1, total: 1, eager: 2}}, "for which it has no credit"},
	} {
		t.Run(name, func(t *testing.T) {
			p, w := newEarly(1 << 20)
			p.addLanes(parallelLanes)
			into := make([]byte, n)
			defer runtime.KeepAlive(into) // the pair has its address alone
			p.post(w, 1, posted{1, 0, hostmem.Addr(into), n})
			_, _, err := p.accept(&p.lanes[0].flow, &header{kind: frameAnnouncement, communicator: 1, total: n})
			require.NoError(t, err)
			var stream []byte
			for _, h := range c.frames {
				stream = append(stream, frame(h, make([]byte, h.length))...)
			}
			l := p.lanes[c.lane]
			l.secure = script{Reader: bytes.NewReader(stream)}
			assert.ErrorContains(t, l.readFrames(0), c.reason)
			assert.Empty(t, w.done)
		})
	}
}

// addLanes adds lanes to those of a pair.
func (p *pair) addLanes(n int) {
	for range n {
		l := &lane{pair: p, index: len(p.lanes), link: newLink(script{}), secure: script{}, wake: make(chan struct{}, 1)}
		p.lanes = append(p.lanes, l)
	}
}

// TestPartsBeforeTheirAnnouncement: on the first lane they are an error, as nothing else can come there meanwhile.
func TestPartsBeforeTheirAnnouncement(t *testing.T) {
	p, _ := newEarly(1 << 20)
	p.addLanes(1)
	part := header{kind: framePart, message: 1, length: 8}
	p.lanes[0].secure = script{Reader: bytes.NewReader(frame(part, make([]byte, 8)))}
	assert.ErrorContains(t, p.lanes[0].readFrames(0), "a part of message 1, of which 0 were announced")
}

// TestPartsGoOverAllLanes: on a short link the first lane carries parts as well, on a long one it is left to
// announcements. Data of a single part goes with the announcement, and wakes nobody.
func TestPartsGoOverAllLanes(t *testing.T) {
	for _, lanes := range []int{1, 2, parallelLanes, parallelLanes + 1} {
		p, w := newEarly(1 << 20)
		p.addLanes(lanes - 1)
		p.cut(chunkOf(lanes))
		memory := make([]byte, 4*p.outbox.chunk)
		address := hostmem.Addr(memory)
		p.send(w, 0, 0, address, len(memory))
		kinds := func(l *lane) (list []kind) {
			for {
				var f outFrame
				if !p.next(l, &f) {
					return list
				}
				list = append(list, f.header.kind)
				if f.header.kind == framePart {
					return list
				}
			}
		}
		first := kinds(p.lanes[0])
		assert.Equal(t, frameAnnouncement, first[0])
		assert.Equal(t, lanes <= parallelLanes, len(first) == 2, "%d lanes: %v", lanes, first)
		if lanes > 1 {
			assert.Equal(t, []kind{framePart}, kinds(p.lanes[lanes-1]), "%d lanes", lanes)
		}
		runtime.KeepAlive(memory)
	}
}

// TestLanesByProcessors: short links have several lanes where there are processors for them, and few ranks.
func TestLanesByProcessors(t *testing.T) {
	for _, c := range []struct{ ranks, processors, lanes int }{
		{2, 1, 1}, {2, 2, 1}, {3, 3, 1}, {2, 4, 4}, {4, 16, 4}, {5, 16, 2}, {16, 64, 2}, {17, 64, 1}, {1000, 128, 1},
	} {
		assert.Equal(t, c.lanes, parallelLanesOf(c.ranks, c.processors), "%+v", c)
	}
}

// Parts of a message come in any order, be it over several lanes or one, and each of them once.
func TestPartsInAnyOrder(t *testing.T) {
	const eager, total = 2*chunkBytes + 5, 4*chunkBytes + 7
	parts := []int{0, chunkBytes, 2 * chunkBytes, eager, eager + chunkBytes, eager + 2*chunkBytes}
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		p, w := newEarly(1 << 20)
		into := make([]byte, total)
		p.post(w, 1, posted{1, 0, hostmem.Addr(into), total})
		_, _, err := p.accept(&p.lanes[0].flow, &header{kind: frameAnnouncement, communicator: 1, total: total, eager: eager})
		require.NoError(t, err)
		random.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		for i, offset := range parts {
			assert.Empty(t, w.done, "seed %d", seed)
			end := total
			if offset < eager {
				end = eager
			}
			h := header{kind: framePart, message: 1, offset: uint64(offset), length: min(chunkBytes, end-offset)}
			p.lanes[0].secure = script{Reader: bytes.NewReader(frame(h, bytes.Repeat([]byte{1}, h.length)))}
			require.ErrorIs(t, p.lanes[0].readFrames(0), io.EOF, "seed %d, part %d", seed, i)
			if i < len(parts)-1 {
				_, _, err := p.accept(&p.lanes[0].flow, &h)
				require.ErrorContains(t, err, "twice", "seed %d, part %d", seed, i)
			}
		}
		assert.Len(t, w.done, 1, "seed %d", seed)
		assert.Equal(t, total, bytes.Count(into, []byte{1}), "seed %d", seed)
	}
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []Config{{}, {WorldSize: 2, Rank: 2}, {WorldSize: 1, Silence: 1}, {WorldSize: 2}, {WorldSize: 2, TLS: new(tls.Config)}} {
		_, err := New(t.Context(), nil, c)
		assert.ErrorIs(t, err, comm.ErrArgument)
	}
}

// earlyMessages returns the messages from rank 1 that no receive has taken.
func earlyMessages(w *wire) []*incoming { return slices.Collect(w.matchers[1].messages.All) }
