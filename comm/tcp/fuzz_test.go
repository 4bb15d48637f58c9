package tcp

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// FuzzFrames has a lane read anything. It does not panic, writes only into the memory of a receive, and keeps no more
// early bytes than twice its window.
func FuzzFrames(f *testing.F) {
	seed := func(frames ...header) {
		var b []byte
		for _, h := range frames {
			b = append(b, make([]byte, headerBytes)...)
			h.put(b[len(b)-headerBytes:])
			b = append(b, make([]byte, h.length)...)
		}
		f.Add(b)
	}
	seed(header{kind: frameAnnouncement, length: 8, communicator: 1, tag: 3, total: 8, eager: 8}) // received
	seed(header{kind: frameAnnouncement, length: 8, communicator: 1, tag: 4, total: 64, eager: 16}, header{kind: framePart, length: 8, message: 1, offset: 8},
		header{kind: framePart, length: 48, message: 1, offset: 16}) // early, and then not granted
	seed(header{kind: frameAnnouncement, communicator: 1, tag: 3, total: 64}, header{kind: framePart, length: 64, message: 1}, header{kind: framePart, length: 64, message: 1})
	seed(header{kind: frameAnnouncement, communicator: 2, total: 9, eager: 9, length: 9}, header{kind: frameGrant, message: 1}, header{kind: frameGoodbye}, header{kind: frameGoodbyeAck})
	seed(header{kind: frameControl, communicator: 1, length: schedule.ControlBytes, report: true}, header{kind: frameAnnouncement, communicator: 1, tag: 3, total: 99}, header{kind: frameControl, length: schedule.ControlBytes + 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		const window, room, guard = 4 << 10, 64, 0xa5
		p, w := newEarly(window)
		around := bytes.Repeat([]byte{guard}, 3*room)
		p.post(w, 1, posted{1, 3, hostmem.Addr(around[room:]), room})
		l := p.lanes[0]
		l.secure = script{Reader: bytes.NewReader(b)}
		assert.Error(t, l.readFrames(0), "the end, if nothing else")
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
		assert.LessOrEqual(t, p.credit.freed, p.credit.used)
	})
}
