// Differences between two arrays: listing them, applying them to another array, and updating its checksums.
#include "order.cuh"

enum { delta_block = 1 << 20 }; // elements covered by one checksum

// A CRC is a remainder of polynomials over bits. Here the highest bit of a word is the coefficient of 1. A CRC is
// linear: a change of an element changes it by the changed bits times a power of x that depends on the number of bits
// after them.
enum : u32 { crc_polynomial = 0x82f63b78, crc_one = 1u << 31 };
METHOD constexpr u32 times_x(u32 a) { return a >> 1 ^ (a & 1) * crc_polynomial; }
METHOD constexpr u32 times(u32 a, u32 b) {
  u32 product = 0;
#pragma unroll
  for (u32 i = 0; i < 32; i++, a <<= 1, b = times_x(b)) product ^= (a >> 31) * b;
  return product;
}

// x to the powers 32 + 8i and 8j * near_bytes.
enum { near_bytes = 4096, far_steps = 2048 };
struct crc_powers {
  u32 near[near_bytes], far[far_steps];
  constexpr crc_powers() : near(), far() {
    u32 power = crc_one, step = crc_one >> 1;
    for (u32 i = 0; i < 32; i++) power = times_x(power);
    for (u32 i = 0; i < near_bytes; i++, power = times_x_8(power)) near[i] = power;
    for (u32 bits = 1; bits < 8 * near_bytes; bits *= 2) step = times(step, step);
    far[0] = crc_one;
    for (u32 j = 1; j < far_steps; j++) far[j] = times(far[j - 1], step);
  }
  static constexpr u32 times_x_8(u32 a) {
    for (u32 i = 0; i < 8; i++) a = times_x(a);
    return a;
  }
};
CONSTANT crc_powers powers;

// The change of a block's checksum if these bits of an element change, with `behind` elements after it in the block.
template <typename T> DEVICE u32 crc_change(T bits, u32 behind) {
  const u32 bytes = behind * (u32)sizeof(T);
  u32 power = times(powers.far[bytes / near_bytes], powers.near[bytes % near_bytes]), sum = 0;
#pragma unroll
  for (i32 j = 8 * sizeof(T) - 1; j >= 0; j--, power = times_x(power)) sum ^= (u32)(bits >> j & 1) * power;
  return sum;
}
DEVICE u32 warp_xor(u32 v) {
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) v ^= shuffle_xor(v, mask);
  return v;
}

// An element as an integer that sorts as its type does, and back: flip is the bits that a sign inverts.
template <typename T> DEVICE T in_order(T x, u64 flip) { return (T)(x ^ (x >> (8 * sizeof(T) - 1) ? (T)flip : (T)0)); }

struct diff_args {
  struct control *control;
  u64 *status;
  const void *old, *now; // old is 0 if there is none
  u64 n, flip;
  i32 *idx;
  void *diff;
  u64 room;
  i32 *length;
  u32 *sums;
};

// The elements of sixteen bytes that differ, one bit each.
template <typename T> DEVICE u32 differ(const words<4> &a, const words<4> &b) {
  u32 flags = 0;
#pragma unroll
  for (u32 w = 0; w < 4; w++) {
    const u32 d = a.word[w] ^ b.word[w];
    if constexpr (sizeof(T) == 8) {
      flags |= (u32)(d != 0) << w / 2;
    } else {
      constexpr u32 of_word = 4 / sizeof(T), mask = ~0u >> (32 - 8 * sizeof(T));
#pragma unroll
      for (u32 j = 0; j < of_word; j++) flags |= (u32)((d >> 8 * sizeof(T) * j & mask) != 0) << (w * of_word + j);
    }
  }
  return flags;
}

// finish writes the listed changes of a block's tile, after those of all tiles before it.
template <typename T> DEVICE void finish(const diff_args &a, const T *old, const T *now, u64 start, const u16 *changed, u32 count, u32 before) {
  if (warp() * warp_size >= count) return;
  const u32 last = (u32)(least(a.n - 1, start | (delta_block - 1)) - start); // last element of its checksum's block
  u32 sum = 0;
  for (u32 e = thread(); e < count; e += block_threads) {
    const u32 at = changed[e];
    const u64 i = start + at, to = (u64)before + e;
    const T is = now[i], was = old ? old[i] : 0;
    if (a.sums) sum ^= crc_change((T)(is ^ was), last - at);
    if (to < a.room) {
      a.idx[to] = (i32)i;
      ((T *)a.diff)[to] = (T)(in_order(is, a.flip) - in_order(was, a.flip));
    }
  }
  sum = warp_xor(sum);
  if (lane() == 0 && sum) flip_bits(a.sums + start / delta_block, sum);
}

// diff makes blocks take tiles of the arrays; each warp has some rows of sixteen bytes for each thread. A block lists
// the positions of a tile's changes in shared memory, so that all threads share the work on the few changed elements.
// It publishes their number. It asks for the number before its tile only after it has listed the next tile, when the
// other blocks have published theirs.
template <typename T> DEVICE void diff(const diff_args &a) {
  enum { rows = sizeof(T) == 1 ? 2 : 4, across = 16 / sizeof(T), of_row = warp_size * across, of_warp = rows * of_row, of_tile = block_warps * of_warp };
  static SHARED u32 ticket, base, counts[block_warps];
  static SHARED u16 changed[2][of_tile];
  const T *const old = (const T *)a.old, *const now = (const T *)a.now;
  const u32 tiles = (u32)((a.n + of_tile - 1) / of_tile);
  const u64 tag = tag_of(a.control);
  if (tiles == 0 && block() == 0 && thread() == 0) *a.length = 0;
  u32 next = thread() == 0 ? add_to(&a.control->ticket, 1) : 0, listed = tiles, total = 0; // the tile that was listed last, and its number of changes
  for (u32 turn = 0;; turn ^= 1) {
    if (thread() == 0) ticket = next;
    barrier();
    const u32 tile = ticket, had = total;
    if (tile < tiles) {
      if (thread() == 0) next = add_to(&a.control->ticket, 1);
      const u64 start = (u64)tile * of_tile;
      const u32 mine = warp() * of_warp + lane() * across; // the thread's first element in the tile
      u32 flags[rows];
      if (start + of_tile <= a.n && ((u64)(now + start) | (u64)(old + (old ? start : 0))) % 16 == 0) {
        words<4> is[rows], was[rows];
#pragma unroll
        for (u32 r = 0; r < rows; r++) {
          is[r] = load_words<4>(now + start + mine + r * of_row);
          was[r] = old ? load_words<4>(old + start + mine + r * of_row) : words<4>{};
        }
#pragma unroll
        for (u32 r = 0; r < rows; r++) flags[r] = differ<T>(is[r], was[r]);
      } else {
#pragma unroll
        for (u32 r = 0; r < rows; r++) {
          flags[r] = 0;
          for (u32 j = 0; j < across; j++) {
            const u64 i = start + mine + r * of_row + j;
            if (i < a.n && now[i] != (old ? old[i] : 0)) flags[r] |= 1u << j;
          }
        }
      }
      u32 inclusive[rows / 2], first[rows], all = 0; // by row, 16 bits each; first change of the thread in each row
#pragma unroll
      for (u32 h = 0; h < rows / 2; h++) {
        inclusive[h] = ones(flags[2 * h]) | ones(flags[2 * h + 1]) << 16;
#pragma unroll
        for (u32 by = 1; by < warp_size; by *= 2) {
          const u32 below = shuffle_up(inclusive[h], by);
          if (lane() >= by) inclusive[h] += below;
        }
      }
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
        const u32 shift = r % 2 * 16;
        first[r] = all + (inclusive[r / 2] >> shift & 0xffff) - ones(flags[r]);
        all += shuffle(inclusive[r / 2], warp_size - 1) >> shift & 0xffff;
      }
      if (lane() == 0) counts[warp()] = all;
      barrier();
      u32 before = 0;
      total = 0;
#pragma unroll
      for (u32 w = 0; w < block_warps; w++) {
        if (w < warp()) before += counts[w];
        total += counts[w];
      }
      if (thread() == 0) store(a.status + tile, tag | (tile == 0 ? status_whole : status_part) | total);
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
        u32 at = before + first[r];
        for (u32 f = flags[r]; f; f &= f - 1) changed[turn][at++] = (u16)(mine + r * of_row + trailing_zeros(f));
      }
    }
    if (listed < tiles) {
      if (warp() == 0) {
        const u32 sum = look_back(a.status, listed, had, tag);
        if (lane() == 0) {
          base = sum;
          if (listed == tiles - 1) *a.length = (i32)(sum + had);
        }
      }
      barrier();
      finish(a, old, now, (u64)listed * of_tile, changed[turn ^ 1], had, base);
    }
    barrier();
    if ((listed = tile) >= tiles) break;
  }
  if (last_block(a.control)) reset(a.control);
}
KERNEL BOUNDS(block_threads, 4) diff_1(diff_args a) { diff<u8>(a); }
KERNEL BOUNDS(block_threads, 4) diff_2(diff_args a) { diff<u16>(a); }
KERNEL BOUNDS(block_threads, 4) diff_4(diff_args a) { diff<u32>(a); }
KERNEL BOUNDS(block_threads, 4) diff_8(diff_args a) { diff<u64>(a); }

struct patch_args {
  void *x;
  u64 n, flip;
  const i32 *idx;
  const void *diff;
  u64 count;
  const i32 *length;
  u32 *sums;
  u64 back;
};

template <typename T> DEVICE void patch(const patch_args &a) {
  T *const x = (T *)a.x;
  const u32 m = length_of(a.count, a.length);
  for (u64 first = thread_index() - lane(); first < m; first += thread_count()) {
    const u64 e = first + lane();
    const u32 i = e < m ? (u32)a.idx[e] : ~0u;
    const bool inside = i < a.n;
    u32 sum = 0;
    if (inside) {
      const T was = x[i], by = ((const T *)a.diff)[e];
      const T is = in_order((T)(in_order(was, a.flip) + (a.back ? (T)-by : by)), a.flip);
      x[i] = is;
      if (a.sums) sum = crc_change((T)(is ^ was), (u32)least(a.n - 1, (u64)(i | (delta_block - 1))) - i);
    }
    if (!a.sums) continue;
    const u32 of = i / delta_block, common = shuffle(of, 0);
    if (ballot(inside && of != common)) {
      if (sum) flip_bits(a.sums + of, sum);
    } else {
      sum = warp_xor(sum);
      if (lane() == 0 && sum) flip_bits(a.sums + common, sum);
    }
  }
}
KERNEL patch_1(patch_args a) { patch<u8>(a); }
KERNEL patch_2(patch_args a) { patch<u16>(a); }
KERNEL patch_4(patch_args a) { patch<u32>(a); }
KERNEL patch_8(patch_args a) { patch<u64>(a); }
