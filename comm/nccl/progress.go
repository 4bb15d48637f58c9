package nccl

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// marks are how far the stream says that it has come: as soon as somebody has asked, it
// writes behind every eighth call or so how many there were.
type marks struct {
	word    *cuda.Word // nil if streams cannot write one
	asked   atomic.Bool
	pending uint64 // calls since the last mark; Comm.mu guards it

	mu   sync.Mutex
	done extent // as far as is known by marks
}

// markEvery is how many calls a mark is for, which takes about a microsecond.
const markEvery = 8

// setMark has the stream say when it is here, behind so many more calls. Comm.mu is
// held. In a graph it would say so again and again.
func (c *Comm) setMark(calls int) {
	m := &c.marks
	if m.word == nil || !m.asked.Load() {
		return
	}
	if m.pending += uint64(calls); m.pending < markEvery {
		return
	}
	if capturing, err := c.stream.Capturing(); err != nil || capturing {
		return
	}
	m.pending = 0
	begun, _ := c.submitted.extents()
	_ = c.stream.Write(m.word, begun.collectives<<32|begun.messages&math.MaxUint32) // what is wrong with the stream, calls tell
}

// Progress implements [comm.Progresser]. What is captured counts when the stream has
// come to what was submitted behind it.
func (c *Comm) Progress() comm.Progress {
	c.marks.asked.Store(true)
	done := c.reached()
	begun, settled := c.submitted.extents()
	done = done.max(settled)
	return comm.Progress{
		Collectives: comm.Count{Submitted: begun.collectives, Done: done.collectives},
		Messages:    comm.Count{Submitted: begun.messages, Done: done.messages},
	}
}

// reached returns how far the stream has come, without waiting for anybody.
func (c *Comm) reached() extent {
	m := &c.marks
	m.mu.Lock()
	defer m.mu.Unlock()
	now, idle := c.idle()
	if !idle && m.word != nil {
		begun, _ := c.submitted.extents()
		now = begun.at(m.word.Load())
	}
	// What an abort ended is not done, here or on another rank: that is known before the
	// stream comes to it.
	if c.sound() == nil && c.abandoned(math.MaxUint64) == nil {
		m.done = m.done.max(now)
	}
	return m.done
}

// endMarks gives the word back, unless the stream may still write it.
func (c *Comm) endMarks() {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := &c.marks
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.word != nil && c.settled() {
		m.word.Close()
	}
	m.word = nil
}

// at returns the extent of a mark, which has the low halves of its numbers. It is not
// further than this one.
func (e extent) at(mark uint64) extent {
	return extent{
		collectives: e.collectives - uint64(uint32(e.collectives)-uint32(mark>>32)),
		messages:    e.messages - uint64(uint32(e.messages)-uint32(mark)),
	}
}

// idle returns what was submitted if all that is done, and nobody is submitting.
func (c *Comm) idle() (extent, bool) {
	if !c.mu.TryLock() {
		return extent{}, false
	}
	defer c.mu.Unlock()
	if !c.looks.TryRLock() {
		return extent{}, false
	}
	defer c.looks.RUnlock()
	begun, _ := c.submitted.extents()
	if capturing, err := c.stream.Capturing(); err != nil || capturing {
		return extent{}, false
	}
	done, err := c.stream.Done()
	return begun, err == nil && done
}
