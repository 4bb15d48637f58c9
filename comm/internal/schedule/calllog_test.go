package schedule

import (
	"fmt"
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
			require.Equal(t, one.fingerprint, one.call(uint64(i)).fingerprint)
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
		m, err := readControl(bytes)
		if err != nil {
			return
		}
		e.keep(1, m)
		err = e.aborted(1)
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

// differentCalls returns calls that differ in one thing or another, as those of ranks that disagree do.
func differentCalls() (calls []comm.Call) {
	counts := []int{0, 1, 2, 3, 5, 8, 13, 34, 64, 100, 1 << 10, 1<<10 + 1, 1 << 20, 1 << 32}
	calls = append(calls, comm.Call{Op: comm.OpBarrier}, comm.Call{Op: comm.OpSplit})
	for _, dt := range []dtype.DType{dtype.U8, dtype.I32, dtype.F32, dtype.F64} {
		for _, n := range counts {
			for other := range 5 {
				calls = append(calls,
					comm.AllReduceCall(0, 0, n, dt, comm.ReduceOp(other)),
					comm.ReduceCall(0, 0, n, dt, comm.ReduceOp(other), 4-other),
					comm.ReduceScatterCall(0, 0, n, dt, comm.ReduceOp(other)),
					comm.BroadcastCall(0, n, dt, other),
					comm.GatherCall(0, 0, n, dt, other),
					comm.ScatterCall(0, 0, n, dt, other))
			}
			for _, other := range counts {
				calls = append(calls, comm.AllGatherVCall(0, 0, []int{n, other}, nil, dt))
			}
			calls = append(calls, comm.AllGatherCall(0, 0, n, dt), comm.AllToAllCall(0, 0, n, dt))
		}
	}
	return calls
}

// No two histories of one call or two have one fingerprint, nor the bits of one that a tag has room for over tcp: they
// are not alike by the arithmetic of mix, as small numbers that cancel each other would be.
func TestFingerprints(t *testing.T) {
	const room = 53
	calls := differentCalls()
	const none = -1
	type history struct{ first, next int } // indices of calls
	histories := map[uint64]history{}
	text := func(h history) string {
		first := &calls[h.first]
		if h.next == none {
			return fmt.Sprint(first, first.RecvCounts)
		}
		next := &calls[h.next]
		return fmt.Sprint(first, first.RecvCounts, ", ", next, next.RecvCounts)
	}
	add := func(log *callLog, c *comm.Call, h history) {
		log.add(newEntry(c), c.RecvCounts)
		bits := log.fingerprint >> (64 - room)
		if other, ok := histories[bits]; ok {
			t.Fatalf("%s and %s have one fingerprint", text(other), text(h))
		}
		histories[bits] = h
	}
	for i := range calls {
		log := new(callLog)
		add(log, &calls[i], history{i, none})
		if i%7 > 0 {
			continue
		}
		for k := 0; k < len(calls); k += 11 {
			next := &callLog{fingerprint: log.fingerprint}
			add(next, &calls[k], history{i, k})
		}
	}
	t.Logf("%d histories", len(histories))
}
