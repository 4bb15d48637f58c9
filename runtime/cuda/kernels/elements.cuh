// Arrays, read by warps in tiles of one or more groups of four elements ("quads") for each thread: sixteen bytes at a
// time, adjacent threads from adjacent addresses.
#pragma once
#include "order.cuh"

enum { quad = 4 };

template <typename T> struct vector { T lane[quad]; };

// Four floats that are loaded and stored together; the same as a quad of T; and a test whether any of them is not +0.
typedef float four __attribute__((ext_vector_type(quad)));
template <typename T> DEVICE words<quad * sizeof(T) / 4> pack(const four &x) {
  if constexpr (__is_same(T, f16))
    return {f32_to_f16(x[0], x[1]), f32_to_f16(x[2], x[3])};
  else if constexpr (__is_same(T, bf16))
    return {f32_to_bf16(x[0], x[1]), f32_to_bf16(x[2], x[3])};
  else
    return {bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])};
}
DEVICE bool any(const four &x) { return bits_of(x[0]) | bits_of(x[1]) | bits_of(x[2]) | bits_of(x[3]); }

// Whether the quad at p, and each quad after it, is aligned for one access.
template <typename T> DEVICE bool aligned(const T *p) { return (u64)p % (quad * sizeof(T)) == 0; }

// The number of elements by which the first tile begins before the array, so that quads are aligned.
template <typename T> DEVICE u32 lead_of(const T *p) { return (u32)((u64)p / sizeof(T) % quad); }

// A tile of one warp: Q quads for each thread, in Q rows.
template <int Q> struct tile {
  enum { elements = Q * quad * warp_size };
  static METHOD u32 count(u64 n, u32 lead) { return n ? (u32)((n + lead + elements - 1) / elements) : 0; }
  // The number of blocks for n elements, if each warp has a tile.
  static METHOD u32 blocks(u64 n, u32 lead) { return (count(n, lead) + block_warps - 1) / block_warps; }

  i64 start; // the first element; elements below 0 or from n on do not exist
  u32 n;
  METHOD tile(u32 number, u32 lead, u32 n) : start((i64)number * elements - lead), n(n) {}
  // The first of this thread's elements in a row.
  METHOD i64 at(u32 row) const { return start + (row * warp_size + lane()) * quad; }
  METHOD bool whole() const { return start >= 0 && start + elements <= (i64)n; }
  METHOD bool has(i64 i) const { return (u64)i < n; }
};
// The tile of this warp within a tile of the block.
template <int Q> DEVICE tile<Q> tile_of_block(u32 number, u32 lead, u32 n) {
  return tile<Q>(number * block_warps + warp(), lead, n);
}

// load_rows and store_rows move a whole tile between memory and registers. All loads are issued before the first wait.
template <int Q, typename T> DEVICE void load_rows(T *to, const tile<Q> &t, const T *p) {
  if (aligned(p + t.start)) {
#pragma unroll
    for (int r = 0; r < Q; r++) {
      const auto v = __builtin_bit_cast(vector<T>, load_words<sizeof(vector<T>) / 4>(p + t.at(r)));
#pragma unroll
      for (int j = 0; j < quad; j++) to[r * quad + j] = v.lane[j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < Q * quad; j++) to[j] = p[t.at(j / quad) + j % quad];
  }
}
template <int Q, typename T> DEVICE void store_rows(T *p, const tile<Q> &t, const T *from) {
  if (aligned(p + t.start)) {
#pragma unroll
    for (int r = 0; r < Q; r++) {
      vector<T> v;
#pragma unroll
      for (int j = 0; j < quad; j++) v.lane[j] = from[r * quad + j];
      store_words(p + t.at(r), __builtin_bit_cast(words<sizeof v / 4>, v));
    }
  } else {
#pragma unroll
    for (int j = 0; j < Q * quad; j++) p[t.at(j / quad) + j % quad] = from[j];
  }
}

// load_tile reads a tile of x. If G is not none, the tile becomes the sum of from and a gradient, also in memory, and
// keep, unless it is 0, receives the values of from. It returns a bit for each element that exists.
struct none {};

template <int Q, typename G>
DEVICE u32 load_tile(float *v, const tile<Q> &t, float *x, const float *from, const G *grad, float factor, float *keep = nullptr) {
  constexpr bool adds = !__is_same(G, none);
  if (t.whole()) {
    load_rows(v, t, adds ? from : x);
    if constexpr (adds) {
      if (keep) store_rows(keep, t, v);
      G g[Q * quad];
      load_rows(g, t, grad);
#pragma unroll
      for (int j = 0; j < Q * quad; j++) v[j] += widen(g[j]) * factor;
      store_rows(x, t, v);
    }
    return (u32)((1ull << Q * quad) - 1);
  }
  u32 exist = 0;
#pragma unroll
  for (int j = 0; j < Q * quad; j++) {
    const i64 i = t.at(j / quad) + j % quad;
    v[j] = 0;
    if (!t.has(i)) continue;
    exist |= 1u << j;
    v[j] = adds ? from[i] : x[i];
    if (adds && keep) keep[i] = v[j];
    if constexpr (adds) x[i] = v[j] += widen(grad[i]) * factor;
  }
  return exist;
}

template <int Q> DEVICE u32 load_tile(float *v, const tile<Q> &t, const float *x) {
  return load_tile(v, t, (float *)x, x, (const none *)nullptr, 1);
}

// The types of a gradient; the numbers match the host's.
enum { type_none, type_f32, type_f16, type_bf16 };

template <int Q>
DEVICE u32 load_tile(float *v, const tile<Q> &t, float *x, const float *from, const void *grad, u64 type, float factor, float *keep) {
  switch (type) {
  case type_f32: return load_tile(v, t, x, from, (const float *)grad, factor, keep);
  case type_f16: return load_tile(v, t, x, from, (const f16 *)grad, factor, keep);
  case type_bf16: return load_tile(v, t, x, from, (const bf16 *)grad, factor, keep);
  }
  return load_tile(v, t, x);
}

// The key of a number is the bits of its magnitude, which compare as magnitudes do.
enum : u32 { key_end = 1u << 31, key_infinite = 0x7f800000 };
DEVICE u32 key_of(float x) { return bits_of(x) & (key_end - 1); }
// The smallest key that reaches the threshold t.
DEVICE u32 threshold_key(float t) { return t <= 0 ? 0 : key_of(t); }
DEVICE bool finite(float t) { return key_of(t) < key_infinite; }
constexpr float tiny = 0x1p-149f;

// Ranks of flagged elements within a warp's tile: how many flags precede the thread's first element of a row, and the
// total. A warp has at most 128 in a row, so the counts of four rows fit the bytes of a word: Q is at most 4.
template <int Q> struct ranks {
  u32 before, rows, all;
  METHOD ranks(u32 flags) {
    u32 nibbles = flags - (flags >> 1 & 0x5555);
    nibbles = (nibbles & 0x3333) + (nibbles >> 2 & 0x3333);
    const u32 mine = (nibbles & 0xf) | (nibbles & 0xf0) << 4 | (nibbles & 0xf00) << 8 | (nibbles & 0xf000) << 12;
    u32 inclusive = mine;
#pragma unroll
    for (u32 by = 1; by < warp_size; by *= 2) {
      const u32 below = shuffle_up(inclusive, by);
      if (lane() >= by) inclusive += below;
    }
    before = inclusive - mine;
    rows = shuffle(inclusive, warp_size - 1);
    all = 0;
#pragma unroll
    for (u32 r = 0; r < Q; r++) all += rows >> 8 * r & 0xff;
  }
  // The number of flags in the warp before this thread's first element of a row.
  METHOD u32 at(u32 row) const {
    u32 n = before >> 8 * row & 0xff;
#pragma unroll
    for (u32 r = 0; r < Q; r++)
      if (r < row) n += rows >> 8 * r & 0xff;
    return n;
  }
};
