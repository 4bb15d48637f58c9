package sparse

import "github.com/tutti-go/tutti/distributed/internal/engine"

// The patterns, for [Config.Pattern]. All names but the last are those of the published Ok-Topk
// code (https://github.com/Shigangli/Ok-Topk), which compares these methods.
const (
	Dense           = engine.Dense           // "dense": sends everything
	TopkA           = engine.TopkA           // "topkA": exact top-k, allgather
	TopkA2          = engine.TopkA2          // "topkA2": the same, and the top k of the sum
	TopkAopt        = engine.TopkAopt        // "topkAopt": reused threshold, allgather
	Gtopk           = engine.Gtopk           // "gtopk": Shi et al., ICDCS 2019
	TopkSA          = engine.TopkSA          // "topkSA": the split allreduce of SparCML, Renggli et al., SC 2019
	Gaussiank       = engine.Gaussiank       // "gaussiank": Shi et al., 2019, "Understanding Top-k Sparsification"
	GaussiankConcat = engine.GaussiankConcat // "gaussiankconcat": the same, as each list is one message here
	GaussiankSA     = engine.GaussiankSA     // "gaussiankSA": the same selection, split allreduce
	Oktopk          = engine.Oktopk          // "oktopk": Li and Hoefler, PPoPP 2022
	Chunked         = engine.Chunked         // "chunked": exact top-k of each 4096 elements, allgather; DeMo, 2024
)

// Auto, for [Config.Pattern], is the pattern whose steps are the fastest on this communicator, with this runtime's
// kernels, for this length and density. The ranks make some steps on random numbers with up to five of [Patterns],
// and agree on one ([Stats].Chosen), which stays. Rank 0 logs it, with the times. It is dense where a sparse pattern
// is faster by less than a twentieth. That patterns which send less need more steps for the same accuracy does not
// count.
//
// The measurement decides how long a step takes, and not what it means. Everything else follows from the
// configuration, as for a sparse pattern, also where the dense one is chosen: NonFinite is [SkipNonFinite] unless
// set, a step that fails is rolled back unless NoUndo is set, there is a residual, an epoch of density 0 sends
// nothing, and results are not there as lists ([Reducer.Entries]).
//
// A [Reducer] chooses in the first step that is not dense by its schedule, for Config.Density; package ddp when it is
// made, once for all buckets of about the same length. It takes about a second where steps with 16,384 elements
// take less than 12 ms, and meanwhile memory of up to eleven times the tensor's size, about twenty with momentum, but
// for no more than 16,777,216 elements.
const Auto = engine.Auto

// Patterns returns the names of all patterns, dense first.
func Patterns() []string { return engine.Patterns() }

// NeedsHost reports whether a step of a pattern waits for the device, on one that
// has streams, because the host needs lengths to size messages. The others only
// submit work, and can be captured in a graph, but with [FailNonFinite]. [Auto] may
// be any of them. Of [Oktopk] not all steps wait, but what the host reads of one leads
// the next, so none can be captured.
func NeedsHost(pattern string) bool { return engine.NeedsHost(pattern) }

// The codecs of values, for [Config.Values]. Bytes are those of an entry where 1 % are selected, its index
// included.
const (
	F32      = engine.F32      // "f32": as they are, and indices as well: 8 bytes, and nothing to encode
	Lossless = engine.Lossless // "lossless": as they are, behind indices at their entropy: 5.0 bytes
	BF16     = engine.BF16     // "bf16": rounded to 8 bits of precision: 3.0
	F16      = engine.F16      // "f16": rounded to 11 bits of precision, and to 65504: 3.0
	FP8      = engine.FP8      // "fp8": E4M3, scaled by blocks of 64: 2.1
	I8       = engine.I8       // "i8": 8 bits, scaled by blocks of 64: 2.1
	I4       = engine.I4       // "i4": 4 bits, scaled by blocks of 64: 1.6
	I2       = engine.I2       // "i2": 2 bits, one of four means of 4096 values: 1.3
	Bit      = engine.Bit      // "1bit": signs, and mean magnitudes of blocks of 64; for the dense pattern
)

// Values returns the names of the codecs of values, from the most bytes to the least.
func Values() []string { return engine.Values() }
