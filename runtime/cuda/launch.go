package cuda

import (
	"embed"
	"errors"
	"fmt"
	goruntime "runtime"
	"sync"

	"github.com/tutti-go/tutti/internal/hostmem"
)

// The kernels' PTX, compiled from kernels/*.cu by kernels/generate.sh. The driver compiles it for the GPU when it is
// loaded.
//
//go:embed kernels/*.ptx.gz
var ptx embed.FS

// kernelID numbers the entry points of the PTX; kernelNames has their names. They are grouped by file.
type kernelID int

const (
	fillU64 kernelID = iota
	copyStrided1
	copyStrided2
	copyStrided4
	copyStrided8
	transpose1
	transpose2
	transpose4
	transpose8

	kernelScaleF32
	kernelScaleF16
	kernelScaleBF16
	kernelStoreF32
	kernelStoreF16
	kernelStoreBF16
	kernelCopyIf
	kernelFit
	kernelSumSquaresF32
	kernelSumSquaresF16
	kernelSumSquaresBF16
	kernelClipFactor
	kernelRefine

	kernelScatterAdd
	kernelZeroAt
	kernelGiveBack
	kernelLowerBounds
	kernelSample
	kernelBalance
	kernelCountAbove
	kernelNarrow
	kernelPutWords
	kernelMergeF32
	kernelMergeF16
	kernelMergeBF16
	kernelUnite
	kernelUniteTwo

	kernelPick
	kernelSift
	kernelCut
	kernelCutOutside

	kernelCopyPieces

	kernelQuantize
	kernelDequantize
	kernelEncode
	kernelDecode
	kernelTopKChunks

	kernelRaiseExponentsF32
	kernelRaiseExponentsF16
	kernelRaiseExponentsBF16
	kernelStoreFixedF32
	kernelStoreFixedF16
	kernelStoreFixedBF16
	kernelLoadFixedF32
	kernelLoadFixedF16
	kernelLoadFixedBF16
	kernelTopHeight
	kernelSquareFixed

	kernelReduceF64
	kernelReduceF32
	kernelReduceF16
	kernelReduceBF16
	kernelReduceE4M3
	kernelReduceE5M2
	kernelReduceI64
	kernelReduceI32
	kernelReduceI16
	kernelReduceI8

	kernelCount
)

var kernelNames = [kernelCount]string{
	fillU64:              "fill_u64",
	copyStrided1:         "copy_strided_1",
	copyStrided2:         "copy_strided_2",
	copyStrided4:         "copy_strided_4",
	copyStrided8:         "copy_strided_8",
	transpose1:           "transpose_1",
	transpose2:           "transpose_2",
	transpose4:           "transpose_4",
	transpose8:           "transpose_8",
	kernelScaleF32:       "scale_f32",
	kernelScaleF16:       "scale_f16",
	kernelScaleBF16:      "scale_bf16",
	kernelStoreF32:       "store_f32",
	kernelStoreF16:       "store_f16",
	kernelStoreBF16:      "store_bf16",
	kernelCopyIf:         "copy_if",
	kernelFit:            "fit",
	kernelSumSquaresF32:  "sum_squares_f32",
	kernelSumSquaresF16:  "sum_squares_f16",
	kernelSumSquaresBF16: "sum_squares_bf16",
	kernelClipFactor:     "clip_factor",
	kernelRefine:         "refine",
	kernelScatterAdd:     "scatter_add",
	kernelZeroAt:         "zero_at",
	kernelGiveBack:       "give_back",
	kernelLowerBounds:    "lower_bounds",
	kernelSample:         "sample",
	kernelBalance:        "balance",
	kernelCountAbove:     "count_above",
	kernelNarrow:         "narrow_bracket",
	kernelPutWords:       "put_words",
	kernelMergeF32:       "merge_f32",
	kernelMergeF16:       "merge_f16",
	kernelMergeBF16:      "merge_bf16",
	kernelUnite:          "unite",
	kernelUniteTwo:       "unite_two",
	kernelPick:           "pick",
	kernelSift:           "sift",
	kernelCut:            "cut",
	kernelCutOutside:     "cut_outside",
	kernelCopyPieces:     "copy_pieces",
	kernelQuantize:       "quantize",
	kernelDequantize:     "dequantize",
	kernelEncode:         "encode",
	kernelDecode:         "decode",
	kernelTopKChunks:     "topk_chunks",

	kernelRaiseExponentsF32:  "raise_exponents_f32",
	kernelRaiseExponentsF16:  "raise_exponents_f16",
	kernelRaiseExponentsBF16: "raise_exponents_bf16",
	kernelStoreFixedF32:      "store_fixed_f32",
	kernelStoreFixedF16:      "store_fixed_f16",
	kernelStoreFixedBF16:     "store_fixed_bf16",
	kernelLoadFixedF32:       "load_fixed_f32",
	kernelLoadFixedF16:       "load_fixed_f16",
	kernelLoadFixedBF16:      "load_fixed_bf16",
	kernelTopHeight:          "top_height",
	kernelSquareFixed:        "square_fixed",

	kernelReduceF64:  "reduce_f64",
	kernelReduceF32:  "reduce_f32",
	kernelReduceF16:  "reduce_f16",
	kernelReduceBF16: "reduce_bf16",
	kernelReduceE4M3: "reduce_e4m3",
	kernelReduceE5M2: "reduce_e5m2",
	kernelReduceI64:  "reduce_i64",
	kernelReduceI32:  "reduce_i32",
	kernelReduceI16:  "reduce_i16",
	kernelReduceI8:   "reduce_i8",
}

// loadKernels compiles and loads PTX into the context, and looks up the kernels in [first, end), unless they are
// loaded.
func (r *Runtime) loadKernels(file string, first, end kernelID) error {
	if r.kernels[end-1] != 0 {
		return nil
	}
	text, err := ptx.ReadFile("kernels/" + file)
	if err != nil {
		return err
	}
	module, err := r.loadModule(text)
	if err != nil {
		return fmt.Errorf("load %s: %w", file, err)
	}
	for k := first; k < end; k++ {
		name := append([]byte(kernelNames[k]), 0)
		r.kernels[k], err = r.get(r.drv.sym.ModuleGetFunc, module, hostmem.Addr(name))
		goruntime.KeepAlive(name)
		if err != nil {
			return errors.Join(fmt.Errorf("kernel %s: %w", kernelNames[k], err), r.destroy(module))
		}
	}
	return nil
}

// block is the number of threads of a block. blocksPerSM is the number of blocks of a grid-stride kernel for each
// multiprocessor: enough to fill it (2048 threads) once.
const (
	block       = 256
	blocksPerSM = 8
)

// early is added to a kernelID to launch the kernel before the one ahead of it in the stream has ended. Its source
// calls start, and the kernel ahead must not wait for another GPU once this one may be launched: that wait may be for
// work that needs the room that this kernel occupies.
const early kernelID = 1 << 16

func (k kernelID) earlyIf(yes bool) kernelID {
	if yes {
		return k | early
	}
	return k
}

// arguments are the parameters of a launch. cuLaunchKernel takes an array of pointers to them. Both are in one heap
// object from a pool, so that a launch allocates nothing. Each word may be a parameter; a kernel with one structure as
// its parameter reads as many words as the structure has.
type arguments struct {
	values [maxValues]uint64  // parameters, or the words of one structure
	params [maxParams]uintptr // addresses of the first values

	config    launchConfig    // configuration of an early launch
	dependent launchAttribute // of config
}

const (
	maxValues = 128
	maxParams = 8
)

var argumentPool = sync.Pool{New: func() any {
	a := &arguments{dependent: launchAttribute{id: attributeDependent, value: [64]byte{1}}}
	a.config = launchConfig{
		block:      [3]uint32{block, 1, 1},
		attributes: hostmem.AddrOf(&a.dependent),
		count:      1,
	}
	for i := range a.params {
		a.params[i] = hostmem.Addr(a.values[i:])
	}
	return a
}}

// launch runs a kernel on the compute stream, with this number of blocks, but at most perSM for each multiprocessor. P
// is the kernel's structure in parameters.go.
func launch[P any](r *Runtime, k kernelID, blocks, perSM int, parameters *P) error {
	return launchOn(r, r.compute.handle, k, blocks, perSM, parameters)
}

// launchOn is launch on another stream.
func launchOn[P any](r *Runtime, stream uintptr, k kernelID, blocks, perSM int, parameters *P) error {
	a := argumentPool.Get().(*arguments)
	hostmem.Slice[P](a.params[0], 1)[0] = *parameters
	err := r.launchArguments(stream, k, blocks, perSM, a)
	argumentPool.Put(a)
	return err
}

// blocksOf returns the number of blocks for n threads.
func blocksOf(n int) int { return (n + block - 1) / block }

// grid returns the number of blocks of a launch.
func (r *Runtime) grid(blocks, perSM int) int {
	return max(min(blocks, r.info.Multiprocessors*perSM), 1)
}

func (r *Runtime) launchArguments(stream uintptr, k kernelID, blocks, perSM int, a *arguments) error {
	starts := k&early != 0 && r.starts
	k &^= early
	grid := r.grid(blocks, perSM)
	if starts {
		a.config.grid = [3]uint32{uint32(grid), 1, 1}
		a.config.stream = stream
		return r.do(r.drv.sym.LaunchKernelEx.As(kernelNames[k]),
			hostmem.AddrOf(&a.config), r.kernels[k], hostmem.Addr(a.params[:]), 0)
	}
	return r.do(r.drv.sym.LaunchKernel.As(kernelNames[k]), r.kernels[k],
		uintptr(grid), 1, 1, block, 1, 1, 0, stream, hostmem.Addr(a.params[:]), 0)
}
