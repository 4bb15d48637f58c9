// Package delta hands the weights of a training to other processes, version by version, as what has changed: inference
// engines, evaluators, members that join, files. An optimizer's step leaves most 16-bit weights as they are and
// moves the others by one unit in the last place, so a version takes 0.8 to 1.3 bytes a changed weight.
// docs/deltas.md is the guide.
//
// A [Publisher] has the versions of a trainer, which come as tensors in any memory ([Of], [Host]). Over a communicator it
// calls Publish where each [Subscriber] calls Update; without one it writes to an [io.Writer] (WriteSince) what
// a subscriber reads from an [io.Reader]. [Diff] and [Delta.Apply] are for tensors that have no versions, such as those of two files.
//
// # What holds
//
//   - What arrives is what was published, bit for bit: the payloads of NaNs, the signs of zeros. The
//     checksum of every tensor is compared before a version counts.
//   - A subscriber is at a version or at the one before, never between, and [Subscriber.View] shows one. A version is
//     applied in place, while readers wait. The undo log is the delta itself, whose differences are subtracted to take it
//     back; what a full copy overwrites, or a delta that was written for files, is copied before. So an update takes memory for the
//     message, 1 to 3 % of the weights where as many change, and otherwise for the weights too.
//   - If it is asked for ([Config].Together), all subscribers of a communicator commit a version or none. They vote when they have
//     applied it. One that loses the others before it knows the outcome shows nothing ([ErrInDoubt]) until it
//     meets those that are left: if one of them has committed, it does too.
//   - A subscriber that has missed versions gets them folded into one, or a full copy if that is smaller; so does one
//     whose tensors are not those of the version that it names.
//   - A publisher's memory is a copy of the weights on the host, and the latest deltas, at most as long as that.
//
// # Format
//
// Integers are little-endian; "number" is an unsigned one in LEB128 ([encoding/binary.AppendUvarint]), and a text a number and
// as many bytes. A delta is
//
//   - 4 bytes, "tdl" and 1, the version of the format; a number, the length of all that follows.
//   - The version that it is for (number; 0 for a full copy) and, if it is not 0, the digest of that version (32 bits); the
//     version that it makes (number); the elements of all its tensors (number).
//   - The layout: the byte 0 if it is that of the version before, or 1, the number of tensors, and for each
//     its name (text), type (text, as package dtype has it), rank and dimensions (numbers). Names ascend, as bytes.
//   - A text for the program, such as the header of a file.
//   - The number of tensors that change, and for each: how many tensors are between the one before and it (number), its checksum (32
//     bits), the number of blocks that change, and for each how many are between the one before and it
//     (number) and its code (text).
//   - The CRC-32C of all from the version on, 32 bits.
//
// A block is 2^20 elements of a tensor, the last one fewer. The checksum of a tensor is the CRC-32C of those of its blocks, 32 bits
// each: so a change costs a pass only over the blocks that change. CRC-32C finds what goes wrong by accident, at
// 10 GB/s and more on one core; against who forges messages the connection is to be protected. The digest of a version is
// the CRC-32C of its layout, as above without the byte, and of the tensors' checksums.
//
// A tensor that is not in the version before with the same name, type and shape, and each of a full copy, is
// coded as if it had been zeros. All its blocks are there, none shorter than 1/1024 of its elements, so that no
// message makes a receiver allocate much more than it has sent.
//
// A block's code is independent of others. It begins with a form (byte) and the number of changed elements. Elements
// are compared as integers in their order: of floats, the bits that follow the sign are inverted where it is set, and
// what results is a signed integer. A difference is new less old, modulo the range of the type, as a signed integer; its
// zigzag is 2d for d ≥ 0 and -2d-1 below.
//
//   - Form 0: the elements, XOR those before.
//   - Form 1: the positions of the changed elements, and the zigzags of their differences, less 1, as values.
//   - Form 2: their positions; their signs, a bit each from the lowest of a byte on, 1 for less than zero; how
//     many differences are beyond ±1 (number), which of them (positions), and their magnitudes less 2 as values.
//   - Form 3: the zigzags of all elements' differences, as values.
//   - Form 4: as form 1, but positions are those among the elements of the version before, sorted by the eight bits that
//     follow their sign (of fp8: seven and a zero), which of a bf16 are its exponent, and otherwise in order. An optimizer moves weights
//     by about as much, so the small ones change more often: that saves a quarter of the bytes. It takes two
//     passes over a block, and a copy of it to take it back: Publish does without.
//
// Positions are a header of 16 bits for each 1024 of them, and then their blocks of Rice codes, as in the message of a
// [runtime.Codec]; the gap before the first one is its position.
//
// Values are coded by rANS with 12 bits of frequencies; no values are no bytes. A value below 16 is a symbol. A larger one of n bits has the
// symbol 16 + 8(n-5) and its three bits below the highest, and its other n-4 bits are extra.
//
//   - The table: 3 and the number of symbols in it (number), and for each how many symbols are between the one before and it,
//     and its frequency, which sum to 4096. Or a number t below 4, and no more, for the standard tables, of symbols below 112: the frequency
//     of the values from v to w-1 is 1 + 3984a/(v+a) - 3984a/(w+a), where a is 3^t and w is infinite for the last one, divisions rounded down.
//   - The number of words; the states (32 bits), one if there are fewer than 1024 values, and otherwise four,
//     of which value i is decoded by state i mod 4; and the words, of 16 bits.
//   - To decode a value from state x: its symbol is the one in whose range of slots x mod 4096 lies, in the order of
//     symbols; x = frequency*(x>>12) + x mod 4096 - the range's begin. Then its extra bits, up to 16 at a time, the lowest first: n of them are
//     x mod 2^n, and x = x>>n. After each of these steps, a state below 2^16 becomes x<<16 and the next word. All states
//     end as 2^16, and no words are left.
//
// # How it is written
//
//   - values.go: the coder of values; block.go: a block; message.go: the delta; replica.go: tensors at a version, and how a delta is made,
//     applied and rolled back; publisher.go, also what ranks tell each other; subscriber.go.
package delta
