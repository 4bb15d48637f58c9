// Reductions of whole arrays. An operand may be in memory of the host that the driver has registered: reads of several
// packs are in flight in each thread.
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

// The reduction of packs i, i + step, … of all operands, in the order of the operands.
template <typename T, u32 U, typename S> DEVICE void reduce_packs(const reduce_args &a, u64 i, u64 step, u64 end, S shape) {
  lanes<T> sum[U];
  for (u32 k = 0; k < a.count; k++) {
    pack v[U];
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (i + u * step < end) v[u] = read(a.operands[k] + (i + u * step) * 16, a.bytes - (i + u * step) * 16, shape);
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      if (i + u * step >= end) continue;
      if (k == 0) sum[u] = widen<T>(v[u]);
      if (k > 0 || a.op == any || a.op == all) combine<T>(a.op, sum[u], v[u]); // normalizes a byte to a truth value
    }
  }
#pragma unroll
  for (u32 u = 0; u < U; u++) {
    const u64 at = i + u * step;
    if (at < end) write(a.dst + at * 16, a.bytes - at * 16, finish<T>(a.op, sum[u], a.count), shape);
  }
}

template <typename T> DEVICE void reduce(const reduce_args &a) {
  const u32 U = T::size > 1 ? 4 : 2; // packs of a thread; lanes of narrow types are wider than they are
  const u64 end = (a.bytes + 15) / 16, whole_packs = a.aligned ? a.bytes / 16 : 0, step = thread_count();
  go_through<U>(
      thread_index(), whole_packs, end, step,
      [&](u64 i) { reduce_packs<T, U>(a, i, step, whole_packs, whole()); },
      [&](u64 i) { reduce_packs<T, 1>(a, i, step, end, ragged()); });
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
