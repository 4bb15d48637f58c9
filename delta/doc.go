// Package delta sends the weights of a training run to other processes, such as inference engines, evaluators and
// joining members, and to files. Of each version it sends only the changes. An optimizer's step leaves most 16-bit
// weights as they are and moves the others by one unit in the last place, so a version takes 0.8 to 1.3 bytes a
// changed weight. docs/deltas.md is the guide.
//
// A [Publisher] has the versions of a trainer, which come as tensors in any memory ([Of], [Host]). Over a
// communicator it calls Publish where each [Subscriber] calls Update; without one it writes to an [io.Writer]
// (WriteSince) what a subscriber reads from an [io.Reader]. [Diff] and [Delta.Apply] are for tensors that have no
// versions, such as those of two files, and [Delta.SetText] for the headers of these.
//
// # What holds
//
//   - What arrives is what was published, bit for bit: the payloads of NaNs, the signs of zeros. The
//     checksum of every tensor is compared before a version counts.
//   - A subscriber is at a version or at the one before, never between, and [Subscriber.View] shows one. A version
//     is applied in place, while readers wait. The undo log is the delta itself, whose differences are subtracted
//     to take it back; what a full copy overwrites, or a delta that was written for files, is copied before. So an
//     update takes memory for the message, 1 to 3 % of the weights where as many change, and otherwise for the
//     weights too.
//   - If it is asked for ([Config].Together), all subscribers of a communicator commit a version or none. They vote
//     when they have checked it, before they change anything, so no reader waits for another subscriber. One that
//     loses the others before it knows the outcome shows nothing ([ErrInDoubt]) until it meets those that are left:
//     if one of them has committed, it does too. One whose memory fails after the vote leaves with the error, at
//     the version before.
//   - A subscriber that has missed versions gets them folded into one, or a full copy if that is smaller; so does one
//     whose tensors are not those of the version that it names.
//   - A publisher's memory is a copy of the weights, where they are ([Publisher.Close] frees that on devices), and
//     on the host the latest deltas, at most as long.
//   - Tensors of the host and of GPUs (package cuda) are compared and changed in place: of those of a GPU only
//     lists cross the bus, and the GPU derives a block's checksum from the one before and what changes. Blocks of
//     other memory are copied to the host and back.
//
// The format of a delta is in docs/delta-format.md.
//
// # How it is written
//
//   - values.go: the coder of values; block.go: a block, whose exponents internal/exponents codes; host.go and
//     gpu.go: how it is compared and changed in memory, on GPUs by the kernels of kernels/delta.cu, which are loaded
//     at the first use; message.go: the delta; replica.go: tensors at a version, and how a delta is made, applied and
//     rolled back; publisher.go, also what ranks tell each other; subscriber.go.
package delta
