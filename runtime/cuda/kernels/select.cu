// Selection by magnitude. pick passes over an array once: it adds the gradient and lists the entries that reach a
// threshold. Each warp lists the entries of its part of the array in its own segment. cut closes the gaps between the
// segments if all listed entries are wanted. If only the k largest are, sift finds the last of these among the listed
// entries, and cut drops the smaller ones. If not all of the k largest are listed, cut searches the array for them.
// The device makes that decision.
//
// Times in microseconds for 26,214,400 float32 and 1 % on an H200: pick takes 83 with a threshold, and 89 with a
// guess, for which it counts a histogram; adding the gradient alone takes 80 to 83. sift takes 6, and 2 if it has
// nothing to do. cut takes 12, and 6 if it drops nothing. In place, reading is not the lower bound. A pass that reads
// everything takes 26, and 36 if it also stores 4 bytes in 4 % of the quads (104,857,600 elements: 97, and 147, or 141
// with 64 bytes), because memory is written in larger units. Three changes made it slower: loading further ahead (four
// quads a row, three blocks), streaming loads or stores, and counting the histogram in memory while entries are
// listed.
#include "elements.cuh"
#include "shared.cuh"

// The treatment of entries that reach the threshold by pick.
enum {
  mode_none, // adds the gradient only
  mode_list, // lists them
  mode_near, // lists them for kernel.Kernels.SelectNear
  mode_top,  // lists a likely superset of the k largest
};

// The guess of the k-th largest magnitude has a margin, a fraction of the guess: mode_top lists entries down to the
// guess less the margin. On 26 million elements on an H200, one percent of margin costs about 4 % of a selection,
// because more entries are listed and dropped. A margin that was too narrow costs 180 %, because the array is
// searched. For some time the thresholds of a training change by similar fractions from step to step: by 1 to 4 %
// while the learning rate falls within a few hundred steps, and hardly at all otherwise. The margin therefore follows
// what earlier steps needed (see TopK of kernel.Kernels). Of several rules, this one cost least over eight trainings.
// The threshold of mode_near was exact many steps ago and has been corrected since. Its margin is wide, because it is
// rarely used.
constexpr float least_margin = 1.0f / 512, first_margin = 1.0f / 32, most_margin = 1.0f / 8, near_margin = 1.0f / 16;

DEVICE bool usable(float guess) { return finite(guess) && guess > 0; }
DEVICE float checked(float margin) { return least_margin <= margin && margin <= most_margin ? margin : first_margin; }
// The next margin, after a guess that led to this threshold.
DEVICE float margin_after(float margin, float guess, float threshold) {
  margin = checked(margin);
  if (!usable(guess)) return margin;
  const float need = (guess - threshold) / guess * 1.5f;
  margin = most(margin * (31.0f / 32), least_margin);
  return need > margin ? least(need, most_margin) : margin;
}

// The bins of the superset's histogram hold 2^superset_shift keys each, from its threshold on. The last bin holds all
// larger keys.
enum { superset_shift = 10 };

// The segments, one for each warp of pick, each with room for some entries, and the number of entries that each warp
// found, which may exceed the room. The counts of the blocks follow.
enum : u32 { overfull = 1u << 31 }; // flag in a block's count: a warp found more entries than its segment holds
struct segments {
  i32 *idx;
  float *val;
  u32 *count;
  u64 room, blocks; // entries in a segment; blocks of pick

  METHOD u32 warps() const { return (u32)blocks * block_warps; }
  // put stores a warp's count, and the block's. All threads of the block call it.
  METHOD void put(u32 *counts, u32 mine) const {
    static SHARED u32 of[block_warps];
    if (lane() == 0) counts[block() * block_warps + warp()] = of[warp()] = mine;
    barrier();
    if (thread() > 0) return;
    u32 all = 0, full = 0;
    for (u32 w = 0; w < block_warps; w++) all += of[w], full |= of[w] > room ? overfull : 0;
    counts[warps() + block()] = all | full;
  }
};

// The array that entries are selected from, or the values of a list.
struct source {
  float *val;
  const i32 *idx;
  u32 n, lead;
  METHOD i32 index(i64 i) const { return idx ? idx[i] : (i32)i; }
};

// A part of an array's tiles, for one of many warps.
template <int Q> struct part {
  u32 first, end;
  METHOD part(const source &s, u32 number, u64 parts) {
    const u64 tiles = tile<Q>::count(s.n, s.lead);
    first = (u32)(tiles * number / parts), end = (u32)(tiles * (number + 1) / parts);
  }
};
enum { pick_quads = 2, pick_blocks = 4 };

struct pick_args {
  control *c;
  segments to;
  float *x;
  const i32 *idx; // if not 0, x is the values of a list
  u64 n;
  const i32 *length; // length of the list
  const float *from;
  const void *grad;
  u64 type;
  const float *factor;
  u64 take;
  u64 mode;
  const float *threshold; // mode_near: the age follows it; mode_top: the margin follows it
  u64 interval;           // for mode_near
  float *keep;            // if not 0, receives the values before the gradient is added
};

// each_of makes a warp load n items, several for each lane at once, and calls f for each of them and for padding up to
// a whole number of warps.
template <u32 ahead, typename L, typename F> DEVICE void each_of(u32 n, L load, F f) {
  for (u32 first = 0; first < n; first += ahead * warp_size) {
    decltype(load(0)) v[ahead];
#pragma unroll
    for (u32 j = 0; j < ahead; j++)
      if (first + j * warp_size + lane() < n) v[j] = load(first + j * warp_size + lane());
#pragma unroll
    for (u32 j = 0; j < ahead; j++) {
      const u32 i = first + j * warp_size + lane();
      if (i - lane() < n) f(i, i < n, v[j]);
    }
  }
}

// A whole tile whose loads are in flight.
template <int Q, typename G> struct coming {
  words<4> x[Q];
  words<sizeof(vector<G>) / 4> grad[Q];

  METHOD void load(const tile<Q> &t, const float *p, const G *g) {
#pragma unroll
    for (int r = 0; r < Q; r++) x[r] = load_words<4>(p + t.at(r));
    if constexpr (!__is_same(G, none))
#pragma unroll
      for (int r = 0; r < Q; r++) grad[r] = load_words<sizeof(vector<G>) / 4>(g + t.at(r));
  }
  METHOD void sum(float *v, float factor) const {
#pragma unroll
    for (int r = 0; r < Q; r++) {
      const auto a = __builtin_bit_cast(vector<float>, x[r]);
#pragma unroll
      for (int j = 0; j < quad; j++) v[r * quad + j] = a.lane[j];
      if constexpr (!__is_same(G, none)) {
        const auto b = __builtin_bit_cast(vector<G>, grad[r]);
#pragma unroll
        for (int j = 0; j < quad; j++) v[r * quad + j] += widen(b.lane[j]) * factor;
      }
    }
  }
};

// picker is the state of a warp at work on its part of the array.
template <typename G> struct picker {
  enum { Q = pick_quads };
  static constexpr bool adds = !__is_same(G, none);
  const pick_args &a;
  const source &s;
  const float *from;
  const G *grad;
  const float factor;
  i32 *const idx;
  float *const val;
  const u32 room, key;
  u32 count; // number of entries found

  METHOD picker(const pick_args &a, const source &s, u32 number, u32 key)
      : a(a), s(s), from(adds ? a.from : a.x), grad((const G *)a.grad), factor(a.factor ? *a.factor : 1), idx(a.to.idx + number * a.to.room),
        val(a.to.val + number * a.to.room), room((u32)a.to.room), key(key), count(0) {}

  // run adds the gradient and lists the entries that reach the key. While the warp works on a tile, the loads of the
  // next are in flight.
  METHOD void run(const part<Q> mine, bool lists) {
    // These tiles are whole and aligned.
    const u32 first = s.lead > 0, whole = (s.n + s.lead) / tile<Q>::elements;
    const bool even = aligned(from - s.lead) && (!adds || (aligned(grad - s.lead) && (!a.keep || aligned(a.keep - s.lead))));
    const u32 count_whole = even && whole > first ? whole - first : 0;
    coming<Q, G> next;
    bool here = mine.first < mine.end && mine.first - first < count_whole;
    if (here) next.load(tile<Q>(mine.first, s.lead, s.n), from, grad);
    for (u32 at = mine.first; at < mine.end; at++) {
      const tile<Q> w(at, s.lead, s.n);
      float v[Q * quad];
      if (!here) {
        piece(w, lists);
      } else {
        next.sum(v, factor);
        if (adds && a.keep)
#pragma unroll
          for (u32 row = 0; row < Q; row++) store_words(a.keep + w.at(row), next.x[row]);
      }
      const bool now = here;
      here = at + 1 < mine.end && at + 1 - first < count_whole;
      if (here) next.load(tile<Q>(at + 1, s.lead, s.n), from, grad);
      if (!now) continue;
      if (lists) list<Q, adds>(w.at(0), v, 0xf);
#pragma unroll
      for (u32 row = 0; adds && row < Q; row++) store_row(w.at(row), v + row * quad);
    }
  }

  // piece handles a tile that is partial or not aligned.
  METHOD void piece(const tile<Q> &w, bool lists) {
#pragma unroll 1
    for (u32 row = 0; row < Q; row++) {
      float v[quad];
      u32 exist = 0;
#pragma unroll
      for (u32 j = 0; j < quad; j++) {
        const i64 i = w.at(row) + j;
        v[j] = 0;
        if (!w.has(i)) continue;
        exist |= 1u << j;
        v[j] = from[i];
        if (adds && a.keep) a.keep[i] = v[j];
        if constexpr (adds) a.x[i] = v[j] += widen(grad[i]) * factor;
      }
      if (lists) list<1, false>(w.at(row), v, exist);
    }
  }

  METHOD void store_row(i64 i, const float *v) {
    words<4> w;
#pragma unroll
    for (u32 j = 0; j < quad; j++) w.word[j] = bits_of(v[j]);
    store_words(a.x + i, w);
  }

  // list lists the elements of some rows, from i on, that reach the key. A thread seldom has several in a row.
  // Selected entries become zero in v if v is stored afterwards, and otherwise in memory.
  template <u32 rows, bool stored> METHOD void list(i64 i, float *v, u32 exist) {
    u32 flags[rows], some[rows];
    bool several = false, any = false;
#pragma unroll
    for (u32 r = 0; r < rows; r++) {
      flags[r] = 0;
#pragma unroll
      for (u32 j = 0; j < quad; j++)
        if (key_of(v[r * quad + j]) >= key) flags[r] |= 1u << j;
      flags[r] &= exist;
      some[r] = ballot(flags[r] != 0);
      any |= some[r] != 0;
      several |= (flags[r] & (flags[r] - 1)) != 0;
    }
    if (!any) return;
    several = ballot(several) != 0;
    const u32 lower = (1u << lane()) - 1;
#pragma unroll
    for (u32 r = 0; r < rows; r++) {
      u32 at = count + ones(some[r] & lower);
      count += ones(some[r]);
      if (several)
        for (u32 j = 1; j < quad; j++) {
          const u32 more = ballot(ones(flags[r]) > j);
          at += ones(more & lower), count += ones(more);
        }
      const float v0 = v[r * quad], v1 = v[r * quad + 1], v2 = v[r * quad + 2], v3 = v[r * quad + 3]; // indexing v by a variable would move it from registers to memory
      const i64 first = i + r * quad * warp_size;
      u32 left = flags[r];
      for (; left && at < room; left &= left - 1, at++) {
        const u32 j = trailing_zeros(left);
        idx[at] = s.index(first + j);
        val[at] = j < 2 ? (j < 1 ? v0 : v1) : (j < 3 ? v2 : v3);
        if (!stored && a.take) a.x[first + j] = 0;
      }
      const u32 taken = stored && a.take ? flags[r] & ~left : 0;
#pragma unroll
      for (u32 j = 0; j < quad; j++)
        if (taken >> j & 1) v[r * quad + j] = 0;
    }
  }
};

template <typename G> DEVICE u32 pick_part(const pick_args &a, const source &s, u32 number, u32 key, bool lists) {
  picker<G> p(a, s, number, key);
  p.run(part<pick_quads>(s, number, (u64)blocks() * block_warps), lists);
  return p.count;
}

KERNEL BOUNDS(block_threads, pick_blocks) pick(pick_args a) {
  static SHARED u32 histogram[superset_bins];
  control *c = a.c;
  if (a.mode == mode_top || a.mode == mode_near)
    for (u32 i = thread(); i < superset_bins; i += block_threads) histogram[i] = 0;
  start();
  const source s = {a.x, a.idx, length_of(a.n, a.length), lead_of(a.x)};
  const float t = a.threshold ? *a.threshold : 0;

  // A threshold that is too old serves as a guess of the exact one.
  u32 mode = (u32)a.mode;
  float margin = near_margin;
  if (mode == mode_near && a.interval > 0 && ((const i32 *)a.threshold)[1] >= (i64)a.interval - 1) mode = mode_top;
  else if (mode == mode_top && usable(t)) margin = checked(a.threshold[1]);
  if ((mode == mode_top || mode == mode_near) && !usable(t)) mode = mode_none;
  u32 key = threshold_key(t); // the least key that is listed
  if (mode == mode_top) key = threshold_key(multiplied(t, 1 - margin));
  if (thread_index() == 0) c->listed = listed{mode, key, t}, c->candidates = 0;

  const u32 number = block() * block_warps + warp();
  const bool lists = mode != mode_none;
  u32 count = 0;
  switch (a.type) {
  case type_none:
    if (lists) count = pick_part<none>(a, s, number, key, lists);
    break;
  case type_f32: count = pick_part<float>(a, s, number, key, lists); break;
  case type_f16: count = pick_part<f16>(a, s, number, key, lists); break;
  case type_bf16: count = pick_part<bf16>(a, s, number, key, lists); break;
  }
  if (a.mode == mode_none) return;
  a.to.put(a.to.count, count);
  if (mode != mode_top) return;
  const float *val = a.to.val + number * a.to.room;
  const u32 held = least(count, (u32)a.to.room);
  each_of<4>(held, [&] METHOD (u32 i) { return val[i]; }, [&] METHOD (u32, bool inside, float v) {
    if (inside) add_to(&histogram[least((key_of(v) - key) >> superset_shift, (u32)superset_bins - 1)], 1);
  });
  barrier();
  for (u32 i = thread(); i < superset_bins; i += block_threads)
    if (histogram[i]) add_to(&c->superset[i], histogram[i]);
}

enum { digit_bits = 12 };
static_assert(histogram_bins == 1 << digit_bits, "bins of a digit");

// find finds the bin with the rank-th largest element, in shared memory if near.
struct place { u32 bin, before, inside; }; // rank counts from before

template <u32 bins, bool near = false> DEVICE place find(const u32 *histogram, u32 rank, u32 *totals) {
  static SHARED place found;
  constexpr u32 share = bins / block_threads; // bins of a thread; the first thread has the last bins
  const u32 first = bins - (thread() + 1) * share;
  u32 count[share], mine = 0, total;
#pragma unroll
  for (u32 i = 0; i < share; i += 4) {
    const words<4> w = near ? load_near(histogram + first + i) : load_words<4>(histogram + first + i);
#pragma unroll
    for (u32 j = 0; j < 4; j++) mine += count[i + j] = w.word[j];
  }
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

DEVICE void clear(u32 *histogram, u32 bins) {
  for (u32 i = thread() * 4; i < bins; i += block_threads * 4) store_words(histogram + i, words<4>{});
}

// tally adds up the counts of the segments before this warp's, and of all segments. full: some warp found more entries
// than its segment holds.
struct tally {
  u32 before, all;
  bool full;
  METHOD tally(const segments &g, const u32 *count) : before(0), all(0), full(false) {
    enum { ahead = 4 };
    static SHARED u32 those[block_warps], total[block_warps];
    const u32 mine = block() * block_warps + lane(), end = (u32)g.blocks;
    const u32 beside = lane() < warp() && mine < g.warps() ? count[mine] : 0;
    for (u32 from = thread(); from < end; from += ahead * block_threads) {
      u32 n[ahead] = {};
#pragma unroll
      for (u32 j = 0; j < ahead; j++)
        if (from + j * block_threads < end) n[j] = count[g.warps() + from + j * block_threads];
#pragma unroll
      for (u32 j = 0; j < ahead; j++) {
        full |= (n[j] & overfull) != 0;
        all += n[j] & ~overfull;
        if (from + j * block_threads < block()) before += n[j] & ~overfull;
      }
    }
    all = warp_sum(all), before = warp_sum(before);
    barrier();
    if (lane() == 0) total[warp()] = all, those[warp()] = before;
    full = barrier_count(full) > 0;
    all = 0, before = warp_sum(beside);
    for (u32 w = 0; w < block_warps; w++) all += total[w], before += those[w];
  }
};

// A warp's segment.
struct segment {
  const i32 *idx;
  const float *val;
  u32 found, held;
  METHOD segment(const segments &s, u32 number)
      : idx(s.idx + number * s.room), val(s.val + number * s.room), found(s.count[number]), held(least(found, (u32)s.room)) {}
};

// The results of sift about the segments, whose entries reach listed.key: the entries that may be the last of the k
// largest (a key and a segment each), and for each segment the number of entries larger than these.
struct sifted {
  u32 *above;
  u64 *candidates;
  u64 room;
};

struct sift_args {
  control *c;
  segments from;
  sifted to;
  u64 n;
  const i32 *length;
  u64 k;
};

KERNEL BOUNDS(block_threads, 4) sift(sift_args a) {
  static SHARED u32 totals[block_warps];
  control *c = a.c;
  start();
  const listed l = c->listed;
  if (l.mode != mode_top) return;
  const u32 rank = least((u32)a.k, length_of(a.n, a.length));
  const tally t(a.from, a.from.count);
  last z = {};
  if (rank > 0 && t.all >= rank && !t.full) {
    const place p = find<superset_bins>(c->superset, rank, totals);
    z.enough = 1, z.key = l.key + (p.bin << superset_shift), z.rank = rank - p.before;
    z.bits = p.bin < superset_bins - 1 ? superset_shift : 32 - leading_zeros(key_end - 1 - z.key);
    u32 above = 0;
    const u32 number = block() * block_warps + warp();
    if (block() < a.from.blocks) {
      const segment g(a.from, number);
      each_of<4>(g.held, [&] METHOD (u32 i) { return key_of(g.val[i]); }, [&] METHOD (u32, bool inside, u32 key) {
        const bool reaches = inside && key >= z.key, candidate = reaches && (key - z.key) >> z.bits == 0;
        above += reaches && !candidate;
        const u32 some = ballot(candidate);
        if (!some) return;
        const u32 at = shuffle(lane() == 0 ? add_to(&c->candidates, ones(some)) : 0, 0) + ones(some & ((1u << lane()) - 1));
        if (candidate && at < a.to.room) a.to.candidates[at] = (u64)number << 32 | key;
      });
      a.from.put(a.to.above, warp_sum(above));
    }
  }
  if (thread_index() == 0) c->last = z;
}

// cut works in phases. A block takes tickets, which are units of the phases in order. The block that finishes the last
// unit of a phase publishes the next phase, for which blocks with later tickets wait. The kernel therefore needs no
// minimum number of resident blocks.
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
  struct sifted sifted;
  float *x;
  u64 n;
  const i32 *idx; // if not 0, x is the values of a list
  const i32 *length;
  u64 picked; // not 0: pick has run; 0: the source is x
  entries dst;
  u64 k;
  u64 take, zeros;
  float *threshold; // receives the threshold that was found
  i32 *age;         // receives 0
  float *used;      // receives the threshold, too
  float *margin;    // margin of the next guess
  u64 min;          // least number of entries for mode_near
  double step;
  const shared_lists *shared; // if not 0, the peers' copies of the list

  METHOD void list(const sharing &others, u32 at, i32 index, float value) const {
    dst.idx[at] = index, dst.val[at] = value;
    others.put(at, index, value);
  }
};

// Additions of cut_outside for a list: a range that is not cut (the hole), and an array that receives dropped entries,
// unless that is 0. For the cut of an array both compile to nothing.
struct no_hole {
  METHOD u32 begin() const { return 0; }
  METHOD u32 length() const { return 0; }
  METHOD array rest() const { return array{}; }
};
struct hole_in_list {
  u32 first, count;
  array to;
  METHOD u32 begin() const { return first; }
  METHOD u32 length() const { return count; }
  METHOD array rest() const { return to; }
};

template <typename H> struct cutting { // the same in all phases
  const cut_args &a;
  source s;
  sharing others;
  H hole;
  u32 tiles, units; // units of the source for writing and for counting
  bool wide;
  u64 tag;
  METHOD bool has(i64 i) const { return (u32)i - hole.begin() >= hole.length(); }
};

template <int Q, typename H> DEVICE void count_keys(const cutting<H> &k, const phase &p, u32 shift, u32 unit, u32 *histogram) {
  const source &s = k.s;
  for (u32 number = unit; number < tile<Q>::blocks(s.n, s.lead); number += p.units) {
    float v[Q * quad];
    const tile<Q> t = tile_of_block<Q>(number, s.lead, s.n);
    const u32 exist = load_tile(v, t, s.val);
#pragma unroll
    for (u32 j = 0; j < Q * quad; j++) {
      const u32 offset = key_of(v[j]) - p.lo;
      if ((exist >> j & 1) && k.has(t.at(j / quad) + j % quad) && offset >> p.bits == 0) add_to(&histogram[offset >> shift], 1);
    }
  }
}

// bases computes before[0], the number of the source's selected entries before this warp's, and before[1], the number
// before it of entries that equal a split threshold.
template <typename H> DEVICE void bases(const cutting<H> &k, const phase &p, u32 number, u32 above, u32 equal, u32 before[2], u32 *totals) {
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

// write_tile lists the entries of a tile with keys above p.lo, and as many of the keys equal to it as are wanted.
template <int Q, typename H> DEVICE void write_tile(const cutting<H> &k, const phase &p, u32 number, u32 *totals) {
  const cut_args &a = k.a;
  const tile<Q> w = tile_of_block<Q>(number, k.s.lead, k.s.n);
  float v[Q * quad];
  u32 above = load_tile(v, w, k.s.val);
#pragma unroll
  for (u32 j = 0; j < Q * quad; j++)
    if (!k.has(w.at(j / quad) + j % quad)) above &= ~(1u << j);
  u32 equal = above, left = above;
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
        a.list(k.others, at, k.s.index(i), v[bit]);
        if (a.take) a.x[i] = 0;
        left &= ~(1u << bit);
      }
      na += is_above, ne += is_equal;
    }
  }
  const array rest = k.hole.rest();
  if (!rest.p) return;
  u32 faults = 0;
#pragma unroll
  for (u32 j = 0; j < Q * quad; j++) {
    if (!(left >> j & 1)) continue;
    const i32 i = k.s.index(w.at(j / quad) + j % quad);
    if (rest.has(i))
      rest.p[i] += v[j];
    else
      faults++;
  }
  count_faults(rest.faults, faults);
}

// restore writes the entries of a segment back into the array.
DEVICE void restore(const cut_args &a, const segment &g) {
  for (u32 i = lane(); i < g.held; i += warp_size) a.x[g.idx[i]] = g.val[i];
  warp_barrier();
}

// write_segment lists the entries of a segment that are above last, and those equal to it that are among the first
// `rank` of all segments. The segments before it have na and ne of these. pick has removed all of them from the array.
// If the segment overflowed, its part of the array is searched again; in that case everything that reaches key is
// wanted.
DEVICE void write_segment(const cut_args &a, const source &s, const sharing &others, u32 last, u32 rank, u32 number, u32 na, u32 ne, u32 key) {
  const segment g(a.from, number);
  if (g.found == g.held) {
    struct entry { i32 index; float value; };
    each_of<4>(g.held, [&] METHOD (u32 i) { return entry{g.idx[i], g.val[i]}; }, [&] METHOD (u32, bool inside, entry e) {
      const u32 mine_key = key_of(e.value), lower = (1u << lane()) - 1;
      const bool is_above = inside && mine_key > last, is_equal = inside && mine_key == last;
      const u32 aboves = ballot(is_above), equals = ballot(is_equal);
      const u32 mine = ne + ones(equals & lower), at = na + ones(aboves & lower) + least(mine, rank);
      if ((is_above || (is_equal && mine < rank)) && at < a.dst.n) {
        a.list(others, at, e.index, e.value);
      } else if (inside && a.take) {
        a.x[e.index] = e.value;
      }
      na += ones(aboves), ne += ones(equals);
    });
    return;
  }
  if (a.take) restore(a, g);
  enum { Q = pick_quads };
  const part<Q> mine(s, number, a.from.blocks * block_warps);
  for (u32 t = mine.first; t < mine.end; t++) {
    const tile<Q> w(t, s.lead, s.n);
    float v[Q * quad];
    u32 passed = load_tile(v, w, s.val);
#pragma unroll
    for (u32 j = 0; j < Q * quad; j++)
      if (key_of(v[j]) < key) passed &= ~(1u << j);
    const ranks<Q> r(passed);
#pragma unroll
    for (u32 j = 0; j < Q * quad; j++) {
      const u32 at = na + r.at(j / quad) + ones(passed >> j / quad * quad & ((1u << j % quad) - 1));
      if (!(passed >> j & 1) || at >= a.dst.n) continue;
      const i64 i = w.at(j / quad) + j % quad;
      a.list(others, at, s.index(i), v[j]);
      if (a.take) a.x[i] = 0;
    }
    na += r.all;
  }
}

// store_count stores the number of listed entries. report stores the least key as well.
DEVICE void store_count(const cut_args &a, u32 count) {
  if (a.dst.length) *(i32 *)a.dst.length = (i32)count;
  sharing(a.shared).tell(count, (u32)a.dst.n);
}
DEVICE void report(const cut_args &a, u32 count, u32 key) {
  store_count(a, count);
  if (a.threshold) *a.threshold = float_of(key);
  if (a.age) *a.age = 0;
  if (a.used) *a.used = float_of(key);
  if (a.margin) *a.margin = margin_after(*a.margin, a.c->listed.threshold, float_of(key));
}

// copy_all lists everything. Every position is known, so no block waits for another.
template <typename H> DEVICE void copy_all(const cutting<H> &k) {
  const cut_args &a = k.a;
  const u32 count = k.s.n - k.hole.length();
  for (u64 i = thread_index(); i < least((u64)count, a.dst.n); i += thread_count()) {
    const u64 from = i < k.hole.begin() ? i : i + k.hole.length();
    a.list(k.others, (u32)i, k.s.index((i64)from), k.s.val[from]);
    if (a.take) a.x[from] = 0;
  }
  if (thread_index() == 0) store_count(a, count);
}

// accept keeps the threshold, corrected for the number of entries that reached it.
DEVICE void accept(const cut_args &a, float threshold, u32 passed) {
  store_count(a, passed);
  const float step = (float)a.step;
  float next = threshold;
  if (step != 0) {
    if (3 * (u64)passed < 2 * a.k)
      next = next / step;
    else if (4 * (u64)passed > 5 * a.k)
      next = next * step;
    if (next < tiny) next = tiny;
  }
  *a.threshold = next;
  ++*a.age;
  if (a.used) *a.used = threshold;
}

// settled is a block's evaluation of sift's candidates: the key of the last of the k largest, how many equal to it are
// selected, and how many candidates above it and equal to it precede a warp's segment. `all` is the number of
// candidates above it.
struct settled {
  u32 key, rank, all, before[2];
  METHOD settled(const cut_args &a, const last &z, u32 found, u32 *histogram, u32 *totals) : key(z.key), rank(z.rank), all(0), before{} {
    static SHARED u32 sums[3][block_warps], beside[2][block_warps];
    const u64 *candidates = a.sifted.candidates;
    const auto each = [&] METHOD (auto f) {
      enum { ahead = 4 };
      for (u32 from = thread(); from < found; from += ahead * block_threads) {
        u64 one[ahead];
#pragma unroll
        for (u32 j = 0; j < ahead; j++)
          if (from + j * block_threads < found) one[j] = candidates[from + j * block_threads];
#pragma unroll
        for (u32 j = 0; j < ahead; j++)
          if (from + j * block_threads < found) f((u32)one[j], (u32)(one[j] >> 32));
      }
    };
    for (u32 bits = z.bits; bits > 0;) { // finds the rank-th largest
      const u32 shift = bits > digit_bits ? bits - digit_bits : 0;
      enum { few = 1 << superset_shift }; // bound of what one bin of the superset may hold
      const bool small = bits <= superset_shift;
      barrier();
      for (u32 i = thread() * 4; i < (small ? few : (u32)histogram_bins); i += block_threads * 4) store_near(&histogram[i], words<4>{});
      barrier();
      each([&] METHOD (u32 k, u32) {
        if ((k - key) >> bits == 0) add_to(&histogram[(k - key) >> shift], 1);
      });
      barrier();
      const place p = small ? find<few, true>(histogram, rank, totals) : find<histogram_bins, true>(histogram, rank, totals);
      key += p.bin << shift, bits = shift, rank -= p.before;
    }
    if (thread() < 2 * block_warps) beside[thread() / block_warps][thread() % block_warps] = 0;
    barrier();
    const u32 first = block() * block_warps;
    each([&] METHOD (u32 k, u32 segment) {
      if (k < key) return;
      const u32 equal = k == key;
      all += !equal;
      if (segment < first)
        before[0] += !equal, before[1] += equal;
      else if (segment - first < block_warps)
        add_to(&beside[equal][segment - first], 1);
    });
    const u32 s0 = warp_sum(before[0]), s1 = warp_sum(before[1]), s2 = warp_sum(all);
    if (lane() == 0) sums[0][warp()] = s0, sums[1][warp()] = s1, sums[2][warp()] = s2;
    barrier();
    before[0] = before[1] = all = 0;
    for (u32 w = 0; w < block_warps; w++) {
      before[0] += sums[0][w] + (w < warp() ? beside[0][w] : 0);
      before[1] += sums[1][w] + (w < warp() ? beside[1][w] : 0);
      all += sums[2][w];
    }
  }
};

// close_gaps lists the entries from the segments if these suffice; no block waits for another. Otherwise it sets
// `restores` if their entries have to return to the array first.
DEVICE bool close_gaps(const cut_args &a, const source &s, const sharing &others, bool &restores, u32 *histogram, u32 *totals) {
  const listed l = a.c->listed;
  const u32 number = block() * block_warps + warp();
  const bool inside = block() < a.from.blocks, first = block() == 0 && thread() == 0;
  if (l.mode == mode_top) {
    const last z = a.c->last;
    const u32 found = a.c->candidates;
    for (u64 i = thread_index() * 4; i < superset_bins; i += thread_count() * 4) store_words(a.c->superset + i, words<4>{});
    if (z.enough && found <= a.sifted.room) {
      if (!inside) return true;
      const tally t(a.from, a.sifted.above);
      const settled k(a, z, found, histogram, totals);
      write_segment(a, s, others, k.key, k.rank, number, t.before + k.before[0], k.before[1], l.key);
      if (first) report(a, t.all + k.all + k.rank, k.key);
      return true;
    }
  }
  const tally t(a.from, a.from.count);
  const u32 found = t.all;
  if (l.mode == mode_list || (l.mode == mode_near && a.min <= found && found <= a.dst.n)) {
    // Keys that reach l.key are above the key before it. If l.key is 0, all keys count as equal to it or above.
    if (inside) write_segment(a, s, others, l.key ? l.key - 1 : 0, l.key ? 0 : found, number, t.before, 0, l.key);
    if (first && l.mode == mode_near) accept(a, l.threshold, found);
    if (first && l.mode == mode_list) store_count(a, found);
    return true;
  }
  restores = a.take && found > 0;
  return false;
}

// finish_phase publishes the phase that follows. All threads of the finishing block call it.
template <typename H> DEVICE void finish_phase(const cutting<H> &k, const phase &p, u32 number, u32 *totals) {
  control *c = k.a.c;
  phase next = p;
  next.first = p.first + p.units;
  switch (p.kind) {
  case phase_restore:
    next.kind = p.rank ? phase_histogram : phase_end;
    next.units = k.units;
    if (p.rank == 0 && thread() == 0) report(k.a, 0, 0);
    break;
  case phase_histogram: {
    const u32 shift = p.bits > digit_bits ? p.bits - digit_bits : 0;
    const place f = find<histogram_bins>(c->histogram, p.rank, totals);
    clear(c->histogram, histogram_bins);
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
    if (thread() == 0) report(k.a, load(&c->total), p.lo);
  }
  if (thread() == 0) {
    c->phase[number] = next;
    fence();
    store(&c->phases, number + 1);
  }
}

// cut_as is cut with a function that finds the hole of a list, using some shared memory.
template <typename F> DEVICE void cut_as(const cut_args &a, F hole) {
  alignas(16) static SHARED u32 histogram[histogram_bins];
  static SHARED u32 totals[2 * block_warps], ticket;
  static SHARED bool last;
  control *c = a.c;
  start();
  const sharing others(a.shared);
  const source s = {a.x, a.idx, length_of(a.n, a.length), lead_of(a.x)};
  cutting<decltype(hole(s.n, totals))> k = {a, s, others, hole(s.n, totals), 0, 0, false, tag_of(c)};
  bool restores = false;
  if (a.picked && close_gaps(a, k.s, others, restores, histogram, totals)) return;
  // Small inputs get small tiles, so that all multiprocessors have work.
  k.wide = k.s.n > 1 << 22;
  k.tiles = k.wide ? tile<4>::blocks(k.s.n, k.s.lead) : tile<1>::blocks(k.s.n, k.s.lead);
  k.units = least(blocks(), k.tiles);

  phase p = {};
  p.bits = 31, p.rank = least((u32)a.k, k.s.n - k.hole.length());
  if (restores) {
    p.kind = phase_restore, p.units = (u32)a.from.blocks;
  } else if (p.rank == k.s.n - k.hole.length() && a.zeros && !a.threshold) {
    return copy_all(k);
  } else if (p.rank) {
    p.kind = phase_histogram, p.units = k.units;
  } else if (k.hole.rest().p) { // everything is dropped
    p.kind = phase_write, p.units = k.tiles, p.lo = key_end;
  } else { // nothing is selected
    p.kind = phase_end;
    if (block() == 0 && thread() == 0) report(a, 0, 0);
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
      if (k.wide)
        count_keys<4>(k, p, shift, unit, histogram);
      else
        count_keys<1>(k, p, shift, unit, histogram);
      barrier();
      for (u32 i = thread(); i < histogram_bins; i += block_threads)
        if (histogram[i]) add_to(&c->histogram[i], histogram[i]);
      break;
    }
    case phase_write:
      if (k.wide)
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

KERNEL BOUNDS(block_threads, 4) cut(cut_args a) {
  cut_as(a, [] METHOD (u32, u32 *) { return no_hole{}; });
}

struct outside_args {
  cut_args cut;
  const i32 *without; // if not 0, the two indices that bound the hole
  array rest;
};
KERNEL BOUNDS(block_threads, 4) cut_outside(outside_args a) {
  cut_as(a.cut, [&] METHOD (u32 n, u32 *ends) {
    if (!a.without) return hole_in_list{0, 0, a.rest};
    if (warp() < 2) {
      const u32 end = warp_lower_bound(a.cut.idx, n, a.without[warp()]);
      if (lane() == 0) ends[warp()] = end;
    }
    barrier();
    const u32 first = ends[0], end = most(first, ends[1]);
    barrier();
    return hole_in_list{first, end - first, a.rest};
  });
}
