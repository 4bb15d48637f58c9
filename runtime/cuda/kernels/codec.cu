// Lists and arrays as they travel: the codecs of package runtime, which describes the format, and the
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

// Values that travel: n of them, with their scales, and then their codes, at p.
struct coded {
  u64 codec, n;
  u8 *scales, *codes;
  METHOD coded(u64 codec, u64 n, u8 *p) : codec(codec), n(n), scales(p), codes(p + scale_bytes(codec, n)) {}
};

DEVICE u16 load16(const u8 *p) { return *(const u16 *)p; }
DEVICE float scale_at(const coded &a, u64 i) { return bf16_to_f32(load16(a.scales + i / block_values * 2)); }

// E4M3, without NaNs on the way there.
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
// 16-bit floats, whose NaNs keep what of them there is room for.
DEVICE u32 to_half(float x) { return x != x ? bits_of(x) >> 31 << 15 | 0x7e00 | (bits_of(x) >> 13 & 0x3ff) : f32_to_f16(x); }
DEVICE u32 to_brain(float x) { return x != x ? bits_of(x) >> 16 | 0x40 : f32_to_bf16(x); }

DEVICE float decode_value(const coded &a, u64 i) {
  switch (a.codec) {
  case as_f32: return float_of(((const u32 *)a.codes)[i]);
  case as_bf16: return bf16_to_f32(((const u16 *)a.codes)[i]);
  case as_f16: return f16_to_f32(((const u16 *)a.codes)[i]);
  case as_fp8: return from_fp8(a.codes[i]) * scale_at(a, i);
  case as_i8: {
    const i32 q = (i8)a.codes[i];
    return q == -128 ? float_of(0x7fc00000) : (float)q * scale_at(a, i);
  }
  case as_i4: {
    const i32 q = (i32)((u32)a.codes[i / 2] << (28 - i % 2 * 4)) >> 28;
    return q == -8 ? float_of(0x7fc00000) : (float)q * scale_at(a, i);
  }
  case as_i2: return float_of(((const u32 *)a.scales)[i / group_values * 4 + (a.codes[i / 4] >> i % 4 * 2 & 3)]);
  }
  const u32 sign = (u32)(a.codes[i / 8] >> i % 8) << 31;
  return float_of(bits_of(scale_at(a, i)) ^ sign);
}

// A magnitude as BF16: not beyond the largest, and 0 if it is subnormal.
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

// encode_block has a warp write a block of values, of which each thread has two, 32 apart, and makes
// them what is decoded. They are 0 behind the end.
DEVICE void encode_block(const coded &a, u64 first, float (&v)[2]) {
  const u32 count = (u32)least(a.n - first, (u64)block_values);
  u32 code[2];
  float decoded[2];
  bool odd = !finite(v[0]) || !finite(v[1]);
  float scale = 0, inverse = 0;
  u32 scale16 = 0;
  const float limit = a.codec == as_fp8 ? 448 : a.codec == as_i8 ? 127 : 7;
  if (a.codec == as_sign) {
    const float sum = warp_sum(float_of(key_of(v[0])) / block_values + float_of(key_of(v[1])) / block_values);
    scale16 = ballot(odd) ? 0x7fc0 : magnitude16(sum * ((float)block_values / (float)count));
  } else if (a.codec >= as_fp8) {
    u32 top = most(finite(v[0]) ? key_of(v[0]) : 0, finite(v[1]) ? key_of(v[1]) : 0);
#pragma unroll
    for (u32 mask = warp_size / 2; mask > 0; mask /= 2) top = most(top, shuffle_xor(top, mask));
    scale16 = magnitude16(float_of(top) / limit);
    if (!finite(bf16_to_f32((u16)scale16) * limit)) scale16--;
  }
  scale = bf16_to_f32((u16)scale16);
  if (scale > 0) inverse = 1 / scale;
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const float x = v[h];
    switch (a.codec) {
    case as_f32: code[h] = bits_of(x), decoded[h] = x; break;
    case as_bf16:
      code[h] = to_brain(finite(x) ? least(most(x, -0x1.fep127f), 0x1.fep127f) : x), decoded[h] = bf16_to_f32((u16)code[h]);
      break;
    case as_f16: code[h] = to_half(finite(x) ? least(most(x, -65504.0f), 65504.0f) : x), decoded[h] = f16_to_f32((u16)code[h]); break;
    case as_fp8: code[h] = finite(x) ? to_fp8(x * inverse) : 127, decoded[h] = from_fp8(code[h]) * scale; break;
    case as_sign: code[h] = bits_of(x) >> 31, decoded[h] = float_of(bits_of(scale) ^ code[h] << 31); break;
    default: {
      const float rounded = finite(x) ? x * inverse + 12582912.0f : 0;
      const i32 q = finite(x) ? least(most((i32)(bits_of(rounded) - 0x4b400000), -(i32)limit), (i32)limit) : -(i32)limit - 1;
      code[h] = (u32)q, decoded[h] = finite(x) ? (float)q * scale : float_of(0x7fc00000);
    }
    }
    const u32 i = h * warp_size + lane();
    const bool exists = i < count;
    if (!exists) code[h] = 0;
    switch (a.codec) { // codes fill up words
    case as_f32:
      if (exists) ((u32 *)a.codes)[first + i] = code[h];
      break;
    case as_bf16:
    case as_f16:
      if (i < up4(2 * count) / 2) ((u16 *)a.codes)[first + i] = (u16)code[h];
      break;
    case as_fp8:
    case as_i8:
      if (i < up4(count)) a.codes[first + i] = (u8)code[h];
      break;
    case as_i4: {
      const u32 next = shuffle_xor(code[h], 1);
      if (i % 2 == 0 && i < 2 * up4((count + 1) / 2)) a.codes[(first + i) / 2] = (u8)((code[h] & 15) | next << 4);
      break;
    }
    default: {
      const u32 word = ballot(code[h] & 1);
      if (lane() == 0 && h * warp_size < count) ((u32 *)a.codes)[(first + i) / 32] = word;
    }
    }
    v[h] = decoded[h];
  }
  if (a.codec < as_fp8 || lane() > 0) return;
  ((u16 *)a.scales)[first / block_values] = (u16)scale16;
  if (first + block_values >= a.n && first / block_values % 2 == 0) ((u16 *)a.scales)[first / block_values + 1] = 0;
}

// block_sum adds up a value of each thread, halves onto halves.
DEVICE double block_sum(double v, double *memory) {
  barrier();
  memory[thread()] = v;
  for (u32 half = block_threads / 2; half >= warp_size; half /= 2) {
    barrier();
    if (thread() < half) memory[thread()] = memory[thread()] + memory[thread() + half];
  }
  barrier();
  return warp_sum(memory[lane()]);
}

enum { share = group_values / block_threads }; // values of a thread in a group

// encode_group has a block write a group in two bits a value. v has those of the thread, every 256th of
// the group, and becomes what is decoded.
DEVICE void encode_group(const coded &a, u64 first, float (&v)[share], double *memory) {
  static SHARED u32 counts[4];
  const u32 count = (u32)least(a.n - first, (u64)group_values);
  const auto exists = [&] METHOD (u32 j) { return j * block_threads + thread() < count; };
  double sum = 0, squares = 0, bins[4] = {0, 0, 0, 0};
  bool odd = false;
  barrier();
  if (thread() < 4) counts[thread()] = 0;
  for (u32 j = 0; j < share; j++)
    if (exists(j)) sum = sum + v[j], odd |= !finite(v[j]);
  const bool spoiled = barrier_count(odd) > 0;
  const float shift = (float)(block_sum(sum, memory) / count);
  for (u32 j = 0; j < share; j++)
    if (exists(j)) v[j] = v[j] - shift, squares = squares + (double)v[j] * (double)v[j];
  const float std = (float)square_root(block_sum(squares, memory) / (count - 1.0));
  float scale = 6 * std / 4;
  if (scale == 0 || !finite(scale)) scale = 1;
  u32 codes = 0;
  for (u32 j = 0; j < share; j++) {
    if (!exists(j)) continue;
    const float y = least(most(v[j] / scale + 2, -1.0f), 4.0f);
    const i32 b = spoiled ? 0 : least(most((i32)(bits_of(y + 12582912.0f) - 0x4b400000), 0), 3);
    codes |= (u32)b << 2 * j;
    add_to(&counts[b], 1);
#pragma unroll
    for (i32 k = 0; k < 4; k++)
      if (k == b) bins[k] = bins[k] + v[j];
  }
  float table[4];
#pragma unroll
  for (u32 b = 0; b < 4; b++) {
    const double total = block_sum(bins[b], memory);
    const float mean = counts[b] ? (float)(total / counts[b]) : 0;
    table[b] = spoiled ? float_of(0x7fc00000) : least(most(mean + shift, -0x1.fffffep127f), 0x1.fffffep127f);
    if (thread() == 0) ((u32 *)a.scales)[first / group_values * 4 + b] = bits_of(table[b]);
  }
  const u32 filled = (u32)up4((count + 3) / 4) * 4;
#pragma unroll
  for (u32 j = 0; j < share; j++) {
    const u32 b = codes >> 2 * j & 3, i = j * block_threads + thread();
    v[j] = b == 0 ? table[0] : b == 1 ? table[1] : b == 2 ? table[2] : table[3];
    u32 byte = b << 2 * (lane() % 4);
    byte |= shuffle_xor(byte, 1);
    byte |= shuffle_xor(byte, 2);
    if (lane() % 4 == 0 && i < filled) a.codes[(first + i) / 4] = (u8)byte;
  }
}

// encode_values has a block write the values of a group, and calls lose with each of them and what is
// decoded.
template <typename F> DEVICE void encode_values(const coded &a, u64 first, const float *x, double *memory, F lose) {
  if (a.codec == as_i2) {
    float v[share];
    for (u32 j = 0; j < share; j++) {
      const u64 i = first + j * block_threads + thread();
      v[j] = i < a.n ? x[i] : 0;
    }
    encode_group(a, first, v, memory);
    for (u32 j = 0; j < share; j++) {
      const u64 i = first + j * block_threads + thread();
      if (i < a.n) lose(i, x[i], v[j]);
    }
    return;
  }
  for (u64 b = first + warp() * block_values; b < least(first + group_values, a.n); b += block_warps * block_values) {
    const u64 at[2] = {b + lane(), b + warp_size + lane()};
    const float before[2] = {at[0] < a.n ? x[at[0]] : 0, at[1] < a.n ? x[at[1]] : 0};
    float v[2] = {before[0], before[1]};
    encode_block(a, b, v);
#pragma unroll
    for (u32 h = 0; h < 2; h++)
      if (at[h] < a.n) lose(at[h], before[h], v[h]);
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
  static SHARED double memory[block_threads];
  const coded to(a.codec, a.n, a.dst);
  for (u64 first = (u64)block() * group_values; first < a.n; first += (u64)blocks() * group_values)
    encode_values(to, first, a.src, memory, [&] METHOD (u64 i, float x, float decoded) {
      if (a.lost) a.lost[i] = finite(decoded) ? x - decoded : 0;
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
  for (u64 i = thread_index(); i < a.n; i += thread_count()) {
    const float v = decode_value(from, i);
    a.dst[i] = a.add ? a.dst[i] + v : v;
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

// choose returns the shortest way to write the gaps of a block, as runtime.RiceParameter says.
DEVICE rice choose(const u32 *gaps, u32 count) {
  u64 sum = 0;
  u32 any = 0;
  for (u32 i = lane(); i < count; i += warp_size) sum += gaps[i], any |= gaps[i];
  sum = warp_sum64(sum);
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) any |= shuffle_xor(any, mask);
  const auto cost = [&] METHOD (u32 k, u32 &capped) { // of the quotients and low bits, in bits
    u64 plain = 0, apart = 0;
    for (u32 i = lane(); i < count; i += warp_size) {
      const u32 q = gaps[i] >> k;
      plain += q + 1;
      apart += q < cap_at ? q + 1 : cap_at + 2 * bit_length(q - cap_at + 1);
    }
    plain = warp_sum64(plain), apart = warp_sum64(apart);
    capped = any >> k >= cap_from && apart < plain;
    if (capped) plain = apart;
    return plain > 8 * most_high ? 1ull << 40 : plain + count * k;
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

// put_bits sets the n bits of v, at most 31, in words that are zero there.
DEVICE void put_bits(u32 *words, u32 at, u32 v) {
  if (!v) return;
  set_bits(&words[at / 32], v << at % 32);
  if (at % 32 && v >> (32 - at % 32)) set_bits(&words[at / 32 + 1], v >> (32 - at % 32));
}
DEVICE u32 get_bits(const u32 *words, u32 at) { // 32 of them
  return at % 32 ? words[at / 32] >> at % 32 | words[at / 32 + 1] << (32 - at % 32) : words[at / 32];
}

// write_gaps has a warp write a block of indices to words, which are zero.
DEVICE void write_gaps(const rice &r, const u32 *gaps, u32 count, u32 *words) {
  for (u32 i = lane(); i < count; i += warp_size) put_bits(words, i * r.k, gaps[i] & ((1u << r.k) - 1));
  if (!r.high) return;
  const u32 rows = (count + warp_size - 1) / warp_size;
  u32 at = (count * r.k + 7) / 8 * 8;
  for (u32 row = 0; row < rows; row++) {
    const u32 i = row * warp_size + lane();
    u32 q = i < count ? gaps[i] >> r.k : 0;
    if (r.capped) q = least(q, (u32)cap_at);
    const u32 end = inclusive_scan(i < count ? q + 1 : 0);
    if (i < count) put_bits(words, at + end - 1, 1);
    at += shuffle(end, warp_size - 1);
  }
  for (u32 row = 0; r.capped && row < rows; row++) {
    const u32 i = row * warp_size + lane();
    const u32 q = i < count ? gaps[i] >> r.k : 0;
    const u32 n = q >= cap_at ? bit_length(q - cap_at + 1) - 1 : 0, size = q >= cap_at ? 2 * n + 1 : 0;
    const u32 end = inclusive_scan(size), start = at + end - size;
    if (size) {
      put_bits(words, start + n, 1);
      put_bits(words, start + n + 1, (q - cap_at + 1) & ((1u << n) - 1));
    }
    at += shuffle(end, warp_size - 1);
  }
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
// encode: a block has a group of entries at a time: all its warps the values, and then one for each block of
// indices. Where their bytes begin, it learns from the groups before.
KERNEL BOUNDS(block_threads, 4) encode(encode_args a) {
  static SHARED u32 gaps[group_blocks][index_block];
  alignas(8) static SHARED u32 staged[group_blocks][staged_words];
  static SHARED u32 sizes[group_blocks], ticket, before;
  control *c = a.c;
  const u64 tag = tag_of(c);
  const u32 listed = length_of(a.l), m = (u32)least((u64)listed, a.fit);
  const u32 groups = (m + group_values - 1) / group_values, all = (m + index_block - 1) / index_block;
  const layout at(a.codec, m);
  u32 faults = 0;
  const auto lose = [&] METHOD (u64 i, float rest) {
    const i32 index = a.l.idx[i];
    if (!a.lost.has(index))
      faults++;
    else
      a.lost.p[index] = a.lost.p[index] + rest;
  };
  const bool loses = a.lost.p && a.codec != positions;
  for (u64 i = m + thread_index(); loses && i < listed; i += thread_count()) lose(i, a.l.val[i]);
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
    const u32 number = ticket;
    if (number >= groups) break;
    const u32 first = number * group_values;
    if (a.codec != positions)
      encode_values(coded(a.codec, m, a.message + at.values), first, a.l.val, (double *)staged, [&] METHOD (u64 i, float x, float decoded) {
        if (loses) lose(i, finite(decoded) ? x - decoded : 0);
      });
    barrier();
    const u32 from = first + warp() * index_block, count = from < m ? least(m - from, (u32)index_block) : 0;
    const bool mine = warp() < group_blocks && count > 0; // the same for all of a warp
    rice r = {0, 0, 0};
    if (mine) {
      u32 *const g = gaps[warp()], *const words = staged[warp()];
      for (u32 i = lane(); i < count; i += warp_size)
        g[i] = from + i == first ? 0 : ((u32)a.l.idx[from + i] - (u32)a.l.idx[from + i - 1] - 1) & 0x7fffffff;
      for (u32 i = lane(); i < staged_words; i += warp_size) words[i] = 0;
      warp_barrier();
      r = choose(g, count);
      write_gaps(r, g, count, words);
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
      const bool fits = group_at + start + r.bytes(count) <= a.capacity; // it does, unless the list does not ascend
      u8 *const to = a.message + group_at + start;
      if (lane() == 0) ((u16 *)(a.message + at.headers))[from / index_block] = fits ? (u16)r.word() : 0;
      for (u32 i = lane(); fits && i < r.bytes(count); i += warp_size) to[i] = (u8)(staged[warp()][i / 4] >> i % 4 * 8);
    }
  }
  count_faults(a.lost.p ? a.lost.faults : nullptr, faults);
  if (last_block(c)) reset(c);
}

// read_gaps has a warp make words the places of the first n of count entries of a block, from the first one's
// least place on, and returns what the next one's is.
DEVICE u32 read_gaps(const rice &r, u32 count, u32 n, const u32 *words, u32 *places) {
  const u32 start = (count * r.k + 7) / 8 * 8, end = start + 8 * r.high;
  for (u32 i = lane(); i < count; i += warp_size) places[i] = ~0u; // of the ones of the quotients
  warp_barrier();
  u32 seen = 0;
  for (u32 at = start; at < end; at += 32 * warp_size) { // a word a thread
    const u32 mine = at + 32 * lane();
    u32 w = mine < end ? get_bits(words, mine) : 0;
    if (mine < end && end - mine < 32) w &= (1u << (end - mine)) - 1;
    const u32 inclusive = inclusive_scan(ones(w));
    for (u32 rank = seen + inclusive - ones(w); w && rank < count; w &= w - 1, rank++) places[rank] = mine + trailing_zeros(w);
    seen += shuffle(inclusive, warp_size - 1);
  }
  warp_barrier();
  u32 apart = r.high && places[count - 1] != ~0u ? places[count - 1] + 1 : end, next = 0, last = start - 1;
  warp_barrier();
  for (u32 row = 0; row < (n + warp_size - 1) / warp_size; row++) {
    const u32 i = row * warp_size + lane();
    const u32 place = i < n ? places[i] : ~0u, previous = shuffle_up(place, 1);
    u32 q = 0;
    if (place != ~0u) q = place - (lane() ? previous : last) - 1;
    last = shuffle(place, warp_size - 1);
    for (u32 large = r.capped ? ballot(place != ~0u && q == cap_at) : 0; large; large &= large - 1) { // the same for all
      u32 zeros = 0;
      while (apart < end && !(get_bits(words, apart) & 1)) apart++, zeros++;
      zeros = apart < end ? least(zeros, 31u) : 0;
      apart++;
      const u32 x = 1u << zeros | (apart < end ? get_bits(words, apart) & ((1u << zeros) - 1) : 0);
      apart += zeros;
      if (trailing_zeros(large) == lane()) q += x - 1;
    }
    const u32 gap = i < n ? get_bits(words, i * r.k) & ((1u << r.k) - 1) | q << r.k : 0;
    const u32 sums = inclusive_scan(i < n ? gap + 1 : 0);
    warp_barrier();
    if (i < n) places[i] = next + sums - 1;
    next += shuffle(sums, warp_size - 1);
  }
  return next;
}

struct decode_args {
  u64 codec;
  u8 *message;
  u64 capacity;
  entries dst; // with a length that is written
};
// decode: a block has a group of entries at a time, a warp a block of indices, and the others the values.
KERNEL BOUNDS(block_threads, 4) decode(decode_args a) {
  static SHARED u32 places[group_blocks][index_block];
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
    const bool mine = warp() < group_blocks && from < m; // the same for all of a warp
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
      u8 *const bytes = (u8 *)staged[warp()];
      for (u32 i = lane(); i < 4 * staged_words; i += warp_size) bytes[i] = i < r.bytes(size) && start + i < length ? a.message[start + i] : 0;
      warp_barrier();
      const u32 span = read_gaps(r, size, n, staged[warp()], places[warp()]);
      if (lane() == 0) spans[warp()] = span;
    } else if (warp() < group_blocks && lane() == 0) {
      spans[warp()] = 0;
    }
    barrier();
    u32 base = directory[0];
    for (u32 w = 0; w < group_blocks; w++) {
      for (u32 i = thread(); first + w * index_block + i < m && i < index_block; i += block_threads)
        a.dst.idx[first + w * index_block + i] = (i32)(base + places[w][i]);
      base += spans[w];
    }
    if (a.codec == positions) continue;
    const coded values(a.codec, count, a.message + at.values);
    for (u32 i = first + thread(); i < m && i < first + group_values; i += block_threads) a.dst.val[i] = decode_value(values, i);
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
// topk_chunks: a block has a chunk at a time, and finds the key of the last entry that is selected digit by digit.
KERNEL BOUNDS(block_threads, 4) topk_chunks(chunks_args a) {
  enum { bins = 256 };
  static SHARED u32 histogram[bins], totals[block_warps], digit, above;
  const u64 chunks = (a.n + a.chunk - 1) / a.chunk;
  const float factor = a.factor ? *a.factor : 1;
  if (thread_index() == 0 && a.length) *a.length = (i32)(a.n / a.chunk * least(a.k, a.chunk) + least(a.k, a.n % a.chunk));
  for (u64 number = block(); number < chunks; number += blocks()) {
    const u64 first = number * a.chunk;
    const u32 size = (u32)least(a.chunk, a.n - first), k = (u32)least(a.k, (u64)size);
    float *const x = a.x + first;
    for (u32 i = thread(); a.type != type_none && i < size; i += block_threads) {
      const u64 j = first + i;
      const float v = a.from[j];
      if (a.keep) a.keep[j] = v;
      const float g = a.type == type_f16 ? widen(((const f16 *)a.grad)[j]) : a.type == type_bf16 ? widen(((const bf16 *)a.grad)[j]) : ((const float *)a.grad)[j];
      x[i] = v + g * factor;
    }
    if (k == 0) continue;
    u32 low = 0, left = k; // the key has these upper bits, and the entry is the left-th of those that have them
    for (i32 shift = 24; shift >= 0; shift -= 8) {
      barrier();
      histogram[thread()] = 0;
      barrier();
      for (u32 i = thread(); i < size; i += block_threads) {
        const u32 key = key_of(x[i]);
        if (shift == 24 || key >> (shift + 8) == low >> (shift + 8)) add_to(&histogram[key >> shift & (bins - 1)], 1);
      }
      barrier();
      // Thread t has the bin t from above.
      const u32 mine = histogram[bins - 1 - thread()];
      u32 total;
      const u32 before = scan(mine, totals, total);
      if (before < left && before + mine >= left) digit = bins - 1 - thread(), above = before;
      barrier();
      low |= digit << shift, left -= above;
    }
    u32 written = 0, ties = 0;
    const u64 to = number * least(a.k, a.chunk);
    for (u32 start = 0; start < size; start += block_threads) {
      const u32 i = start + thread();
      const float v = i < size ? x[i] : 0;
      const u32 key = key_of(v);
      const bool tie = i < size && key == low;
      u32 total;
      barrier();
      const u32 tied = ties + scan(tie, totals, total);
      ties += total;
      const bool selected = i < size && (key > low || (tie && tied < left));
      barrier();
      const u32 place = written + scan(selected, totals, total);
      written += total;
      if (!selected) continue;
      a.idx[to + place] = (i32)(first + i), a.val[to + place] = v;
      if (a.take) x[i] = 0;
    }
  }
}
