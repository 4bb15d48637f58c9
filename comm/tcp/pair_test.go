package tcp

import (
	"crypto/tls"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// newEarly is a pair of a node without connections, and the communicator 1 of its two ranks.
func newEarly(window int) (*pair, *wire) {
	n := &node{size: 2, wires: map[uint64]*wire{}}
	n.pairs = []*pair{newPair(n, 0), newPair(n, 1)}
	p := n.pairs[1]
	p.window, p.credit = window, window
	p.lanes = []*lane{{pair: p, wake: make(chan struct{}, 1)}}
	w := n.newWire(1, 0, []int{0, 1})
	n.wires[1] = w
	return p, w
}

// Short messages that wait for their receives do not keep the memory of long ones that came and went: what is
// held, and what is kept for others, stay within twice the window each.
func TestEarlyMemory(t *testing.T) {
	const window, long = 1 << 20, 3 << 18
	p, w := newEarly(window)
	into := make([]byte, long)
	come := func(tag uint64, n int) {
		h := header{kind: frameMessage, length: n, id: 1, tag: tag, total: uint64(n), eager: uint64(n)}
		in, to, err := p.accept(&h)
		require.NoError(t, err)
		require.Len(t, to, n)
		p.took(in, &h)
	}
	for i := range uint64(300) {
		come(i, 8)
		come(1000, long)
		p.post(w, 1, posted{1, 1000, hostmem.Addr(into), long})
		p.lent = 8 * int(i+1) // its sender has the credit back
	}
	held, spare := 0, 0
	for _, in := range w.boxes[1].early {
		held += cap(in.early)
	}
	for _, b := range p.spareBytes {
		spare += cap(b)
	}
	assert.Len(t, w.boxes[1].early, 300)
	assert.LessOrEqual(t, held, 2*8*300)
	assert.LessOrEqual(t, spare, 2*window)
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []Config{{}, {WorldSize: 2, Rank: 2}, {WorldSize: 1, Silence: 1}, {WorldSize: 2}, {WorldSize: 2, TLS: new(tls.Config)}} {
		_, err := New(t.Context(), nil, c)
		assert.ErrorIs(t, err, comm.ErrArgument)
	}
}
