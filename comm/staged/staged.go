// Package staged lets tensors of a GPU travel over a communicator of host memory, such as MPI without GPU support, or
// the other way round: [New] copies between the two.
package staged

import (
	"context"
	"fmt"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/backend"
	"github.com/tutti-go/tutti/internal/hostmem"
	"github.com/tutti-go/tutti/internal/leak"
	"github.com/tutti-go/tutti/runtime"
)

// New returns a communicator for memory of device over c, which reaches memory of host. The data that a call sends is
// copied to the host, and the data that it receives is copied back, so that GPUs communicate over MPI, TCP or
// goroutines. A GPU copies through pinned memory, as much as the longest call needs: close the communicator before
// the GPU's runtime. An allreduce, a reduce or a broadcast of at least 16 MiB is done in chunks, whose copies overlap
// the communication of other chunks. The result is for links much slower than the copies, such as between hosts, and
// for small messages. Calls run one at a time ([backend.NewSerial]).
//
// If all ranks share memory, as those of comm/tcp on one host do, and the devices are GPUs, an allreduce of at least
// 2 MiB goes from device to device through that memory, and devices reduce it. The bits are the same.
//
// With device and host the other way round, host memory is communicated over a communicator
// that reaches a device's, such as NCCL.
//
// All ranks of c call New together. The result owns and closes c, which nothing else may use from then on. A
// reduction that c does not support fails in the wait, which aborts both. New returns [comm.ErrDevice] if c does not
// reach host's memory.
func New(c comm.Communicator, device, host runtime.Runtime) (comm.Communicator, error) {
	check := &backend.Check{
		Backend:   "staged",
		Rank:      c.Rank(),
		WorldSize: c.WorldSize(),
	}
	if err := comm.CheckDevice(c, host.Device()); err != nil {
		return nil, check.Fail("check device", err)
	}
	s := &stage{base: c, device: device, host: host}
	staged := &staged{backend.NewSerial(check, s), check, device.Device()}
	mark := leak.NewMark(check.Backend, fmt.Sprintf("rank %d of %d", check.Rank, check.WorldSize))
	s.leakAlarm = goruntime.AddCleanup(staged, (*leak.Mark).Report, mark)
	return staged, nil
}

// staged says which memory a stage is for.
type staged struct {
	*backend.Base
	check  *backend.Check // of arguments
	device runtime.Device // whose memory it is for
}

// CheckDevice implements [backend.MemoryChecker].
func (s *staged) CheckDevice(d runtime.Device) error {
	if d != s.device {
		return s.check.Unreachable(d, fmt.Sprintf("this communicator was made for %v", s.device))
	}
	return nil
}

// pinner is a device that has memory of the host pinned, and copies to and from that at its own speed: other memory is
// staged by its driver, page by page.
type pinner interface {
	AllocatePinned(bytes int) ([]byte, error)
	FreePinned(memory []byte) error
}

// stage is the [backend.Worker] of a staged communicator.
type stage struct {
	base      comm.Communicator // does the calls, in the host's memory
	device    runtime.Runtime   // whose memory calls are for
	host      runtime.Runtime   // whose memory base reaches
	leakAlarm goruntime.Cleanup // reports a staged communicator that was lost without Close, which stops it

	working sync.Mutex  // held while calls are done
	left    bool        // guarded by working
	memory  uintptr     // of host, or pinned, for the calls of a group; 0 for none; guarded by working
	pinned  []byte      // memory if the device has pinned it; guarded by working
	bytes   int         // of memory; guarded by working
	counts  int         // offset in memory of what ranks tell each other of a long call; guarded by working
	calls   []comm.Call // the same calls there; guarded by working

	windowState windowState // of window; guarded by working
	window      passages    // zero unless windowState is windowOpen; guarded by working
}

// Work implements [backend.Worker].
func (s *stage) Work(calls []comm.Call) error {
	s.working.Lock()
	defer s.working.Unlock()
	if s.left {
		return comm.ErrClosed
	}
	if len(calls) == 1 && s.fitsWindow(&calls[0]) {
		open, err := s.hasWindow()
		if err != nil {
			return err
		}
		if open {
			return s.workInWindow(&calls[0])
		}
	}
	if err := s.place(calls); err != nil {
		return err
	}
	if len(calls) == 1 && s.divides(&calls[0]) {
		return s.workInChunks(&calls[0], &s.calls[0])
	}
	for i := range calls {
		if err := s.copyParts(&calls[i], &s.calls[i], (*comm.Call).SendPart, s.copyIn); err != nil {
			return err
		}
	}
	if err := s.host.Synchronize(context.Background()); err != nil {
		return err
	}
	if err := s.submit(); err != nil {
		return err
	}
	if err := s.base.Sync(context.Background()); err != nil { // Leave ends it
		return err
	}
	for i := range calls {
		if err := s.copyParts(&calls[i], &s.calls[i], (*comm.Call).RecvPart, s.copyOut); err != nil {
			return err
		}
	}
	return nil
}

// submit makes the calls of base.
func (s *stage) submit() error {
	if len(s.calls) == 1 {
		return s.calls[0].Make(s.base)
	}
	return s.base.Group(s.calls...)
}

// copyIn copies bytes of the device to memory that base reaches. One of the two is memory of this process.
func (s *stage) copyIn(device, host uintptr, bytes int) error {
	if s.host.Device().Kind == runtime.CPU {
		return s.device.CopyOut(hostmem.Slice[byte](host, bytes), device)
	}
	return s.host.CopyIn(host, hostmem.Slice[byte](device, bytes))
}

// copyOut copies bytes from memory that base reaches to the device.
func (s *stage) copyOut(device, host uintptr, bytes int) error {
	if s.host.Device().Kind == runtime.CPU {
		return s.device.CopyIn(device, hostmem.Slice[byte](host, bytes))
	}
	return s.host.CopyOut(hostmem.Slice[byte](device, bytes), host)
}

// part is [comm.Call.SendPart] or [comm.Call.RecvPart].
type part func(c *comm.Call, rank, peer int) (address uintptr, bytes int, ok bool)

// place makes room on the host for what calls send and receive.
func (s *stage) place(calls []comm.Call) error {
	s.calls = append(s.calls[:0], calls...)
	total := 0
	for i := range calls {
		staged := &s.calls[i]
		staged.Send, total = s.reserve(&calls[i], calls[i].Send, (*comm.Call).SendPart, total)
		if staged.Op == comm.OpAllReduce { // in place: half the memory, and what is read is in the caches to be written
			staged.Recv = staged.Send
			continue
		}
		staged.Recv, total = s.reserve(&calls[i], calls[i].Recv, (*comm.Call).RecvPart, total)
	}
	if err := s.growAround(total); err != nil {
		return err
	}
	for i := range s.calls {
		staged := &s.calls[i]
		staged.Send += s.memory
		staged.Recv += s.memory
		if staged.Op == comm.OpBroadcast { // from and to the same place
			staged.Send = staged.Recv
		}
	}
	return nil
}

// growAround makes room for this many bytes, and for the counts behind them.
func (s *stage) growAround(bytes int) error {
	s.counts = bytes
	return s.grow(bytes + countBytes*(1+s.base.WorldSize()))
}

// reserve returns the offset of a buffer in memory that has some bytes, and the bytes with it.
func (s *stage) reserve(call *comm.Call, buffer uintptr, p part, bytes int) (offset uintptr, total int) {
	const align = 64
	extent := 0
	for peer := range s.base.WorldSize() {
		address, length, ok := p(call, s.base.Rank(), peer)
		if ok && length > 0 {
			extent = max(extent, int(address-buffer)+length)
		}
	}
	return uintptr(bytes), bytes + (extent+align-1)/align*align
}

// grow makes memory of at least a number of bytes.
func (s *stage) grow(bytes int) error {
	if bytes <= s.bytes {
		return nil
	}
	if err := s.free(); err != nil {
		return err
	}
	if err := s.allocate(bytes); err != nil {
		return err
	}
	s.bytes = bytes
	return nil
}

// allocate makes memory of some bytes, pinned where the device can do that.
func (s *stage) allocate(bytes int) (err error) {
	device, ok := s.device.(pinner)
	if !ok || s.host.Device().Kind != runtime.CPU {
		s.memory, err = s.host.Allocate(bytes)
		return err
	}
	s.pinned, err = device.AllocatePinned(bytes)
	if err == nil {
		s.memory = hostmem.Addr(s.pinned)
	}
	return err
}

// free gives the memory back, if there is some.
func (s *stage) free() error {
	memory := s.memory
	pinned := s.pinned
	s.memory = 0
	s.pinned = nil
	s.bytes = 0
	if pinned != nil {
		return s.device.(pinner).FreePinned(pinned)
	}
	return s.host.Deallocate(memory)
}

// copyParts copies what a call sends or receives between the device's memory and the memory of the same call
// that is staged.
func (s *stage) copyParts(call, staged *comm.Call, p part, copyPart func(device, host uintptr, bytes int) error) error {
	var last uintptr
	copied := 0
	for peer := range s.base.WorldSize() {
		device, bytes, ok := p(call, s.base.Rank(), peer)
		if !ok || bytes == 0 || device == last && bytes == copied { // the same for every peer
			continue
		}
		last = device
		copied = bytes
		host, _, _ := p(staged, s.base.Rank(), peer)
		if err := copyPart(device, host, bytes); err != nil {
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
	s.leakAlarm.Stop()
	_ = s.base.Close()
	s.working.Lock() // a Work ends, now that base has
	defer s.working.Unlock()
	s.left = true
	_ = s.closeWindow()
	_ = s.free()
}
