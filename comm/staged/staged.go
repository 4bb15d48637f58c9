// Package staged communicates memory of a device through that of the host, or the other way round.
package staged

import (
	"context"
	"fmt"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/runtime"
)

// New returns a communicator for memory of device over c, which reaches that
// of host: what a call sends is copied to the host, and what it received is copied
// back, so that GPUs communicate over MPI or goroutines. It is for links that are
// slow beside those copies, as between hosts ([Levels] has a use), and for small
// messages; what is submitted is done one after the other ([backend.NewSerial]).
//
// With device and host the other way round, host memory is communicated over one that reaches a
// device's, such as NCCL.
//
// The staged communicator closes c, whose ranks make one of it together, and which
// nobody else uses from then on. A reduction that c does not have is an error of
// the wait, which aborts both. The error is [comm.ErrDevice] if c does not reach host's
// memory.
//
// [Levels]: https://pkg.go.dev/github.com/tutti-go/tutti/distributed/sparse#Hierarchical
func New(c comm.Communicator, device, host runtime.Runtime) (comm.Communicator, error) {
	check := &backend.Check{Backend: "staged", Rank: c.Rank(), WorldSize: c.WorldSize()}
	if err := comm.CheckDevice(c, host.Device()); err != nil {
		return nil, check.Fail("check device", err)
	}
	s := &stage{base: c, device: device, host: host}
	return &staged{comm.Wrap(backend.NewSerial(check, s)), check, device.Device()}, nil
}

// staged says which memory a stage is for.
type staged struct {
	comm.Wrapped
	check  *backend.Check
	device runtime.Device
}

// CheckDevice implements [backend.MemoryChecker].
func (s *staged) CheckDevice(d runtime.Device) error {
	if d != s.device {
		return s.check.Unreachable(d, fmt.Sprintf("this communicator was made for %v", s.device))
	}
	return nil
}

// stage is the [backend.Worker] of a staged communicator.
type stage struct {
	base         comm.Communicator
	device, host runtime.Runtime
	working      sync.Mutex
	left         bool
	memory       uintptr // on the host, of the calls of a group
	bytes        int
	calls        []comm.Call // the same calls there
}

// Work implements [backend.Worker].
func (s *stage) Work(calls []comm.Call) error {
	s.working.Lock()
	defer s.working.Unlock()
	if s.left {
		return comm.ErrClosed
	}
	if err := s.place(calls); err != nil {
		return err
	}
	for i := range calls {
		if err := s.parts(&calls[i], &s.calls[i], (*comm.Call).SendPart, s.fetch); err != nil {
			return err
		}
	}
	err := s.host.Synchronize(context.Background())
	if err != nil {
		return err
	}
	if len(calls) == 1 {
		err = s.calls[0].Make(s.base)
	} else {
		err = s.base.Group(s.calls...)
	}
	if err == nil {
		err = s.base.Sync(context.Background()) // Leave ends it
	}
	for i := range calls {
		if err == nil {
			err = s.parts(&calls[i], &s.calls[i], (*comm.Call).RecvPart, s.put)
		}
	}
	return err
}

// fetch copies what is sent, and put what was received, there in the device's memory, here in what base reaches.
func (s *stage) fetch(there, here uintptr, bytes int) error {
	if s.host.Device().Kind == runtime.CPU {
		return s.device.CopyOut(hostmem.Slice[byte](here, bytes), there)
	}
	return s.host.CopyIn(here, hostmem.Slice[byte](there, bytes))
}

func (s *stage) put(there, here uintptr, bytes int) error {
	if s.host.Device().Kind == runtime.CPU {
		return s.device.CopyIn(there, hostmem.Slice[byte](here, bytes))
	}
	return s.host.CopyOut(hostmem.Slice[byte](there, bytes), here)
}

// place makes room on the host for what calls send and receive.
func (s *stage) place(calls []comm.Call) error {
	const align = 64
	s.calls = append(s.calls[:0], calls...)
	total := 0
	for i := range calls {
		own := &s.calls[i]
		for _, side := range [...]struct {
			address *uintptr
			parts   func(c *comm.Call, rank, peer int) (uintptr, int, bool)
		}{{&own.Send, (*comm.Call).SendPart}, {&own.Recv, (*comm.Call).RecvPart}} {
			extent := 0
			for peer := range s.base.WorldSize() {
				if p, bytes, ok := side.parts(&calls[i], s.base.Rank(), peer); ok && bytes > 0 {
					extent = max(extent, int(p-*side.address)+bytes)
				}
			}
			*side.address = uintptr(total) // from where the memory begins
			total += (extent + align - 1) / align * align
		}
	}
	if total > s.bytes {
		if err := s.host.Deallocate(s.memory); err != nil {
			return err
		}
		s.memory, s.bytes = 0, 0
		memory, err := s.host.Allocate(total)
		if err != nil {
			return err
		}
		s.memory, s.bytes = memory, total
	}
	for i := range s.calls {
		own := &s.calls[i]
		own.Send += s.memory
		own.Recv += s.memory
		if own.Op == comm.OpBroadcast { // from and to the same place
			own.Send = own.Recv
		}
	}
	return nil
}

// parts calls f for what a call sends or receives, in the device's memory and here.
func (s *stage) parts(call, own *comm.Call, part func(c *comm.Call, rank, peer int) (uintptr, int, bool), f func(there, here uintptr, bytes int) error) error {
	last, copied := uintptr(0), 0
	for peer := range s.base.WorldSize() {
		there, bytes, ok := part(call, s.base.Rank(), peer)
		if !ok || bytes == 0 || there == last && bytes == copied { // the same for every peer
			continue
		}
		last, copied = there, bytes
		here, _, _ := part(own, s.base.Rank(), peer)
		if err := f(there, here, bytes); err != nil {
			return err
		}
	}
	return nil
}

// Collective implements [backend.Worker].
func (s *stage) Collective(w comm.Wait) (comm.Communicator, error) {
	child, err := w.Make(context.Background(), s.base)
	if err != nil || child == nil {
		return nil, err
	}
	return New(child, s.device, s.host)
}

// Leave implements [backend.Worker]. Sub-communicators of base go on.
func (s *stage) Leave(_ context.Context, cause error) {
	if cause != nil {
		s.base.Abort(cause)
	}
	_ = s.base.Close()
	s.working.Lock() // a Work ends, now that base has
	defer s.working.Unlock()
	s.left = true
	_ = s.host.Deallocate(s.memory)
	s.memory, s.bytes = 0, 0
}
