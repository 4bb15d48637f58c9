package overlap

import (
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/lab/cublas"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// GPU is the [Compute] of NVIDIA GPUs: cuBLAS computes products, and CUDA events are timers.
type GPU struct {
	*cublas.Handle
	rt *cuda.Runtime // records the events; its owner closes it
}

var _ Compute = (*GPU)(nil)

// NewGPU prepares the GPU of a runtime.
func NewGPU(rt *cuda.Runtime) (*GPU, error) {
	handle, err := cublas.Open(rt)
	return &GPU{Handle: handle, rt: rt}, err
}

// CreateTimer implements [Compute].
func (g *GPU) CreateTimer() (uintptr, error) {
	event, err := g.rt.NewTimingEvent()
	if err != nil {
		return 0, err
	}
	return event.Handle(), nil
}

// DestroyTimer implements [Compute].
func (g *GPU) DestroyTimer(event uintptr) error {
	return g.rt.WrapEvent(event).Close()
}

// Elapsed implements [Compute].
func (g *GPU) Elapsed(from, to uintptr) (time.Duration, error) {
	return g.rt.WrapEvent(to).Since(g.rt.WrapEvent(from))
}
