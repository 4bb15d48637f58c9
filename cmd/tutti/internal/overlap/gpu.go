package overlap

import (
	"fmt"
	"time"

	"github.com/tutti-go/tutti/cmd/tutti/internal/cublas"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// GPU is the [Compute] of NVIDIA GPUs: products by cuBLAS, CUDA events as
// timers.
type GPU struct {
	*cublas.Handle
	rt *cuda.Runtime
}

var _ Compute = (*GPU)(nil)

// NewGPU prepares the GPU of a runtime, which has to be one of package cuda.
func NewGPU(rt runtime.Runtime) (*GPU, error) {
	own, ok := rt.(*cuda.Runtime)
	if !ok {
		return nil, fmt.Errorf("overlap: %w: %v is no NVIDIA GPU", runtime.ErrUnsupported, rt.Device())
	}
	handle, err := cublas.Open(own)
	if err != nil {
		return nil, err
	}
	return &GPU{Handle: handle, rt: own}, nil
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
func (g *GPU) DestroyTimer(event uintptr) error { return g.rt.WrapEvent(event).Close() }

// Elapsed implements [Compute].
func (g *GPU) Elapsed(from, to uintptr) (time.Duration, error) {
	return g.rt.WrapEvent(to).Since(g.rt.WrapEvent(from))
}
