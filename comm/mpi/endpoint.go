package mpi

import (
	"context"
	goruntime "runtime"
	"sync/atomic"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/comm/internal/schedule"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// host is where this package's own memory comes from: outside the Go heap, as
// MPI keeps addresses while messages are in flight.
var host = cpu.New()

// endpoint is one rank of a communicator: an engine over an MPI communicator.
type endpoint struct {
	*schedule.Engine
	*wire
	state    *state // of this process
	rank     int    // in the communicator
	size     int    // of the communicator, at least 1
	shared   []byte // memory that the ranks share, nil if they do not
	unshared error  // why they do not; nil if they do, and if it is a single rank

	leakAlarm goruntime.Cleanup // says that nobody has called Close
	lost      atomic.Bool       // leakAlarm has said that

	nativeStep schedule.Step // is startNative, bound once; nil unless collectives are the library's own
}

// native reports whether collectives are the library's own.
func (e *endpoint) native() bool { return e.state.collectives != scheduled }

// asWire is the wire as an engine gets it; tests have their own.
var asWire = func(w *wire) schedule.Wire { return w }

// newEndpoint returns the endpoint over an MPI communicator.
func (s *state) newEndpoint(rank, size int, handle uintptr) *endpoint {
	e := &endpoint{
		wire:  newWire(s.lib, handle, size, s.maxTag),
		state: s,
		rank:  rank,
		size:  size,
	}
	c := schedule.Config{
		Check:  backend.Check{Backend: name, Rank: rank, WorldSize: size},
		Wire:   asWire(e.wire),
		MaxTag: e.tags.head - 1,
		Notify: s.progress.notify,
		Pieces: true,
	}
	if e.native() {
		c.Offload = e
		c.Check.Supports = nativeSupports
		e.nativeStep = e.startNative
	}
	e.Engine = schedule.New(c)
	e.SetHome(s.home)
	return e
}

// Wait implements [backend.Backend].
func (e *endpoint) Wait(ctx context.Context, w comm.Wait) (comm.Communicator, error) {
	if w.Op != comm.OpSplit {
		return nil, e.Engine.Wait(ctx, w.Op)
	}
	child, err := e.makeSub(ctx, w.Color, w.Key)
	if child == nil {
		return nil, err
	}
	return newCommunicator(child), nil
}
