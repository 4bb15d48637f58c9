// Allreduce of float32 values rounded to a byte. Each rank adds a gradient to its values, if there is one, rounds the
// pieces of its peers, and sends them over the rings. It adds up its own piece in rank order, rounds the sums, and
// sends them to all. Rounding errors stay with the rank. The values equal those of package runtime's codecs i8 and fp8
// bit for bit, with one bf16 scale for 64 values of a piece. The layout on the wire differs.
//
// A warp handles a tile of 512 values at a time: four packs for each lane, adjacent packs in adjacent lanes. If a
// piece begins `lead` values after a pack boundary of its buffer, the lanes' packs do so too, so that they are loaded
// and stored whole: value i of pack k is value 4 k + i - lead of the tile, and the first pack begins with the last
// `lead` values of the tile. Each lane stores one pack of codes. The scales follow the codes of all tiles in a slot.
// The line of a ring is a block here, so that one flag announces all of its tiles. A slot is filled again three rounds
// later, when the peers have read it.
enum { lane_packs = 4, lane_values = 4 * lane_packs, tile_values = lane_values * 32, tile_bytes = tile_values + 16, rounded_slots = 3 };
enum { rounded_width = 320 }; // threads of a block, at most

// The rounded form of a value, and its code.
struct rounded_value {
  float value;
  u32 code;
};
struct i8_code {
  static const u32 nan = 0x80;
  DEVICE float limit() { return 127; }
  DEVICE rounded_value round(float x) { // to nearest even
    const float magic = 12582912, moved = __builtin_fminf(__builtin_fmaxf(x, -127), 127) + magic;
    return {moved - magic, __builtin_bit_cast(u32, moved) & 0xff};
  }
  DEVICE float decode(u32 code, float scale) {
    // The code as the low bits of a float32 with a unit of 1.
    const float v = times(__builtin_bit_cast(float, 0x4b000000 | (code ^ 0x80)) - 8388736, scale);
    return code == nan ? __builtin_nanf("") : v;
  }
};
struct e4m3_code {
  static const u32 nan = 0x7f;
  DEVICE float limit() { return 448; }
  DEVICE rounded_value round(float x) {
    const u32 bits = __builtin_bit_cast(u32, x), sign = bits & 0x80000000, magnitude = (bits ^ sign) < 0x43e00000 ? bits ^ sign : 0x43e00000;
    // A power of two with the code's unit in the last place. Codes count up from the smallest number with its
    // exponent.
    const u32 least_normal = 121 << 23, power = magnitude & 0x7f800000, from = power > least_normal ? power : least_normal;
    const float magic = __builtin_bit_cast(float, from + (20 << 23)), moved = __builtin_bit_cast(float, magnitude) + magic;
    const u32 code = (from - least_normal) / (1 << 20) + __builtin_bit_cast(u32, moved) - __builtin_bit_cast(u32, magic);
    return {__builtin_bit_cast(float, sign | __builtin_bit_cast(u32, moved - magic)), sign >> 24 | code};
  }
  DEVICE float decode(u32 code, float scale) { return times(e4m3_format::decode(code), scale); }
};

DEVICE bool is_finite(float x) { return (__builtin_bit_cast(u32, x) & 0x7f800000) != 0x7f800000; }

struct tile_part { float v[lane_values]; };
struct coded {
  words<4> codes;
  u64 scales; // of the lane's half of the tile, one block for each pack
  u64 before; // scales of the first lead values of the lane's packs
};

// The distance of the start of a piece from a pack boundary, in values.
DEVICE u32 lead_of(const call &c, u32 p) { return (u32)(p * c.send_stride / 4) % 4; }
// Whether the first lead values of the lane's packs belong to the block before. A block has sixteen lanes.
DEVICE bool splits(u32 lead) { return lead && thread() % 16 == 0; }
// Whether value i of a pack has the scale of the block before. Without split packs both scales are the same.
template <bool leads> DEVICE bool is_before(u32 i, u32 lead) { return leads && i < 3 && (i == 0 || i < lead); }

// The start of a lane's packs of a tile in the float32 buffers, in bytes.
struct place {
  u64 at;
  i64 left; // from the lane's packs to the end; packs are 512 bytes apart
  u32 lead;
  bool whole;
  // The first lead values of a warp's first pack are the last ones of the tile.
  METHOD bool wraps() const { return lead && thread() % 32 == 0; }
  METHOD i64 offset(u32 i) const { return i / 4 * 512 + i % 4 * 4 + (i < lead && wraps() ? tile_values * 4 : 0); }
  METHOD bool has(u32 i) const { return left > offset(i); }
};
template <bool leads> DEVICE place place_of(const call &c, u32 p, u64 tile) {
  const u32 lead = leads ? lead_of(c, p) : 0;
  const u64 bytes = piece(c, p), first = tile * tile_values * 4, at = first + (thread() % 32) * 16 - lead * 4;
  return {p * c.send_stride + at, (i64)bytes - (i64)at, lead, c.aligned && first + tile_values * 4 <= bytes};
}
// The values at a place, plus a gradient unless G is none. All loads of a whole tile are issued before the first wait.
// Values bypass the cache, to keep the slots in it.
struct none {};
template <typename G> DEVICE tile_part load_values(const place &p, const call &c, float factor) {
  constexpr bool adds = !__is_same(G, none);
  struct lanes { G value[4]; };
  tile_part t;
  lanes g[lane_packs];
  const char *from = c.send + p.at;
  const G *grad = (const G *)c.grad + p.at / 4;
  if (p.whole) {
#pragma unroll
    for (u32 j = 0; j < lane_packs; j++) {
      if (j == 0 && p.wraps()) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) t.v[i] = *(const float *)(from + p.offset(i));
        continue;
      }
      const words<4> v = stream_words<4>(from + j * 512);
#pragma unroll
      for (u32 i = 0; i < 4; i++) t.v[j * 4 + i] = __builtin_bit_cast(float, v.word[i]);
    }
#pragma unroll
    for (u32 j = 0; j < lane_packs; j++) {
      if constexpr (adds) {
        if (j == 0 && p.wraps()) {
#pragma unroll
          for (u32 i = 0; i < 4; i++) g[0].value[i] = grad[p.offset(i) / 4];
          continue;
        }
        g[j] = __builtin_bit_cast(lanes, stream_words<sizeof(G)>(grad + j * 128));
      }
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < lane_values; i++) {
      t.v[i] = p.has(i) ? *(const float *)(from + p.offset(i)) : 0;
      if constexpr (adds) g[i / 4].value[i % 4] = p.has(i) ? grad[p.offset(i) / 4] : G{};
    }
  }
#pragma unroll
  for (u32 i = 0; i < lane_values; i++)
    if constexpr (adds) t.v[i] = t.v[i] + times(widen(g[i / 4].value[i % 4]), factor);
  return t;
}
DEVICE tile_part load_values(const place &p, const call &c, float factor) {
  switch (c.grad_type) {
  case grad_f32: return load_values<float>(p, c, factor);
  case grad_f16: return load_values<f16>(p, c, factor);
  case grad_bf16: return load_values<bf16>(p, c, factor);
  }
  return load_values<none>(p, c, factor);
}
DEVICE void store_values(char *to, const place &p, const tile_part &t) {
  to += p.at;
  if (p.whole) {
#pragma unroll
    for (u32 j = 0; j < lane_packs; j++) {
      if (j == 0 && p.wraps()) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) *(float *)(to + p.offset(i)) = t.v[i];
        continue;
      }
      words<4> v;
#pragma unroll
      for (u32 i = 0; i < 4; i++) v.word[i] = __builtin_bit_cast(u32, t.v[j * 4 + i]);
      stream_words(to + j * 512, v);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < lane_values; i++)
      if (p.has(i)) *(float *)(to + p.offset(i)) = t.v[i];
  }
}

DEVICE float scale_in(u64 scales, u32 pack) { return bf16_to_f32((u16)(scales >> 16 * pack)); }
template <typename C, bool leads> DEVICE tile_part decode(const coded &c, u32 lead) {
  tile_part t;
#pragma unroll
  for (u32 i = 0; i < lane_values; i++)
    t.v[i] = C::decode(c.codes.word[i / 4] >> i % 4 * 8 & 0xff, scale_in(is_before<leads>(i % 4, lead) ? c.before : c.scales, i / 4));
  return t;
}

DEVICE void add(tile_part &sum, const tile_part &t) {
#pragma unroll
  for (u32 i = 0; i < lane_values; i++) sum.v[i] = sum.v[i] + t.v[i];
}

DEVICE tile_part multiplied(tile_part t, float factor) {
#pragma unroll
  for (u32 i = 0; i < lane_values; i++) t.v[i] = times(t.v[i], factor);
  return t;
}

// The bf16 scale of values with the greatest magnitude top.
template <typename C> DEVICE u32 scale_of(u32 top) {
  const u32 bits = __builtin_bit_cast(u32, quotient(__builtin_bit_cast(float, top), C::limit()));
  u32 scale = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  scale = scale < 0x80 ? 0 : scale < 0x7f7f ? scale : 0x7f7f;
  return is_finite(times(bf16_to_f32((u16)scale), C::limit())) ? scale : scale - 1;
}

// The scales of a lane's packs, and the factors that replace a division by them.
struct pack_scales { float scale[lane_packs], inverse[lane_packs]; };

// Rounds a lane's values to codes, and replaces the values by the rounding errors. `finite` says that all values are
// finite. With `leads`, the first lead values of a pack have separate scales.
template <typename C, bool finite, bool leads>
DEVICE words<4> round_part(tile_part &t, tile_part &rounded, const pack_scales &own, const pack_scales &before, u32 lead) {
  words<4> codes = {};
#pragma unroll
  for (u32 i = 0; i < lane_values; i++) {
    const bool is = finite || is_finite(t.v[i]), first = is_before<leads>(i % 4, lead);
    const rounded_value r = C::round(is ? times(t.v[i], first ? before.inverse[i / 4] : own.inverse[i / 4]) : 0);
    codes.word[i / 4] |= (is ? r.code : C::nan) << i % 4 * 8;
    rounded.v[i] = is ? times(r.value, first ? before.scale[i / 4] : own.scale[i / 4]) : C::decode(C::nan, 1);
    t.v[i] = is ? t.v[i] - rounded.v[i] : 0;
  }
  return codes;
}

// Counts the greatest magnitude of the first lead values of split packs, of four packs each, for the block before.
// That block belongs to the other half of the warp: the same packs for the upper lanes, the packs before for the lower
// lanes.
template <typename F> DEVICE void count_before(u32 *top, u32 lead, F magnitude) {
  u32 before[lane_packs];
  const bool moves = splits(lead);
#pragma unroll
  for (u32 j = 0; j < lane_packs; j++) {
    const u32 a = magnitude(j * 4), b = magnitude(j * 4 + 1), c = magnitude(j * 4 + 2), d = magnitude(j * 4 + 3);
    auto greater_of = [](u32 x, u32 y) { return x > y ? x : y; };
    const u32 first_two = greater_of(a, b), last_two = greater_of(c, d);
    before[j] = moves ? lead == 1 ? a : lead == 2 ? first_two : greater_of(first_two, c) : 0;
    top[j] = moves ? lead == 1 ? greater_of(b, last_two) : lead == 2 ? last_two : d : top[j];
  }
#pragma unroll
  for (u32 j = 0; j < lane_packs; j++) {
    const u32 other = shuffle_xor(thread() & 16 ? before[j] : before[(j + 1) % lane_packs], 16);
    top[j] = other > top[j] ? other : top[j];
  }
}

// Rounds the values of a warp. A lane has the scale of its pack lane % 4.
template <typename C, bool leads> DEVICE words<4> round(tile_part &t, tile_part &rounded, u32 &scale, u32 lead) {
  u32 top[lane_packs], most = 0;
  auto magnitude = [&](u32 i) { return __builtin_bit_cast(u32, t.v[i]) & 0x7fffffff; };
#pragma unroll
  for (u32 j = 0; j < lane_packs; j++) {
    top[j] = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) top[j] = magnitude(j * 4 + i) > top[j] ? magnitude(j * 4 + i) : top[j];
    most = top[j] > most ? top[j] : most;
  }
  const bool finite = most < 0x7f800000;
  if (!finite) {
#pragma unroll
    for (u32 j = 0; j < lane_packs; j++) {
      top[j] = 0;
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        if (is_finite(t.v[j * 4 + i]) && magnitude(j * 4 + i) > top[j]) top[j] = magnitude(j * 4 + i);
    }
  }
  if constexpr (leads) count_before(top, lead, [&](u32 i) { return finite || is_finite(t.v[i]) ? magnitude(i) : 0; });
  // A block has sixteen lanes. They halve the packs that each holds maxima for, twice.
  const bool odd = thread() & 1, upper = thread() & 2;
  auto greater_of = [](u32 own, u32 other) { return own > other ? own : other; };
  const u32 low = greater_of(odd ? top[1] : top[0], shuffle_xor(odd ? top[0] : top[1], 1));
  const u32 high = greater_of(odd ? top[3] : top[2], shuffle_xor(odd ? top[2] : top[3], 1));
  u32 all = greater_of(upper ? high : low, shuffle_xor(upper ? low : high, 2));
  all = greater_of(all, shuffle_xor(all, 4));
  all = greater_of(all, shuffle_xor(all, 8));
  scale = scale_of<C>(all);
  const float own = bf16_to_f32((u16)scale), inverse = own > 0 ? quotient(1.0f, own) : 0;
  auto scale_at = [&](pack_scales &s, u32 pack, u32 lane) {
    s.scale[pack] = __builtin_bit_cast(float, shuffle(__builtin_bit_cast(u32, own), lane));
    s.inverse[pack] = __builtin_bit_cast(float, shuffle(__builtin_bit_cast(u32, inverse), lane));
  };
  pack_scales scales, before;
#pragma unroll
  for (u32 j = 0; j < lane_packs; j++) {
    scale_at(scales, j, (thread() & 16) + j);
    if (leads) {
      const u32 other = thread() & 16 ? j : 16 + (j + lane_packs - 1) % lane_packs;
      scale_at(before, j, splits(lead) ? other : (thread() & 16) + j);
    }
  }
  return finite ? round_part<C, true, leads>(t, rounded, scales, before, lead) : round_part<C, false, leads>(t, rounded, scales, before, lead);
}

// The slots of a block, by stage and round and by the index of a rank among its peers. With two ranks a ring has one
// stage, and its places have halves.
struct tiles {
  u64 place[stages], size; // of a slot
  u32 ranks, codes;        // bytes of codes in a slot
  METHOD tiles(const world &w, const call &c, const operation &o)
      : size((c.tiles * (u64)tile_bytes + 127) / 128 * 128), ranks(w.ranks), codes(c.tiles * tile_values) {
    const u64 parity = o.epoch & 1, whole = (u64)w.places.lines * ring_slots * (w.ranks - 1) * w.places.ring_slot;
#pragma unroll
    for (u32 s = 0; s < stages; s++)
      place[s] = w.places.ring + (w.ranks == 2 ? (2 * parity + s) * (whole / 2) : (2 * s + parity) * whole) + block() * rounded_slots * (w.ranks - 1) * size;
  }
  METHOD char *slot(const world &w, u32 to, u32 stage, u64 round, u32 from) const {
    return w.scratch[to] + place[stage] + (round % rounded_slots * (ranks - 1) + seat(from, to)) * size;
  }
  METHOD void put(char *slot, u32 number, const words<4> &packed, u32 scale) const {
    const u32 lane = thread() % 32;
    store_words(slot + number * tile_values + lane * 16, packed);
    if ((lane & 12) == 0) ((u16 *)(slot + codes))[number * 8 + lane / 16 * 4 + lane % 4] = (u16)scale;
  }
  template <bool leads> METHOD coded take(const char *slot, u32 number, u32 lead) const {
    const u32 lane = thread() % 32;
    const pack p = load(slot + number * tile_values + lane * 16);
    const u64 *scales = (const u64 *)(slot + codes + number * 16);
    coded c = {{{p.word[0], p.word[1], p.word[2], p.word[3]}}, load64(scales + lane / 16), 0};
    c.before = c.scales;
    if (leads && splits(lead)) {
      const u64 other = load64(scales + 1 - lane / 16);
      c.before = lane & 16 ? other : other << 16 | other >> 48;
    }
    return c;
  }
};

// Waits, as a block, for a chunk of every peer.
DEVICE bool hear_together(const world &w, const call &c, const operation &o, line &l, u32 stage, u64 round) {
  const bool here = arrived(w, c, o, l, stage, round);
  return l.alive = barrier_count(!here) == 0;
}

// Reads values at send and writes the sums, times the factor, to recv. recv may be the memory of an f32 gradient,
// because a lane has the same elements of each buffer. Pieces begin at packs, unless `leads` is set.
template <typename C, bool leads> DEVICE void round_pieces(const world &w, const call &c) {
  operation o = begin(w);
  advance(w, o);
  line l = {block(), thread(), 0, barrier_count(!o.alive) == 0};
  const tiles at(w, c, o);
  const u32 stripe = blocks() * c.tiles, rounds = (u32)((c.bytes / 4 + tile_values - 1) / tile_values + stripe - 1) / stripe;
  const float factor = c.grad_factor ? *c.grad_factor : 1;
  // Calls each(tile, number) with a warp's tiles of a piece in a round.
  auto of_round = [&](u64 bytes, u32 round, auto each) {
    const u32 all = (u32)((bytes / 4 + tile_values - 1) / tile_values);
#pragma unroll 1
    for (u32 number = thread() / 32; number < c.tiles; number += threads() / 32) {
      const u32 tile = round * stripe + number * blocks() + block();
      if (tile >= all) break;
      each(tile, number);
    }
  };
#pragma unroll 1
  for (u32 k = 0; k < rounds + 2 && l.alive; k++) {
    const bool fills = k < rounds, reduces = k >= 1 && k - 1 < rounds;
#pragma unroll 1
    for (u32 step = 1; fills && step < w.ranks; step++) {
      const u32 p = after(w, step);
      char *to = at.slot(w, p, 0, k, w.rank);
      of_round(piece(c, p), k, [&](u32 tile, u32 number) {
        const place here = place_of<leads>(c, p, tile);
        tile_part t = load_values(here, c, factor), decoded;
        u32 scale;
        const words<4> codes = round<C, leads>(t, decoded, scale, here.lead);
        at.put(to, number, codes, scale);
        if (c.lost) store_values(c.lost, here, t);
      });
    }
    if (reduces) {
      if (!hear_together(w, c, o, l, 0, k - 1)) return;
      of_round(piece(c, w.rank), k - 1, [&](u32 tile, u32 number) {
        const place here = place_of<leads>(c, w.rank, tile);
        auto take = [&](u32 s) { return at.template take<leads>(at.slot(w, w.rank, 0, k - 1, s), number, here.lead); };
        const tile_part own = load_values(here, c, factor);
        coded next = take(w.rank == 0); // of the first peer
        tile_part t = {};
#pragma unroll 1
        for (u32 s = 0; s < w.ranks; s++) {
          if (s == w.rank) {
            add(t, own);
            continue;
          }
          const coded now = next;
          const u32 then = s + 1 + (s + 1 == w.rank);
          if (then < w.ranks) next = take(then);
          add(t, decode<C, leads>(now, here.lead));
        }
        tile_part decoded;
        u32 scale;
        const words<4> codes = round<C, leads>(t, decoded, scale, here.lead);
#pragma unroll 1
        for (u32 step = 1; step < w.ranks; step++) at.put(at.slot(w, after(w, step), 1, k - 1, w.rank), number, codes, scale);
        if (c.lost) store_values(c.lost, here, t);
        store_values(c.recv, here, multiplied(decoded, c.factor));
      });
    }
    if (k >= 2) {
      if (!hear_together(w, c, o, l, 1, k - 2)) return;
#pragma unroll 1
      for (u32 step = 1; step < w.ranks; step++) {
        const u32 s = after(w, step);
        const char *from = at.slot(w, w.rank, 1, k - 2, s);
        of_round(piece(c, s), k - 2, [&](u32 tile, u32 number) {
          const place there = place_of<leads>(c, s, tile);
          const coded sums = at.template take<leads>(from, number, there.lead);
          store_values(c.recv, there, multiplied(decode<C, leads>(sums, there.lead), c.factor));
        });
      }
    }
    barrier();
    if (fills) tell(w, o, l, 0, k);
    if (reduces) tell(w, o, l, 1, k - 1);
  }
}
