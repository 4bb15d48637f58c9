package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	goruntime "runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// mutant is a rank that knows the secret, whose frames a script changes on their way: a valid conversation with what a
// broken or hostile peer would make of it. A script has three bytes for each change: the number of frames before it, what
// it is, and a parameter.
type mutant struct {
	mu     sync.Mutex
	lanes  []*mutantLane
	script []byte // what is left of it; guarded by mu
	wait   int    // frames before the next change; guarded by mu
}

// mutantLane is a lane of a mutant, as a lane writes to it.
type mutantLane struct {
	*tls.Conn
	mutant  *mutant
	index   int
	partial []byte   // of the frame that is being written; guarded by mutant.mu
	held    [][]byte // frames that come behind the next one; guarded by mutant.mu
	mute    bool     // nothing comes any more; guarded by mutant.mu
	paused  bool     // what comes goes behind late; guarded by mutant.mu
	late    []byte   // guarded by mutant.mu
}

// Write takes frames as the lane seals them.
func (l *mutantLane) Write(b []byte) (int, error) {
	l.mutant.mu.Lock()
	defer l.mutant.mu.Unlock()
	l.partial = append(l.partial, b...)
	for len(l.partial) >= headerBytes {
		var h header
		h.get(l.partial)
		if len(l.partial) < headerBytes+h.length {
			break
		}
		f := bytes.Clone(l.partial[:headerBytes+h.length])
		l.partial = l.partial[len(f):]
		l.mutant.pass(l, h, f)
	}
	return len(b), nil
}

// say sends bytes as a record, or several.
func (l *mutantLane) say(b []byte) {
	switch {
	case l.mute:
	case l.paused:
		l.late = append(l.late, b...)
	default:
		_, _ = l.Conn.Write(b) // the other side may be gone
	}
}

// pause says the beginning of something, and the rest of it after a while, before anything else.
func (l *mutantLane) pause(b []byte, begin int, d time.Duration) {
	if l.paused {
		return
	}
	l.say(b[:begin])
	l.paused = true
	l.late = bytes.Clone(b[begin:])
	time.AfterFunc(d, func() {
		l.mutant.mu.Lock()
		defer l.mutant.mu.Unlock()
		l.paused = false
		l.say(l.late)
	})
}

// pass sends a frame, or what the script makes of it. mu is held.
func (m *mutant) pass(l *mutantLane, h header, f []byte) {
	const late = 19
	if m.wait > 0 || len(m.script) < 3 || m.script[1]%20 == late && (h.kind != framePart || len(m.lanes) < 3) {
		m.wait--
		l.say(f)
		for _, later := range l.held {
			l.say(later)
		}
		l.held = nil
		return
	}
	change, parameter := m.script[1], m.script[2]
	if m.script = m.script[3:]; len(m.script) > 0 {
		m.wait = int(m.script[0])
	}
	other := m.lanes[int(parameter)%len(m.lanes)]
	numbers := []uint64{0, 1, 2, math.MaxUint64, 1 << 63, 1 << 31, chunkBytes, minWindow, h.communicator + h.message + 1, h.tag + h.offset + 1, h.total + 1, h.total - 1}
	number := numbers[int(parameter)%len(numbers)]
	again := func(h header, payload []byte) { l.say(frame(h, payload)) }
	payload := f[headerBytes:]
	switch change % 20 {
	case 0: // twice
		l.say(f)
		l.say(f)
	case 1: // twice, on two lanes
		l.say(f)
		other.say(f)
	case 2: // on another lane
		other.say(f)
	case 3: // behind the next one
		l.held = append(l.held, f)
	case 4: // cut, and what comes next belongs to it
		l.say(f[:min(len(f), int(parameter))])
	case 5: // and nothing more
		l.say(f[:min(len(f), int(parameter)*16)])
		l.mute = true
	case 6: // a record that ends behind the first byte of the payload, and nothing more
		l.say(f[:min(len(f), headerBytes+1)])
		l.mute = true
	case 7: // in records of a byte
		for i := range min(len(f), 200) {
			l.say(f[i : i+1])
		}
		l.say(f[min(len(f), 200):])
	case 8: // a byte more
		h.length++
		again(h, append(payload, 7))
	case 9: // a byte less
		h.length = max(h.length-1, 0)
		again(h, payload[:h.length])
	case 10: // a length without the bytes
		h.length = int(uint32(number))
		again(h, payload)
	case 11:
		h.communicator = number
		h.message = number
		again(h, payload)
	case 12:
		h.tag = number
		h.offset = number
		again(h, payload)
	case 13:
		h.total, h.eager = number, min(h.eager, number)
		again(h, payload)
	case 14:
		h.eager = number
		again(h, payload)
	case 15:
		h.credit = number
		again(h, payload)
	case 16:
		h.kind = kind(parameter % 9)
		again(h, payload)
	case 17: // other bytes
		if len(payload) > 0 {
			for i := range payload {
				payload[i] ^= parameter | 1
			}
		}
		l.say(f)
	case 18: // late
		l.pause(f, min(len(f), headerBytes+int(parameter)), time.Duration(parameter)*20*time.Millisecond)
	case late: // a part twice, on two lanes, and late on one of them
		other = m.lanes[(l.index+1)%len(m.lanes)]
		other.pause(f, min(len(f), headerBytes+2), time.Duration(parameter%100)*20*time.Millisecond)
		l.say(f)
	}
}

// exposed is memory of a receive with guards around it.
type exposed struct {
	memory []byte
	n      int
	done   bool // it is the caller's again
}

const (
	guardBytes = 64
	guard      = 0xa5
	reused     = 77
)

func newExposed(n int) *exposed {
	e := &exposed{memory: bytes.Repeat([]byte{guard}, n+2*guardBytes), n: n}
	return e
}

func (e *exposed) bytes() []byte    { return e.memory[guardBytes : guardBytes+e.n] }
func (e *exposed) address() uintptr { return hostmem.Addr(e.bytes()) }

// reuse has the caller write to memory that is its own again.
func (e *exposed) reuse() {
	e.done = true
	for i := range e.bytes() {
		e.bytes()[i] = reused
	}
}

// check reports whether anybody else has written to memory that no receive has.
func (e *exposed) check() bool {
	ok := bytes.Count(e.memory[:guardBytes], []byte{guard}) == guardBytes && bytes.Count(e.memory[guardBytes+e.n:], []byte{guard}) == guardBytes
	return ok && (!e.done || bytes.Count(e.bytes(), []byte{reused}) == e.n)
}

// converse makes calls of every kind on a rank of two, until one fails.
func converse(c comm.Communicator, rank int, from uintptr, receive func(n int) uintptr, wait func(name string, f func(ctx context.Context) error) error) error {
	for round := range 3 {
		for tag, n := range []int{8, 3000, 100 << 10, 300 << 10} {
			err := c.Send(from, n, dtype.U8, 1-rank, uint32(tag))
			if err == nil {
				err = c.Recv(receive(n), n, dtype.U8, 1-rank, uint32(tag))
			}
			if err != nil {
				return err
			}
		}
		if err := c.AllReduce(from, receive(20<<10), 5<<10, dtype.I32, comm.Sum); err != nil {
			return err
		}
		if err := c.AllGather(from, receive(16), 8, dtype.U8); err != nil {
			return err
		}
		if err := wait("sync", c.Sync); err != nil {
			return err
		}
		var child comm.Communicator
		if err := wait("split", func(ctx context.Context) (err error) { child, err = c.Split(ctx, 0, rank); return err }); err != nil {
			return err
		}
		err := child.AllReduce(from, receive(400<<10), 100<<10, dtype.I32, comm.Sum)
		if err == nil {
			err = wait("sync", child.Sync)
		}
		if round == 1 {
			child.Abort(errors.New("of the test"))
		}
		if closed := child.Close(); err == nil {
			err = closed
		}
		if err != nil {
			return err
		}
	}
	return wait("barrier", c.Barrier)
}

// expose has a rank converse with a mutant.
func expose(t *testing.T, lanes int, script []byte) {
	sentinels := []error{comm.ErrPeerFailed, comm.ErrMismatch, comm.ErrTimeout, comm.ErrBroken, comm.ErrClosed}
	const patience, slack = 2 * time.Second, 20 * time.Millisecond
	victim, other := newTestNode(0, 2), newTestNode(1, 2)
	servers, clients := secured(t, lanes)
	m := &mutant{script: script}
	if len(script) > 0 {
		m.wait = int(script[0])
	}
	victim.pairs[1].attach(servers, nil)
	other.pairs[0].attach(clients, func(l *lane, conn *tls.Conn) {
		l.link.direct = true
		changed := &mutantLane{Conn: conn, mutant: m, index: l.index}
		m.lanes = append(m.lanes, changed)
		l.secure = changed
	})
	bounded := func(ctx context.Context, f func(ctx context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		return f(ctx)
	}
	const longest = 400 << 10
	memory := make([]byte, 3*longest)
	ended := make(chan struct{})
	theirs := other.world()
	go func() {
		defer close(ended)
		_ = converse(theirs, 1, hostmem.Addr(memory), func(int) uintptr { return hostmem.Addr(memory[longest:]) },
			func(_ string, f func(ctx context.Context) error) error { return bounded(t.Context(), f) })
		time.Sleep(5 * time.Second)
		_ = theirs.Close()
	}()

	c := victim.world()
	var all []*exposed
	flying := 0 // of all, the first that receives have
	receive := func(n int) uintptr {
		all = append(all, newExposed(n))
		return all[len(all)-1].address()
	}
	reuse := func() {
		for _, e := range all[flying:] {
			e.reuse()
		}
		flying = len(all)
	}
	err := converse(c, 0, hostmem.Addr(memory[2*longest:]), receive, func(name string, f func(ctx context.Context) error) error {
		began := time.Now()
		err := bounded(t.Context(), f)
		assert.LessOrEqual(t, time.Since(began), patience+slack, name)
		if err == nil && name == "sync" {
			reuse()
		}
		return err
	})
	if err != nil {
		known := false
		for _, s := range sentinels {
			known = known || errors.Is(err, s)
		}
		assert.True(t, known, "%v", err)
		began := time.Now()
		c.Abort(nil)
		assert.LessOrEqual(t, time.Since(began), 3*time.Second+slack, "abort")
		reuse()
	}
	time.Sleep(5 * time.Second) // what else comes
	began := time.Now()
	_ = c.Close()
	assert.LessOrEqual(t, time.Since(began), 5*time.Second+slack, "close")
	<-ended
	for _, conns := range [][]*tls.Conn{servers, clients} {
		for _, conn := range conns {
			_ = conn.NetConn().Close()
		}
	}
	synctest.Wait()
	goruntime.KeepAlive(memory)
	for i, e := range all {
		assert.True(t, e.check(), "receive %d of %d bytes", i, e.n)
	}
}

// TestMutants makes ranks converse with peers that know the secret, and send frames that are changed a little: no
// memory is written except receives in flight, no wait outlasts its deadline, nothing panics, and errors are comm's.
func TestMutants(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	scripts := 80
	if os.Getenv("TUTTI_EXTENDED") != "" {
		scripts = 600
	}
	for i := range scripts {
		script := make([]byte, 3*(1+random.IntN(3)))
		for j := range script {
			script[j] = byte(random.Uint32())
			if j%3 == 0 {
				script[j] %= 40
			}
		}
		lanes := 1 + 2*random.IntN(3)
		synctest.Test(t, func(t *testing.T) { expose(t, lanes, script) })
		if t.Failed() {
			t.Fatalf("case %d of seed %d: %d lanes, script %v", i, seed, lanes, script)
		}
	}
	synctest.Test(t, func(t *testing.T) { expose(t, 3, nil) })
}

// FuzzMutants is TestMutants for other scripts.
func FuzzMutants(f *testing.F) {
	for kind := range byte(20) {
		f.Add(kind%2 == 0, []byte{3 * kind, kind, kind})
		f.Add(kind%2 == 1, []byte{kind, kind, 4, 2, kind, 9})
	}
	f.Fuzz(func(t *testing.T, several bool, script []byte) {
		lanes := 1
		if several {
			lanes = 3
		}
		synctest.Test(t, func(t *testing.T) { expose(t, lanes, script) })
	})
}
