// Selection by magnitude, in two kernels. pick passes over an array once: it
// adds the gradient, and lists what reaches a threshold, each warp what it finds
// in its part of the array, in a segment of its own. cut closes the gaps between
// the segments; or it finds the k largest exactly, of what pick listed if that
// contains them, and otherwise of the array. Which, is decided on the device.
#include "elements.cuh"

// What pick does with what passes.
enum {
  mode_none, // only adds
  mode_list, // lists
  mode_near, // lists, as runtime.Kernels.SelectNear
  mode_top,  // lists what probably contains the k largest
};

// The share of the guessed threshold that the superset of mode_top is listed
// from.
constexpr float superset = 0.95f;

// The superset's histogram has bins of 2^superset_shift keys from its threshold
// on; the last one has the rest.
enum { superset_bins = 1024, superset_shift = 12 };

// The segments: one for each warp of pick, with room for some entries, and how
// many its warp found, which may be more.
struct segments {
  i32 *idx;
  float *val;
  u32 *count;
  u64 room, blocks; // of one; and of pick
};

// The array that entries are picked from; or a list, whose values it is then.
struct source {
  float *val;
  const i32 *idx;
  u32 n, lead;
  METHOD i32 index(i64 i) const { return idx ? idx[i] : (i32)i; }
};

// A part of the array's tiles for each of many warps.
template <int Q> struct part {
  u32 first, end;
  METHOD part(const source &s, u32 number, u64 parts) {
    const u64 tiles = tile<Q>::count(s.n, s.lead);
    first = (u32)(tiles * number / parts), end = (u32)(tiles * (number + 1) / parts);
  }
};
enum { pick_quads = 4 };

struct pick_args {
  control *c;
  segments to;
  float *x;
  const i32 *idx; // x is the values of a list
  u64 n;
  const i32 *length; // of the list
  const float *from;
  const void *grad;
  u64 type;
  const float *factor;
  u64 take;
  u64 mode, k;
  float *threshold; // mode_near: with the age behind it
  u64 room;         // of dst, and
  i32 *length_to;   // where its length goes, in mode_near
  u64 min, interval;
  double step;
  float *used;
};

// find finds the bin that has the rank-th largest, and empties the histogram.
struct place { u32 bin, before, inside; }; // the rank is counted from before

template <u32 bins> DEVICE place find(u32 *histogram, u32 rank, u32 *totals) {
  static SHARED place found;
  constexpr u32 share = bins / block_threads; // of a thread; the first one has the last bins
  const u32 first = bins - (thread() + 1) * share;
  u32 count[share], mine = 0, total;
#pragma unroll
  for (u32 i = 0; i < share; i += 4) {
    const words<4> w = load_words<4>(histogram + first + i);
#pragma unroll
    for (u32 j = 0; j < 4; j++) mine += count[i + j] = w.word[j];
  }
#pragma unroll
  for (u32 i = 0; i < share; i += 4) store_words(histogram + first + i, words<4>{});
  u32 before = scan(mine, totals, total);
  if (before < rank && rank <= before + mine) {
#pragma unroll
    for (u32 i = share; i-- > 0;) {
      if (before < rank && rank <= before + count[i]) found = place{first + i, before, count[i]};
      before += count[i];
    }
  }
  barrier();
  return found;
}

// plan_top says how cut finds the k largest when found entries reached key.
DEVICE void plan_top(const pick_args &a, u32 n, u32 key, u32 found, u32 *totals) {
  control *c = a.c;
  const u32 rank = least((u32)a.k, n);
  const place p = find<superset_bins>(c->histogram, rank, totals);
  if (thread() != 0) return;
  plan to = {};
  if (rank > 0 && found >= rank) {
    to.lo = key + (p.bin << superset_shift);
    to.bits = p.bin < superset_bins - 1 ? superset_shift : 32 - leading_zeros(key_end - 1 - to.lo);
    to.rank = rank - p.before;
    to.segments = load(&c->spilled) == 0;
  } else {
    to.bits = 31, to.rank = rank;
  }
  to.restore = !to.segments && a.take && found > 0;
  c->plan = to;
}

// plan_near accepts the threshold t if enough passed, or leaves it to cut.
DEVICE void plan_near(const pick_args &a, u32 n, float t, u32 found) {
  plan to = {};
  if (a.min <= found && found <= a.room) {
    const u64 k = a.k;
    const float step = (float)a.step;
    float next = t;
    if (step != 0) {
      if (3 * (u64)found < 2 * k)
        next = t / step;
      else if (4 * (u64)found > 5 * k)
        next = t * step;
      if (next < tiny) next = tiny;
    }
    a.threshold[0] = next;
    ((i32 *)a.threshold)[1]++;
    if (a.used) *a.used = t;
    to.segments = to.close = 1, to.key = key_of(t);
  } else {
    to.bits = 31, to.rank = least((u32)a.k, n);
    to.restore = a.take && found > 0;
  }
  a.c->plan = to;
}

KERNEL BOUNDS(block_threads, 4) pick(pick_args a) {
  enum { Q = pick_quads };
  static SHARED u32 histogram[superset_bins], totals[block_warps];
  control *c = a.c;
  const source s = {a.x, a.idx, length_of(a.n, a.length), lead_of(a.x)};
  const float factor = a.factor ? *a.factor : 1;
  const float t = a.threshold ? *a.threshold : 0;

  u64 mode = a.mode;
  u32 key = threshold_key(t); // of what is listed
  const bool guess = finite(t) && t > 0;
  if (mode == mode_near && !(guess && (a.interval == 0 || ((const i32 *)a.threshold)[1] < (i64)a.interval - 1))) mode = mode_top;
  if (mode == mode_top) {
    key = key_of(t * superset);
    if (!guess) mode = mode_none;
    for (u32 i = thread(); i < superset_bins; i += block_threads) histogram[i] = 0;
    barrier();
  }

  const u32 number = block() * block_warps + warp();
  const part<Q> mine(s, number, (u64)blocks() * block_warps);
  i32 *idx = a.to.idx + number * a.to.room;
  float *val = a.to.val + number * a.to.room;
  u32 count = 0;
  if (mode != mode_none || a.type != type_none)
    for (u32 at = mine.first; at < mine.end; at++) {
      const tile<Q> w(at, s.lead, s.n);
      float v[Q * quad];
      u32 passed = load_tile(v, w, a.x, a.from, a.grad, a.type, factor);
      if (mode == mode_none) continue;
#pragma unroll
      for (u32 j = 0; j < Q * quad; j++)
        if (key_of(v[j]) < key) passed &= ~(1u << j);
      if (!ballot(passed != 0)) continue;
      const ranks<Q> r(passed);
#pragma unroll
      for (u32 row = 0; row < Q; row++) {
        if (!(passed >> row * quad & 0xf)) continue;
        u32 to = count + r.at(row);
#pragma unroll
        for (u32 j = 0; j < quad; j++) {
          if (!(passed >> (row * quad + j) & 1)) continue;
          const i64 i = w.at(row) + j;
          const float x = v[row * quad + j];
          if (to < a.to.room) {
            idx[to] = s.index(i);
            val[to] = x;
            if (a.take) a.x[i] = 0;
          }
          to++;
          if (mode == mode_top) add_to(&histogram[least((key_of(x) - key) >> superset_shift, (u32)superset_bins - 1)], 1);
        }
      }
      count += r.all;
    }
  if (a.mode == mode_none) return;

  if (lane() == 0) {
    a.to.count[number] = totals[warp()] = count;
    if (count > a.to.room) add_to(&c->spilled, 1);
  }
  barrier();
  if (thread() == 0) {
    u32 all = 0;
    for (u32 w = 0; w < block_warps; w++) all += totals[w];
    add_to(&c->total, all);
  }
  if (mode == mode_top)
    for (u32 i = thread(); i < superset_bins; i += block_threads)
      if (histogram[i]) add_to(&c->histogram[i], histogram[i]);

  if (!last_block(c)) return;
  const u32 found = load(&c->total);
  if (a.mode == mode_list) {
    if (thread() == 0) {
      plan to = {};
      to.segments = to.close = 1, to.key = key;
      c->plan = to;
    }
  } else if (mode == mode_near) {
    if (thread() == 0) plan_near(a, s.n, t, found);
  } else {
    plan_top(a, s.n, key, found, totals); // of what was not listed, found is 0
  }
  reset(c);
}

// cut works in phases. A block takes tickets, which are units of the phases, one
// after the other; the block that finishes a phase's last unit says what the
// next phase is, and those with a ticket behind the phase wait for that. So the
// kernel needs no more blocks at a time than happen to run.
enum {
  phase_restore,   // put listed entries back into the array
  phase_histogram, // count keys by the next bits
  phase_write,     // list the entries, in order
  phase_end,
};

struct cut_args {
  control *c;
  u64 *status, *ties;
  segments from;
  float *x;
  u64 n;
  const i32 *idx; // x is the values of a list, of
  const i32 *length;
  u64 planned; // by pick; otherwise the source is x
  entries dst;
  u64 k;
  u64 take, zeros;
  float *threshold; // where the threshold found goes, and
  i32 *age;         // 0, and
  float *used;      // the threshold again
};

// A unit of a phase on the segments is a block's: each warp has its own segment.
struct segment {
  const i32 *idx;
  const float *val;
  u32 found, held;
  METHOD segment(const segments &s, u32 number)
      : idx(s.idx + number * s.room), val(s.val + number * s.room), found(s.count[number]), held(least(found, (u32)s.room)) {}
};

struct cutting { // what is the same in all phases
  const cut_args &a;
  plan start;
  source s;
  u32 tiles, units; // of the source when it is written, and when it is counted
  bool wide;
  u64 tag;
};

template <int Q> DEVICE void count_keys(const source &s, const phase &p, u32 shift, u32 unit, u32 *histogram) {
  for (u32 number = unit; number < tile<Q>::blocks(s.n, s.lead); number += p.units) {
    float v[Q * quad];
    const u32 exist = load_tile(v, tile_of_block<Q>(number, s.lead, s.n), s.val);
#pragma unroll
    for (u32 j = 0; j < Q * quad; j++) {
      const u32 offset = key_of(v[j]) - p.lo;
      if ((exist >> j & 1) && offset >> p.bits == 0) add_to(&histogram[offset >> shift], 1);
    }
  }
}

// bases finds how many entries come before those of each warp, and of the block,
// in the source; and, with k = 1, how many of those that are split.
DEVICE void bases(const cutting &k, const phase &p, u32 number, u32 above, u32 equal, u32 before[2], u32 *totals) {
  static SHARED u32 first[2];
  if (lane() == 0) totals[warp()] = above, totals[block_warps + warp()] = equal;
  barrier();
  u32 count[2] = {};
  before[0] = before[1] = 0;
#pragma unroll
  for (u32 i = 0; i < block_warps; i++) {
    const u32 x = totals[i], y = totals[block_warps + i];
    if (i < warp()) before[0] += x, before[1] += y;
    count[0] += x, count[1] += y;
  }
  if (warp() == 0 || (warp() == 1 && p.split)) {
    const u32 f = look_back(warp() ? k.a.ties : k.a.status, number, warp() ? count[1] : count[0], k.tag);
    if (lane() == 0) first[warp()] = f;
  } else if (thread() == warp_size) {
    first[1] = 0;
  }
  barrier();
  before[0] += first[0], before[1] += first[1];
  if (thread() == 0 && number == k.tiles - 1) k.a.c->total = first[0] + count[0] + least(first[1] + count[1], p.rank);
}

// write_tile lists a tile's entries with keys above p.lo, and those equal to it,
// of which there may be more than wanted.
template <int Q> DEVICE void write_tile(const cutting &k, const phase &p, u32 number, u32 *totals) {
  const cut_args &a = k.a;
  const tile<Q> w = tile_of_block<Q>(number, k.s.lead, k.s.n);
  float v[Q * quad];
  u32 above = load_tile(v, w, k.s.val), equal = above;
#pragma unroll
  for (u32 j = 0; j < Q * quad; j++) {
    const u32 key = key_of(v[j]);
    if (key < p.lo || (p.split && key == p.lo)) above &= ~(1u << j);
    if (!p.split || key != p.lo) equal &= ~(1u << j);
  }
  const ranks<Q> ra(above), re(equal);
  u32 before[2];
  bases(k, p, number, ra.all, re.all, before, totals);
#pragma unroll
  for (u32 row = 0; row < Q; row++) {
    if (!((above | equal) >> row * quad & 0xf)) continue;
    u32 na = before[0] + ra.at(row), ne = before[1] + re.at(row);
#pragma unroll
    for (u32 j = 0; j < quad; j++) {
      const u32 bit = row * quad + j;
      const bool is_above = above >> bit & 1, is_equal = equal >> bit & 1;
      const u32 at = na + least(ne, p.rank);
      if ((is_above || (is_equal && ne < p.rank)) && at < a.dst.n) {
        const i64 i = w.at(row) + j;
        a.dst.idx[at] = k.s.index(i);
        a.dst.val[at] = v[bit];
        if (a.take) a.x[i] = 0;
      }
      na += is_above, ne += is_equal;
    }
  }
}

// restore puts a segment's entries back into the array.
DEVICE void restore(const cut_args &a, const segment &g) {
  for (u32 i = lane(); i < g.held; i += warp_size) a.x[g.idx[i]] = g.val[i];
  warp_barrier();
}

// write_segment is write_tile for segments, whose entries pick has taken. What
// a full one does not hold is looked for again.
DEVICE void write_segment(const cutting &k, const phase &p, u32 unit, u32 *totals) {
  const cut_args &a = k.a;
  const u32 number = unit * block_warps + warp();
  const segment g(a.from, number);
  u32 above = g.found, equal = 0, before[2];
  if (!k.start.close) {
    above = 0;
    for (u32 i = lane(); i < g.held; i += warp_size) {
      const u32 key = key_of(g.val[i]);
      above += key > p.lo || (!p.split && key == p.lo), equal += p.split && key == p.lo;
    }
    above = warp_sum(above), equal = warp_sum(equal);
  }
  bases(k, p, unit, above, equal, before, totals);
  u32 na = before[0], ne = before[1];
  if (g.found == g.held) {
    for (u32 from = 0; from < g.held; from += warp_size) {
      const u32 i = from + lane();
      const bool inside = i < g.held;
      const i32 index = inside ? g.idx[i] : 0;
      const float value = inside ? g.val[i] : 0;
      const u32 key = key_of(value), lower = (1u << lane()) - 1;
      const bool is_above = inside && (key > p.lo || (!p.split && key == p.lo)), is_equal = inside && p.split && key == p.lo;
      const u32 aboves = ballot(is_above), equals = ballot(is_equal);
      const u32 mine = ne + ones(equals & lower), at = na + ones(aboves & lower) + least(mine, p.rank);
      if ((is_above || (is_equal && mine < p.rank)) && at < a.dst.n) {
        a.dst.idx[at] = index;
        a.dst.val[at] = value;
      } else if (inside && a.take) {
        a.x[index] = value;
      }
      na += ones(aboves), ne += ones(equals);
    }
    return;
  }
  if (a.take) restore(a, g);
  enum { Q = pick_quads };
  const part<Q> mine(k.s, number, a.from.blocks * block_warps);
  for (u32 t = mine.first; t < mine.end; t++) {
    const tile<Q> w(t, k.s.lead, k.s.n);
    float v[Q * quad];
    u32 passed = load_tile(v, w, k.s.val);
#pragma unroll
    for (u32 j = 0; j < Q * quad; j++)
      if (key_of(v[j]) < k.start.key) passed &= ~(1u << j);
    const ranks<Q> r(passed);
#pragma unroll
    for (u32 j = 0; j < Q * quad; j++) {
      const u32 at = na + r.at(j / quad) + ones(passed >> j / quad * quad & ((1u << j % quad) - 1));
      if (!(passed >> j & 1) || at >= a.dst.n) continue;
      const i64 i = w.at(j / quad) + j % quad;
      a.dst.idx[at] = k.s.index(i);
      a.dst.val[at] = v[j];
      if (a.take) a.x[i] = 0;
    }
    na += r.all;
  }
}

// report stores how many entries were listed, and the least key.
DEVICE void report(const cutting &k, u32 count, u32 key) {
  const cut_args &a = k.a;
  if (a.dst.length) *(i32 *)a.dst.length = (i32)count;
  if (k.start.close) return;
  if (a.threshold) *a.threshold = float_of(key);
  if (a.age) *a.age = 0;
  if (a.used) *a.used = float_of(key);
}

enum { digit_bits = 12 };
static_assert(histogram_bins == 1 << digit_bits, "bins of a digit");

// finish_phase says what comes after a phase. All threads of the block that
// finished it come here.
DEVICE void finish_phase(const cutting &k, const phase &p, u32 number, u32 *totals) {
  control *c = k.a.c;
  phase next = p;
  next.first = p.first + p.units;
  switch (p.kind) {
  case phase_restore:
    next.kind = p.rank ? phase_histogram : phase_end;
    next.units = k.units;
    if (p.rank == 0 && thread() == 0) report(k, 0, 0);
    break;
  case phase_histogram: {
    const u32 shift = p.bits > digit_bits ? p.bits - digit_bits : 0;
    const place f = find<histogram_bins>(c->histogram, p.rank, totals);
    next.lo = p.lo + (f.bin << shift), next.bits = shift, next.rank = p.rank - f.before;
    next.units = k.units;
    if (shift > 0) break;
    next.split = next.rank < f.inside;
    if (next.lo == 0 && !k.a.zeros) next.lo = 1, next.split = 0;
    next.kind = phase_write;
    next.units = k.tiles;
    break;
  }
  case phase_write:
    next.kind = phase_end;
    if (thread() == 0) report(k, load(&c->total), p.lo);
  }
  if (thread() == 0) {
    c->phase[number] = next;
    fence();
    store(&c->phases, number + 1);
  }
}

KERNEL BOUNDS(block_threads, 4) cut(cut_args a) {
  static SHARED u32 histogram[histogram_bins], totals[2 * block_warps], ticket;
  static SHARED bool last;
  control *c = a.c;
  cutting k = {a, {}, {a.x, a.idx, length_of(a.n, a.length), lead_of(a.x)}, 0, 0, false, tag_of(c)};
  if (a.planned)
    k.start = c->plan;
  else
    k.start.bits = 31, k.start.rank = least((u32)a.k, k.s.n);
  // Few entries are cut into small tiles, so that all processors get some.
  k.wide = k.s.n > 1 << 22;
  if (k.start.segments) {
    k.tiles = k.units = (u32)a.from.blocks;
  } else {
    k.tiles = k.wide ? tile<4>::blocks(k.s.n, k.s.lead) : tile<1>::blocks(k.s.n, k.s.lead);
    k.units = least(blocks(), k.tiles);
  }

  phase p = {};
  p.lo = k.start.lo, p.bits = k.start.bits, p.rank = k.start.rank;
  if (k.start.restore) {
    p.kind = phase_restore, p.units = (u32)a.from.blocks;
  } else if (k.start.close) {
    p.kind = phase_write, p.units = k.tiles;
  } else if (k.start.rank) {
    p.kind = phase_histogram, p.units = k.units;
  } else { // nothing is wanted
    p.kind = phase_end;
    if (block() == 0 && thread() == 0) report(k, 0, 0);
  }

  for (u32 number = 0; p.kind != phase_end;) {
    if (thread() == 0) ticket = add_to(&c->ticket, 1);
    barrier();
    const u32 mine = ticket;
    while (p.kind != phase_end && mine - p.first >= p.units) {
      if (thread() == 0) {
        while (load(&c->phases) <= number) {}
        fence();
      }
      barrier();
      const u32 *from = (const u32 *)&c->phase[number++];
      p = phase{load(from), load(from + 1), load(from + 2), load(from + 3), load(from + 4), load(from + 5), load(from + 6)};
    }
    const u32 unit = mine - p.first;
    switch (p.kind) {
    case phase_restore: restore(a, segment(a.from, unit * block_warps + warp())); break;
    case phase_histogram: {
      const u32 shift = p.bits > digit_bits ? p.bits - digit_bits : 0;
      for (u32 i = thread(); i < histogram_bins; i += block_threads) histogram[i] = 0;
      barrier();
      if (k.start.segments) {
        const segment g(a.from, unit * block_warps + warp());
        for (u32 i = lane(); i < g.held; i += warp_size) {
          const u32 offset = key_of(g.val[i]) - p.lo;
          if (offset >> p.bits == 0) add_to(&histogram[offset >> shift], 1);
        }
      } else if (k.wide) {
        count_keys<4>(k.s, p, shift, unit, histogram);
      } else {
        count_keys<1>(k.s, p, shift, unit, histogram);
      }
      barrier();
      for (u32 i = thread(); i < histogram_bins; i += block_threads)
        if (histogram[i]) add_to(&c->histogram[i], histogram[i]);
      break;
    }
    case phase_write:
      if (k.start.segments)
        write_segment(k, p, unit, totals);
      else if (k.wide)
        write_tile<4>(k, p, unit, totals);
      else
        write_tile<1>(k, p, unit, totals);
      break;
    default: continue;
    }
    barrier();
    if (thread() == 0) {
      fence();
      last = add_to(&c->finished, 1) + 1 == p.first + p.units;
      fence();
    }
    barrier();
    if (last) finish_phase(k, p, number, totals);
  }
  if (last_block(c)) reset(c);
}
