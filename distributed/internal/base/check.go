package base

import (
	"fmt"
	"log/slog"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/runtime"
)

// Address checks one tensor and returns its address.
func Address(op, role string, c comm.Communicator, t *runtime.Tensor) (uintptr, error) {
	if t == nil {
		return 0, OpError(op, fmt.Errorf("%w: %s tensor is nil", comm.ErrArgument, role))
	}
	p, err := t.Ptr()
	if err != nil {
		return 0, OpError(op, fmt.Errorf("%s: %w", role, err))
	}
	if !t.IsContiguous() {
		return 0, OpError(op, fmt.Errorf("%w: %s has shape %v and strides %v; make a copy with Contiguous",
			runtime.ErrNotContiguous, role, t.Shape(), t.Strides()))
	}
	if err := comm.CheckDevice(c, t.Device()); err != nil {
		return 0, OpError(op, fmt.Errorf("%s: %w", role, err))
	}
	return p, nil
}

// SameStream checks that other's memory may take part in work on rt's stream: an order knows the compute stream of one
// runtime only, and two runtimes of one GPU may have different streams.
func SameStream(rt, second runtime.Runtime) error {
	if rt.Device() != second.Device() {
		return fmt.Errorf("%w: %v and %v", runtime.ErrDevice, rt.Device(), second.Device())
	}
	if rt.ComputeStream() != second.ComputeStream() {
		return fmt.Errorf("%w: two runtimes of %v, whose compute streams nothing puts into an order",
			runtime.ErrDevice, rt.Device())
	}
	return nil
}

// CheckComm checks that there is a communicator.
func CheckComm(c comm.Communicator) error {
	if c == nil {
		return fmt.Errorf("%w: communicator is nil", comm.ErrArgument)
	}
	return nil
}

// Reaches checks that there are a runtime and a communicator that can access its memory.
func Reaches(rt runtime.Runtime, c comm.Communicator) error {
	if rt == nil || c == nil {
		return fmt.Errorf("%w: runtime or communicator is nil", comm.ErrArgument)
	}
	return comm.CheckDevice(c, rt.Device())
}

// ReportLost logs that residuals of some ranks are lost, if there were more ranks before. It does not know whether
// members of an elastic job that left in order have handed theirs over. about describes the residuals, in pairs as for
// [slog.Warn].
func ReportLost(log *repeats.Log, had int, c comm.Communicator, about ...any) {
	have := c.WorldSize()
	if have >= had || c.Rank() != 0 {
		return
	}
	if times, due := log.Count("lost residuals"); due {
		about = append(about, "ranks", have, "lost", had-have, "rank", c.Rank(), "times", times)
		slog.Warn("distributed: moved to fewer ranks; the others' residuals are lost unless they handed them over",
			about...)
	}
}

// CheckGradientType refuses types that the kernels cannot add to a residual.
func CheckGradientType(dt dtype.DType) error {
	switch dt {
	case dtype.F32, dtype.F16, dtype.BF16:
		return nil
	}
	return fmt.Errorf("%w: gradient is %v, want f32, f16 or bf16", comm.ErrUnsupported, dt)
}
