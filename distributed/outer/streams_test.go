package outer_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/local"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/internal/standin"
	"github.com/tutti-go/tutti/distributed/outer"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// waits writes down what waits for communication: streams, by their number, and the host.
type waits struct {
	mu     sync.Mutex
	events map[uintptr]uintptr // the stream that each was recorded on
	last   uintptr
	log    []string
}

func (w *waits) note(what string) {
	w.mu.Lock()
	w.log = append(w.log, what)
	w.mu.Unlock()
}

// watched is a communicator with a stream and events, whose waits are written down.
type watched struct {
	standin.ByEvents
	*waits
}

func (w watched) Split(ctx context.Context, color, key int) (comm.Communicator, error) {
	c, err := w.ByEvents.Split(ctx, color, key)
	return watched{standin.NewByEvents(ctx, c), w.waits}, err
}

func (w watched) CreateEvent() (uintptr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last++
	return w.last, nil
}

func (w watched) RecordOnStream(event, stream uintptr) error {
	w.mu.Lock()
	w.events[event] = stream
	w.mu.Unlock()
	return nil
}

func (w watched) StreamWaitEvent(stream, event uintptr) error {
	w.mu.Lock()
	of := w.events[event]
	w.mu.Unlock()
	w.note(fmt.Sprintf("%d after %d", stream, of))
	return nil
}

func (w watched) AfterComm(stream uintptr) error {
	w.note(fmt.Sprintf("%d after communication", stream))
	return w.ByEvents.AfterComm(stream)
}

func (w watched) Sync(ctx context.Context) error {
	w.note("host")
	return w.ByEvents.Sync(ctx)
}

// On a device a fragment is selected from, exchanged and merged on a side stream. Neither the compute stream nor
// the host waits for that, until the fragment is to arrive.
func TestTheComputeStreamDoesNotWait(t *testing.T) {
	const every, delay, rounds = 6, 3, 4
	compute, side := standin.ComputeStream, standin.ComputeStream+2
	for _, pattern := range []string{sparse.Dense, sparse.Chunked, sparse.TopkA} {
		require.NoError(t, local.Run(t.Context(), 2, func(ctx context.Context, c comm.Communicator) error {
			memory := cpu.New()
			rt := standin.NewForking(memory)
			m := newModel(t, memory)
			for i, x := range m.tensors {
				of, err := runtime.Wrap(rt, standin.Pointer(x), dtype.F32, []int{x.Len()}, nil, func() { assert.NoError(t, x.Free()) })
				require.NoError(t, err)
				m.tensors[i] = of
			}
			w := &waits{events: map[uintptr]uintptr{}}
			l, err := outer.New(ctx, rt, watched{standin.NewByEvents(ctx, c), w}, m.tensors, outer.Config{Every: every, Delay: delay,
				Reduce: ddp.Config{Config: sparse.Config{Pattern: pattern, Density: 0.1}, DenseUpTo: -1}})
			require.NoError(t, err)
			for step := range every * rounds {
				m.sgd(step, c.Rank())
				w.log = nil
				require.NoError(t, l.Step(ctx))
				label := fmt.Sprintf("%s, step %d", pattern, step+1)
				computeWaits := fmt.Sprintf("%d after %d", compute, side)
				switch at := (step + 1) % every; {
				case step+1 == every: // ranks compare their configurations
				case at == 0:
					assert.Contains(t, w.log, fmt.Sprintf("%d after %d", side, compute), label)
					assert.NotContains(t, w.log, computeWaits, label)
					assert.NotContains(t, w.log, fmt.Sprintf("%d after communication", compute), label)
					assert.NotContains(t, w.log, "host", label)
				case at == delay && step > every:
					assert.Contains(t, w.log, computeWaits, label)
				default:
					assert.Empty(t, w.log, label)
				}
			}
			return l.Close()
		}))
	}
}
