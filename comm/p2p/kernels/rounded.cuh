// Allreduce of float32 rounded to a byte: each rank rounds the pieces of its peers and
// pushes them through the rings, adds up its own one in the order of the ranks, rounds
// the sums and pushes those to all. What a rounding loses stays with the rank. The values
// are those of package runtime's codecs i8 and fp8, bit for bit: a scale, as bf16, for
// each 64 values of a piece. Their layout on the way is another one.

// A warp has 512 values at a time, a tile: a pack of codes a lane, and a pack of scales.
enum { lane_values = 16, tile_values = lane_values * 32, tile_packs = 33, lanes_of_scale = 4 };

struct i8_code {
  DEVICE float limit() { return 127; }
  DEVICE u32 encode(float x, bool finite) {
    const float y = finite ? lesser(greater(x, -127.0f), 127.0f) : -128;
    return (__builtin_bit_cast(u32, y + 12582912.0f) - 0x4b400000) & 0xff; // rounded to even
  }
  DEVICE float decode(u32 code, float scale) { return code == 0x80 ? __builtin_nanf("") : times((float)(i8)code, scale); }
};
struct e4m3_code {
  DEVICE float limit() { return 448; }
  DEVICE u32 encode(float x, bool finite) { return finite ? e4m3_format::encode(x, 0x7f, 0x43e00000) : 0x7f; }
  DEVICE float decode(u32 code, float scale) { return times(e4m3_format::decode(code), scale); }
};

DEVICE bool is_finite(float x) { return (__builtin_bit_cast(u32, x) & 0x7f800000) != 0x7f800000; }

struct tile_part { float v[lane_values]; };
struct coded { pack codes, scales; };

// Where a lane's values of a tile are, of left bytes.
struct place { u64 at, left; };
DEVICE place place_of(u64 bytes, u64 tile) {
  const u64 at = (tile * tile_values + lane() * lane_values) * 4;
  return {at, at < bytes ? bytes - at : 0};
}
DEVICE bool in_packs(const call &c, const place &p) { return c.aligned && p.left >= 4 * lane_values; }
DEVICE tile_part load_values(const call &c, const char *from, const place &p) {
  tile_part t;
  if (in_packs(c, p)) {
#pragma unroll
    for (u32 i = 0; i < lane_values; i += 4) {
      const pack v = *(const pack *)(from + p.at + i * 4);
#pragma unroll
      for (u32 j = 0; j < 4; j++) t.v[i + j] = __builtin_bit_cast(float, v.word[j]);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < lane_values; i++) t.v[i] = p.left > i * 4 ? ((const float *)(from + p.at))[i] : 0;
  }
  return t;
}
DEVICE void store_values(const call &c, char *to, const place &p, const tile_part &t) {
  if (in_packs(c, p)) {
#pragma unroll
    for (u32 i = 0; i < lane_values; i += 4) {
      pack v;
#pragma unroll
      for (u32 j = 0; j < 4; j++) v.word[j] = __builtin_bit_cast(u32, t.v[i + j]);
      *(pack *)(to + p.at + i * 4) = v;
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < lane_values; i++)
      if (p.left > i * 4) ((float *)(to + p.at))[i] = t.v[i];
  }
}

DEVICE float scale_in(const pack &scales) {
  const u32 block = lane() / lanes_of_scale;
  return bf16_to_f32((u16)(scales.word[block / 2] >> block % 2 * 16));
}
template <typename C> DEVICE tile_part decode(const coded &c) {
  tile_part t;
  const float scale = scale_in(c.scales);
#pragma unroll
  for (u32 i = 0; i < lane_values; i++) t.v[i] = C::decode(c.codes.word[i / 4] >> i % 4 * 8 & 0xff, scale);
  return t;
}

// Rounds the values of a warp.
template <typename C> DEVICE coded encode(const tile_part &t) {
  u32 top = 0;
#pragma unroll
  for (u32 i = 0; i < lane_values; i++) {
    const u32 magnitude = __builtin_bit_cast(u32, t.v[i]) & 0x7fffffff;
    if (is_finite(t.v[i]) && magnitude > top) top = magnitude;
  }
#pragma unroll
  for (u32 mask = 1; mask < lanes_of_scale; mask *= 2) {
    const u32 other = shuffle_xor(top, mask);
    top = other > top ? other : top;
  }
  const u32 bits = __builtin_bit_cast(u32, quotient(__builtin_bit_cast(float, top), C::limit()));
  u32 scale16 = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  scale16 = scale16 < 0x80 ? 0 : scale16 < 0x7f7f ? scale16 : 0x7f7f;
  if (!is_finite(bf16_to_f32((u16)scale16) * C::limit())) scale16--;
  const float scale = bf16_to_f32((u16)scale16), inverse = scale > 0 ? quotient(1.0f, scale) : 0;
  coded c;
#pragma unroll
  for (u32 i = 0; i < lane_values; i++) {
    if (i % 4 == 0) c.codes.word[i / 4] = 0;
    const bool finite = is_finite(t.v[i]);
    c.codes.word[i / 4] |= C::encode(finite ? t.v[i] * inverse : 0, finite) << i % 4 * 8;
  }
#pragma unroll
  for (u32 w = 0; w < 4; w++) {
    const u32 low = shuffle(scale16, 8 * w), high = shuffle(scale16, 8 * w + 4);
    c.scales.word[w] = low | high << 16;
  }
  return c;
}

// What is lost of the values when they become what is decoded.
DEVICE tile_part lost_of(tile_part t, const tile_part &decoded) {
#pragma unroll
  for (u32 i = 0; i < lane_values; i++) t.v[i] = is_finite(decoded.v[i]) ? t.v[i] - decoded.v[i] : 0;
  return t;
}

// The slot of a stage and round. Two ranks have rings of one stage, whose slots have halves.
DEVICE char *tiles_at(const world &w, const operation &o, const line &l, u32 to, u32 stage, u64 round, u32 from) {
  const bool halves = w.ranks == 2;
  return w.scratch[to] + slot_at(w, o, l, halves ? 0 : stage, round, seat(from, to)) + (halves ? stage * w.at.ring_slot / 2 : 0);
}
DEVICE u32 tiles_of(const world &w) { return w.at.chunk / (w.ranks == 2 ? 2 : 1) / tile_packs; }

DEVICE void put_tile(char *to, const coded &c) {
  *(pack *)(to + lane() * 16) = c.codes;
  if (lane() == 0) *(pack *)(to + 32 * 16) = c.scales;
}
DEVICE coded take_tile(const char *from) { return {load(from + lane() * 16), load(from + 32 * 16)}; }

// Calls each(tile, number) with the tiles of a piece that a line has in a round.
template <typename F> DEVICE void of_round(const world &w, const line &l, u64 bytes, u64 round, F each) {
  const u64 lines = blocks() * (threads() / 32), all = (bytes / 4 + tile_values - 1) / tile_values, first = (round * lines + l.index) * tiles_of(w);
#pragma unroll 1
  for (u64 t = first; t < least(first + tiles_of(w), all); t++) each(t, (t - first) * tile_packs * 16);
}

// rounded: the values are at send, and what is lost takes their place if reduction is not
// 0; the sums go to recv.
template <typename C> DEVICE void rounded(const world &w, const call &c) {
  start();
  operation o = begin(w);
  advance(w, o);
  line l = line_of(w, c, o);
  const u64 stripe = (u64)blocks() * (threads() / 32) * tiles_of(w) * tile_values * 4, rounds = (c.bytes + stripe - 1) / stripe;
  char *values = (char *)c.send;
  auto lose = [&](char *at, const place &p, const tile_part &t, const tile_part &decoded) {
    if (c.reduction) store_values(c, at, p, lost_of(t, decoded));
  };
#pragma unroll 1
  for (u64 k = 0; k < rounds + 2 && l.alive; k++) {
    const bool fills = k < rounds, reduces = k >= 1 && k - 1 < rounds;
#pragma unroll 1
    for (u32 step = 1; fills && step < w.ranks; step++) {
      const u32 p = after(w, step);
      char *at = values + p * c.send_stride, *to = tiles_at(w, o, l, p, 0, k, w.rank);
      of_round(w, l, piece(c, p), k, [&](u64 tile, u64 offset) {
        const place here = place_of(piece(c, p), tile);
        const tile_part t = load_values(c, at, here);
        const coded e = encode<C>(t);
        put_tile(to + offset, e);
        lose(at, here, t, decode<C>(e));
      });
    }
    if (reduces) {
      if (!hear(w, c, o, l, 0, k - 1)) return;
      char *at = values + w.rank * c.send_stride, *to = c.recv + w.rank * c.recv_stride;
      of_round(w, l, piece(c, w.rank), k - 1, [&](u64 tile, u64 offset) {
        const place here = place_of(piece(c, w.rank), tile);
        tile_part sum = {};
#pragma unroll 1
        for (u32 s = 0; s < w.ranks; s++) {
          const tile_part t = s == w.rank ? load_values(c, at, here) : decode<C>(take_tile(tiles_at(w, o, l, w.rank, 0, k - 1, s) + offset));
#pragma unroll
          for (u32 i = 0; i < lane_values; i++) sum.v[i] = sum.v[i] + t.v[i];
        }
        const coded e = encode<C>(sum);
#pragma unroll 1
        for (u32 step = 1; step < w.ranks; step++) put_tile(tiles_at(w, o, l, after(w, step), 1, k - 1, w.rank) + offset, e);
        const tile_part decoded = decode<C>(e);
        lose(at, here, sum, decoded);
        store_values(c, to, here, decoded);
      });
    }
    if (k >= 2) {
      if (!hear(w, c, o, l, 1, k - 2)) return;
#pragma unroll 1
      for (u32 step = 1; step < w.ranks; step++) {
        const u32 s = after(w, step);
        of_round(w, l, piece(c, s), k - 2, [&](u64 tile, u64 offset) {
          store_values(c, c.recv + s * c.recv_stride, place_of(piece(c, s), tile), decode<C>(take_tile(tiles_at(w, o, l, w.rank, 1, k - 2, s) + offset)));
        });
      }
    }
    warp_barrier();
    if (fills) tell(w, o, l, 0, k);
    if (reduces) tell(w, o, l, 1, k - 1);
  }
}
