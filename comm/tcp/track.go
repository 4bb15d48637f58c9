package tcp

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/internal/segment"
)

// Capacities of rings, powers of two.
const (
	ringBytes      = 256 << 10 // what two processes pass through the caches that they share
	leastRingBytes = 64 << 10  // room for one of the longest frames
	allRingBytes   = 256 << 20 // the most that the rings of a machine's ranks take together
)

// ringCapacity is the capacity of the rings of a machine's ranks, each of which has one to each other: 0 if there are
// none, or too many ranks.
func ringCapacity(ranks int) int {
	if ranks < 2 {
		return 0
	}
	capacity := ringBytes
	for capacity > allRingBytes/ranks/ranks {
		capacity /= 2
	}
	if capacity < leastRingBytes {
		return 0
	}
	return capacity
}

// trackChunkBytes is the most payload of a frame of a track, so that one side copies while the other does.
const trackChunkBytes = 32 << 10

// frameRoom is what the longest frame of a track takes of its ring.
const frameRoom = headerBytes + trackChunkBytes + ringUnit

// ringUnit is the alignment of frames in a ring.
const ringUnit = 64

// track carries the messages of a pair whose ranks share memory, with their grants and credit, in place of the lanes.
// The first lane keeps what tells that the peer aborts, ends or is stopped: control messages, signs of life, and
// acknowledgements.
//
// A track has no goroutine: a rank that waits moves it, and neighborhood.listen does when nobody waits. A frame is
// published whole, so nobody waits for the end of one. The header of a frame is copied, and then checked, as on
// a lane.
type track struct {
	flow
	pair  *pair         // to which it belongs
	out   *segment.Ring // guarded by sealing
	in    *segment.Ring // guarded by filling
	bell  segment.Bell  // of the peer
	full  atomic.Bool   // there is no room for what is to be sent
	wrong bool          // nothing is read after a frame that is none; guarded by filling

	// See locks.go.
	sealing sync.Mutex
	filling sync.Mutex

	frame [headerBytes]byte // being written; guarded by sealing
	head  [headerBytes]byte // being read; guarded by filling
}

// write sends what there is, as far as the ring has room. Called with the engine's lock or no lock held.
func (t *track) write() {
	if err := t.writeFrames(); err != nil {
		t.pair.failAsync(err)
	}
}

func (t *track) writeFrames() error {
	t.sealing.Lock()
	defer t.sealing.Unlock()
	select {
	case <-t.pair.dead:
		return nil
	default:
	}
	for {
		roomy, err := t.roomy()
		if err != nil {
			return err
		}
		var f outFrame
		if !roomy {
			return nil
		}
		if !t.pair.nextOfTrack(t, &f) {
			t.full.Store(false)
			return nil
		}
		if f.send != nil {
			f.send.wire.progress()
		}
		f.header.put(t.frame[:])
		t.out.Write(t.frame[:])
		t.out.Write(f.payload)
		t.out.Skip(padding(&f.header))
		t.out.Publish()
		t.pair.sealed(&f)
		t.bell.Ring()
	}
}

// padding is what follows a frame up to the next one.
func padding(h *header) int { return -(headerBytes + h.length) & (ringUnit - 1) }

// roomy reports whether there is room for a frame. If there is not, the peer rings when there may be.
func (t *track) roomy() (bool, error) {
	room, err := t.out.Room()
	if err == nil && room < frameRoom {
		t.full.Store(true) // before the peer may ring: who hears the bell writes only then
		t.out.Starve()
		room, err = t.out.Room()
	}
	return room >= frameRoom, err
}

// read takes frames that have come, at most a ring full of them, and reports whether there were any. If it is not to
// wait, it leaves them to another goroutine that reads. Called with the engine's lock or no lock held.
func (t *track) read(wait bool) (moved bool) {
	if wait {
		t.filling.Lock()
	} else if !t.filling.TryLock() {
		return false
	}
	moved, sends, err := t.readFrames()
	t.filling.Unlock()
	if err != nil {
		t.pair.failAsync(err)
	} else if sends || moved && t.full.Load() {
		t.write()
	}
	return moved
}

func (t *track) readFrames() (moved, sends bool, err error) {
	for total := 0; total < ringBytes && !t.wrong; {
		available, err := t.in.Available()
		if err == nil && available == 0 {
			break
		}
		n := 0
		answers := false
		if err == nil {
			n, answers, err = t.readFrame(available)
		}
		if err != nil {
			t.wrong = true
			return moved, sends, err
		}
		total += n
		moved = true
		sends = sends || answers
	}
	return moved, sends, nil
}

// readFrame takes a frame, of which that many bytes are available. sends reports whether there is something to send
// because of it.
func (t *track) readFrame(available int) (n int, sends bool, err error) {
	if available < ringUnit {
		return 0, false, fmt.Errorf("%d bytes of a frame", available)
	}
	t.in.Read(t.head[:])
	var h header
	h.get(t.head[:])
	n = headerBytes + h.length + padding(&h)
	if err := t.check(&h); err != nil {
		return 0, false, err
	}
	if n > available {
		return 0, false, fmt.Errorf("%d bytes of a frame of %d", available, n)
	}
	in, target, err := t.pair.accept(&t.flow, &h)
	if err != nil {
		return 0, false, err
	}
	if in != nil && !in.dropped.Load() {
		in.wire.progress()
		t.in.Read(target)
		t.in.Skip(h.length - len(target))
	} else {
		t.in.Skip(h.length)
	}
	t.in.Skip(padding(&h))
	if t.in.Release() {
		t.bell.Ring()
	}
	return n, t.pair.finish(&t.flow, in, &h), nil
}

// check returns why a frame is none that the peer sends on a track at this point.
func (t *track) check(h *header) error {
	switch h.kind {
	case frameAnnouncement, framePart, frameGrant, frameBeat, frameGoodbye:
	default:
		return fmt.Errorf("a frame of kind %d in shared memory", h.kind)
	}
	if !h.hasLength() || h.length > trackChunkBytes {
		return fmt.Errorf("a frame of kind %d with %d bytes in shared memory", h.kind, h.length)
	}
	if t.heardGoodbye && h.kind != frameBeat {
		return errors.New("a frame behind a goodbye in shared memory")
	}
	return nil
}
