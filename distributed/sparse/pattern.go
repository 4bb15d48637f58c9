package sparse

import "github.com/tutti-go/tutti/internal/sparsity"

// The patterns, for [Config.Pattern]. All names but the last are those of the published Ok-Topk
// code (https://github.com/Shigangli/Ok-Topk), which compares these methods.
//
// On a device with streams the host waits for lengths, to size messages, in the steps of [TopkSA], [GaussiankSA] and
// [Oktopk], and of [Auto], which may be one of them. Steps of the others only submit work, and can be captured in a
// graph, unless NonFinite is [FailNonFinite].
const (
	Dense           = sparsity.Dense           // "dense": sends everything
	TopkA           = sparsity.TopkA           // "topkA": exact top-k, allgather
	TopkA2          = sparsity.TopkA2          // "topkA2": the same, and the top k of the sum
	TopkAopt        = sparsity.TopkAopt        // "topkAopt": reused threshold, allgather
	Gtopk           = sparsity.Gtopk           // "gtopk": Shi et al., ICDCS 2019
	TopkSA          = sparsity.TopkSA          // "topkSA": the split allreduce of SparCML, Renggli et al., SC 2019
	Gaussiank       = sparsity.Gaussiank       // "gaussiank": Shi et al., 2019, "Understanding Top-k Sparsification"
	GaussiankConcat = sparsity.GaussiankConcat // "gaussiankconcat": the same, as each list is one message here
	GaussiankSA     = sparsity.GaussiankSA     // "gaussiankSA": the same selection, split allreduce
	Oktopk          = sparsity.Oktopk          // "oktopk": Li and Hoefler, PPoPP 2022
	Chunked         = sparsity.Chunked         // "chunked": exact top-k of each 4096 elements, allgather; DeMo, 2024
)

// Auto, for [Config.Pattern], selects the pattern with the fastest steps on this communicator, with this runtime's
// kernels, for this length and density. The ranks time some steps on random numbers with up to five of the patterns,
// agree on one ([Stats].Chosen), and keep it. Rank 0 logs it, with the times. The choice is the dense pattern if a
// sparse one is faster by less than a twentieth. It ignores that patterns which send less need more steps for the same
// accuracy.
//
// The choice affects the time of a step, not its semantics. These follow from the configuration, as for a sparse
// pattern, even if the dense one is chosen: NonFinite is [SkipNonFinite] unless set, a step that fails is rolled back
// unless NoUndo is set, there is a residual, an epoch of density 0 sends nothing, and results are not available as
// lists ([Reducer.Entries]).
//
// A [Reducer] chooses in the first step that is not dense by its schedule, for Config.Density; package ddp when it is
// made, once for all buckets of about the same length. It takes about a second where steps with 16,384 elements
// take less than 12 ms, and meanwhile memory of up to eleven times the tensor's size, about twenty with momentum, but
// for no more than 16,777,216 elements.
const Auto = sparsity.Auto

// The codecs of values, for [Config.Values]. Bytes are those of an entry where 1 % are selected, its index
// included.
const (
	F32      = sparsity.F32      // "f32": as they are, and indices as well: 8 bytes, and nothing to encode
	Lossless = sparsity.Lossless // "lossless": as they are, behind indices at their entropy: 5.0 bytes
	BF16     = sparsity.BF16     // "bf16": rounded to 8 bits of precision: 3.0
	F16      = sparsity.F16      // "f16": rounded to 11 bits of precision, and to 65504: 3.0
	FP8      = sparsity.FP8      // "fp8": E4M3, scaled by blocks of 64: 2.1
	I8       = sparsity.I8       // "i8": 8 bits, scaled by blocks of 64: 2.1
	I4       = sparsity.I4       // "i4": 4 bits, scaled by blocks of 64: 1.6
	I2       = sparsity.I2       // "i2": 2 bits, one of four means of 4096 values: 1.3
	Bit      = sparsity.Bit      // "1bit": signs, and mean magnitudes of blocks of 64; for the dense pattern
)
