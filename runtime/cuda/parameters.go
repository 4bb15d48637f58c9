package cuda

import (
	"github.com/tutti-go/tutti/internal/window"
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The parameters of each kernel are a structure. Its layout equals the structure in kernels/*.cu that its comment
// names, or a list of 64-bit words for kernels with several parameters; a kernel reads only as much of a word as its
// type has. Fields have the names of the device's fields, or name these in their tags. buildEmulator makes the
// compiler compare their offsets. A uintptr is an address in GPU memory, and its comment describes the data there.
// Values are read when the launch is submitted.

// listParameters is entries of kernels/order.cuh.
type listParameters struct {
	idx    uintptr // of I32, ascending
	val    uintptr // of F32; not read if only indices count
	n      int     // entries, or capacity in entries
	length uintptr // of the I32 with the number of entries; 0: it is n
}

func listOf(l kernel.Entries) listParameters {
	return listParameters{
		idx:    l.Idx,
		val:    l.Val,
		n:      l.N,
		length: l.Len,
	}
}

// arrayParameters is array of kernels/order.cuh.
type arrayParameters struct {
	p      uintptr // of F32; 0 means no array
	n      int     // elements
	faults uintptr // of the I32 that counts indices beyond n; 0: they are not counted
}

func arrayOf(a kernel.Array) arrayParameters {
	return arrayParameters{
		p:      a.Ptr,
		n:      a.N,
		faults: a.Faults,
	}
}

// gradientParameters are a gradient and the array to which it is added.
type gradientParameters struct {
	from   uintptr // of F32; x if the gradient is added in place
	grad   uintptr // of elements of kind; 0 if kind is 0
	kind   uint64  `cu:"type"` // as kernels/elements.cuh numbers them
	factor uintptr // of the F32 that scales the gradient; 0 means 1
}

func gradientOf(src kernel.Source) gradientParameters {
	return gradientParameters{
		from:   augend(src),
		grad:   src.Grad,
		kind:   gradientKind(src),
		factor: src.Factor,
	}
}

// flag returns a condition in the form that kernels read.
func flag(condition bool) uint64 {
	if condition {
		return 1
	}
	return 0
}

// kernels/memory.cu

// fillParameters are the parameters of fill_u64.
type fillParameters struct {
	dst   uintptr // of 64-bit words
	n     int     // words
	value uint64  // of each of them
}

// stridedParameters are the parameters of copy_strided and transpose, which exist for each element size.
type stridedParameters struct {
	dst    uintptr       // of the first element
	src    uintptr       // the same
	layout stridedLayout // layout of both
}

// kernels/dense.cu

// scaleParameters are the parameters of scale, for each type of elements.
type scaleParameters struct {
	x      uintptr // of elements, in place
	n      int     // elements
	factor uintptr // of an F32
}

// storeParameters are the parameters of store, for each type of elements.
type storeParameters struct {
	dst    uintptr // of elements
	src    uintptr // of F32
	n      int     // elements
	factor float32 // scale
	_      uint32  // parameters are whole words
	excess uintptr // of n F32 that receive the part beyond the type's range; 0: overflow becomes infinite
}

// copyParameters is copy.
type copyParameters struct {
	dst  uintptr // of elements
	src  uintptr // of elements; 0 stores zeros
	n    int     // elements
	size int     // bytes of one
}

// copyIfParameters is copy_if_args.
type copyIfParameters struct {
	flags  uintptr                          // of m I32; the condition is that any is not 0
	m      int                              // at least 1
	count  int                              // copies in use
	copies [kernel.MaxCopies]copyParameters // unused ones are zero
}

// fitParameters is fit_args.
type fitParameters struct {
	control uintptr `cu:"c"` // of the launches' common state
	parts   uintptr // of the moments of each segment
	x       uintptr // of F32
	n       int     // elements
	gradientParameters
	z         float64 // standard deviations above the mean
	threshold uintptr // of the F32 that is written
	keep      uintptr // of n F32 that receive the values before the gradient is added; 0 for none
}

// sumSquaresParameters is sum_args.
type sumSquaresParameters struct {
	control uintptr `cu:"c"` // of the launches' common state
	parts   uintptr // of an F64 for each segment
	x       uintptr // of elements
	n       int     // elements
	sum     uintptr // of the F64 that is written
}

// fixedParameters is fixed_args.
type fixedParameters struct {
	sums      uintptr // of n I32
	exponents uintptr // of the blocks' I8
	n         int     // elements
	skip      int     // elements of the first block before them, less than FixedBlock
	bits      int     // of a term below its exponent, 1 to 30
	x         uintptr // of n elements
	add       uint64  // of store: 1 adds to sums, 0 replaces them
	divisor   int     // divisor of load: at least 1; 0 for other kernels
	factor    uintptr // of the F32 that load multiplies by; 0 means 1
}

// squareParameters is square_args.
type squareParameters struct {
	control   uintptr `cu:"c"` // of the launches' common state
	parts     uintptr // of pairs of 64-bit words: the largest height, and one for each block
	sums      uintptr // of n I32
	exponents uintptr // of the blocks' I8
	n         int     // elements
	skip      int     // elements of the first block before them, less than FixedBlock
	bits      int     // of a term below its exponent, 1 to 30
	divisor   int     // divisor of sums, at least 1
	sum       uintptr // of the F64 that is written
}

// clipFactorParameters are the parameters of clip_factor.
type clipFactorParameters struct {
	factor  uintptr // of the F32 that is written
	squares uintptr // of m F64
	m       int     // at least 1
	share   float64 // factor of the sum of squares
	limit   float64 // limit of the norm
}

// refineParameters is refine_args.
type refineParameters struct {
	control   uintptr             `cu:"c"` // of the launches' common state
	x         uintptr             // of F32
	n         int                 // elements
	threshold uintptr             // of an F32, in place
	k         int                 // number of entries that should reach it
	m         int                 // factors in use; 0 leaves the threshold
	factors   [maxFactors]float32 // ascending; unused ones are 0
}

// kernels/select.cu

// segmentsParameters is segments: the entries listed by the warps of pick.
type segmentsParameters struct {
	idx    uintptr // of I32, a segment for each warp
	val    uintptr // of F32, the same
	count  uintptr // of a U32 for each warp, followed by one for each block
	room   int     // entries of a warp's segment
	blocks int     // blocks of pick; 0 without pick
}

// siftedParameters is sifted.
type siftedParameters struct {
	counts     uintptr `cu:"above"` // of a U32 for each warp and block: entries that need no decision by cut
	candidates uintptr // of 64-bit words: entries that cut decides on
	room       int     // candidates at most
}

// pickParameters is pick_args.
type pickParameters struct {
	control uintptr            `cu:"c"`  // of the launches' common state
	target  segmentsParameters `cu:"to"` // not written by pickNone
	x       uintptr            // of n F32: an array, or the values of a list
	idx     uintptr            // of the indices of a list; 0 for an array
	n       int                // elements, or capacity of the list
	length  uintptr            // of the I32 with the list's length; 0: it is n
	gradientParameters
	take      uint64  // 1 stores zeros for selected entries, 0 leaves them
	mode      int     // a pickMode
	threshold uintptr // of an F32, followed by its age (pickNear) or margin (pickTop); 0: no threshold
	interval  int     // for pickNear: calls that a threshold serves; 0: while it is accepted
	keep      uintptr // of n F32 that receive the values before the gradient is added; 0 for none
}

// siftParameters is sift_args.
type siftParameters struct {
	control uintptr            `cu:"c"`    // of the launches' common state
	source  segmentsParameters `cu:"from"` // entries listed by pick
	target  siftedParameters   `cu:"to"`   // entries for cut to decide on
	n       int                // elements, or capacity of the list
	length  uintptr            // of the I32 with the list's length; 0: it is n
	k       int                // entries wanted
}

// cutParameters is cut_args.
type cutParameters struct {
	control   uintptr            `cu:"c"` // of the launches' common state
	status    uintptr            // of a 64-bit word for each tile
	ties      uintptr            // the same, for entries that equal the threshold
	source    segmentsParameters `cu:"from"` // entries listed by pick, if picked is 1
	sifted    siftedParameters   // results of sift
	x         uintptr            // of n F32: an array, or the values of a list
	n         int                // elements, or capacity of the list
	idx       uintptr            // of the indices of a list; 0 for an array
	length    uintptr            // of the I32 with the list's length; 0: it is n
	picked    uint64             // 1 after pick; 0: all of x is the source
	dst       listParameters     // receives the selected entries
	k         int                // entries wanted, for top-k and near
	take      uint64             // 1 stores zeros for selected entries, 0 leaves them
	zeros     uint64             // 1: zeros may be among the k largest
	threshold uintptr            // of the threshold's F32, which top-k and near write; 0 for none
	age       uintptr            // of the threshold's I32, for near; 0 for none
	used      uintptr            // of an F32 that receives the threshold that was used; 0 for none
	margin    uintptr            // of the guess's F32, for top-k; 0 for none
	min       int                // minimum number of entries for near
	step      float64            // for near: the correction of a threshold; 0 for none
	shared    uintptr            // of the shared lists that receive a copy of dst; 0 for none
}

// cutOutsideParameters is outside_args.
type cutOutsideParameters struct {
	cut      cutParameters   // cut of a list
	without  uintptr         // of two I32; indices between them are not cut; 0 cuts all
	residual arrayParameters `cu:"rest"` // receives the dropped entries; its p is 0 for none
}

// kernels/lists.cu

// restorationParameters is back.
type restorationParameters struct {
	dst   arrayParameters // array that receives the entries
	l     listParameters  // entries
	taken listParameters  // entries whose indices are skipped; its n is 0 for none
}

func restorationOf(r kernel.Restoration) restorationParameters {
	return restorationParameters{
		dst:   arrayOf(r.Dst),
		l:     listOf(r.L),
		taken: listOf(r.Taken),
	}
}

// scatterParameters is scatter_args.
type scatterParameters struct {
	restorationParameters
	scale float64 // factor of scatter_add; 1 for others
}

// lowerBoundsParameters is bounds_args.
type lowerBoundsParameters struct {
	l         listParameters // list whose indices are counted
	bounds    uintptr        // of m I32
	m         int            // bounds
	positions uintptr        // of m I32 to write
	lengths   uintptr        // of m-1 I32 to write; 0 for none
}

// sampleParameters is sample_args.
type sampleParameters struct {
	l         listParameters        // list whose indices are read
	n         int                   // the range of indices, for an empty list
	m         int                   // quantiles in use
	dst       uintptr               // of m I32
	quantiles [maxQuantiles]float64 // in [0, 1); unused ones are 0
}

// balanceParameters is balance_args.
type balanceParameters struct {
	control uintptr `cu:"c"` // of the launches' common state
	samples uintptr // of m I32, which are sorted in place
	sorted  uintptr // of m I32, scratch memory
	m       int     // samples, at least 1
	n       int     // the range of indices
	bounds  uintptr // of parts+1 I32 to write
	parts   int     // at least 1
}

// countAboveParameters is count_args.
type countAboveParameters struct {
	control    uintptr        `cu:"c"` // of the launches' common state
	l          listParameters // list whose values are counted
	thresholds uintptr        // of m F32
	m          int            // thresholds, at most maxCounts
	counts     uintptr        // of m I32 to write
}

// narrowParameters is narrow_args.
type narrowParameters struct {
	bracket    uintptr // of two U32, in place
	counts     uintptr // of m I32 of the round before; 0 begins a search
	k          int     // rank of the magnitude that is searched
	thresholds uintptr // of m F32 to write
	m          int     // thresholds in a round
}

// putListsParameters is put_args.
type putListsParameters struct {
	table uintptr                    `cu:"to"`   // of the 64-bit words to write
	words int                        `cu:"n"`    // 64-bit words of the lists in use
	lists [listsOfPut]listParameters `cu:"word"` // unused ones are zero
}

// mergeParameters is merge_args.
type mergeParameters struct {
	control     uintptr                     `cu:"c"` // of the launches' common state
	status      uintptr                     // of unite: of a 64-bit word for each tile
	dst         uintptr                     // of merge
	union       listParameters              `cu:"to"` // of unite
	n           int                         // elements of dst, or the range of indices
	scale       float64                     // factor of values
	faults      uintptr                     // of the I32 that counts indices beyond n; 0: they are not counted
	excess      uintptr                     `cu:"rest"` // of merge
	threshold   uintptr                     // of unite
	shared      uintptr                     // of unite
	restoration restorationParameters       `cu:"back"` // of merge
	count       int                         // lists
	table       uintptr                     // of the lists, if there are too many for lists; otherwise 0
	lists       [inlineLists]listParameters `cu:"list"` // unused ones are zero; unused if table is set
}

// kernels/pieces.cu

// pieceParameters is piece.
type pieceParameters struct {
	source  listParameters `cu:"from"` // list to copy from
	start   uintptr        // of the I32 at which the piece begins; 0: at the list's first entry
	end     uintptr        // of the I32 at which it ends; 0: after the last entry
	byIndex uint64         // 1: start and end are indices; 0: positions
	idx     uintptr        // of the target's I32
	val     uintptr        // of the target's F32
	room    int            // capacity of the target in entries
	length  uintptr        // of the I32 that receives the target's length
}

// copyPiecesParameters is pieces_args.
type copyPiecesParameters struct {
	count  int                        // pieces in use
	pieces [maxPieces]pieceParameters // unused ones are zero
}

// kernels/codec.cu

// quantizeParameters is quantize_args.
type quantizeParameters struct {
	dst   uintptr // of the codec's bytes
	codec uint64  // a kernel.Codec that quantizes
	src   uintptr // of n F32
	n     int     // elements
	lost  uintptr // of n F32 that receive the rounding errors; 0 for none
}

// dequantizeParameters is dequantize_args.
type dequantizeParameters struct {
	dst   uintptr // of n F32
	codec uint64  // a kernel.Codec that quantizes
	src   uintptr // of the codec's bytes
	n     int     // elements, at least 1
	add   uint64  // 1 adds to dst, 0 replaces it
}

// encodeParameters is encode_args.
type encodeParameters struct {
	control  uintptr         `cu:"c"` // of the launches' common state
	status   uintptr         // of a 64-bit word for each tile
	l        listParameters  // the entries
	codec    uint64          // a kernel.Codec that encodes
	fit      int             // capacity in entries
	message  uintptr         // of the bytes to write
	capacity int             // bytes, at least 8
	length   uintptr         // of the I32 that receives the message's length in bytes; 0 for none
	lost     arrayParameters // receives the rounding errors; its p is 0 for none
}

// decodeParameters is decode_args.
type decodeParameters struct {
	codec    uint64         // a kernel.Codec that encodes
	message  uintptr        // of the bytes to read
	capacity int            // bytes
	dst      listParameters // its length is written
}

// topKChunksParameters is chunks_args.
type topKChunksParameters struct {
	x uintptr // of n F32
	gradientParameters
	keep   uintptr // of n F32 that receive the values before the gradient is added; 0 for none
	n      int     // elements
	take   uint64  // 1 stores zeros for selected entries, 0 leaves them
	k      int     // entries of a chunk
	chunk  int     // elements of a chunk, at least 1
	idx    uintptr // of I32
	val    uintptr // of F32
	length uintptr // of the I32 that receives the number of entries; 0 for none
}

// kernels/reduce.cu

// reduceParameters is reduce_args.
type reduceParameters struct {
	dst      uintptr                     // of n elements
	operands [window.MaxOperands]uintptr // of n elements each, in the device's memory or the host's
	bytes    int                         // of n elements
	count    uint32                      // operands
	op       uint32                      // as package elements numbers it
	aligned  uint64                      // 1: all addresses are multiples of packBytes
}
