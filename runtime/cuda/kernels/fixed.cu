// Sums in fixed point by blocks of elements with a common exponent. Half a warp handles a block, four elements for
// each thread, in tiles of some rows.
#include "elements.cuh"

enum { fixed_block = 64, fixed_rows = 4, fixed_share = fixed_rows * quad, not_finite = 255, exponent_bias = 126, square_unit = 56, endless = 1 << 16 };

struct fixed_args {
  i32 *sums;
  u8 *exponents;
  u64 n, skip, bits;
  void *x;
  u64 add, divisor;
  const float *factor;
};

DEVICE u64 fixed_blocks(u64 skip, u64 n) { return n ? (skip + n + fixed_block - 1) / fixed_block : 0; }
DEVICE u32 warp_index() { return block() * block_warps + warp(); }
DEVICE u32 warp_count() { return blocks() * block_warps; }

// A stored exponent: less 128, so that I8 sorts exponents correctly.
DEVICE u32 field_of(u8 exponent) { return exponent ^ 0x80u; }

// A tile of blocks. Its first block may begin before the first element.
struct fixed_tile : tile<fixed_rows> {
  enum { row_blocks = quad * warp_size / fixed_block, block_lanes = fixed_block / quad };
  u32 first, all; // the tile's first block, and the number of blocks
  METHOD fixed_tile(u32 number, u64 skip, u64 n)
      : tile(number, (u32)skip, (u32)n), first(number * (elements / fixed_block)), all((u32)fixed_blocks(skip, n)) {}
  METHOD i64 element(u32 j) const { return at(j / quad) + j % quad; }
  // The block of this thread's elements in a row.
  METHOD u32 block_of(u32 row) const { return first + row * row_blocks + lane() / block_lanes; }
  METHOD bool leads(u32 row) const { return lane() % block_lanes == 0 && block_of(row) < all; }

  // Elements that do not exist read as 0.
  template <typename T> METHOD void load(T *to, const T *p) const {
    if (whole()) return load_rows(to, *this, p);
#pragma unroll
    for (u32 j = 0; j < fixed_share; j++) to[j] = has(element(j)) ? p[element(j)] : T{};
  }
  template <typename T> METHOD void store(T *p, const T *from) const {
    if (whole()) return store_rows(p, *this, from);
#pragma unroll
    for (u32 j = 0; j < fixed_share; j++)
      if (has(element(j))) p[element(j)] = from[j];
  }
  METHOD void load_fields(u32 *fields, const u8 *exponents) const {
#pragma unroll
    for (u32 row = 0; row < fixed_rows; row++) fields[row] = block_of(row) < all ? field_of(exponents[block_of(row)]) : 0;
  }
};

// Calls f for each tile of a warp.
template <typename F> DEVICE void each_tile(u64 skip, u64 n, F f) {
  const u32 end = fixed_tile::count(n, (u32)skip);
  for (u32 number = warp_index(); number < end; number += warp_count()) f(fixed_tile(number, skip, n));
}

// The maximum over the lanes of a block, or over all lanes; and the sum over a block.
template <u32 lanes = warp_size> DEVICE u32 most_of(u32 v) {
#pragma unroll
  for (u32 by = lanes / 2; by > 0; by /= 2) v = most(v, shuffle_xor(v, by));
  return v;
}
template <u32 lanes = warp_size> DEVICE u64 sum_of(u64 v) {
#pragma unroll
  for (u32 by = lanes / 2; by > 0; by /= 2) v += shuffle_xor(v, by);
  return v;
}

DEVICE double power_of_two(i64 exponent) { return __builtin_bit_cast(double, (u64)(exponent + 1023) << 52); }

template <typename T> DEVICE void raise_exponents(const fixed_args &a) {
  each_tile(a.skip, a.n, [&] METHOD (const fixed_tile &t) {
    T x[fixed_share];
    t.load(x, (const T *)a.x);
    u32 fields[fixed_rows];
    t.load_fields(fields, a.exponents);
#pragma unroll
    for (u32 row = 0; row < fixed_rows; row++) {
      u32 largest = 0;
#pragma unroll
      for (u32 j = 0; j < quad; j++) largest = most(largest, key_of(widen(x[row * quad + j])));
      const u32 exponent = most_of<fixed_tile::block_lanes>(largest) >> 23;
      if (t.leads(row) && exponent > fields[row]) a.exponents[t.block_of(row)] = (u8)(exponent ^ 0x80u);
    }
  });
}
KERNEL raise_exponents_f32(fixed_args a) { raise_exponents<float>(a); }
KERNEL raise_exponents_f16(fixed_args a) { raise_exponents<f16>(a); }
KERNEL raise_exponents_bf16(fixed_args a) { raise_exponents<bf16>(a); }

// Doubles hold the products exactly. Adding this number rounds them to an even integer.
constexpr double rounder = 0x1.8p52;

template <typename T> DEVICE void store_fixed(const fixed_args &a) {
  each_tile(a.skip, a.n, [&] METHOD (const fixed_tile &t) {
    T x[fixed_share];
    t.load(x, (const T *)a.x);
    u32 fields[fixed_rows];
    t.load_fields(fields, a.exponents);
    i32 sums[fixed_share] = {};
    if (a.add) t.load(sums, (const i32 *)a.sums);
#pragma unroll
    for (u32 row = 0; row < fixed_rows; row++) {
      const u32 exponent = fields[row];
      const double scale = exponent == not_finite ? 0 : power_of_two((i64)a.bits + exponent_bias - exponent);
#pragma unroll
      for (u32 j = row * quad; j < (row + 1) * quad; j++) {
        const double term = ((double)widen(x[j]) * scale + rounder) - rounder;
        sums[j] = (i32)((u32)sums[j] + (u32)(exponent == not_finite ? 0 : (i32)term));
      }
    }
    t.store(a.sums, sums);
  });
}
KERNEL store_fixed_f32(fixed_args a) { store_fixed<float>(a); }
KERNEL store_fixed_f16(fixed_args a) { store_fixed<f16>(a); }
KERNEL store_fixed_bf16(fixed_args a) { store_fixed<bf16>(a); }

template <typename T> DEVICE void load_fixed(const fixed_args &a) {
  const double limit = (double)largest<T>();
  double multiple = 1 / (double)a.divisor;
  if (a.factor) multiple *= (double)*a.factor;
  each_tile(a.skip, a.n, [&] METHOD (const fixed_tile &t) {
    i32 sums[fixed_share];
    t.load(sums, (const i32 *)a.sums);
    u32 fields[fixed_rows];
    t.load_fields(fields, a.exponents);
    T x[fixed_share];
#pragma unroll
    for (u32 row = 0; row < fixed_rows; row++) {
      const u32 exponent = fields[row];
      const double scale = multiple * power_of_two((i64)exponent - exponent_bias - (i64)a.bits);
#pragma unroll
      for (u32 j = row * quad; j < (row + 1) * quad; j++) {
        double v = (double)sums[j] * scale;
        if (v > limit) v = limit;
        if (v < -limit) v = -limit;
        narrow(x[j], exponent == not_finite ? float_of(0x7fc00000) : (float)v);
      }
    }
    t.store((T *)a.x, x);
  });
}
KERNEL load_fixed_f32(fixed_args a) { load_fixed<float>(a); }
KERNEL load_fixed_f16(fixed_args a) { load_fixed<f16>(a); }
KERNEL load_fixed_bf16(fixed_args a) { load_fixed<bf16>(a); }

struct square_words {
  u64 low, high;
};
struct square_args {
  control *c;
  struct square_words *parts; // the first word is the largest height
  const i32 *sums;
  const u8 *exponents;
  u64 n, skip, bits, divisor;
  double *sum;
};

// The maximum over all threads of a block, and the sum of their words, in thread 0.
DEVICE u32 join_threads(u32 v) {
  static SHARED u32 warps[block_warps];
  v = most_of(v);
  barrier();
  if (lane() == 0) warps[warp()] = v;
  barrier();
  for (u32 w = 0; w < block_warps; w++) v = most(v, warps[w]);
  return v;
}
DEVICE struct square_words join_threads(const struct square_words &words) {
  static SHARED struct square_words warps[block_warps];
  struct square_words all = {sum_of(words.low), sum_of(words.high)};
  barrier();
  if (lane() == 0) warps[warp()] = all;
  barrier();
  all = {};
  for (u32 w = 0; w < block_warps; w++) all.low += warps[w].low, all.high += warps[w].high;
  return all;
}

// The largest exponent of a block together with the length of its largest sum. The terms of one with a larger exponent
// may have canceled.
KERNEL top_height(square_args a) {
  u32 top = 0;
  each_tile(a.skip, a.n, [&] METHOD (const fixed_tile &t) {
    i32 sums[fixed_share];
    t.load(sums, a.sums);
    u32 fields[fixed_rows];
    t.load_fields(fields, a.exponents);
#pragma unroll
    for (u32 row = 0; row < fixed_rows; row++) {
      u32 magnitude = 0;
#pragma unroll
      for (u32 j = row * quad; j < (row + 1) * quad; j++) magnitude = most(magnitude, sums[j] < 0 ? 0 - (u32)sums[j] : (u32)sums[j]);
      if (magnitude > 0) top = most(top, fields[row] + 32 - leading_zeros(magnitude));
      if (fields[row] == not_finite) top = endless;
    }
  });
  top = join_threads(top);
  if (thread() == 0) a.parts[1 + block()].low = top;
  if (!last_block(a.c)) return;
  u32 height = 0;
  for (u32 i = thread(); i < blocks(); i += block_threads) height = most(height, (u32)load(&a.parts[1 + i].low));
  height = join_threads(height);
  if (thread() == 0) a.parts->low = height;
  reset(a.c);
}

// Squares are added as 64-bit integers within a block, and as separate 32-bit words across blocks.
KERNEL square_fixed(square_args a) {
  const u32 top = (u32)a.parts->low;
  struct square_words words = {};
  each_tile(a.skip, a.n, [&] METHOD (const fixed_tile &t) {
    i32 sums[fixed_share];
    t.load(sums, a.sums);
    u32 fields[fixed_rows];
    t.load_fields(fields, a.exponents);
#pragma unroll
    for (u32 row = 0; row < fixed_rows; row++) {
      const i32 shift = square_unit - 2 * (i32)(top - fields[row]);
      const u32 left = shift > 0 ? shift : 0;
      const u32 right = shift > 0 ? 0 : shift < -63 ? 63 : -shift;
      u64 squares = 0;
#pragma unroll
      for (u32 j = row * quad; j < (row + 1) * quad; j++) squares += (u64)((i64)sums[j] * sums[j]) << left >> right;
      squares = sum_of<fixed_tile::block_lanes>(squares);
      if (!t.leads(row)) continue;
      words.low += squares & 0xffffffff;
      words.high += squares >> 32;
    }
  });
  words = join_threads(words);
  if (thread() == 0) a.parts[1 + block()] = words;
  if (!last_block(a.c)) return;
  words = {};
  for (u32 i = thread(); i < blocks(); i += block_threads) words.low += load(&a.parts[1 + i].low), words.high += load(&a.parts[1 + i].high);
  words = join_threads(words);
  if (thread() == 0) {
    const double total = (double)words.high * 0x1p32 + (double)words.low;
    const double unit = 1 / (double)a.divisor * power_of_two((i64)top - exponent_bias - (i64)a.bits);
    const double sum = total * 0x1p-56 * (unit * unit);
    *a.sum = top == endless ? __builtin_bit_cast(double, 0x7ff8ull << 48) : sum;
  }
  reset(a.c);
}
