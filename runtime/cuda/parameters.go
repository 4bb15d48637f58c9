package cuda

import (
	"github.com/tutti-go/tutti/runtime/kernel"
)

// The parameters of each kernel are a structure here. It is laid out as the one in kernels/*.cu that its
// comment names, or as the parameters of functions that take one after the other: whole 64-bit words, of
// which the kernel reads as much as the parameter's type has. Fields have the names of the device's, or say
// in their tags what those are; buildEmulator has the compiler compare where they are.

// listParameters is entries of kernels/order.cuh.
type listParameters struct {
	idx    uintptr
	val    uintptr
	n      int
	length uintptr
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
	p      uintptr
	n      int
	faults uintptr
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
	from   uintptr
	grad   uintptr
	kind   uint64 `cu:"type"` // as kernels/elements.cuh numbers them
	factor uintptr
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
	dst   uintptr
	n     int
	value uint64
}

// stridedParameters are the parameters of the kernels that copy_strided and transpose have for each size of elements.
type stridedParameters struct {
	dst    uintptr
	src    uintptr
	layout stridedLayout
}

// Of kernels/dense.cu.

// scaleParameters are the parameters of scale, for each type of elements.
type scaleParameters struct {
	x      uintptr
	n      int
	factor uintptr
}

// storeParameters are the parameters of store, for each type of elements.
type storeParameters struct {
	dst    uintptr
	src    uintptr
	n      int
	factor float32
	_      uint32
	excess uintptr
}

// copyParameters is copy.
type copyParameters struct {
	dst  uintptr
	src  uintptr
	n    int
	size int
}

// copyIfParameters is copy_if_args.
type copyIfParameters struct {
	flags  uintptr
	m      int
	count  int
	copies [kernel.MaxCopies]copyParameters
}

// fitParameters is fit_args.
type fitParameters struct {
	control uintptr `cu:"c"`
	parts   uintptr
	x       uintptr
	n       int
	gradientParameters
	z         float64
	threshold uintptr
	keep      uintptr
}

// sumSquaresParameters is sum_args.
type sumSquaresParameters struct {
	control uintptr `cu:"c"`
	parts   uintptr
	x       uintptr
	n       int
	sum     uintptr
}

// fixedParameters is fixed_args.
type fixedParameters struct {
	sums      uintptr
	exponents uintptr
	n         int
	skip      int
	bits      int
	x         uintptr
	add       uint64
	divisor   int
	factor    uintptr
}

// squareParameters is square_args.
type squareParameters struct {
	control   uintptr `cu:"c"`
	parts     uintptr
	sums      uintptr
	exponents uintptr
	n         int
	skip      int
	bits      int
	divisor   int
	sum       uintptr
}

// clipFactorParameters are the parameters of clip_factor.
type clipFactorParameters struct {
	factor  uintptr
	squares uintptr
	m       int
	share   float64
	limit   float64
}

// refineParameters is refine_args.
type refineParameters struct {
	control   uintptr `cu:"c"`
	x         uintptr
	n         int
	threshold uintptr
	k         int
	m         int
	factors   [maxFactors]float32
}

// Of kernels/select.cu.

// segmentsParameters is segments: what the warps of pick have listed.
type segmentsParameters struct {
	idx    uintptr
	val    uintptr
	count  uintptr
	room   int
	blocks int
}

// siftedParameters is sifted.
type siftedParameters struct {
	counts     uintptr `cu:"above"`
	candidates uintptr
	room       int
}

// pickParameters is pick_args.
type pickParameters struct {
	control uintptr            `cu:"c"`
	target  segmentsParameters `cu:"to"`
	x       uintptr
	idx     uintptr
	n       int
	length  uintptr
	gradientParameters
	take      uint64
	mode      int
	threshold uintptr
	interval  int
	keep      uintptr
}

// siftParameters is sift_args.
type siftParameters struct {
	control uintptr            `cu:"c"`
	source  segmentsParameters `cu:"from"`
	target  siftedParameters   `cu:"to"`
	n       int
	length  uintptr
	k       int
}

// cutParameters is cut_args.
type cutParameters struct {
	control   uintptr `cu:"c"`
	status    uintptr
	ties      uintptr
	source    segmentsParameters `cu:"from"`
	sifted    siftedParameters
	x         uintptr
	n         int
	idx       uintptr
	length    uintptr
	picked    uint64
	dst       listParameters
	k         int
	take      uint64
	zeros     uint64
	threshold uintptr
	age       uintptr
	used      uintptr
	margin    uintptr
	min       int
	step      float64
	shared    uintptr
}

// cutOutsideParameters is outside_args.
type cutOutsideParameters struct {
	cut      cutParameters
	without  uintptr
	residual arrayParameters `cu:"rest"`
}

// Of kernels/lists.cu.

// restorationParameters is back.
type restorationParameters struct {
	dst   arrayParameters
	l     listParameters
	taken listParameters
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
	scale float64
}

// lowerBoundsParameters is bounds_args.
type lowerBoundsParameters struct {
	l         listParameters
	bounds    uintptr
	m         int
	positions uintptr
	lengths   uintptr
}

// sampleParameters is sample_args.
type sampleParameters struct {
	l         listParameters
	n         int
	m         int
	dst       uintptr
	quantiles [maxQuantiles]float64
}

// balanceParameters is balance_args.
type balanceParameters struct {
	control uintptr `cu:"c"`
	samples uintptr
	sorted  uintptr
	m       int
	n       int
	bounds  uintptr
	parts   int
}

// countAboveParameters is count_args.
type countAboveParameters struct {
	control    uintptr `cu:"c"`
	l          listParameters
	thresholds uintptr
	m          int
	counts     uintptr
}

// narrowParameters is narrow_args.
type narrowParameters struct {
	bracket    uintptr
	counts     uintptr
	k          int
	thresholds uintptr
	m          int
}

// putListsParameters is put_args.
type putListsParameters struct {
	table uintptr                    `cu:"to"`
	words int                        `cu:"n"`
	lists [listsOfPut]listParameters `cu:"word"`
}

// mergeParameters is merge_args.
type mergeParameters struct {
	control     uintptr `cu:"c"`
	status      uintptr
	dst         uintptr        // of merge
	union       listParameters `cu:"to"` // of unite
	n           int
	scale       float64
	faults      uintptr
	excess      uintptr               `cu:"rest"` // of merge
	threshold   uintptr               // of unite
	shared      uintptr               // of unite
	restoration restorationParameters `cu:"back"` // of merge
	count       int
	table       uintptr                     // of lists that are too many; otherwise 0
	lists       [inlineLists]listParameters `cu:"list"`
}

// Of kernels/pieces.cu.

// pieceParameters is piece.
type pieceParameters struct {
	source  listParameters `cu:"from"`
	start   uintptr
	end     uintptr
	byIndex uint64
	idx     uintptr
	val     uintptr
	room    int
	length  uintptr
}

// copyPiecesParameters is pieces_args.
type copyPiecesParameters struct {
	count  int
	pieces [maxPieces]pieceParameters
}

// Of kernels/codec.cu.

// quantizeParameters is quantize_args.
type quantizeParameters struct {
	dst   uintptr
	codec uint64
	src   uintptr
	n     int
	lost  uintptr
}

// dequantizeParameters is dequantize_args.
type dequantizeParameters struct {
	dst   uintptr
	codec uint64
	src   uintptr
	n     int
	add   uint64
}

// encodeParameters is encode_args.
type encodeParameters struct {
	control  uintptr `cu:"c"`
	status   uintptr
	l        listParameters
	codec    uint64
	fit      int
	message  uintptr
	capacity int
	length   uintptr
	lost     arrayParameters
}

// decodeParameters is decode_args.
type decodeParameters struct {
	codec    uint64
	message  uintptr
	capacity int
	dst      listParameters
}

// topKChunksParameters is chunks_args.
type topKChunksParameters struct {
	x uintptr
	gradientParameters
	keep   uintptr
	n      int
	take   uint64
	k      int
	chunk  int
	idx    uintptr
	val    uintptr
	length uintptr
}
