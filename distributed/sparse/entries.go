package sparse

import (
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// Entries returns the average that the last step made as a list, the same on
// every rank: its indices ascend, and the average is zero elsewhere. It lies in
// device memory, valid until the next step, ready for work on the compute stream;
// how many entries it has, is on the device too ([kernel.Entries].Len). [runtime.Runtime].CopyOut brings them to the
// host.
//
// A dense result, which topkSA and oktopk may make too, is in the tensor alone, and
// that is [comm.ErrUnsupported]. So is every result of [Auto], which may choose the dense pattern.
// There are no entries after a step that was skipped; where only the device knows
// whether it was ([SkipNonFinite]), the host waits for it, 5 seconds at most.
func (r *Reducer) Entries() (kernel.Entries, error) {
	return r.engine.Entries()
}

// AddResult adds the average that the last step made to t, multiplied by factor:
// with the negative learning rate it is the update of plain SGD, and with 1 and a
// tensor of zeros it makes the average as a dense tensor. t is F32, with as many
// elements as the gradient. Only the entries are touched, one list of each rank
// after the other.
//
// The entries are those of [Reducer.Entries], until the next step.
func (r *Reducer) AddResult(t *runtime.Tensor, factor float32) error {
	return r.engine.AddResult(t, factor)
}
