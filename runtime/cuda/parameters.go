package cuda

import (
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The parameters of each kernel are a structure here. It is laid out as the one in kernels/*.cu that its
// comment names, or as the parameters of functions that take one after the other: whole 64-bit words, of
// which the kernel reads as much as the parameter's type has. Fields have the names of the device's, or say
// in their tags what those are; buildEmulator has the compiler compare where they are. A uintptr is an address in the
// GPU's memory, and its comment says what lies there. The values are read when the launch is submitted.

// listParameters is entries of kernels/order.cuh.
type listParameters struct {
	idx    uintptr // of I32, ascending
	val    uintptr // of F32; not read where only indices count
	n      int     // entries, or those that there is room for
	length uintptr // of the I32 with the number of entries; 0 where that is n
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
	p      uintptr // of F32; 0 where there is no array
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

// gradientParameters are what a gradient is added to, and the gradient.
type gradientParameters struct {
	from   uintptr // of F32; where the gradient is added in place it is x
	grad   uintptr // of elements of kind; 0 where kind is 0
	kind   uint64  `cu:"type"` // as kernels/elements.cuh numbers them
	factor uintptr // of the F32 that the gradient is multiplied by; 0 is one
}

func gradientOf(src kernel.Source) gradientParameters {
	return gradientParameters{
		from:   augend(src),
		grad:   src.Grad,
		kind:   gradientKind(src),
		factor: src.Factor,
	}
}

// flag is a condition as a kernel reads it.
func flag(condition bool) uint64 {
	if condition {
		return 1
	}
	return 0
}

// Of kernels/memory.cu.

// fillParameters are the parameters of fill_u64.
type fillParameters struct {
	dst   uintptr // of 64-bit words
	n     int     // words
	value uint64  // of each of them
}

// stridedParameters are the parameters of the kernels that copy_strided and transpose have for each size of elements.
type stridedParameters struct {
	dst    uintptr       // of the first element
	src    uintptr       // the same
	layout stridedLayout // of both
}

// Of kernels/dense.cu.

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
	factor float32 // that each is multiplied by
	_      uint32  // parameters are whole words
	excess uintptr // of n F32 that get what is beyond the type's range; 0: that becomes infinite
}

// copyParameters is copy.
type copyParameters struct {
	dst  uintptr // of elements
	src  uintptr // the same; 0 stores zeros
	n    int     // elements
	size int     // bytes of one
}

// copyIfParameters is copy_if_args.
type copyIfParameters struct {
	flags  uintptr                          // of m I32, of which one that is not 0 is the condition
	m      int                              // at least 1
	count  int                              // copies in use
	copies [kernel.MaxCopies]copyParameters // those behind count are zero
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
	keep      uintptr // of n F32 that get what the gradient is added to; 0 for none
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
	divisor   int     // of load: at least 1; 0 of the others
	factor    uintptr // of load: of an F32; 0 is one
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
	divisor   int     // of sums, at least 1
	sum       uintptr // of the F64 that is written
}

// clipFactorParameters are the parameters of clip_factor.
type clipFactorParameters struct {
	factor  uintptr // of the F32 that is written
	squares uintptr // of m F64
	m       int     // at least 1
	share   float64 // that the sum of squares is multiplied by
	limit   float64 // of the norm
}

// refineParameters is refine_args.
type refineParameters struct {
	control   uintptr             `cu:"c"` // of the launches' common state
	x         uintptr             // of F32
	n         int                 // elements
	threshold uintptr             // of an F32, in place
	k         int                 // entries that should pass
	m         int                 // factors in use; 0 leaves the threshold
	factors   [maxFactors]float32 // ascending; those behind m are 0
}

// Of kernels/select.cu.

// segmentsParameters is segments: what the warps of pick have listed.
type segmentsParameters struct {
	idx    uintptr // of I32, room for each warp
	val    uintptr // of F32, the same
	count  uintptr // of a U32 for each warp, and behind them for each block
	room   int     // entries of a warp's segment
	blocks int     // of pick; 0 where cut comes without it
}

// siftedParameters is sifted.
type siftedParameters struct {
	counts     uintptr `cu:"above"` // of a U32 for each warp and block: entries that cut need not decide on
	candidates uintptr // of 64-bit words: entries that cut decides on
	room       int     // candidates at most
}

// pickParameters is pick_args.
type pickParameters struct {
	control uintptr            `cu:"c"`  // of the launches' common state
	target  segmentsParameters `cu:"to"` // not written by pickNone
	x       uintptr            // of n F32: an array, or the values of a list
	idx     uintptr            // of a list's indices; 0 for an array
	n       int                // elements, or entries of the list at most
	length  uintptr            // of the I32 with the list's length; 0 where that is n
	gradientParameters
	take      uint64  // 1 stores zeros where entries were selected, 0 leaves them
	mode      int     // a pickMode
	threshold uintptr // of an F32 and, of pickNear its age, of pickTop its margin; 0 is no threshold
	interval  int     // of pickNear: calls that a threshold serves; 0 is as long as it is accepted
	keep      uintptr // of n F32 that get what the gradient is added to; 0 for none
}

// siftParameters is sift_args.
type siftParameters struct {
	control uintptr            `cu:"c"`    // of the launches' common state
	source  segmentsParameters `cu:"from"` // what pick has listed
	target  siftedParameters   `cu:"to"`   // what cut has to decide on
	n       int                // elements, or entries of a list at most
	length  uintptr            // of the I32 with the list's length; 0 where that is n
	k       int                // entries wanted
}

// cutParameters is cut_args.
type cutParameters struct {
	control   uintptr            `cu:"c"` // of the launches' common state
	status    uintptr            // of a 64-bit word for each tile
	ties      uintptr            // the same, for entries that equal the threshold
	source    segmentsParameters `cu:"from"` // what pick has listed, where picked is 1
	sifted    siftedParameters   // what sift has left
	x         uintptr            // of n F32: an array, or the values of a list
	n         int                // elements, or entries of the list at most
	idx       uintptr            // of a list's indices; 0 for an array
	length    uintptr            // of the I32 with the list's length; 0 where that is n
	picked    uint64             // 1 after pick; 0: all of x is the source
	dst       listParameters     // gets the entries selected
	k         int                // entries wanted; of top-k and near
	take      uint64             // 1 stores zeros where entries were selected, 0 leaves them
	zeros     uint64             // 1: zeros may be among the k largest
	threshold uintptr            // of the threshold's F32, which top-k and near write; 0 for none
	age       uintptr            // of the threshold's I32, of near; 0 for none
	used      uintptr            // of an F32 that gets the threshold as it was used; 0 for none
	margin    uintptr            // of the guess's F32, of top-k; 0 for none
	min       int                // entries of near at least
	step      float64            // of near: the correction of a threshold; 0 is none
	shared    uintptr            // of the lists of other ranks that get dst too; 0 for none
}

// cutOutsideParameters is outside_args.
type cutOutsideParameters struct {
	cut      cutParameters   // of a list
	without  uintptr         // of two I32, between which indices take no part; 0: all do
	residual arrayParameters `cu:"rest"` // gets the entries left out; its p is 0 where nothing does
}

// Of kernels/lists.cu.

// restorationParameters is back.
type restorationParameters struct {
	dst   arrayParameters // that entries are added to
	l     listParameters  // the entries
	taken listParameters  // entries whose indices are left out; its n is 0 where none are
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
	scale float64 // of scatter_add; 1 otherwise
}

// lowerBoundsParameters is bounds_args.
type lowerBoundsParameters struct {
	l         listParameters // whose indices are counted
	bounds    uintptr        // of m I32
	m         int            // bounds
	positions uintptr        // of m I32 that are written
	lengths   uintptr        // of m-1 I32 that are written; 0 for none
}

// sampleParameters is sample_args.
type sampleParameters struct {
	l         listParameters        // whose indices are read
	n         int                   // the range of indices, for an empty list
	m         int                   // quantiles in use
	dst       uintptr               // of m I32
	quantiles [maxQuantiles]float64 // in [0, 1); those behind m are 0
}

// balanceParameters is balance_args.
type balanceParameters struct {
	control uintptr `cu:"c"` // of the launches' common state
	samples uintptr // of m I32, which get sorted
	sorted  uintptr // of m I32, for the kernel's own use
	m       int     // samples, at least 1
	n       int     // the range of indices
	bounds  uintptr // of parts+1 I32 that are written
	parts   int     // at least 1
}

// countAboveParameters is count_args.
type countAboveParameters struct {
	control    uintptr        `cu:"c"` // of the launches' common state
	l          listParameters // whose values are counted
	thresholds uintptr        // of m F32
	m          int            // thresholds, at most maxCounts
	counts     uintptr        // of m I32 that are written
}

// narrowParameters is narrow_args.
type narrowParameters struct {
	bracket    uintptr // of two U32, in place
	counts     uintptr // of m I32 of the round before; 0 begins a search
	k          int     // magnitudes sought
	thresholds uintptr // of m F32 that are written
	m          int     // thresholds of a round
}

// putListsParameters is put_args.
type putListsParameters struct {
	table uintptr                    `cu:"to"`   // of the 64-bit words that are written
	words int                        `cu:"n"`    // 64-bit words of the lists in use
	lists [listsOfPut]listParameters `cu:"word"` // those behind words are zero
}

// mergeParameters is merge_args.
type mergeParameters struct {
	control     uintptr                     `cu:"c"` // of the launches' common state
	status      uintptr                     // of unite: of a 64-bit word for each tile
	dst         uintptr                     // of merge
	union       listParameters              `cu:"to"` // of unite
	n           int                         // elements of dst, or the range of indices
	scale       float64                     // that values are multiplied by
	faults      uintptr                     // of the I32 that counts indices beyond n; 0: they are not counted
	excess      uintptr                     `cu:"rest"` // of merge
	threshold   uintptr                     // of unite
	shared      uintptr                     // of unite
	restoration restorationParameters       `cu:"back"` // of merge
	count       int                         // lists
	table       uintptr                     // of lists that are too many; otherwise 0
	lists       [inlineLists]listParameters `cu:"list"` // those behind count are zero; unused where table is set
}

// Of kernels/pieces.cu.

// pieceParameters is piece.
type pieceParameters struct {
	source  listParameters `cu:"from"` // the list that is copied from
	start   uintptr        // of the I32 where the piece begins; 0: at the list's first entry
	end     uintptr        // of the I32 where it ends; 0: behind the last
	byIndex uint64         // 1: start and end are indices; 0: positions
	idx     uintptr        // of the target's I32
	val     uintptr        // of the target's F32
	room    int            // entries that the target takes
	length  uintptr        // of the I32 with the target's length, which is written
}

// copyPiecesParameters is pieces_args.
type copyPiecesParameters struct {
	count  int                        // pieces in use
	pieces [maxPieces]pieceParameters // those behind count are zero
}

// Of kernels/codec.cu.

// quantizeParameters is quantize_args.
type quantizeParameters struct {
	dst   uintptr // of the codec's bytes
	codec uint64  // a kernel.Codec that quantizes
	src   uintptr // of n F32
	n     int     // elements
	lost  uintptr // of n F32 that get what rounding loses; 0 for none
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
	fit      int             // entries that there is room for
	message  uintptr         // of the bytes that are written
	capacity int             // bytes, at least 8
	length   uintptr         // of the I32 with the message's bytes, which is written; 0 for none
	lost     arrayParameters // gets what rounding loses; its p is 0 where nothing does
}

// decodeParameters is decode_args.
type decodeParameters struct {
	codec    uint64         // a kernel.Codec that encodes
	message  uintptr        // of the bytes that are read
	capacity int            // bytes
	dst      listParameters // whose length is written
}

// topKChunksParameters is chunks_args.
type topKChunksParameters struct {
	x uintptr // of n F32
	gradientParameters
	keep   uintptr // of n F32 that get what the gradient is added to; 0 for none
	n      int     // elements
	take   uint64  // 1 stores zeros where entries were selected, 0 leaves them
	k      int     // entries of a chunk
	chunk  int     // elements of a chunk, at least 1
	idx    uintptr // of I32
	val    uintptr // of F32
	length uintptr // of the I32 with the number of entries, which is written; 0 for none
}
