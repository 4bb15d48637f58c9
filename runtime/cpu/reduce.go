package cpu

import (
	"fmt"

	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/hostops"
	"github.com/tutti-go/tutti/internal/reductions"
	"github.com/tutti-go/tutti/runtime"
)

// Reduce combines count elements of all srcs, in the order of srcs, and stores the result in every one of dsts: the
// reduction that a custom communicator needs. Both hold addresses of host buffers.
//
// F16, BF16 and the FP8 types are accumulated in float32 and rounded once, to
// nearest even; FP8 saturates as [dtype.FromFloat32] does. Avg divides the sum
// once by len(srcs). Integers wrap around, Bool follows
// [reductions.Op.Defined]. Min and Max of floats are minimum and maximum of
// IEEE 754-2019. A single source is copied bit by bit (a Bool becomes 0 or 1).
// All that combine the same sources in the same order store the same bits,
// whatever their processor, but for the payload and sign of the NaN that an
// addition or multiplication gives.
//
// A destination may be one of the sources; other overlaps are not allowed. No
// source, a nil pointer or a negative count is [runtime.ErrArgument], an op that
// is not defined on dt is [runtime.ErrDType].
func (rt *Runtime) Reduce(dsts, srcs []uintptr, count int, dt dtype.DType, op reductions.Op) error {
	const name = "reduce"
	switch {
	case !op.Defined(dt):
		return fmt.Errorf("cpu: %s: %v of %v is not defined: %w", name, op, dt, runtime.ErrDType)
	case len(srcs) == 0:
		return fmt.Errorf("cpu: %s: no source: %w", name, runtime.ErrArgument)
	}
	if err := rt.check(name, count, srcs...); err != nil {
		return err
	}
	if err := rt.check(name, count, dsts...); err != nil {
		return err
	}
	hostops.Reduce(dsts, srcs, count, dt, op, false)
	return nil
}
