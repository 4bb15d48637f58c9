// Work on lists of entries. Their indices may come from another rank: one that
// is not in the array is skipped, and counted where that is asked for.
#include "order.cuh"

// Adds to the number at faults how many threads of the grid met one.
DEVICE void count_faults(i32 *faults, u32 mine) {
  if (!faults) return;
  const u32 all = warp_sum(mine);
  if (lane() == 0 && all) add_to((u32 *)faults, all);
}

// lower_bound returns how many of the first n indices are below bound, if they
// ascend, and something up to n if they do not.
DEVICE u32 lower_bound(const i32 *idx, u32 n, i32 bound) {
  u32 low = 0, high = n;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (idx[middle] < bound)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The same, by a whole warp: 33 parts a step instead of two.
DEVICE u32 warp_lower_bound(const i32 *idx, u32 n, i64 bound) {
  u32 low = 0, high = n;
  while (low < high) {
    const u32 step = (high - low) / (warp_size + 1) + 1, at = low + step * (lane() + 1) - 1;
    const u32 below = trailing_zeros(~ballot(at < high && idx[at] < bound)); // of the probes
    const u32 end = low + step * (below + 1) - 1;
    low += step * below;
    high = least(high, end);
  }
  return low;
}

struct array {
  float *p;
  u64 n;
  i32 *faults;
  METHOD bool has(i32 i) const { return (u32)i < n; }
};
struct scatter_args {
  array dst;
  entries l, taken;
  double scale; // of scatter_add
};

template <typename F> DEVICE void each(const scatter_args &a, F f) {
  const u32 n = length_of(a.l);
  u32 faults = 0;
  for (u64 j = thread_index(); j < n; j += thread_count()) {
    const i32 i = a.l.idx[j];
    if (a.dst.has(i))
      f(i, j);
    else
      faults++;
  }
  count_faults(a.dst.faults, faults);
}
#define EACH(body) each(a, [&] METHOD (i32 i, u64 j) { body; })
KERNEL scatter_add(scatter_args a) { EACH(a.dst.p[i] = a.dst.p[i] + a.l.val[j] * (float)a.scale); }
KERNEL scatter_set(scatter_args a) { EACH(a.dst.p[i] = a.l.val[j]); }
KERNEL zero_at(scatter_args a) { EACH(a.dst.p[i] = 0; (void)j); }
KERNEL give_back(scatter_args a) {
  const u32 taken = length_of(a.taken);
  EACH(const u32 at = lower_bound(a.taken.idx, taken, i); if (at == taken || a.taken.idx[at] != i) a.dst.p[i] += a.l.val[j]);
}

struct bounds_args {
  entries l;
  const i32 *bounds;
  u64 m;
  i32 *positions, *lengths;
};
KERNEL lower_bounds(bounds_args a) {
  const u32 n = length_of(a.l);
  for (u64 j = thread_index(); j < a.m; j += thread_count()) {
    const u32 at = lower_bound(a.l.idx, n, a.bounds[j]);
    a.positions[j] = (i32)at;
    if (a.lengths && j + 1 < a.m) a.lengths[j] = (i32)(lower_bound(a.l.idx, n, a.bounds[j + 1]) - at);
  }
}

enum { max_quantiles = 64 };
struct sample_args {
  entries l;
  u64 n, m;
  i32 *dst;
  double quantiles[max_quantiles];
};
KERNEL sample(sample_args a) {
  const u32 n = length_of(a.l), j = thread();
  if (block() > 0 || j >= a.m) return;
  if (n == 0)
    a.dst[j] = (i32)((double)a.n * a.quantiles[j]);
  else
    a.dst[j] = a.l.idx[least((u32)((double)n * a.quantiles[j]), n - 1)];
}

// balance sorts by counting how many samples come before each one.
struct balance_args {
  control *c;
  i32 *samples, *sorted;
  u64 m, n;
  i32 *bounds;
  u64 parts;
};
KERNEL BOUNDS(block_threads, 4) balance(balance_args a) {
  for (u64 j = thread_index(); j < a.m; j += thread_count()) {
    const i32 mine = a.samples[j];
    u64 before = 0;
    for (u64 i = 0; i < a.m; i++) before += a.samples[i] < mine || (a.samples[i] == mine && i < j);
    a.sorted[before] = mine;
  }
  if (!last_block(a.c)) return;
  for (u64 j = thread(); j < a.m; j += block_threads) a.samples[j] = (i32)load((const u32 *)&a.sorted[j]);
  for (u64 r = thread(); r <= a.parts; r += block_threads) {
    const i32 bound = r < a.parts ? (i32)load((const u32 *)&a.sorted[r * a.m / a.parts]) : 0;
    a.bounds[r] = r == 0 ? 0 : r == a.parts ? (i32)a.n : bound < 0 ? 0 : (i32)least((u64)bound, a.n);
  }
  reset(a.c);
}

struct count_args {
  control *c;
  entries l;
  const float *thresholds;
  u64 m; // at most max_counts
  i32 *counts;
};
KERNEL BOUNDS(block_threads, 4) count_above(count_args a) {
  static SHARED u32 keys[max_counts], counts[max_counts];
  const u32 n = length_of(a.l), m = (u32)a.m;
  if (thread() < m) {
    const float t = a.thresholds[thread()];
    keys[thread()] = t <= 0 ? 0 : bits_of(t) & ~(1u << 31);
    counts[thread()] = 0;
  }
  barrier();
  // Lane j of a warp counts for threshold j, and for j + 32.
  u32 low = 0, high = 0;
  for (u64 first = thread_index() - lane(); first < n; first += thread_count()) {
    const bool inside = first + lane() < n;
    const u32 key = inside ? bits_of(a.l.val[first + lane()]) & ~(1u << 31) : 0;
    for (u32 j = 0; j < m; j++) {
      const u32 passed = ones(ballot(inside && key >= keys[j]));
      if (j == lane()) low += passed;
      if (j == lane() + warp_size) high += passed;
    }
  }
  if (lane() < m && low) add_to(&counts[lane()], low);
  if (lane() + warp_size < m && high) add_to(&counts[lane() + warp_size], high);
  barrier();
  if (thread() < m && counts[thread()]) add_to(&a.c->counts[thread()], counts[thread()]);
  if (!last_block(a.c)) return;
  if (thread() < m) {
    a.counts[thread()] = (i32)load(&a.c->counts[thread()]);
    a.c->counts[thread()] = 0;
  }
  reset(a.c);
}

struct narrow_args {
  u32 *bracket;
  const i32 *counts;
  u64 k;
  u32 *thresholds;
  u64 m;
};
KERNEL narrow_bracket(narrow_args a) {
  if (thread_index() > 0) return;
  const u32 m = (u32)a.m;
  u32 low = 1, high = 1u << 31;
  if (a.counts) {
    low = a.bracket[0], high = a.bracket[1];
    const u32 width = (high - low) / (m + 1);
    u32 passed = 0;
    while (passed < m && (i64)a.counts[passed] >= (i64)a.k) passed++;
    if (passed < m) high = low + width * (passed + 1);
    low += width * passed;
  }
  a.bracket[0] = low, a.bracket[1] = high;
  const u32 width = (high - low) / (m + 1);
  for (u32 j = 0; j < m; j++) a.thresholds[j] = low + width * (j + 1);
}

// put_words writes its arguments to memory: what is too long for those of the
// kernel that needs it.
struct put_args {
  u64 *to;
  u64 n;
  u64 word[120];
};
KERNEL put_words(put_args a) {
  for (u32 i = thread(); i < a.n; i += threads()) a.to[i] = a.word[i];
}

// A block of merge or unite owns a tile of the index space, which is in shared
// memory. It adds the tile's part of every list to it, list by list.
enum { max_lists = 256, inline_lists = 28 };
struct merge_args {
  control *c;
  u64 *status;
  void *dst;  // merge
  entries to; // unite
  u64 n;
  double scale;
  i32 *faults;
  float *rest; // merge
  u64 count;
  const u64 *table; // the lists, if they are too many
  u64 list[inline_lists * sizeof(entries) / 8];
};

// Where the lists stand that tiles are filled from, in order: in shared memory.
struct cursors {
  entries list[max_lists];
  u32 at[max_lists];
  u32 count;

  METHOD void open(const merge_args &a) {
    const u32 all = (u32)a.count * (sizeof(entries) / 8);
    u64 *to = (u64 *)list;
    if (a.table)
      for (u32 i = thread(); i < all; i += block_threads) to[i] = a.table[i];
    else
      for (u32 i = thread(); i < all; i += block_threads) to[i] = a.list[i];
    if (thread() == 0) count = (u32)a.count;
    barrier();
    for (u32 p = thread(); p < count; p += block_threads) list[p].n = length_of(list[p]);
    barrier();
  }
  // seek moves to the first entries with an index of at least bound.
  METHOD void seek(i64 bound) {
    for (u32 p = warp(); p < count; p += block_warps) {
      const u32 found = warp_lower_bound(list[p].idx, (u32)list[p].n, bound);
      if (lane() == 0) at[p] = found;
    }
    barrier();
  }
  // What threads load of a list before they need it: an entry each.
  struct ahead {
    u32 at;
    bool inside;
    i32 index;
    float value;
    METHOD void load(const entries &l, u32 from) {
      at = from;
      inside = from + thread() < l.n;
      if (inside) index = l.idx[from + thread()], value = l.val[from + thread()];
    }
  };
  // The next entries of some lists, all on their way at the same time.
  enum { group = 4 };
  struct aheads {
    ahead of[group];
    METHOD void load(const cursors &s, u32 first) {
#pragma unroll
      for (u32 i = 0; i < group; i++)
        if (first + i < s.count) of[i].load(s.list[first + i], s.at[first + i]);
    }
  };
  // add calls f for the entries whose index is below end: those of a list by
  // different threads, those of different lists one after the other. next has
  // those of the first lists.
  template <typename F> METHOD void add(aheads &next, i64 end, F f) {
    for (u32 first = 0; first < count; first += group) {
      if (first) next.load(*this, first);
#pragma unroll
      for (u32 i = 0; i < group; i++) {
        const u32 p = first + i;
        if (p >= count) break;
        ahead now = next.of[i];
        for (;;) {
          const bool here = now.inside && now.index < end;
          if (here) f(now.index, now.value, p);
          const u32 found = barrier_count(here);
          now.at += found;
          if (found < block_threads) break;
          now.load(list[p], now.at);
        }
        if (thread() == 0) at[p] = now.at;
      }
    }
    barrier();
  }
};

// count_outside counts the indices of all lists that are not in [0, n).
DEVICE void count_outside(const merge_args &a, const cursors &s) {
  if (!a.faults) return;
  u32 faults = 0;
  for (u32 p = 0; p < s.count; p++)
    for (u64 i = thread_index(); i < s.list[p].n; i += thread_count()) faults += (u32)s.list[p].idx[i] >= a.n;
  count_faults(a.faults, faults);
}

template <typename T> DEVICE void merge(const merge_args &a) {
  enum { elements = 8192, width = 16 / sizeof(T) };
  alignas(16) static SHARED float tile[elements];
  static SHARED cursors s;
  T *dst = (T *)a.dst;
  const float factor = (float)a.scale;
  const u32 lead = (u32)((u64)dst / sizeof(T) % width);
  const u64 tiles = (a.n + lead + elements - 1) / elements;
  const u32 first = (u32)(tiles * block() / blocks()), last = (u32)(tiles * (block() + 1) / blocks());
  s.open(a);
  if (first == last) return count_outside(a, s);
  s.seek(most((i64)first * elements - lead, (i64)0));
  cursors::aheads next;
  next.load(s, 0);
  for (u32 i = thread() * 4; i < elements; i += block_threads * 4) store_near(&tile[i], words<4>{});
  barrier();
  for (u32 number = first; number < last; number++) {
    const i64 start = (i64)number * elements - lead;
    s.add(next, least(start + elements, (i64)a.n), [&] METHOD (i32 index, float value, u32) {
      const u64 i = (u64)(index - start);
      if (i < elements && index >= 0) tile[i] = tile[i] + value * factor;
    });
    next.load(s, 0);
    for (u32 i = thread() * width; i < elements; i += block_threads * width) {
      T v[width];
#pragma unroll
      for (u32 j = 0; j < width; j += 4) {
        const words<4> w = load_near(&tile[i + j]);
        store_near(&tile[i + j], words<4>{});
#pragma unroll
        for (u32 l = 0; l < 4; l++) {
          const float x = float_of(w.word[l]);
          narrow(v[j + l], x);
          if (too_large<T>(x) && a.rest) narrow_into(v[j + l], x, a.rest + (start + i + j + l));
        }
      }
      if (start + i >= 0 && start + i + width <= (i64)a.n) {
        struct whole { T lane[width]; } w;
#pragma unroll
        for (u32 j = 0; j < width; j++) w.lane[j] = v[j];
        store_words(dst + start + i, __builtin_bit_cast(words<4>, w));
      } else {
#pragma unroll
        for (u32 j = 0; j < width; j++)
          if ((u64)(start + i + j) < a.n) dst[start + i + j] = v[j];
      }
    }
    if (number == first) count_outside(a, s); // while the memory is busy writing
    barrier();
  }
}

// merge_f32 needs no tile beside the array: it writes zeros, and adds the entries
// while they are in the cache.
KERNEL BOUNDS(block_threads, 4) merge_f32(merge_args a) {
  enum { elements = 8192 };
  static SHARED cursors s;
  float *dst = (float *)a.dst;
  const float factor = (float)a.scale;
  const u32 lead = (u32)((u64)dst / sizeof(float) % 4);
  const u64 tiles = (a.n + lead + elements - 1) / elements;
  const u32 first = (u32)(tiles * block() / blocks()), last = (u32)(tiles * (block() + 1) / blocks());
  s.open(a);
  if (first == last) return count_outside(a, s);
  s.seek(most((i64)first * elements - lead, (i64)0));
  for (u32 number = first; number < last; number++) {
    const i64 start = (i64)number * elements - lead, end = least(start + elements, (i64)a.n);
    cursors::aheads next;
    next.load(s, 0);
    for (i64 i = start + thread() * 4; i < end; i += block_threads * 4) {
      if (i >= 0 && i + 4 <= end) {
        store_words(dst + i, words<4>{});
      } else {
#pragma unroll
        for (u32 j = 0; j < 4; j++)
          if (i + j >= 0 && i + j < end) dst[i + j] = 0;
      }
    }
    barrier();
    s.add(next, end, [&] METHOD (i32 index, float value, u32 list) {
      if (index < most(start, (i64)0)) return;
      dst[index] = (list ? dst[index] : 0.0f) + value * factor;
    });
    if (number == first) count_outside(a, s); // while the memory is busy writing
  }
}
KERNEL BOUNDS(block_threads, 4) merge_f16(merge_args a) { merge<f16>(a); }
KERNEL BOUNDS(block_threads, 4) merge_bf16(merge_args a) { merge<bf16>(a); }

// unite lists what was added to a tile instead of writing all of it. Tiles begin
// at the least index of all lists.
KERNEL BOUNDS(block_threads, 4) unite(merge_args a) {
  enum { elements = 8192, share = elements / block_threads }; // of a thread, at most 32
  alignas(16) static SHARED float tile[elements];
  static SHARED u32 met[elements / 32], totals[block_warps], next, before;
  static SHARED cursors s;
  control *c = a.c;
  const u64 tag = tag_of(c);
  const float factor = (float)a.scale;
  s.open(a);
  count_outside(a, s);
  i64 low = (i64)a.n, end = 0;
  for (u32 p = 0; p < s.count; p++) {
    const entries l = s.list[p];
    if (!l.n) continue;
    low = least(low, (i64)l.idx[0]);
    end = most(end, (i64)l.idx[l.n - 1] + 1);
  }
  low = most(low, (i64)0), end = least(end, (i64)a.n);
  const u32 tiles = low < end ? (u32)((end - low + elements - 1) / elements) : 0;
  if (thread() == 0) next = add_to(&c->ticket, 1);
  barrier();
  for (u32 number = next; number < tiles; number = next) {
    const i64 start = low + (i64)number * elements;
    for (u32 i = thread() * 4; i < elements; i += block_threads * 4) store_near(&tile[i], words<4>{});
    if (thread() < elements / 32) met[thread()] = 0;
    s.seek(start);
    cursors::aheads next_entries;
    next_entries.load(s, 0);
    s.add(next_entries, least(start + elements, (i64)a.n), [&] METHOD (i32 index, float value, u32) {
      const u64 i = (u64)(index - start);
      if (i >= elements || index < 0) return;
      tile[i] = tile[i] + value * factor;
      set_bits(&met[i / 32], 1u << i % 32);
    });
    u32 mine = met[thread() * share / 32] >> thread() * share % 32 & (u32)((1ull << share) - 1), count;
    u32 place = scan(ones(mine), totals, count);
    if (warp() == 0) {
      const u32 b = look_back(a.status, number, count, tag);
      if (lane() == 0) {
        before = b;
        if (number == tiles - 1) c->total = b + count;
      }
    } else if (thread() == warp_size) {
      next = add_to(&c->ticket, 1);
    }
    barrier();
    place += before;
    for (; mine; mine &= mine - 1, place++) {
      if (place >= a.to.n) break;
      const u32 i = thread() * share + trailing_zeros(mine);
      a.to.idx[place] = (i32)(start + i);
      a.to.val[place] = tile[i];
    }
    barrier();
  }
  if (!last_block(c)) return;
  if (thread() == 0) *(i32 *)a.to.length = (i32)load(&c->total);
  reset(c);
}
