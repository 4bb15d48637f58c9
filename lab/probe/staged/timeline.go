package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// timeline holds the parts of one call.
type timeline struct {
	mu    sync.Mutex // guards the fields below
	began time.Time  // of the call; guarded by mu
	parts []span     // in the order of their ends; guarded by mu
}

// span is a part of a call.
type span struct {
	name string        // of the work
	from time.Duration // since the call began
	to   time.Duration // since the call began
}

func (l *timeline) restart() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = time.Now()
	l.parts = l.parts[:0]
}

// time calls f and records it as a part.
func (l *timeline) time(name string, f func() error) error {
	begin := time.Now()
	err := f()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.parts = append(l.parts, span{
		name: name,
		from: begin.Sub(l.began),
		to:   time.Since(l.began),
	})
	return err
}

// print prints the parts of the last call, and the total time of each name.
func (l *timeline) print(bytes int) {
	sums := map[string]time.Duration{}
	for _, p := range l.parts {
		took := micros(p.to - p.from)
		fmt.Printf("| %d | timeline: %s, from %.0f to %.0f | %.0f | | | |\n",
			bytes, p.name, micros(p.from), micros(p.to), took)
		sums[p.name] += p.to - p.from
	}
	for _, name := range []string{
		"device to host", "host to device", "submit", "sync",
		"submit copy out", "submit reduction", "submit copy in", "wait for device",
	} {
		fmt.Printf("| %d | timeline: all of %s | %.0f | | | |\n", bytes, name, micros(sums[name]))
	}
}

// timedGPU is a GPU that records copies as parts.
type timedGPU struct {
	*cuda.Runtime
	timeline *timeline // of the copies
}

func (g *timedGPU) CopyOut(dst []byte, src uintptr) error {
	return g.timeline.time("device to host", func() error { return g.Runtime.CopyOut(dst, src) })
}

func (g *timedGPU) CopyIn(dst uintptr, src []byte) error {
	return g.timeline.time("host to device", func() error { return g.Runtime.CopyIn(dst, src) })
}

func (g *timedGPU) OpenWindow(memory []byte) (window.Window, error) {
	w, err := g.Runtime.OpenWindow(memory)
	if err != nil {
		return nil, err
	}
	return timedWindow{w, g.timeline}, nil
}

// timedComm is a communicator whose calls are parts.
type timedComm struct {
	comm.Wrapped
	timeline *timeline // of the calls
}

func (c timedComm) AllReduce(send, recv uintptr, count int, dt dtype.DType, op comm.ReduceOp) error {
	return c.timeline.time("submit", func() error { return c.Wrapped.AllReduce(send, recv, count, dt, op) })
}

func (c timedComm) AllGather(send, recv uintptr, count int, dt dtype.DType) error {
	return c.timeline.time("submit", func() error { return c.Wrapped.AllGather(send, recv, count, dt) })
}

func (c timedComm) Sync(ctx context.Context) error {
	return c.timeline.time("sync", func() error { return c.Wrapped.Sync(ctx) })
}
