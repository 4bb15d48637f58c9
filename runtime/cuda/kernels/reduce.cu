// Reductions of whole arrays.
#include "element.cuh"

// Must match reduceParameters.
enum { max_operands = 16 };
struct reduce_args {
  char *dst; // may be an operand
  const char *operands[max_operands];
  u64 bytes;   // of each of them
  u32 count;   // operands
  u32 op;      // enum reduction
  u64 aligned; // 1: all addresses are multiples of a pack
};

// The reduction of pack i of all operands, in the order of the operands.
template <typename T, typename S> DEVICE void reduce_pack(const reduce_args &a, u64 i, S shape) {
  const u64 at = i * 16, left = a.bytes - at;
  lanes<T> sum;
#pragma unroll 1
  for (u32 k = 0; k < a.count; k++) {
    const pack v = read(a.operands[k] + at, left, shape);
    if (k == 0) sum = widen<T>(v);
    if (k > 0 || a.op == any || a.op == all) combine<T>(a.op, sum, v); // normalizes a byte to a truth value
  }
  write(a.dst + at, left, finish<T>(a.op, sum, a.count), shape);
}

template <typename T> DEVICE void reduce(const reduce_args &a) {
  const u64 whole_packs = a.aligned ? a.bytes / 16 : 0;
  go_through<1>(
      thread_index(), whole_packs, (a.bytes + 15) / 16, thread_count(),
      [&](u64 i) { reduce_pack<T>(a, i, whole()); },
      [&](u64 i) { reduce_pack<T>(a, i, ragged()); });
}

KERNEL reduce_f64(reduce_args a) { reduce<f64_element>(a); }
KERNEL reduce_f32(reduce_args a) { reduce<f32_element>(a); }
KERNEL reduce_f16(reduce_args a) { reduce<f16_element>(a); }
KERNEL reduce_bf16(reduce_args a) { reduce<bf16_element>(a); }
KERNEL reduce_e4m3(reduce_args a) { reduce<e4m3_element>(a); }
KERNEL reduce_e5m2(reduce_args a) { reduce<e5m2_element>(a); }
KERNEL reduce_i64(reduce_args a) { reduce<i64_element>(a); }
KERNEL reduce_i32(reduce_args a) { reduce<i32_element>(a); }
KERNEL reduce_i16(reduce_args a) { reduce<i16_element>(a); }
KERNEL reduce_i8(reduce_args a) { reduce<i8_element>(a); }
