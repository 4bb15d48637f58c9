package schedule

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// drawCalls reads calls from bytes, four for each.
func drawCalls(data []byte) []comm.Call {
	var calls []comm.Call
	for ; len(data) >= 4; data = data[4:] {
		c := comm.Call{Op: comm.Op(data[0] % byte(comm.OpSend)), DType: dtype.All()[int(data[1])%len(dtype.All())], Count: int(data[2])}
		switch {
		case c.Op == comm.OpAllGatherV:
			c.RecvCounts, c.Count = []int{int(data[2]), int(data[3])}, 0
		case c.Op.Reduces():
			c.Reduce = comm.ReduceOp(data[3] % 5)
		case c.Op.HasRoot():
			c.Peer = int(data[3] % 3)
		}
		calls = append(calls, c)
	}
	return calls
}

// FuzzFingerprint has two ranks make calls: their fingerprints are the same exactly as long as
// the calls are.
func FuzzFingerprint(f *testing.F) {
	f.Add([]byte("aaaabbbbcccc"), []byte("aaaabbbbcccc"))
	f.Add([]byte("aaaabbbb"), []byte("bbbbaaaa"))
	f.Add([]byte{4, 0, 1, 2}, []byte{4, 0, 2, 1})
	f.Add([]byte{0, 1, 2, 0}, []byte{0, 1, 2, 1})
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var one, other callLog
		same := true
		calls, others := drawCalls(a), drawCalls(b)
		for i := range min(len(calls), len(others)) {
			c, d := calls[i], others[i]
			one.add(newEntry(&c), c.RecvCounts)
			other.add(newEntry(&d), d.RecvCounts)
			same = same && assert.ObjectsAreEqual(c, d)
			require.Equal(t, same, one.fingerprint == other.fingerprint, "%v, %v", c, d)
			require.True(t, one.knows(uint64(i)))
			require.Equal(t, one.fingerprint, one.at(uint64(i)).fingerprint)
		}
	})
}

// FuzzControlMessage has another rank send anything: an error or none, and nothing worse.
func FuzzControlMessage(f *testing.F) {
	f.Add([]byte{}, []byte("aaaabbbb"))
	for kind := range byte(5) {
		n := controlMessage{kind: controlKind(kind), calls: 3, number: 1, length: 5}
		copy(n.text[:], "hello")
		f.Add(append([]byte(nil), hostmem.Bytes([]controlMessage{n})...), []byte("aaaabbbbcccc"))
		n.length, n.number, n.calls = 1<<63, 1<<63, 1<<63
		f.Add(append([]byte(nil), hostmem.Bytes([]controlMessage{n})...), []byte("aaaabbbbcccc"))
	}
	f.Fuzz(func(t *testing.T, bytes, calls []byte) {
		e := &Engine{size: 2, peers: make([]peer, 2)}
		for _, c := range drawCalls(calls) {
			e.log.add(newEntry(&c), c.RecvCounts)
		}
		messages := make([]controlMessage, 1)
		copy(hostmem.Bytes(messages), bytes)
		e.keep(1, &messages[0])
		err := e.aborted(1)
		if err == nil {
			err = e.compare(1)
		}
		if err == nil {
			err = e.needs(1)
		}
		if err != nil {
			require.NotEmpty(t, err.Error())
		}
		if n := e.peers[1].report; n != nil {
			require.NotEmpty(t, n.recent[n.number-n.first()].String())
		}
	})
}
