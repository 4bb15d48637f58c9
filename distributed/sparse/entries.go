package sparse

import (
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Entries returns the average of the last step as a list, the same on every rank. Its indices ascend, and the average
// is zero elsewhere. The list is in device memory, valid until the next step, and ready for work on the compute stream.
// Its length is on the device, too ([kernel.Entries].Len). [runtime.Runtime].CopyOut copies both to the host.
//
// For a dense result, which topkSA and oktopk may also make, Entries returns [comm.ErrUnsupported]: it is in the tensor
// alone. The same holds for every result of [Auto], which may choose the dense pattern. A skipped step has no entries.
// If only the device knows whether the step was skipped ([SkipNonFinite]), the host waits for it, at most 5 seconds.
func (r *Reducer) Entries() (kernel.Entries, error) {
	return r.engine.Entries()
}

// AddResult adds the average of the last step, multiplied by factor, to t. With the negative learning rate, that is the
// update of plain SGD. With a factor of 1 and a tensor of zeros, t becomes the average as a dense tensor. t is F32,
// with as many elements as the gradient. Only the entries are touched, one list of each rank after the other.
//
// The entries are those of [Reducer.Entries], until the next step.
func (r *Reducer) AddResult(t *runtime.Tensor, factor float32) error {
	return r.engine.AddResult(t, factor)
}
