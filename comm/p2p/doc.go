// Package p2p is a [comm.Communicator] over another one of GPUs of the same
// machine (comm/nccl), from which it takes over the collectives that go faster by
// kernels that write into the memory of the other GPUs, as NVLink lets them.
//
// A rank has scratch memory that all others map, and writes what it sends into
// theirs; each waits for what lands in its own. There is no barrier and no buffer
// to register: any address works, captured in a graph or not. What a word of a
// message is tells that it has arrived: a float that is not one certain NaN, or the
// number of the operation beside 32 bits of anything else. Large messages go
// through rings of chunks, whose arrival a flag tells.
//
// Reductions accumulate in rank order, f16, bf16 and fp8 in float32 and rounded
// once, so the result has the bits that comm/local gives, on every rank, at every
// size. All element types and reductions work, also where the base has none.
//
// Kernels do not wait for ever. When the context of a Sync ends they leave, those
// of a graph too, and the error names the rank that was waited for, the operation
// and its number; so they do after a time of their own ([WithPatience]). The process
// goes on; the communicator is broken, and the base can be shrunk.
//
// What is taken over is measured when the communicator is made, agreed on by all
// ranks, and up to a size. Both submit to the base's stream.
package p2p
