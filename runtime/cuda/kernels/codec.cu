// Encoding and decoding of lists and arrays by the codecs of package runtime, which specifies the format, and top-k
// selection by chunks.
#include "elements.cuh"

enum codec { positions = 1, as_f32, as_bf16, as_f16, as_fp8, as_i8, as_i4, as_i2, as_sign };
enum { block_values = 64, group_values = 4096, index_block = 1024, group_blocks = group_values / index_block, message_header = 8 };

DEVICE u64 up4(u64 n) { return (n + 3) & ~3ull; }
DEVICE u32 bits_of_code(u64 c) { return c == as_f32 ? 32 : c == as_bf16 || c == as_f16 ? 16 : c == as_fp8 || c == as_i8 ? 8 : c == as_i4 ? 4 : c == as_i2 ? 2 : c == as_sign ? 1 : 0; }
DEVICE u64 scale_bytes(u64 c, u64 n) {
  if (c == as_i2) return (n + group_values - 1) / group_values * 16;
  return c >= as_fp8 ? up4((n + block_values - 1) / block_values * 2) : 0;
}
DEVICE u64 array_bytes(u64 c, u64 n) { return scale_bytes(c, n) + up4((n * bits_of_code(c) + 7) / 8); }

// Encoded values at p: n of them, first their scales, then their codes.
struct coded {
  u64 codec, n;
  u8 *scales, *codes;
  METHOD coded(u64 codec, u64 n, u8 *p) : codec(codec), n(n), scales(p), codes(p + scale_bytes(codec, n)) {}
};

DEVICE u16 load16(const u8 *p) { return *(const u16 *)p; }
DEVICE float scale_at(const coded &a, u64 i) { return bf16_to_f32(load16(a.scales + i / block_values * 2)); }

// Rounds to E4M3. NaNs do not reach it.
DEVICE u32 to_fp8(float x) {
  const u32 bits = bits_of(x), sign = bits >> 31 << 7, m = least(bits & ~(1u << 31), bits_of(448.0f));
  const u32 rebias = 120u << 23;
  if (m < rebias + (1u << 23)) return sign | (bits_of(float_of(m) + float_of(141u << 23)) - (141u << 23));
  return sign | (m - rebias + (1u << 19) - 1 + (m >> 20 & 1)) >> 20;
}
DEVICE float from_fp8(u32 b) {
  const u32 sign = b >> 7 << 31, m = b & 127;
  return float_of(sign | (m == 127 ? 0x7fc00000 : bits_of(float_of(m << 20) * float_of(247u << 23))));
}
// Rounds to a 16-bit float and keeps as much of a NaN's payload as fits.
DEVICE u32 to_half(float x) { return x != x ? bits_of(x) >> 31 << 15 | 0x7e00 | (bits_of(x) >> 13 & 0x3ff) : f32_to_f16(x); }
DEVICE u32 to_brain(float x) { return x != x ? bits_of(x) >> 16 | 0x40 : f32_to_bf16(x); }

// The number of elements of the quad at i that exist, of n in all; and the quad with the others set to 0.
DEVICE u32 of_quad(u64 n, u64 i) { return i < n ? (u32)least(n - i, (u64)quad) : 0; }
DEVICE four load_quad(const float *p, u32 count) {
  four v = {0, 0, 0, 0};
  if (count == quad && aligned(p)) {
    const auto w = load_words<4>(p);
    for (u32 j = 0; j < quad; j++) v[j] = float_of(w.word[j]);
  } else {
#pragma unroll
    for (u32 j = 0; j < quad; j++)
      if (j < count) v[j] = p[j];
  }
  return v;
}
DEVICE void store_quad(float *p, u32 count, const four &v) {
  if (count == quad && aligned(p)) return store_words(p, pack<float>(v));
#pragma unroll
  for (u32 j = 0; j < quad; j++)
    if (j < count) p[j] = v[j];
}

// decode_quad decodes the quad at i, which has at least one element.
DEVICE four decode_quad(const coded &a, u64 i) {
  four v;
  const u32 *const words = (const u32 *)a.codes;
  switch (a.codec) {
  case as_f32: return load_quad((const float *)words + i, of_quad(a.n, i));
  case as_bf16:
  case as_f16: {
    const u32 low = words[i / 2], high = i + 2 < a.n ? words[i / 2 + 1] : 0;
#pragma unroll
    for (u32 j = 0; j < quad; j++) {
      const u16 h = (u16)((j < 2 ? low : high) >> j % 2 * 16);
      v[j] = a.codec == as_bf16 ? bf16_to_f32(h) : f16_to_f32(h);
    }
    return v;
  }
  case as_i2: {
    const float *const table = (const float *)a.scales + i / group_values * 4;
    const u32 b = a.codes[i / 4];
#pragma unroll
    for (u32 j = 0; j < quad; j++) v[j] = table[b >> 2 * j & 3];
    return v;
  }
  }
  const float scale = scale_at(a, i), nan = float_of(0x7fc00000);
  if (a.codec == as_sign) {
    const u32 signs = a.codes[i / 8] >> i % 8;
#pragma unroll
    for (u32 j = 0; j < quad; j++) v[j] = float_of(bits_of(scale) ^ signs >> j << 31);
    return v;
  }
  const u32 word = a.codec == as_i4 ? ((const u16 *)a.codes)[i / 4] : words[i / 4];
#pragma unroll
  for (u32 j = 0; j < quad; j++) {
    if (a.codec == as_fp8) {
      v[j] = from_fp8(word >> 8 * j & 0xff) * scale;
    } else {
      const i32 q = a.codec == as_i8 ? (i32)(word << (24 - 8 * j)) >> 24 : (i32)(word << (28 - 4 * j)) >> 28;
      v[j] = q == (a.codec == as_i8 ? -128 : -8) ? nan : (float)q * scale;
    }
  }
  return v;
}

// A magnitude as BF16: at most the largest finite one, and 0 for subnormal numbers.
DEVICE u32 magnitude16(float v) {
  if (v != v) return 0x7fc0;
  const u32 b = least((bits_of(v) + 0x7fff + (bits_of(v) >> 16 & 1)) >> 16, 0x7f7fu);
  return b < 0x80 ? 0 : b;
}

DEVICE float warp_sum(float v) {
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) v += float_of(shuffle_xor(bits_of(v), mask));
  return v;
}

// encode_quads makes a warp write two blocks of values, of which this thread has the quad at i, and replaces the quad
// by its decoded values. Values past the end are 0. Codes fill whole words.
DEVICE void encode_quads(const coded &a, u64 i, four &v) {
  enum { lanes = block_values / quad }; // lanes of a block
  const u32 exist = of_quad(a.n, i);
  bool odd = false;
#pragma unroll
  for (u32 j = 0; j < quad; j++) odd |= !finite(v[j]);
  float scale = 0, inverse = 0;
  const float limit = a.codec == as_fp8 ? 448 : a.codec == as_i8 ? 127 : 7;
  if (a.codec >= as_fp8) {
    u32 scale16;
    if (a.codec == as_sign) {
      four sum;
#pragma unroll
      for (u32 j = 0; j < quad; j++) {
        sum[j] = float_of(key_of(v[j])) / block_values;
#pragma unroll
        for (u32 mask = lanes / 2; mask > 0; mask /= 2) sum[j] += float_of(shuffle_xor(bits_of(sum[j]), mask));
      }
      const bool spoiled = ballot(odd) >> (lane() & ~(lanes - 1)) & ((1 << lanes) - 1);
      const u64 left = a.n - i / block_values * block_values; // values of the block, if it exists
      scale16 = spoiled ? 0x7fc0 : magnitude16((sum[0] + sum[2] + (sum[1] + sum[3])) * ((float)block_values / (float)least(left, (u64)block_values)));
    } else {
      u32 top = 0;
#pragma unroll
      for (u32 j = 0; j < quad; j++) top = most(top, finite(v[j]) ? key_of(v[j]) : 0);
#pragma unroll
      for (u32 mask = lanes / 2; mask > 0; mask /= 2) top = most(top, shuffle_xor(top, mask));
      scale16 = magnitude16(float_of(top) / limit);
      if (!finite(bf16_to_f32((u16)scale16) * limit)) scale16--;
    }
    scale = bf16_to_f32((u16)scale16);
    if (scale > 0) inverse = 1 / scale;
    if (lane() % lanes == 0 && exist) {
      u16 *const scales = (u16 *)a.scales + i / block_values;
      *scales = (u16)scale16;
      if (i + block_values >= a.n && i / block_values % 2 == 0) scales[1] = 0;
    }
  }
  u32 code[quad];
  const auto each = [&] METHOD (auto of) {
#pragma unroll
    for (u32 j = 0; j < quad; j++) {
      float x = v[j];
      code[j] = j < exist ? of(x) : 0;
      v[j] = x;
    }
  };
  u32 *const words = (u32 *)a.codes;
  const auto halves = [&] METHOD {
    if (exist) words[i / 2] = code[0] | code[1] << 16;
    if (exist > 2) words[i / 2 + 1] = code[2] | code[3] << 16;
  };
  switch (a.codec) {
  case as_f32: store_quad((float *)words + i, exist, v); break;
  case as_bf16:
    each([&] METHOD (float &x) {
      const u32 c = to_brain(finite(x) ? least(most(x, -0x1.fep127f), 0x1.fep127f) : x);
      x = bf16_to_f32((u16)c);
      return c;
    });
    halves();
    break;
  case as_f16:
    each([&] METHOD (float &x) {
      const u32 c = to_half(finite(x) ? least(most(x, -65504.0f), 65504.0f) : x);
      x = f16_to_f32((u16)c);
      return c;
    });
    halves();
    break;
  case as_fp8:
    each([&] METHOD (float &x) {
      const u32 c = finite(x) ? to_fp8(x * inverse) : 127;
      x = from_fp8(c) * scale;
      return c;
    });
    if (exist) words[i / 4] = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
    break;
  case as_sign: {
    each([&] METHOD (float &x) {
      const u32 c = bits_of(x) >> 31;
      x = float_of(bits_of(scale) ^ c << 31);
      return c;
    });
    u32 word = (code[0] | code[1] << 1 | code[2] << 2 | code[3] << 3) << i % warp_size;
#pragma unroll
    for (u32 mask = 1; mask < warp_size / quad; mask *= 2) word |= shuffle_xor(word, mask);
    if (i % warp_size == 0 && exist) words[i / warp_size] = word;
    break;
  }
  default:
    each([&] METHOD (float &x) {
      const bool real = finite(x);
      const i32 q = real ? least(most((i32)(bits_of(x * inverse + 12582912.0f) - 0x4b400000), -(i32)limit), (i32)limit) : -(i32)limit - 1;
      x = real ? (float)q * scale : float_of(0x7fc00000);
      return (u32)q & (a.codec == as_i8 ? 0xff : 15);
    });
    if (a.codec == as_i8) {
      if (exist) words[i / 4] = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
    } else if (i / 8 * 8 < a.n) {
      ((u16 *)words)[i / 4] = (u16)(code[0] | code[1] << 4 | code[2] << 8 | code[3] << 12);
    }
  }
}

// block_sums adds up values of each kind over the threads of the block, by repeated halving.
template <u32 kinds> DEVICE void block_sums(double (&v)[kinds], double *memory) {
  static_assert(kinds <= block_warps, "a warp for each");
  barrier();
#pragma unroll
  for (u32 k = 0; k < kinds; k++) memory[k * block_threads + thread()] = v[k];
  barrier();
  if (warp() < kinds) {
    double part[block_warps];
#pragma unroll
    for (u32 w = 0; w < block_warps; w++) part[w] = memory[warp() * block_threads + w * warp_size + lane()];
#pragma unroll
    for (u32 half = block_warps / 2; half > 0; half /= 2)
#pragma unroll
      for (u32 w = 0; w < half; w++) part[w] = part[w] + part[w + half];
    const double sum = warp_sum(part[0]);
    warp_barrier();
    if (lane() == 0) memory[warp() * block_threads] = sum;
  }
  barrier();
#pragma unroll
  for (u32 k = 0; k < kinds; k++) v[k] = memory[k * block_threads];
}

enum { share = group_values / block_threads }; // values of a thread in a group

// A group encoded with two bits a value: the codes of the thread's values, which are every 256th of the group, and for
// each code the sum and the number of its values. shift is added to decoded values.
enum { bins = 4 };
struct group_bins {
  u32 codes; // two bits each
  double of_bins[2 * bins]; // sums, then numbers of values
  float shift;
  bool spoiled; // some value is not finite
};

// array_bins computes the bins for a group of an array, and subtracts shift from the values in v.
DEVICE void array_bins(group_bins &g, u32 count, float (&v)[share], double *memory) {
  const auto exists = [&] METHOD (u32 j) { return j * block_threads + thread() < count; };
  bool odd = false;
  double sum[2] = {0, 0}, squares[1] = {0};
#pragma unroll
  for (u32 j = 0; j < share; j++)
    if (exists(j)) sum[0] = sum[0] + v[j], odd |= !finite(v[j]);
  sum[1] = odd;
  block_sums(sum, memory);
  g.spoiled = sum[1] > 0;
  g.shift = (float)(sum[0] / count);
#pragma unroll
  for (u32 j = 0; j < share; j++)
    if (exists(j)) v[j] = v[j] - g.shift, squares[0] = squares[0] + (double)v[j] * (double)v[j];
  block_sums(squares, memory);
  const float std = (float)square_root(squares[0] / (count - 1.0));
  float scale = 6 * std / 4;
  if (scale == 0 || !finite(scale)) scale = 1;
#pragma unroll
  for (u32 j = 0; j < share; j++) {
    if (!exists(j)) continue;
    const float y = least(most(v[j] / scale + 2, -1.0f), 4.0f);
    const i32 b = g.spoiled ? 0 : least(most((i32)(bits_of(y + 12582912.0f) - 0x4b400000), 0), 3);
    g.codes |= (u32)b << 2 * j;
  }
}

// The histogram of magnitudes that divides the values of a list into two halves: sixteen bars an octave, for each
// sign.
enum { bar_shift = 19, octave_bars = 16, bar_count = 128, signs = 2, bar_room = signs * bar_count };
static_assert(bar_room == block_threads, "a thread for each bar");
DEVICE u32 middle_of(u32 bar) { return (33 + 2 * (bar % octave_bars)) << bar / octave_bars; }

// score_of returns the sum of squares that is kept if the upper half of its sign begins with the thread's bar. It
// returns 0 if either half is empty.
DEVICE double score_of(const u32 *counts) {
  const u32 own = thread() % bar_count;
  const u32 *const bars = counts + thread() / bar_count * bar_count;
  u32 below = 0, sum_below = 0, all = 0, sum = 0; // sums of at most 4096 middles of 13 bits
#pragma unroll 16
  for (u32 b = 0; b < bar_count; b++) {
    if (b == own) below = all, sum_below = sum;
    const u32 n = bars[b];
    all += n;
    sum += n * middle_of(b);
  }
  const u32 above = all - below, sum_above = sum - sum_below;
  if (below == 0 || above == 0) return 0;
  return (double)((u64)sum_below * sum_below) / (double)below + (double)((u64)sum_above * sum_above) / (double)above;
}

// best_bar returns the first bar of the greatest score over a warp, which has one each, and that score.
DEVICE u32 best_bar(double &score) {
  u32 bar = thread() % bar_count;
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) {
    const double other = shuffle_xor(score, mask);
    const u32 of_other = shuffle_xor(bar, mask);
    if (other > score || (other == score && of_other < bar)) score = other, bar = of_other;
  }
  return bar;
}

// list_bins computes the bins for a group of a list: for each sign, the smaller and the larger values.
DEVICE void list_bins(group_bins &g, u32 count, const float (&v)[share], double *memory) {
  const auto exists = [&] METHOD (u32 j) { return j * block_threads + thread() < count; };
  u32 *const counts = (u32 *)memory, *const tops = counts + bar_room, *const bars = tops + block_warps;
  double *const scores = memory + block_threads;
  u32 top = 0;
#pragma unroll
  for (u32 j = 0; j < share; j++)
    if (exists(j)) top = most(top, bits_of(v[j]) << 1 >> 1);
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) top = most(top, shuffle_xor(top, mask));
  barrier();
  counts[thread()] = 0;
  if (lane() == 0) tops[warp()] = top;
  barrier();
#pragma unroll
  for (u32 w = 0; w < block_warps; w++) top = most(top, tops[w]);
  g.spoiled = top >= 0x7f800000;
  g.shift = 0;
  const i32 lowest = ((i32)(top >> 23) - (bar_count / octave_bars - 1)) * octave_bars;
  const auto bar_of = [&] METHOD (float x) { return (u32)most((i32)(bits_of(x) << 1 >> (bar_shift + 1)) - lowest, 0); };
  if (!g.spoiled) { // the same for all threads
#pragma unroll
    for (u32 j = 0; j < share; j++)
      if (exists(j)) add_to(&counts[(bits_of(v[j]) >> 31) * bar_count + bar_of(v[j])], 1);
  }
  barrier();
  double score = score_of(counts);
  const u32 bar = best_bar(score);
  if (lane() == 0) scores[warp()] = score, bars[warp()] = bar;
  barrier();
  enum { of_sign = block_warps / signs }; // warps
  u32 cuts[signs];
#pragma unroll
  for (u32 sign = 0; sign < signs; sign++) {
    u32 best = sign * of_sign;
#pragma unroll
    for (u32 w = 1; w < of_sign; w++)
      if (scores[sign * of_sign + w] > scores[best]) best = sign * of_sign + w;
    cuts[sign] = bars[best];
  }
#pragma unroll
  for (u32 j = 0; j < share; j++) {
    if (!exists(j) || g.spoiled) continue;
    const u32 sign = bits_of(v[j]) >> 31, larger = bar_of(v[j]) >= (sign ? cuts[1] : cuts[0]);
    g.codes |= (sign ? 1 - larger : 2 + larger) << 2 * j;
  }
}

// encode_group makes a block write a group with two bits a value, and replaces the thread's values in v by decoded
// ones.
DEVICE void encode_group(const coded &a, u64 first, float (&v)[share], double *memory, bool list) {
  const u32 count = (u32)least(a.n - first, (u64)group_values);
  const auto exists = [&] METHOD (u32 j) { return j * block_threads + thread() < count; };
  group_bins g = {};
  if (list)
    list_bins(g, count, v, memory);
  else
    array_bins(g, count, v, memory);
  u32 counts = 0; // one byte for each code
#pragma unroll
  for (u32 j = 0; j < share; j++) {
    if (!exists(j)) continue;
    const u32 b = g.codes >> 2 * j & 3;
    counts += 1u << 8 * b;
#pragma unroll
    for (u32 k = 0; k < bins; k++)
      if (k == b) g.of_bins[k] = g.of_bins[k] + v[j];
  }
#pragma unroll
  for (u32 k = 0; k < bins; k++) g.of_bins[bins + k] = counts >> 8 * k & 0xff;
  block_sums(g.of_bins, memory);
  float table[bins];
#pragma unroll
  for (u32 b = 0; b < bins; b++) {
    const double n = g.of_bins[bins + b];
    const float mean = n > 0 ? (float)(g.of_bins[b] / n) : 0;
    table[b] = g.spoiled ? float_of(0x7fc00000) : least(most(mean + g.shift, -0x1.fffffep127f), 0x1.fffffep127f);
    if (thread() == 0) ((u32 *)a.scales)[first / group_values * bins + b] = bits_of(table[b]);
  }
  const u32 filled = (u32)up4((count + 3) / 4) * 4;
#pragma unroll
  for (u32 j = 0; j < share; j++) {
    const u32 b = g.codes >> 2 * j & 3, i = j * block_threads + thread();
    v[j] = b == 0 ? table[0] : b == 1 ? table[1] : b == 2 ? table[2] : table[3];
    u32 byte = b << 2 * (lane() % 4);
    byte |= shuffle_xor(byte, 1);
    byte |= shuffle_xor(byte, 2);
    if (lane() % 4 == 0 && i < filled) a.codes[(first + i) / 4] = (u8)byte;
  }
}

enum { memory_of_group = 8 * block_threads }; // doubles that encode_group needs

// floats are values at places a number of elements apart.
template <u32 n> struct floats { float of[n]; };

// encode_values makes a block write the values of a group of a list or array. It calls lose with rounding errors: the
// index of the first one, their distance in elements, and the errors.
DEVICE float lost_of(float x, float decoded) { return finite(decoded) ? x - decoded : 0; }
template <typename F> DEVICE void encode_values(const coded &a, u64 first, const float *x, double *memory, bool list, F lose) {
  if (a.codec == as_i2) {
    const u32 left = (u32)least(a.n - first, (u64)group_values);
    float v[share];
#pragma unroll
    for (u32 j = 0; j < share; j++) v[j] = j * block_threads + thread() < left ? x[first + thread() + j * block_threads] : 0;
    encode_group(a, first, v, memory, list);
    enum { batch = 8 };
#pragma unroll
    for (u32 from = 0; from < share; from += batch) {
      const u64 start = first + from * block_threads + thread();
      floats<batch> rest;
#pragma unroll
      for (u32 j = 0; j < batch; j++) rest.of[j] = (from + j) * block_threads + thread() < left ? x[start + j * block_threads] : 0;
#pragma unroll
      for (u32 j = 0; j < batch; j++) rest.of[j] = lost_of(rest.of[j], v[from + j]);
      lose(start, (u32)block_threads, rest);
    }
    return;
  }
  enum { row = quad * warp_size, of_warp = group_values / block_warps, rows = 2 }; // rows at a time
#pragma unroll 1
  for (u64 start = first + warp() * of_warp + lane() * quad, end = start + of_warp; start < end; start += rows * row) {
    four before[rows];
#pragma unroll
    for (u32 r = 0; r < rows; r++) before[r] = load_quad(x + start + r * row, of_quad(a.n, start + r * row));
#pragma unroll
    for (u32 r = 0; r < rows; r++) {
      four v = before[r];
      encode_quads(a, start + r * row, v);
#pragma unroll
      for (u32 j = 0; j < quad; j++) v[j] = lost_of(before[r][j], v[j]);
      lose(start + r * row, 1u, __builtin_bit_cast(floats<quad>, v));
    }
  }
}

struct quantize_args {
  u8 *dst;
  u64 codec;
  const float *src;
  u64 n;
  float *lost;
};
KERNEL BOUNDS(block_threads, 4) quantize(quantize_args a) {
  static SHARED double memory[memory_of_group];
  const coded to(a.codec, a.n, a.dst);
  for (u64 first = (u64)block() * group_values; first < a.n; first += (u64)blocks() * group_values)
    encode_values(to, first, a.src, memory, false, [&] METHOD (u64 i, u32 apart, auto rest) {
      if (!a.lost) return;
      enum { n = sizeof rest / sizeof(float) };
      if constexpr (n == quad) {
        store_quad(a.lost + i, of_quad(a.n, i), __builtin_bit_cast(four, rest));
      } else {
#pragma unroll
        for (u32 j = 0; j < n; j++)
          if (i + j * apart < a.n) a.lost[i + j * apart] = rest.of[j];
      }
    });
}

struct dequantize_args {
  float *dst;
  u64 codec;
  u8 *src;
  u64 n, add;
};
KERNEL dequantize(dequantize_args a) {
  const coded from(a.codec, a.n, a.src);
  for (u64 i = thread_index() * quad; i < a.n; i += thread_count() * quad) {
    const u32 exist = of_quad(a.n, i);
    four v = {0, 0, 0, 0};
    if (a.add) v = load_quad(a.dst + i, exist);
    const four decoded = decode_quad(from, i);
    store_quad(a.dst + i, exist, a.add ? v + decoded : decoded);
  }
}

// The parts of a message with m entries.
struct layout {
  u64 headers, values, blocks;
  METHOD layout(u64 codec, u64 m) {
    headers = message_header + 8 * ((m + group_values - 1) / group_values);
    values = headers + up4(2 * ((m + index_block - 1) / index_block));
    blocks = values + array_bytes(codec, m);
  }
};

// The header of a block of indices.
struct rice {
  u32 k, capped, high; // the bytes of quotients
  METHOD u32 word() const { return k | capped << 5 | high << 6; }
  METHOD u32 bytes(u32 count) const { return (count * k + 7) / 8 + high; }
};
enum { cap_at = 8, cap_from = 32, most_high = 1023 };
enum { staged_words = (index_block * 31 / 8 + most_high) / 4 + 3 };

DEVICE u32 bit_length(u32 v) { return 32 - leading_zeros(v); }
DEVICE u64 warp_sum64(u64 v) {
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
  return v;
}
DEVICE u32 inclusive_scan(u32 v) {
#pragma unroll
  for (u32 by = 1; by < warp_size; by *= 2) {
    const u32 below = shuffle_up(v, by);
    if (lane() >= by) v += below;
  }
  return v;
}

// A warp holds the gaps of a block of indices in runs: each lane has those of 32 consecutive entries.
enum { run = index_block / warp_size, run_room = index_block + warp_size };
struct gaps {
  u32 count;   // of the lane's run
  u32 of[run]; // 0 after these
};
// run_place returns the place of a block's entry in shared memory: lanes that walk through their runs use different banks.
DEVICE u32 run_place(u32 i) { return i + i / run; }

// load_gaps loads the gaps of a block, the first one of which is 0 if nothing is before it in the group.
DEVICE gaps load_gaps(const i32 *idx, u32 count, bool first, u32 *memory) {
  i32 row[run];
#pragma unroll
  for (u32 r = 0; r < run; r++) row[r] = r * warp_size + lane() < count ? idx[r * warp_size + lane()] : 0;
#pragma unroll
  for (u32 r = 0; r < run; r++) memory[run_place(r * warp_size + lane())] = (u32)row[r];
  warp_barrier();
  gaps g;
  g.count = count > lane() * run ? least(count - lane() * run, (u32)run) : 0;
  u32 before = lane() ? memory[run_place(lane() * run - 1)] : first ? memory[0] - 1 : (u32)idx[-1];
#pragma unroll
  for (u32 j = 0; j < run; j++) {
    const u32 index = memory[run_place(lane() * run) + j];
    g.of[j] = j < g.count ? (index - before - 1) & 0x7fffffff : 0;
    before = index;
  }
  return g;
}

// choose returns the shortest encoding of a block's gaps, as kernel.RiceParameter specifies.
DEVICE rice choose(const gaps &g, u32 count) {
  u64 sum = 0;
  u32 any = 0;
#pragma unroll
  for (u32 j = 0; j < run; j++) sum += g.of[j], any |= g.of[j];
  sum = warp_sum64(sum);
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) any |= shuffle_xor(any, mask);
  const auto cost = [&] METHOD (u32 k, u32 &capped) { // of the quotients and low bits, in bits
    enum { most_quotient = 1 << 20 }; // longer than all that are taken
    u32 plain = 0;
#pragma unroll
    for (u32 j = 0; j < run; j++) plain += least(g.of[j] >> k, (u32)most_quotient);
    plain = warp_sum(plain) + count;
    capped = 0;
    if (any >> k >= cap_from) { // the same for all
      u32 apart = 0;
#pragma unroll
      for (u32 j = 0; j < run; j++) {
        const u32 q = g.of[j] >> k;
        apart += q < cap_at ? q : cap_at - 1 + 2 * bit_length(q - cap_at + 1);
      }
      apart = warp_sum(apart) + count;
      capped = apart < plain;
      if (capped) plain = apart;
    }
    return plain > 8 * most_high ? 1ull << 40 : (u64)plain + count * k;
  };
  const u32 mean = (u32)(sum / count);
  u32 k = mean ? bit_length(mean) - 1 : 0, capped, other;
  u64 best = cost(k, capped);
  bool down = false;
  while (k > 0) {
    const u64 next = cost(k - 1, other);
    if (next >= best) break;
    k--, best = next, capped = other, down = true;
  }
  while (!down && k < 30) {
    const u64 next = cost(k + 1, other);
    if (next >= best) break;
    k++, best = next, capped = other;
  }
  const rice r = {k, capped, (u32)(best - count * k + 7) / 8}, fixed = {bit_length(any), 0, 0};
  return fixed.bytes(count) <= r.bytes(count) ? fixed : r;
}

// put_bits sets the n bits of v, at most 31, in words that are zero at these positions.
DEVICE void put_bits(u32 *words, u32 at, u32 v) {
  if (!v) return;
  set_bits(&words[at / 32], v << at % 32);
  if (at % 32 && v >> (32 - at % 32)) set_bits(&words[at / 32 + 1], v >> (32 - at % 32));
}
DEVICE u32 get_bits(const u32 *words, u32 at) { // 32 of them
  return at % 32 ? words[at / 32] >> at % 32 | words[at / 32 + 1] << (32 - at % 32) : words[at / 32];
}

// write_gaps makes a warp write a block of indices to words. Each lane writes its run, whose low bits fill one word for
// each bit of a gap.
DEVICE void write_gaps(const rice &r, const gaps &g, u32 count, u32 *words) {
  for (u32 i = run * r.k + lane(); i < least(r.bytes(count) / 4 + 2, (u32)staged_words); i += warp_size) words[i] = 0;
  u64 held = 0;
  u32 filled = 0, *to = words + lane() * r.k;
#pragma unroll
  for (u32 j = 0; j < run; j++) {
    held |= (u64)(g.of[j] & ((1u << r.k) - 1)) << filled;
    filled += r.k;
    if (filled < 32) continue; // the same for all
    *to++ = (u32)held;
    held >>= 32;
    filled -= 32;
  }
  warp_barrier();
  if (!r.high) return;
  const auto quotient = [&] METHOD (u32 j) {
    const u32 q = g.of[j] >> r.k;
    return r.capped ? least(q, (u32)cap_at) : q;
  };
  u32 at = (count * r.k + 7) / 8 * 8, mine = g.count;
#pragma unroll
  for (u32 j = 0; j < run; j++) mine += quotient(j);
  u32 end = inclusive_scan(mine), place = at + end - mine;
#pragma unroll
  for (u32 j = 0; j < run; j++) {
    place += quotient(j);
    if (j < g.count) set_bits(&words[place / 32], 1u << place % 32);
    place++;
  }
  if (!r.capped) return;
  at += shuffle(end, warp_size - 1);
  const auto length = [&] METHOD (u32 j) { // of what is kept apart, in bits behind the first one
    const u32 q = g.of[j] >> r.k;
    return bit_length(q - cap_at + 1) - 1;
  };
  mine = 0;
#pragma unroll
  for (u32 j = 0; j < run; j++)
    if (g.of[j] >> r.k >= cap_at) mine += 2 * length(j) + 1;
  end = inclusive_scan(mine), place = at + end - mine;
#pragma unroll
  for (u32 j = 0; j < run; j++) {
    const u32 q = g.of[j] >> r.k;
    if (q < cap_at) continue;
    const u32 n = length(j);
    put_bits(words, place + n, 1);
    put_bits(words, place + n + 1, (q - cap_at + 1) & ((1u << n) - 1));
    place += 2 * n + 1;
  }
}

// copy_bits has a warp copy bytes from words.
DEVICE void copy_bits(u8 *to, const u32 *words, u32 bytes) {
  const u32 head = least((u32)(-(u64)to & 3), bytes), whole = (bytes - head) / 4, behind = head + 4 * whole;
  const auto byte = [&] METHOD (u32 i) { to[i] = (u8)(words[i / 4] >> i % 4 * 8); };
  if (lane() < head) byte(lane());
  for (u32 i = lane(); i < whole; i += warp_size) ((u32 *)(to + head))[i] = get_bits(words, 8 * head + 32 * i);
  if (lane() < bytes - behind) byte(behind + lane());
}

struct encode_args {
  control *c;
  u64 *status;
  entries l;
  u64 codec, fit;
  u8 *message;
  u64 capacity;
  i32 *length;
  array lost;
};
// encode: a block has the indices of a group of entries at a time, a warp for each block of them, or the values. Where
// the bytes of indices begin, it learns from the groups before.
KERNEL BOUNDS(block_threads, 3) encode(encode_args a) {
  static SHARED u32 indices[group_blocks][run_room];
  alignas(16) static SHARED u32 staged[group_blocks][staged_words];
  static SHARED u32 sizes[group_blocks], ticket, before;
  control *c = a.c;
  const u64 tag = tag_of(c);
  const u32 listed = length_of(a.l), m = (u32)least((u64)listed, a.fit);
  const u32 groups = (m + group_values - 1) / group_values, all = (m + index_block - 1) / index_block;
  const layout at(a.codec, m);
  enum { of_indices, of_values };
  const u32 parts = a.codec == positions ? of_indices + 1 : of_values + 1; // of a group
  u32 faults = 0;
  const auto lose = [&] METHOD (u64 i, u32 apart, u32 end, auto rest) { // of the entries before an end
    constexpr u32 n = sizeof rest / sizeof(float);
    i32 index[n];
    float before[n];
#pragma unroll
    for (u32 j = 0; j < n; j++) index[j] = i + j * apart < end ? a.l.idx[i + j * apart] : -1;
#pragma unroll
    for (u32 j = 0; j < n; j++) {
      if (a.lost.has(index[j])) before[j] = a.lost.p[index[j]];
      else faults += i + j * apart < end;
    }
#pragma unroll
    for (u32 j = 0; j < n; j++)
      if (a.lost.has(index[j])) a.lost.p[index[j]] = before[j] + rest.of[j];
  };
  const bool loses = a.lost.p && a.codec != positions;
  for (u64 i = m + thread_index(); loses && i < listed; i += thread_count()) lose(i, 1, listed, floats<1>{a.l.val[i]});
  if (thread_index() == 0) {
    ((u32 *)a.message)[0] = m;
    if (all % 2) ((u16 *)(a.message + at.headers))[all] = 0;
    if (m == 0) {
      ((u32 *)a.message)[1] = message_header;
      if (a.length) *a.length = message_header;
    }
  }
  for (;;) {
    barrier();
    if (thread() == 0) ticket = add_to(&c->ticket, 1);
    barrier();
    const u32 number = ticket / parts, first = number * group_values;
    if (number >= groups) break;
    if (ticket % parts == of_values) {
      encode_values(coded(a.codec, m, a.message + at.values), first, a.l.val, (double *)staged, true, [&] METHOD (u64 i, u32 apart, auto rest) {
        if (loses) lose(i, apart, m, rest);
      });
      continue;
    }
    const u32 from = first + warp() * index_block, count = from < m ? least(m - from, (u32)index_block) : 0;
    const bool mine = warp() < group_blocks && count > 0; // the same for all lanes of a warp
    rice r = {0, 0, 0};
    if (mine) {
      const gaps g = load_gaps(a.l.idx + from, count, from == first, indices[warp()]);
      r = choose(g, count);
      write_gaps(r, g, count, staged[warp()]);
    }
    if (warp() < group_blocks && lane() == 0) sizes[warp()] = r.bytes(count);
    barrier();
    u32 total = 0, start = 0;
    for (u32 w = 0; w < group_blocks; w++) {
      if (w == warp()) start = total;
      total += sizes[w];
    }
    if (warp() == 0) {
      const u32 b = look_back(a.status, number, total, tag);
      if (lane() == 0) before = b;
    }
    barrier();
    const u64 group_at = at.blocks + before;
    if (thread() == 0) {
      u32 *const directory = (u32 *)(a.message + message_header) + 2 * number;
      directory[0] = (u32)a.l.idx[first];
      directory[1] = (u32)least(group_at, a.capacity);
      if (number == groups - 1) {
        const u32 length = (u32)least(group_at + total, a.capacity);
        ((u32 *)a.message)[1] = length;
        if (a.length) *a.length = (i32)length;
      }
    }
    if (mine) {
      const bool fits = group_at + start + r.bytes(count) <= a.capacity; // always true for an ascending list
      u8 *const to = a.message + group_at + start;
      if (lane() == 0) ((u16 *)(a.message + at.headers))[from / index_block] = fits ? (u16)r.word() : 0;
      if (fits) copy_bits(to, staged[warp()], r.bytes(count));
    }
  }
  count_faults(a.lost.p ? a.lost.faults : nullptr, faults);
  if (last_block(c)) reset(c);
}

// load_bits makes a warp load bytes of a message into words. Bytes beyond its length are 0.
DEVICE void load_bits(u32 *words, const u8 *message, u64 start, u32 bytes, u32 length) {
  const u64 end = least(start + bytes, (u64)length);
  for (u32 i = lane(); i < bytes / 4 + 2; i += warp_size) {
    const u64 at = start + 4 * i;
    u32 word = 0;
    if (at + 4 <= end && at + 8 <= length) {
      const u32 *const p = (const u32 *)message + at / 4;
      const u32 shift = at % 4 * 8;
      word = p[0] >> shift;
      if (shift) word |= p[1] << (32 - shift);
    } else {
#pragma unroll
      for (u32 b = 0; b < 4; b++)
        if (at + b < end) word |= (u32)message[at + b] << 8 * b;
    }
    words[i] = word;
  }
}

// read_gaps makes a warp decode the first n of a block's count entries into words, as positions relative to the
// smallest that the first can have. It returns the smallest position of the next block. Each lane decodes a run, whose
// low bits fill one word for each bit of a gap.
DEVICE u32 read_gaps(const rice &r, u32 count, u32 n, const u32 *words, u32 *places) {
  const u32 start = (count * r.k + 7) / 8 * 8, end = start + 8 * r.high, first = lane() * run;
  u32 *const mine = places + run_place(first);
#pragma unroll
  for (u32 row = 0; row < run; row++) places[run_place(row * warp_size + lane())] = ~0u; // of the ones of the quotients
  warp_barrier();
  u32 seen = 0;
  for (u32 at = start; at < end; at += 32 * warp_size) { // a word a thread
    const u32 own = at + 32 * lane();
    u32 w = own < end ? get_bits(words, own) : 0;
    if (own < end && end - own < 32) w &= (1u << (end - own)) - 1;
    const u32 inclusive = inclusive_scan(ones(w));
    for (u32 rank = seen + inclusive - ones(w); w && rank < count; w &= w - 1, rank++) places[run_place(rank)] = own + trailing_zeros(w);
    seen += shuffle(inclusive, warp_size - 1);
  }
  warp_barrier();
  const u32 last = places[run_place(count - 1)];
  u32 apart = r.high && last != ~0u ? last + 1 : end, previous = lane() ? places[run_place(first - 1)] : start - 1, large = 0;
  warp_barrier();
#pragma unroll
  for (u32 j = 0; j < run; j++) { // places become quotients
    const u32 place = first + j < n ? mine[j] : ~0u, q = place != ~0u ? place - previous - 1 : 0;
    if (place != ~0u && q == cap_at) large |= 1u << j;
    previous = place;
    mine[j] = q;
  }
  for (u32 lanes = r.capped ? ballot(large) : 0; lanes; lanes &= lanes - 1) { // the same for all
    const u32 owner = trailing_zeros(lanes);
    for (u32 left = shuffle(large, owner); left; left &= left - 1) {
      u32 zeros = 0;
      while (apart < end && !(get_bits(words, apart) & 1)) apart++, zeros++;
      zeros = apart < end ? least(zeros, 31u) : 0;
      apart++;
      const u32 x = 1u << zeros | (apart < end ? get_bits(words, apart) & ((1u << zeros) - 1) : 0);
      apart += zeros;
      if (owner == lane()) mine[trailing_zeros(left)] += x - 1;
    }
  }
  const u32 *from = words + lane() * r.k;
  u64 held = 0;
  u32 filled = 0, sum = 0;
#pragma unroll
  for (u32 j = 0; j < run; j++) { // and these places
    if (filled < r.k) { // the same for all
      held |= (u64)*from++ << filled;
      filled += 32;
    }
    const u32 gap = ((u32)held & ((1u << r.k) - 1)) | mine[j] << r.k;
    held >>= r.k;
    filled -= r.k;
    if (first + j < n) sum += gap + 1;
    mine[j] = sum - 1;
  }
  const u32 inclusive = inclusive_scan(sum);
#pragma unroll
  for (u32 j = 0; j < run; j++) mine[j] += inclusive - sum;
  return shuffle(inclusive, warp_size - 1);
}

struct decode_args {
  u64 codec;
  u8 *message;
  u64 capacity;
  entries dst; // its length is written
};
// decode: a block decodes one group of entries at a time. Some warps decode a block of indices each, the others the
// values meanwhile.
KERNEL BOUNDS(block_threads, 4) decode(decode_args a) {
  static SHARED u32 places[group_blocks][run_room];
  static SHARED u32 staged[group_blocks][staged_words];
  static SHARED u32 spans[group_blocks];
  u32 m = 0, count = 0, length = 0;
  if (a.capacity >= message_header) count = ((const u32 *)a.message)[0], length = ((const u32 *)a.message)[1];
  const layout at(a.codec, count);
  if (length <= a.capacity && count <= 0x7fffffff && at.blocks <= length) m = (u32)least((u64)count, a.dst.n);
  if (thread_index() == 0) *(i32 *)a.dst.length = (i32)m;
  for (u32 first = block() * group_values; first < m; first += blocks() * group_values) {
    const u32 *directory = (const u32 *)(a.message + message_header) + first / group_values * 2;
    const u32 from = first + warp() * index_block;
    const bool mine = warp() < group_blocks && from < m; // the same for all lanes of a warp
    const u32 n = mine ? least(m - from, (u32)index_block) : 0;
    barrier();
    if (mine) {
      u64 start = directory[1];
      rice r;
      u32 size = 0;
      for (u32 w = 0; w <= warp(); w++) {
        const u32 header = ((const u16 *)(a.message + at.headers))[first / index_block + w];
        start += size;
        size = least(count - first - w * index_block, (u32)index_block);
        r = {header & 31, header >> 5 & 1, header >> 6};
        if (w < warp()) size = r.bytes(size);
      }
      load_bits(staged[warp()], a.message, start, r.bytes(size), length);
      warp_barrier();
      const u32 span = read_gaps(r, size, n, staged[warp()], places[warp()]);
      if (lane() == 0) spans[warp()] = span;
    } else if (warp() < group_blocks) {
      if (lane() == 0) spans[warp()] = 0;
    } else if (a.codec != positions) {
      const coded values(a.codec, count, a.message + at.values);
      enum { others = (block_warps - group_blocks) * warp_size };
      for (u32 i = first + (thread() - group_blocks * warp_size) * quad; i < m && i < first + group_values; i += others * quad)
        store_quad(a.dst.val + i, of_quad(m, i), decode_quad(values, i));
    }
    barrier();
    u32 base = directory[0];
    for (u32 w = 0; w < group_blocks; w++) {
      for (u32 i = thread(); first + w * index_block + i < m && i < index_block; i += block_threads)
        a.dst.idx[first + w * index_block + i] = (i32)(base + places[w][run_place(i)]);
      base += spans[w];
    }
  }
}

struct chunks_args {
  float *x;
  const float *from;
  const void *grad;
  u64 type;
  const float *factor;
  float *keep;
  u64 n, take, k, chunk;
  i32 *idx;
  float *val;
  i32 *length;
};
// topk_chunks: a block selects from one chunk at a time, which it keeps in registers if it fits one round. Bisection
// of [low, high) finds the key of the last selected entry. Once few keys are left in the interval, each thread holds
// one.
KERNEL BOUNDS(block_threads, 4) topk_chunks(chunks_args a) {
  typedef tile<4> part;
  enum { round = block_warps * part::elements, each = part::elements / warp_size };
  static SHARED u32 totals[2][block_warps], candidates[block_threads], listed, found[3];
  const u64 chunks = (a.n + a.chunk - 1) / a.chunk;
  const float factor = a.factor ? *a.factor : 1;
  const u32 wide = a.type == type_f32 ? 4 : 2;
  u32 turn = 0; // alternates between two arrays of totals
  if (thread_index() == 0 && a.length) *a.length = (i32)(a.n / a.chunk * least(a.k, a.chunk) + least(a.k, a.n % a.chunk));
  for (u64 number = block(); number < chunks; number += blocks()) {
    const u64 first = number * a.chunk;
    const u32 size = (u32)least(a.chunk, a.n - first), k = (u32)least(a.k, (u64)size), rounds = (size + round - 1) / round;
    float *const x = a.x + first;
    float v[each];
    u32 exist = 0;
    const auto at = [&] METHOD (u32 r) { return part(r * block_warps + warp(), 0, size); };
    for (u32 r = 0; r < rounds; r++)
      exist = load_tile(v, at(r), x, a.from + first, (const u8 *)a.grad + first * wide, a.type, factor, a.keep ? a.keep + first : nullptr);
    if (k == 0) continue;
    const auto reload = [&] METHOD (u32 r) {
      if (rounds > 1) exist = load_tile(v, at(r), x);
    };
    // total adds up one number for each warp, and the numbers of the warps before this one.
    u32 before;
    const auto total = [&] METHOD (u32 mine) {
      u32 *const t = totals[turn++ % 2], sum = 0;
      if (lane() == 0) t[warp()] = mine;
      barrier();
      before = 0;
#pragma unroll
      for (u32 w = 0; w < block_warps; w++) {
        if (w < warp()) before += t[w];
        sum += t[w];
      }
      return sum;
    };
    // At least k keys are at or above low, and fewer than k at or above high.
    u32 low = 0, high = key_end, from_low = size, from_high = 0;
    const auto halve = [&] METHOD (auto count) {
      const u32 middle = low + (high - low) / 2, n = count(middle);
      if (n >= k) low = middle, from_low = n;
      else high = middle, from_high = n;
    };
    while (from_low > k && high - low > 1 && from_low - from_high > block_threads)
      halve([&] METHOD (u32 key) {
        u32 n = 0;
        for (u32 r = 0; r < rounds; r++) {
          reload(r);
#pragma unroll
          for (u32 j = 0; j < each; j++) n += key_of(v[j]) >= key; // key > 0, so elements that do not exist do not count
        }
        return total(warp_sum(n));
      });
    // each_of calls f for each flagged element of a round, with its place in the chunk and its rank among them.
    const auto each_of = [&] METHOD (u32 r, u32 flags, auto f) {
      for (; flags; flags &= flags - 1) f((u32)at(r).at(trailing_zeros(flags) / quad) + trailing_zeros(flags) % quad, trailing_zeros(flags));
    };
    const auto between = [&] METHOD {
      u32 flags = 0;
#pragma unroll
      for (u32 j = 0; j < each; j++) flags |= (u32)(key_of(v[j]) - low < high - low) << j;
      return flags & exist;
    };
    if (from_low > k && high - low > 1) {
      if (thread() == 0) listed = 0;
      barrier();
      for (u32 r = 0; r < rounds; r++) {
        reload(r);
        each_of(r, between(), [&] METHOD (u32 i, u32) { candidates[add_to(&listed, 1)] = key_of(x[i]); });
      }
      barrier();
      if (warp() == 0) {
        const u32 beyond = from_high;
        u32 mine[block_warps];
#pragma unroll
        for (u32 w = 0; w < block_warps; w++) mine[w] = w * warp_size + lane() < listed ? candidates[w * warp_size + lane()] : 0;
        while (from_low > k && high - low > 1)
          halve([&] METHOD (u32 key) {
            u32 n = 0;
#pragma unroll
            for (u32 w = 0; w < block_warps; w++) n += mine[w] >= key;
            return beyond + warp_sum(n);
          });
        if (lane() == 0) found[0] = low, found[1] = high, found[2] = from_high;
      }
      barrier();
      low = found[0], high = found[1], from_high = found[2];
    }
    // All entries with keys at or above high are selected, and the first ones of those in [low, high).
    u32 written = 0, tied = from_high;
    const u64 to = number * least(a.k, a.chunk);
    for (u32 r = 0; r < rounds; r++) {
      reload(r);
      u32 selected = 0;
#pragma unroll
      for (u32 j = 0; j < each; j++) selected |= (u32)(key_of(v[j]) >= high) << j;
      const auto places = [&] METHOD (u32 flags, u32 &sum, auto f) {
        const ranks<4> of(flags);
        const u32 all = total(of.all), start = sum + before;
        sum += all;
        each_of(r, flags, [&] METHOD (u32 i, u32 j) { f(start + of.at(j / quad) + ones(flags >> j / quad * quad & ((1u << j % quad) - 1)), i, j); });
      };
      places(between(), tied, [&] METHOD (u32 place, u32, u32 j) { selected |= (u32)(place < k) << j; });
      places(selected, written, [&] METHOD (u32 place, u32 i, u32) {
        a.idx[to + place] = (i32)(first + i), a.val[to + place] = x[i];
        if (a.take) x[i] = 0;
      });
    }
  }
}
