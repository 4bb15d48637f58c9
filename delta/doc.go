// Package delta sends the weights of a training run to other processes, such as inference engines, evaluators and
// joining members, and to files. It sends only the changes of each version. An optimizer's step leaves most 16-bit
// weights unchanged and moves the others by one unit in the last place, so a version takes 0.8 to 1.3 bytes for each
// changed weight. docs/deltas.md is the guide.
//
// A [Publisher] has the versions of a trainer, as tensors in any memory ([Of], [Host]). With a communicator, it calls
// Publish while each [Subscriber] calls Update. Without one, it writes to an [io.Writer] (WriteSince), and a
// subscriber reads from an [io.Reader]. [Diff] and [Delta.Apply] are for tensors without versions, such as those of
// two files, and [Delta.SetText] is for the headers of such files.
//
// # Guarantees
//
//   - A subscriber receives exactly what was published, bit for bit, including the payloads of NaNs and the signs
//     of zeros. The checksum of every tensor is compared before a version is committed.
//   - A subscriber is at a version or at the previous one, never in between, and [Subscriber.View] shows it. A
//     version is applied in place, while readers wait. The undo log is the delta itself: a rollback subtracts its
//     differences. Data that a full copy or a delta for files overwrites is saved first. An update thus takes
//     memory for the message, 1 to 3 % of the weights if as many change, and otherwise also for the weights.
//   - With [Config].Together, all subscribers of a communicator commit a version or none does. They vote after they
//     have checked it and before they change anything, so no reader waits for another subscriber. A subscriber that
//     loses the others before it knows the outcome shows nothing ([ErrInDoubt]) until it meets the remaining ones;
//     if one of them has committed, it commits too. A subscriber whose memory fails after the vote returns the
//     error, and stays at the previous version.
//   - A subscriber that has missed versions gets them folded into one, or a full copy if that is smaller. The same
//     holds if its tensors differ from those of its version.
//   - A publisher keeps a copy of the weights in their kind of memory ([Publisher.Close] frees it on devices), and
//     on the host the latest deltas, which are together at most as large.
//   - Tensors on the host and on GPUs (package cuda) are compared and changed in place. For tensors on a GPU only
//     lists cross the bus, and the GPU derives a block's checksum from the old one and the changes. Blocks of other
//     memory are copied to the host and back.
//
// The format of a delta is in docs/delta-format.md.
//
// # Files
//
//   - values.go: the coder of values
//   - block.go: a block, whose exponents internal/exponents codes
//   - host.go, gpu.go: comparing and changing it in memory, on GPUs by the kernels of kernels/delta.cu, which are
//     loaded at their first use
//   - message.go: the delta
//   - replica.go: tensors at a version; making, applying and rolling back a delta
//   - publisher.go: also the protocol between ranks
//   - subscriber.go
package delta
