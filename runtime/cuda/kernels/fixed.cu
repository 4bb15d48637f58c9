// Sums in fixed point, by blocks of elements that have an exponent in common: a warp has a block, and each of its
// threads two elements.
#include "elements.cuh"

enum { fixed_block = 64, not_finite = 255, exponent_bias = 126, square_unit = 56, endless = 1 << 16 };

struct fixed_args {
  i32 *sums;
  u8 *exponents;
  u64 n, skip, bits;
  void *x;
  u64 add, divisor;
  const float *factor;
};

DEVICE u64 fixed_blocks(u64 skip, u64 n) { return n ? (skip + n + fixed_block - 1) / fixed_block : 0; }
DEVICE u64 warp_index() { return (u64)block() * block_warps + warp(); }
DEVICE u64 warp_count() { return (u64)blocks() * block_warps; }

// An exponent as it is stored: less 128, so that the order of I8 is that of exponents.
DEVICE u32 field_of(u8 exponent) { return exponent ^ 0x80u; }

// Element number j of this thread in block b; those from n on, and before the first, do not exist.
DEVICE u64 fixed_element(u64 b, u32 j, u64 skip) { return b * fixed_block + j * warp_size + lane() - skip; }

DEVICE u32 warp_most(u32 v) {
#pragma unroll
  for (u32 by = warp_size / 2; by > 0; by /= 2) v = most(v, shuffle_xor(v, by));
  return v;
}

DEVICE double power_of_two(i64 exponent) { return __builtin_bit_cast(double, (u64)(exponent + 1023) << 52); }

template <typename T> DEVICE void raise_exponents(const fixed_args &a) {
  const T *x = (const T *)a.x;
  const u64 all = fixed_blocks(a.skip, a.n);
  for (u64 b = warp_index(); b < all; b += warp_count()) {
    u32 largest = 0;
#pragma unroll
    for (u32 j = 0; j < fixed_block / warp_size; j++) {
      const u64 i = fixed_element(b, j, a.skip);
      if (i < a.n) largest = most(largest, key_of(widen(x[i])));
    }
    const u32 exponent = warp_most(largest) >> 23;
    if (lane() == 0 && exponent > field_of(a.exponents[b])) a.exponents[b] = (u8)(exponent ^ 0x80u);
  }
}
KERNEL raise_exponents_f32(fixed_args a) { raise_exponents<float>(a); }
KERNEL raise_exponents_f16(fixed_args a) { raise_exponents<f16>(a); }
KERNEL raise_exponents_bf16(fixed_args a) { raise_exponents<bf16>(a); }

// Doubles hold the products exactly; the sum with this number rounds them to an even integer.
constexpr double rounder = 0x1.8p52;

template <typename T> DEVICE void store_fixed(const fixed_args &a) {
  const T *x = (const T *)a.x;
  const u64 all = fixed_blocks(a.skip, a.n);
  for (u64 b = warp_index(); b < all; b += warp_count()) {
    const u32 exponent = field_of(a.exponents[b]);
    const double scale = exponent == not_finite ? 0 : power_of_two((i64)a.bits + exponent_bias - exponent);
#pragma unroll
    for (u32 j = 0; j < fixed_block / warp_size; j++) {
      const u64 i = fixed_element(b, j, a.skip);
      if (i >= a.n) continue;
      const double term = ((double)widen(x[i]) * scale + rounder) - rounder;
      const i32 whole = exponent == not_finite ? 0 : (i32)term;
      a.sums[i] = a.add ? (i32)((u32)a.sums[i] + (u32)whole) : whole;
    }
  }
}
KERNEL store_fixed_f32(fixed_args a) { store_fixed<float>(a); }
KERNEL store_fixed_f16(fixed_args a) { store_fixed<f16>(a); }
KERNEL store_fixed_bf16(fixed_args a) { store_fixed<bf16>(a); }

template <typename T> DEVICE void load_fixed(const fixed_args &a) {
  T *x = (T *)a.x;
  const double limit = (double)largest<T>();
  double multiple = 1 / (double)a.divisor;
  if (a.factor) multiple *= (double)*a.factor;
  const u64 all = fixed_blocks(a.skip, a.n);
  for (u64 b = warp_index(); b < all; b += warp_count()) {
    const u32 exponent = field_of(a.exponents[b]);
    const double scale = multiple * power_of_two((i64)exponent - exponent_bias - (i64)a.bits);
#pragma unroll
    for (u32 j = 0; j < fixed_block / warp_size; j++) {
      const u64 i = fixed_element(b, j, a.skip);
      if (i >= a.n) continue;
      double v = (double)a.sums[i] * scale;
      if (v > limit) v = limit;
      if (v < -limit) v = -limit;
      narrow(x[i], exponent == not_finite ? float_of(0x7fc00000) : (float)v);
    }
  }
}
KERNEL load_fixed_f32(fixed_args a) { load_fixed<float>(a); }
KERNEL load_fixed_f16(fixed_args a) { load_fixed<f16>(a); }
KERNEL load_fixed_bf16(fixed_args a) { load_fixed<bf16>(a); }

struct square_words {
  u64 low, high;
};
struct square_args {
  control *c;
  struct square_words *parts; // the first one is the largest height
  const i32 *sums;
  const u8 *exponents;
  u64 n, skip, bits, divisor;
  double *sum;
};

// The largest exponent of a block and the length of its largest sum, together: those of terms may have cancelled out.
KERNEL top_height(square_args a) {
  static SHARED u32 warps[block_warps];
  const u64 all = fixed_blocks(a.skip, a.n);
  u32 top = 0;
  for (u64 b = warp_index(); b < all; b += warp_count()) {
    u32 magnitude = 0;
#pragma unroll
    for (u32 j = 0; j < fixed_block / warp_size; j++) {
      const u64 i = fixed_element(b, j, a.skip);
      if (i < a.n) magnitude = most(magnitude, a.sums[i] < 0 ? 0 - (u32)a.sums[i] : (u32)a.sums[i]);
    }
    magnitude = warp_most(magnitude);
    const u32 exponent = field_of(a.exponents[b]);
    if (magnitude > 0) top = most(top, exponent + 32 - leading_zeros(magnitude));
    if (exponent == not_finite) top = endless;
  }
  if (lane() == 0) warps[warp()] = top;
  barrier();
  if (thread() == 0) {
    for (u32 w = 1; w < block_warps; w++) top = most(top, warps[w]);
    a.parts[1 + block()].low = top;
  }
  if (!last_block(a.c)) return;
  if (thread() == 0) {
    u64 height = 0;
    for (u32 i = 0; i < blocks(); i++) height = most(height, load(&a.parts[1 + i].low));
    a.parts->low = height;
  }
  reset(a.c);
}

// Squares add up as integers of 64 bits within a block, and as their words of 32 bits beyond it.
KERNEL square_fixed(square_args a) {
  static SHARED struct square_words warps[block_warps];
  const u32 top = (u32)a.parts->low;
  const u64 all = fixed_blocks(a.skip, a.n);
  struct square_words words = {};
  for (u64 b = warp_index(); b < all; b += warp_count()) {
    const i32 shift = square_unit - 2 * (i32)(top - field_of(a.exponents[b]));
    const u32 left = shift > 0 ? shift : 0;
    const u32 right = shift > 0 ? 0 : shift < -63 ? 63 : -shift;
    u64 squares = 0;
#pragma unroll
    for (u32 j = 0; j < fixed_block / warp_size; j++) {
      const u64 i = fixed_element(b, j, a.skip);
      if (i < a.n) squares += (u64)((i64)a.sums[i] * a.sums[i]) << left >> right;
    }
#pragma unroll
    for (u32 by = warp_size / 2; by > 0; by /= 2) squares += shuffle_xor(squares, by);
    words.low += squares & 0xffffffff;
    words.high += squares >> 32;
  }
  if (lane() == 0) warps[warp()] = words;
  barrier();
  if (thread() == 0) {
    for (u32 w = 1; w < block_warps; w++) words.low += warps[w].low, words.high += warps[w].high;
    a.parts[1 + block()] = words;
  }
  if (!last_block(a.c)) return;
  if (thread() == 0) {
    words = {};
    for (u32 i = 0; i < blocks(); i++) words.low += load(&a.parts[1 + i].low), words.high += load(&a.parts[1 + i].high);
    const double total = (double)words.high * 0x1p32 + (double)words.low;
    const double unit = 1 / (double)a.divisor * power_of_two((i64)top - exponent_bias - (i64)a.bits);
    const double sum = total * 0x1p-56 * (unit * unit);
    *a.sum = top == endless ? __builtin_bit_cast(double, 0x7ff8ull << 48) : sum;
  }
  reset(a.c);
}
