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
#include "../kernels/delta.cu"

namespace {

struct kernel {
  const char *name;
  u32 parameters;
  u32 bytes[8];
  void (*call)(void *const *parameters);
};

template <u32... i> struct indices {};
template <u32 n, u32... i> struct first : first<n - 1, n - 1, i...> {};
template <u32... i> struct first<0, i...> { typedef indices<i...> type; };

template <auto f> struct trampoline;
template <typename... A, void (*f)(A...)> struct trampoline<f> {
  template <u32... i> static void apply(void *const *p, indices<i...>) { f(*(A *)p[i]...); }
  static void call(void *const *p) { apply(p, typename first<sizeof...(A)>::type{}); }
  static constexpr kernel of(const char *name) { return kernel{name, sizeof...(A), {sizeof(A)...}, call}; }
};

const kernel kernels[] = {
#define K(name) trampoline<name>::of(#name)
  K(scale_f32), K(scale_f16), K(scale_bf16), K(store_f32), K(store_f16), K(store_bf16), K(copy_if), K(fit),
  K(sum_squares_f32), K(sum_squares_f16), K(sum_squares_bf16), K(clip_factor), K(refine), K(scatter_add),
  K(scatter_set), K(zero_at), K(give_back), K(lower_bounds), K(sample), K(balance), K(count_above),
  K(narrow_bracket), K(put_words), K(merge_f32), K(merge_f16), K(merge_bf16), K(unite), K(unite_two), K(pick), K(sift), K(cut), K(cut_outside), K(copy_pieces),
  K(quantize), K(dequantize), K(encode), K(decode), K(topk_chunks),
  K(diff_1), K(diff_2), K(diff_4), K(diff_8), K(patch_1), K(patch_2), K(patch_4), K(patch_8),
};

} // namespace

/* What driver.c calls: the number of a kernel, -1 if there is none; the bytes of
 * its parameters, one after the other; and its run. */
extern "C" int emulated_find(const char *name) {
  for (u32 i = 0; i < sizeof kernels / sizeof *kernels; i++)
    if (strcmp(kernels[i].name, name) == 0) return (int)i;
  return -1;
}
extern "C" unsigned emulated_parameter(int k, unsigned i) { return i < kernels[k].parameters ? kernels[k].bytes[i] : 0; }
extern "C" void emulated_run(int k, unsigned grid, unsigned size, void **parameters) {
  struct call { int k; void **parameters; } c = {k, parameters};
  body = [](void *p) { kernels[((call *)p)->k].call(((call *)p)->parameters); };
  body_argument = &c;
  thread_total = size, block_total = grid;
  for (block_now = 0; block_now < grid; block_now++) run_block();
}
