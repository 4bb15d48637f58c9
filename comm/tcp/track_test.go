package tcp

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/segment"
)

// newTracked is newEarly with a track. peer writes what the track reads.
func newTracked(window int) (p *pair, w *wire, peer *segment.Ring) {
	p, w = newEarly(window)
	in := make([]uint64, segment.RingBytes(ringBytes)/8)
	out := make([]uint64, len(in))
	bell := make([]uint64, segment.BellBytes/8)
	p.useTrack(&track{
		pair: p,
		out:  segment.NewRing(hostmem.Addr(out), ringBytes),
		in:   segment.NewRing(hostmem.Addr(in), ringBytes),
		bell: segment.NewBell(hostmem.Addr(bell)),
	})
	peer = segment.NewRing(hostmem.Addr(in), ringBytes)
	for _, memory := range [][]uint64{in, out, bell} {
		runtime.KeepAlive(memory) // the rings refer to it from here on
	}
	p.state = connected
	w.shares.Store(true)
	return p, w, peer
}

// put writes a frame as a track does.
func put(r *segment.Ring, h header, payload []byte) {
	head := make([]byte, headerBytes)
	h.put(head)
	r.Write(head)
	r.Write(payload)
	r.Skip(padding(&h))
	r.Publish()
}

// Bytes that are no frame of a track end the pair, and are not read any further.
func TestTrackRefuses(t *testing.T) {
	announce := header{kind: frameAnnouncement, length: 8, communicator: 1, tag: 3, total: 64, eager: 8}
	for name, frames := range map[string][]header{
		"an unknown kind":           {{kind: 99}},
		"a kind of lanes":           {{kind: frameControl, length: schedule.ControlBytes, communicator: 1}},
		"an acknowledgement":        {{kind: frameGoodbyeAck}},
		"a payload that has none":   {{kind: frameGrant, message: 1, length: 8}},
		"a long payload":            {{kind: frameAnnouncement, length: trackChunkBytes + 1, communicator: 1, total: 1 << 20, eager: 1 << 18}},
		"a part of nothing":         {{kind: framePart, message: 1, length: 8}},
		"a part that is not due":    {announce, {kind: framePart, message: 1, offset: 8, length: 56}},
		"a part outside":            {announce, {kind: framePart, message: 1, offset: 64, length: 8}},
		"a grant of nothing":        {{kind: frameGrant, message: 7}},
		"credit that was not spent": {{kind: frameBeat, credit: 1 << 40}},
		"a message behind goodbye":  {{kind: frameGoodbye}, announce},
		"more than its eager part":  {{kind: frameAnnouncement, length: 16, communicator: 1, total: 64, eager: 8}},
	} {
		t.Run(name, func(t *testing.T) {
			p, _, peer := newTracked(1 << 20)
			for _, h := range frames {
				put(peer, h, make([]byte, min(h.length, 2*trackChunkBytes)))
			}
			p.track.Load().read(true)
			assert.Equal(t, closed, p.state)
			assert.False(t, p.track.Load().read(true), "nothing more is read")
		})
	}
	t.Run("a part of nothing, beside several lanes", func(t *testing.T) {
		p, _, peer := newTracked(1 << 20)
		p.lanes = append(p.lanes, p.lanes[0])
		put(peer, header{kind: framePart, message: 1, length: 8}, make([]byte, 8))
		p.track.Load().read(true) // nobody waits for the announcement, as of lanes
		assert.Equal(t, closed, p.state)
	})
	t.Run("a frame that is not there", func(t *testing.T) {
		p, _, peer := newTracked(1 << 20)
		head := make([]byte, headerBytes)
		announce.put(head)
		peer.Write(head)
		peer.Publish()
		p.track.Load().read(true)
		assert.Equal(t, closed, p.state)
	})
}

// FuzzTrack has a track read anything. It does not panic, writes only into the memory of a receive, and keeps no more
// early bytes than twice its window.
func FuzzTrack(f *testing.F) {
	random := rand.New(rand.NewPCG(3, 0))
	for range 20 {
		var b []byte
		for range 1 + random.IntN(4) {
			kinds := []kind{frameAnnouncement, framePart, frameGrant, frameBeat, frameGoodbye, frameControl}
			h := header{kind: kinds[random.IntN(len(kinds))], communicator: 1, tag: 3, total: uint64(random.IntN(90)), length: random.IntN(70)}
			h.eager = h.total
			if h.kind != frameAnnouncement {
				h = header{kind: h.kind, message: uint64(random.IntN(3)), offset: uint64(random.IntN(80)), length: random.IntN(2) * 8}
			}
			head := make([]byte, headerBytes)
			h.put(head)
			b = append(b, head...)
			b = append(b, make([]byte, h.length+padding(&h))...)
		}
		f.Add(b, uint64(len(b)))
	}
	f.Fuzz(func(t *testing.T, b []byte, published uint64) {
		const window, room, guard = 4 << 10, 64, 0xa5
		p, w, peer := newTracked(window)
		around := bytes.Repeat([]byte{guard}, 3*room)
		p.post(w, 1, posted{1, 3, hostmem.Addr(around[room:]), room})
		b = b[:min(len(b), ringBytes)]
		peer.Write(b)
		peer.Skip(int(published - uint64(len(b))))
		peer.Publish()
		for p.track.Load().read(true) {
			continue
		}
		early := 0
		for in := range w.matchers[1].messages.All {
			if early += messageBytes; in.room != nil {
				early += cap(*in.room)
			}
		}
		assert.LessOrEqual(t, early, 2*window)
		assert.LessOrEqual(t, len(p.inbox.incomplete), window/messageBytes+1)
		outside := append(bytes.Clone(around[:room]), around[2*room:]...)
		assert.Equal(t, bytes.Repeat([]byte{guard}, 2*room), outside)
		p.forget(w, 1)
		assert.Empty(t, p.inbox.incomplete)
	})
}

// A message that is abandoned while its parts are still to come is not received into its memory.
func TestAbandonedOverTrack(t *testing.T) {
	p, w, peer := newTracked(1 << 20)
	memory := make([]byte, 64)
	p.post(w, 1, posted{1, 3, hostmem.Addr(memory), len(memory)})
	put(peer, header{kind: frameAnnouncement, length: 8, communicator: 1, tag: 3, total: 64, eager: 8}, bytes.Repeat([]byte{1}, 8))
	require.True(t, p.track.Load().read(true))
	p.forget(w, 1)
	put(peer, header{kind: framePart, message: 1, offset: 8, length: 56}, bytes.Repeat([]byte{2}, 56))
	require.True(t, p.track.Load().read(true))
	assert.Equal(t, append(bytes.Repeat([]byte{1}, 8), make([]byte, 56)...), memory)
	assert.NotEqual(t, closed, p.state, "the peer may send what is not wanted any more")
}

// A movement in a communicator keeps its waits polling, but not those of another one. A movement of none, such as
// credit, does so for no wait.
func TestWhatMoves(t *testing.T) {
	p, w, peer := newTracked(1 << 20)
	other := w.node.newWire(2, 0, []int{0, 1})
	other.shares.Store(true)
	w.node.wires[2] = other
	moved := func() [2]bool {
		_, err := w.Poll(nil, schedule.Hint{})
		require.NoError(t, err)
		return [2]bool{w.Moved(), other.Moved()}
	}
	announcement := header{kind: frameAnnouncement, length: 8, tag: 3, total: 64, eager: 64, communicator: 1}
	part := header{kind: framePart, message: 1, offset: 8, length: 56}
	put(peer, announcement, make([]byte, 8))
	assert.Equal(t, [2]bool{true, false}, moved())
	put(peer, part, make([]byte, 56))
	assert.Equal(t, [2]bool{true, false}, moved())
	announcement.communicator = 2
	put(peer, announcement, make([]byte, 8))
	assert.Equal(t, [2]bool{false, true}, moved())
	put(peer, header{kind: frameBeat}, nil)
	assert.Equal(t, [2]bool{false, false}, moved())
	memory := make([]byte, 8)
	p.send(other, 1, 3, hostmem.Addr(memory), len(memory))
	p.track.Load().write()
	assert.Equal(t, [2]bool{false, true}, moved())
}

// Data that the peer had written before its connection was lost arrives before the peer is gone.
func TestGoneBehindTheRing(t *testing.T) {
	p, w, peer := newTracked(1 << 20)
	memory := make([]byte, 8)
	p.post(w, 1, posted{1, 3, hostmem.Addr(memory), len(memory)})
	put(peer, header{kind: frameAnnouncement, length: 8, communicator: 1, tag: 3, total: 8, eager: 8}, bytes.Repeat([]byte{1}, 8))
	p.fail(errLeft)
	assert.NoError(t, w.Gone(1))
	done, err := w.Poll(nil, schedule.Hint{})
	require.NoError(t, err)
	assert.Equal(t, []schedule.Done{{ID: 1, Bytes: 8}}, done)
	assert.Equal(t, bytes.Repeat([]byte{1}, 8), memory)
	assert.Error(t, w.Gone(1))
}

// The memory of a machine's rings is bounded however many ranks it has, and counted without overflow. A ring has room for
// the longest frame.
func TestRingCapacity(t *testing.T) {
	for ranks, want := range map[int]int{
		0: 0, 1: 0, 2: 256 << 10, 32: 256 << 10, 33: 128 << 10, 45: 128 << 10, 46: 64 << 10, 64: 64 << 10,
		65: 0, 256: 0, 1 << 16: 0, 1<<31 - 1: 0,
	} {
		assert.Equal(t, want, ringCapacity(ranks), "%d ranks", ranks)
		if want > 0 {
			assert.LessOrEqual(t, want*ranks*ranks, 256<<20, "%d ranks", ranks)
			assert.Greater(t, want, frameRoom)
		}
	}
}
