package standin

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// ComputeStream is the compute stream of all stand-ins.
const ComputeStream = 77

// Streamed is a runtime and a communicator with a stream each, which log how they are ordered. (The work itself is
// done on the host at once.)
type Streamed struct {
	*cpu.Runtime
	log   []string
	Reach runtime.Kind
	In    int // copies to the device, which wait for the stream

	SyncFails, OrderFails error // of the communicator
}

func (s *Streamed) note(format string, args ...any) {
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

// Take returns the log since the last Take.
func (s *Streamed) Take() string {
	log := strings.Join(s.log, " ")
	s.log = nil
	return log
}

// ComputeStream implements [runtime.Runtime].
func (s *Streamed) ComputeStream() uintptr { return ComputeStream }

// Synchronize implements [runtime.Runtime].
func (s *Streamed) Synchronize(context.Context) error {
	s.note("HOST-WAITS")
	return nil
}

// CopyIn implements [runtime.Runtime].
func (s *Streamed) CopyIn(dst uintptr, src []byte) error {
	s.In++
	return s.Runtime.CopyIn(dst, src)
}

// CopyOut implements [runtime.Runtime].
func (s *Streamed) CopyOut(dst []byte, src uintptr) error {
	s.note("copyout")
	return s.Runtime.CopyOut(dst, src)
}

// StreamedComm is a communicator that writes to the log of a runtime.
type StreamedComm struct {
	comm.Communicator
	S *Streamed
}

// NewStreamedComm returns c with a stream.
func NewStreamedComm(c comm.Communicator, s *Streamed) StreamedComm {
	return StreamedComm{c, s}
}

// CheckDevice implements [backend.MemoryChecker].
func (c StreamedComm) CheckDevice(d runtime.Device) error {
	if d.Kind != c.S.Reach {
		return fmt.Errorf("%w: %v", comm.ErrDevice, d)
	}
	return nil
}

// AllReduce implements [comm.Communicator].
func (c StreamedComm) AllReduce(send, recv uintptr, n int, dt dtype.DType, op comm.ReduceOp) error {
	c.S.note("allreduce")
	if err := c.Communicator.AllReduce(send, recv, n, dt, op); err != nil {
		return err
	}
	return c.Communicator.Sync(context.Background())
}

// AllGather implements [comm.Communicator].
func (c StreamedComm) AllGather(send, recv uintptr, n int, dt dtype.DType) error {
	c.S.note("allgather")
	return c.Communicator.AllGather(send, recv, n, dt)
}

// Group implements [comm.Communicator].
func (c StreamedComm) Group(calls ...comm.Call) error {
	c.S.note("group")
	return c.Communicator.Group(calls...)
}

// Sync implements [comm.Communicator].
func (c StreamedComm) Sync(context.Context) error {
	c.S.note("HOST-WAITS")
	return c.S.SyncFails
}

// CommStream implements [comm.StreamOrder].
func (c StreamedComm) CommStream() uintptr { return 5 }

// CommAfter implements [comm.StreamOrder].
func (c StreamedComm) CommAfter(stream uintptr) error {
	c.S.note("comm-after-%d", stream)
	return nil
}

// AfterComm implements [comm.StreamOrder].
func (c StreamedComm) AfterComm(stream uintptr) error {
	if c.S.OrderFails != nil {
		return c.S.OrderFails
	}
	c.S.note("%d-after-comm", stream)
	return c.Communicator.Sync(context.Background())
}

// WithStreams runs body with one rank that has streams.
func WithStreams(t *testing.T, body func(ctx context.Context, s *Streamed, c comm.Communicator)) {
	s := &Streamed{Runtime: cpu.New(), Reach: runtime.CPU}
	require.NoError(t, local.Run(t.Context(), 1, func(ctx context.Context, c comm.Communicator) error {
		// Streams are found through decorators.
		body(ctx, s, metered.New(NewStreamedComm(c, s)))
		return nil
	}))
	assert.NoError(t, s.Close())
}

// Fenced is the log of a call between two fences.
const Fenced = "comm-after-77 %s 77-after-comm"
