/* Runs the kernels of kernels/ on the host, for the stand-in for the driver:
 * the same text, compiled as C++, with another tutti.cuh underneath.
 *
 * Blocks run one after the other, the threads of a block as coroutines. What
 * they wait for each other at (barriers, and what the threads of a warp tell
 * each other) is checked: all have to come, and to the same kind of place. Races
 * are not found. */
#define EMULATOR "../testdata/emulator.h"
#include "../kernels/dense.cu"
#include "../kernels/lists.cu"
#include "../kernels/select.cu"
#include "../kernels/pieces.cu"
#include "../kernels/codec.cu"
#include "../kernels/fixed.cu"
namespace reductions { // element.cuh has names of the others
#include "../kernels/reduce.cu"
}
using reductions::reduce_args, reductions::max_operands;
using reductions::reduce_f64, reductions::reduce_f32, reductions::reduce_f16, reductions::reduce_bf16;
using reductions::reduce_e4m3, reductions::reduce_e5m2;
using reductions::reduce_i64, reductions::reduce_i32, reductions::reduce_i16, reductions::reduce_i8;

#define KERNELS \
  K(scale_f32), K(scale_f16), K(scale_bf16), K(store_f32), K(store_f16), K(store_bf16), K(copy_if), K(fit), \
  K(sum_squares_f32), K(sum_squares_f16), K(sum_squares_bf16), K(clip_factor), K(refine), K(scatter_add), \
  K(zero_at), K(give_back), K(lower_bounds), K(sample), K(balance), K(count_above), \
  K(narrow_bracket), K(put_words), K(merge_f32), K(merge_f16), K(merge_bf16), K(unite), K(unite_two), K(pick), K(sift), K(cut), K(cut_outside), K(copy_pieces), \
  K(quantize), K(dequantize), K(encode), K(decode), K(topk_chunks), \
  K(raise_exponents_f32), K(raise_exponents_f16), K(raise_exponents_bf16), \
  K(store_fixed_f32), K(store_fixed_f16), K(store_fixed_bf16), \
  K(load_fixed_f32), K(load_fixed_f16), K(load_fixed_bf16), K(top_height), K(square_fixed), \
  K(reduce_f64), K(reduce_f32), K(reduce_f16), K(reduce_bf16), K(reduce_e4m3), K(reduce_e5m2), \
  K(reduce_i64), K(reduce_i32), K(reduce_i16), K(reduce_i8),
#include "table.h"
