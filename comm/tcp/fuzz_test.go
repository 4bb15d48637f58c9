package tcp

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// FuzzFrames has a pair take headers of any kind. It does not panic, puts payloads only into memory
// of their length, and keeps no more early bytes than its window.
func FuzzFrames(f *testing.F) {
	seed := func(frames ...header) {
		var b []byte
		for _, h := range frames {
			b = append(b, make([]byte, headerBytes)...)
			h.put(b[len(b)-headerBytes:])
		}
		f.Add(b)
	}
	seed(header{kind: frameMessage, length: 8, id: 1, tag: 3, total: 8, eager: 8}) // received
	seed(header{kind: frameMessage, length: 8, id: 1, tag: 4, total: 64, eager: 16}, header{kind: frameData, length: 8, id: 1, tag: 8},
		header{kind: frameData, length: 48, id: 1, tag: 16}) // early, and then not granted
	seed(header{kind: frameMessage, id: 1, tag: 3, total: 64}, header{kind: frameData, length: 64, id: 1}, header{kind: frameData, length: 64, id: 1})
	seed(header{kind: frameMessage, id: 2, total: 9, eager: 9, length: 9}, header{kind: frameGrant, id: 1}, header{kind: frameBye}, header{kind: frameSeen})
	f.Fuzz(func(t *testing.T, b []byte) {
		const window, room = 1 << 10, 64
		p, w := newEarly(window)
		into := make([]byte, room)
		p.post(w, 1, posted{1, 3, hostmem.Addr(into), room})
		for ; len(b) >= headerBytes; b = b[headerBytes:] {
			var h header
			h.get(b)
			in, to, err := p.accept(&h)
			if err != nil {
				return
			}
			early := 0
			for _, in := range w.boxes[1].early {
				early += cap(in.early)
			}
			assert.LessOrEqual(t, early, 2*window)
			if in == nil {
				continue
			}
			assert.Len(t, to, h.length)
			clear(to)
			p.took(in, &h)
		}
		p.forget(w, 1)
		assert.Empty(t, p.incoming)
		assert.LessOrEqual(t, p.owed, p.lent)
	})
}
