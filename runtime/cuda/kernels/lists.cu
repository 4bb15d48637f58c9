// Operations on lists of entries. Their indices may come from another rank: an index outside the array is skipped, and
// counted on request.
#include "elements.cuh"
#include "shared.cuh"

// lower_bound returns how many of the first n indices are below bound if they ascend, and otherwise some number up to
// n.
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

// back is kernel.Restoration: the entries that are restored to an array.
struct back {
  array dst;
  entries l, taken;
};
struct scatter_args : back {
  double scale; // factor of scatter_add
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
KERNEL zero_at(scatter_args a) { EACH(a.dst.p[i] = 0; (void)j); }

// give restores entries; this is warp `mine` of `warps`. For consecutive entries the selected ones lie close together:
// a warp searches for the range of all of its 32 entries, and each thread for its own within that range.
DEVICE void give(const back &a, u32 mine, u32 warps) {
  const u32 n = length_of(a.l), taken = length_of(a.taken);
  u32 faults = 0;
  for (u64 first = (u64)mine * warp_size; first < n; first += (u64)warps * warp_size) {
    const u32 j = (u32)first + lane(), inside = j < n;
    const i32 i = a.l.idx[least(j, n - 1)];
    const float value = a.l.val[least(j, n - 1)];
    u32 low[2] = {0, 0}, high[2] = {taken, taken};
    const i32 bound[2] = {(i32)shuffle((u32)i, 0), (i32)shuffle((u32)i, warp_size - 1)};
    while (low[0] < high[0] || low[1] < high[1]) { // warp_search for both ends at once
      u32 step[2], below[2];
#pragma unroll
      for (u32 s = 0; s < 2; s++) {
        step[s] = (high[s] - low[s]) / (warp_size + 1) + 1;
        const u32 at = low[s] + step[s] * (lane() + 1) - 1;
        below[s] = at < high[s] && a.taken.idx[at] < bound[s];
      }
#pragma unroll
      for (u32 s = 0; s < 2; s++) {
        const u32 passed = trailing_zeros(~ballot(below[s]));
        high[s] = least(high[s], low[s] + step[s] * (passed + 1) - 1);
        low[s] += step[s] * passed;
      }
    }
    if (!inside) continue;
    if (!a.dst.has(i)) {
      faults++;
      continue;
    }
    const u32 at = low[0] + lower_bound(a.taken.idx + low[0], most(low[0], low[1]) - low[0], i);
    if (at == taken || a.taken.idx[at] != i) a.dst.p[i] += value;
  }
  count_faults(a.dst.faults, faults);
}
KERNEL BOUNDS(block_threads, 4) give_back(scatter_args a) { give(a, block() * block_warps + warp(), blocks() * block_warps); }

struct bounds_args {
  entries l;
  const i32 *bounds;
  u64 m;
  i32 *positions, *lengths;
};
// A warp searches each bound: it needs four dependent loads where a thread would need twenty.
KERNEL lower_bounds(bounds_args a) {
  const u32 n = length_of(a.l);
  for (u64 j = thread_index() / warp_size; j < a.m; j += thread_count() / warp_size) {
    const bool has_length = a.lengths && j + 1 < a.m;
    const u32 at = warp_lower_bound(a.l.idx, n, a.bounds[j]);
    const u32 end = has_length ? warp_lower_bound(a.l.idx, n, a.bounds[j + 1]) : at;
    if (lane() > 0) continue;
    a.positions[j] = (i32)at;
    if (has_length) a.lengths[j] = (i32)(end - at);
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

// balance sorts: the rank of a sample is the number of samples before it.
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
  // Lane j of a warp counts for thresholds j and j + 32.
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

// put_words writes its arguments to memory, for kernels that need more than their own arguments can hold.
struct put_args {
  u64 *to;
  u64 n;
  u64 word[120];
};
KERNEL put_words(put_args a) {
  for (u32 i = thread(); i < a.n; i += threads()) a.to[i] = a.word[i];
}

enum { max_lists = 256, inline_lists = 25 };
struct merge_args {
  control *c;
  u64 *status;
  void *dst;  // of merge
  entries to; // of unite
  u64 n;
  double scale;
  i32 *faults;
  float *rest; // of merge
  const float *threshold; // of unite
  const shared_lists *shared; // of unite: the peers' copies of the list, if not 0
  struct back back; // of merge
  u64 count;
  const u64 *table; // the lists, if there are too many for list
  u64 list[inline_lists * sizeof(entries) / 8];
};

// A team of threads that fills a tile: a warp or a block. After meet or count its threads see each other's writes.
struct warp_team {
  enum { threads = warp_size, warps = 1, teams = block_warps, group = 8 };
  static METHOD u32 number() { return warp(); }
  static METHOD u32 rank() { return lane(); }
  static METHOD void meet() { warp_barrier(); }
  static METHOD u32 count(bool condition) {
    warp_barrier();
    return ones(ballot(condition));
  }
};
struct block_team {
  enum { threads = block_threads, warps = block_warps, teams = 1, group = 4 };
  static METHOD u32 number() { return 0; }
  static METHOD u32 rank() { return thread(); }
  static METHOD void meet() { barrier(); }
  static METHOD u32 count(bool condition) { return barrier_count(condition); }
};

// A list with a known length.
struct list {
  const GLOBAL i32 *idx;
  const GLOBAL float *val;
  u32 n;
};
DEVICE list list_of(const u64 *table, u32 number) {
  const u64 *words = table + number * (sizeof(entries) / 8);
  return list{(const GLOBAL i32 *)words[0], (const GLOBAL float *)words[1], length_of(words[2], (const i32 *)words[3])};
}

// A window: one entry of a list for each thread of a team, beginning at a cursor. It is loaded ahead of its use.
struct window {
  i32 index; // INT_MAX where there is no entry
  float value;
  METHOD void load(const list &l, u32 at) {
    index = (i32)0x7fffffff;
    if (at < l.n) index = l.idx[at], value = l.val[at];
  }
};

// The positions in the lists from which a team fills its tiles, in order. The windows of a group of lists are loaded
// together. If a group holds all lists, a window stays until half of it is used.
template <typename team> struct cursors {
  enum { group = team::group, batch = 2 };
  struct memory {
    list lists[max_lists];
    u32 at[team::teams][max_lists]; // first entries of the windows
  };
  const list *lists;
  u32 *at, count;
  window windows[group];

  METHOD cursors(memory &m, const merge_args &a) : lists(m.lists), at(m.at[team::number()]), count((u32)a.count) {
    if (a.table)
      for (u32 p = thread(); p < count; p += block_threads) m.lists[p] = list_of(a.table, p);
    else
      for (u32 p = thread(); p < count; p += block_threads) m.lists[p] = list_of(a.list, p);
    barrier();
  }
  METHOD void load(u32 first) {
#pragma unroll
    for (u32 i = 0; i < group; i++)
      if (first + i < count) windows[i].load(lists[first + i], at[first + i] + team::rank());
  }
  // seek moves the windows to the first entries with an index of at least bound.
  METHOD void seek(i32 bound) {
    find(bound, warp() % team::warps, team::warps);
    team::meet();
    load(0);
  }
  // find makes some warps search the windows' positions. Each step, for a group of lists, reduces the intervals to
  // 1/33.
  METHOD void find(i32 bound, u32 mine, u32 warps) {
    for (u32 first = mine; first < count; first += group * warps) {
      const list *const l = lists + first;
      const u32 left = (count - first + warps - 1) / warps; // number of lists of this warp
      u32 low[group], high[group], widest;
#pragma unroll
      for (u32 i = 0; i < group; i++) low[i] = 0, high[i] = i < left ? l[i * warps].n : 0;
      do {
        i32 probe[group];
#pragma unroll
        for (u32 i = 0; i < group; i++) {
          if (i >= left) continue;
          const u32 place = low[i] + ((high[i] - low[i]) / (warp_size + 1) + 1) * (lane() + 1) - 1;
          probe[i] = bound;
          if (place < high[i]) probe[i] = l[i * warps].idx[place];
        }
        widest = 0;
#pragma unroll
        for (u32 i = 0; i < group; i++) {
          if (i >= left) continue;
          const u32 step = (high[i] - low[i]) / (warp_size + 1) + 1;
          low[i] += step * trailing_zeros(~ballot(probe[i] < bound)); // the probes before it are below bound
          high[i] = least(high[i], low[i] + step - 1);
          widest = most(widest, high[i] - low[i]);
        }
      } while (widest > warp_size);
#pragma unroll
      for (u32 i = 0; i < group; i++)
        if (i < left && lane() == 0) at[first + i * warps] = low[i];
    }
  }
  // take calls f for the entries of a window with an index below end, and returns their number.
  template <typename F> METHOD u32 take(const window &w, i32 end, F f) {
    const bool here = w.index < end;
    if (here) f(w.index, w.value);
    return team::count(here);
  }
  // add calls f for the entries with an index below end, and for some that come before these. Different threads handle
  // the entries of one list; different lists follow each other. The indices of an ascending list are distinct, so its
  // threads add to different words; take has a barrier between two lists. Threads race for a word only if a list
  // repeats an index. The contract (kernel.Kernels) leaves that result undefined: one of the two sums stays, and f
  // does not leave the tile.
  template <typename F> METHOD void add(i32 end, F f) {
    for (u32 first = 0; first < count; first += group) {
#pragma unroll
      for (u32 i = 0; i < group; i++) {
        const u32 p = first + i;
        if (p >= count) break;
        u32 next = at[p], found = take(windows[i], end, f);
        if (found <= team::threads / 2) continue;
        next += found;
        while (found == team::threads) {
          window more[batch];
#pragma unroll
          for (u32 j = 0; j < batch; j++) more[j].load(lists[p], next + j * team::threads + team::rank());
#pragma unroll
          for (u32 j = 0; j < batch; j++)
            if (found == team::threads) next += found = take(more[j], end, f);
        }
        if (team::rank() == 0) at[p] = next;
        if (count <= group) windows[i].load(lists[p], next + team::rank());
      }
      team::meet();
      if (count > group) load(first + group < count ? first + group : 0);
    }
  }
  // count_outside counts the indices of all lists that are outside the array. Since lists may be short, each one
  // begins at different warps.
  METHOD void count_outside(const merge_args &a) const {
    if (!a.faults) return;
    enum { loads = 4, entries_of_part = loads * warp_size };
    const u32 warps = blocks() * block_warps, share = warps / most(count, 1u);
    u32 faults = 0, mine = block() * block_warps + warp();
    for (u32 p = 0; p < count; p++) {
      const list l = lists[p];
      for (u64 first = (u64)mine * entries_of_part; first < l.n; first += (u64)warps * entries_of_part)
#pragma unroll
        for (u32 i = 0; i < loads; i++) {
          const u32 j = (u32)first + i * warp_size + lane();
          faults += (u32)l.idx[least(j, l.n - 1)] >= a.n && j < l.n;
        }
      if ((mine += share) >= warps) mine -= warps;
    }
    count_faults(a.faults, faults);
  }
};

// merge writes every element once and needs no barriers. Each warp has a part of the array, which passes through a
// tile in shared memory. The tile is zero except for added entries, and is cleared as it is read.
//
// The lower bound is the time to write the array: 24 us for 26,214,400 float32 on an H200, or 7,800 cycles for each of
// a warp's 6 tiles, with the 4 KiB tiles of 32 warps in flight. (For 16-bit types it is half of that.) A tile takes
// some 75 to 95 instructions, and 20 for each list; 8 lists use a quarter to a half of the issue slots of 4
// schedulers. It waits only for shared memory, because windows are loaded tiles ahead.
//
// Measured times are 31 us for 2 lists, 46 us for 8, and 28 us for nearly empty lists. The search before the first
// tile takes some 3 us: a length, two or three probes and a window, each dependent on the one before. Writes bypass
// the cache: otherwise they evict the lists, and 2 lists took 38 us. The order in which warps write their tiles does
// not matter (25 to 26 us for stores alone). Tiles assigned in turn or by tickets, each with a search, cost 3 to 12 us
// more.
template <typename T> DEVICE void merge(const merge_args &a) {
  enum { rows = 8, elements = tile<rows>::elements };
  static SHARED four tiles[block_warps][elements / quad];
  four *const sums = tiles[warp()];
  T *dst = (T *)a.dst;
  const float factor = (float)a.scale;
  const u32 n = (u32)a.n, lead = lead_of(dst), count = tile<rows>::count(n, lead);
  const u32 warps = blocks() * block_warps, mine = block() * block_warps + warp();
  const u32 first = (u32)((u64)count * mine / warps), last = (u32)((u64)count * (mine + 1) / warps);
  static SHARED cursors<warp_team>::memory m;
#pragma unroll
  for (u32 r = 0; r < rows; r++) sums[r * warp_size + lane()] = 0;
  start();
  cursors<warp_team> s(m, a);
  if (first == last) {
    s.count_outside(a);
    return give(a.back, mine, warps);
  }
  s.seek((i32)most(tile<rows>(first, lead, n).start, (i64)0));
  for (u32 number = first; number < last; number++) {
    const tile<rows> t(number, lead, n);
    const i32 start = (i32)t.start, begin = most(start, 0), end = (i32)least(t.start + elements, (i64)n);
    bool large = false;
    s.add(end, [&] METHOD (i32 index, float value) {
      if (index < begin) return;
      float &x = ((float *)sums)[index - start];
      x = x + value * factor;
      large |= too_large<T>(x);
    });
    if (!t.whole() || (!__is_same(T, float) && a.rest && ballot(large))) {
      for (u32 i = lane(); i < elements; i += warp_size) {
        float &x = ((float *)sums)[i];
        const i64 at = t.start + i;
        if (t.has(at)) narrow_into(dst[at], x, a.rest ? a.rest + at : nullptr);
        x = 0;
      }
    } else {
      four x[rows];
#pragma unroll
      for (u32 r = 0; r < rows; r++) x[r] = sums[r * warp_size + lane()];
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
        stream_words(dst + t.at(r), pack<T>(x[r]));
        if (any(x[r])) sums[r * warp_size + lane()] = 0;
      }
    }
    warp_barrier();
    if (number > first) continue;
    s.count_outside(a); // overlaps with the writes
    give(a.back, mine, warps);
  }
}
KERNEL BOUNDS(block_threads, 4) merge_f32(merge_args a) { merge<float>(a); }
KERNEL BOUNDS(block_threads, 4) merge_f16(merge_args a) { merge<f16>(a); }
KERNEL BOUNDS(block_threads, 4) merge_bf16(merge_args a) { merge<bf16>(a); }

// finish_union makes the last block store the number of entries.
DEVICE void finish_union(const merge_args &a, const sharing &others) {
  if (!last_block(a.c)) return;
  if (thread() == 0) {
    const u32 count = load(&a.c->total);
    *(i32 *)a.to.length = (i32)count;
    others.tell(count, (u32)a.to.n);
  }
  reset(a.c);
}

// unite lists what was added to a tile of a block, instead of writing the whole tile. Tiles begin at the lowest index
// of all lists. A block holds two tickets: while it waits for the number of entries before one tile, it searches the
// entries of the next.
KERNEL BOUNDS(block_threads, 4) unite(merge_args a) {
  enum { share = 32, elements = share * block_threads }; // elements of a thread and of the tile
  alignas(16) static SHARED float tile[elements];
  static SHARED u32 met[block_threads], totals[block_warps], tickets[2], before;
  control *c = a.c;
  const u64 tag = tag_of(c);
  const float factor = (float)a.scale;
  const u32 key = a.threshold ? threshold_key(*a.threshold) : 0;
  const sharing others(a.shared);
  static SHARED cursors<block_team>::memory m;
  cursors<block_team> s(m, a);
  s.count_outside(a);
  i64 low = (i64)a.n, end = 0;
  for (u32 p = 0; p < s.count; p++) {
    const list l = s.lists[p];
    if (!l.n) continue;
    low = least(low, (i64)l.idx[0]);
    end = most(end, (i64)l.idx[l.n - 1] + 1);
  }
  low = most(low, (i64)0), end = least(end, (i64)a.n);
  const u32 tiles = low < end ? (u32)((end - low + elements - 1) / elements) : 0;
  const auto start_of = [&] METHOD (u32 number) { return low + (i64)number * elements; };
  for (u32 i = thread() * 4; i < elements; i += block_threads * 4) store_near(&tile[i], words<4>{});
  met[thread()] = 0;
  if (thread() == 0) tickets[0] = add_to(&c->ticket, 1);
  barrier();
  u32 number = tickets[0], turn = 1;
  if (number < tiles) {
    s.seek((i32)start_of(number));
    if (thread() == 0) tickets[1] = add_to(&c->ticket, 1); // after the other blocks have their first tickets
  }
  while (number < tiles) {
    const i64 start = start_of(number);
    s.add((i32)least(start + elements, (i64)a.n), [&] METHOD (i32 index, float value) {
      const u64 i = (u64)(index - start);
      if (i >= elements || index < 0) return;
      tile[i] = tile[i] + value * factor;
      set_bits(&met[i / share], 1u << i % share);
    });
    u32 mine = met[thread()], count;
    met[thread()] = 0;
    for (u32 left = mine; key && left; left &= left - 1) {
      float &x = tile[thread() * share + trailing_zeros(left)];
      if (key_of(x) < key) x = 0, mine ^= left & -left;
    }
    u32 place = scan(ones(mine), totals, count);
    const u32 next = tickets[turn];
    turn ^= 1;
    if (warp() == 0) {
      const u32 b = look_back(a.status, number, count, tag);
      if (lane() == 0) {
        before = b;
        if (number == tiles - 1) c->total = b + count;
      }
    } else {
      if (thread() == warp_size) tickets[turn] = add_to(&c->ticket, 1);
      if (next < tiles) s.find((i32)start_of(next), warp() - 1, block_warps - 1);
    }
    barrier();
    if (next < tiles) s.load(0);
    place += before;
    for (; mine; mine &= mine - 1, place++) {
      const u32 i = thread() * share + trailing_zeros(mine);
      if (place < a.to.n) {
        a.to.idx[place] = (i32)(start + i);
        a.to.val[place] = tile[i];
        others.put(place, (i32)(start + i), tile[i]);
      }
      tile[i] = 0;
    }
    barrier();
    number = next;
  }
  finish_union(a, others);
}

// unite_two is unite for two lists. Its tiles are equal parts of their merged sequence, whose ends a search in both
// lists finds (Odeh et al., "Merge Path: Parallel Merging Made Simple", 2012). Its time depends on the lists alone. Of
// two entries with the same index the entry of the first list comes first and gets the sum, even if the tile ends
// between them.
KERNEL BOUNDS(block_threads, 4) unite_two(merge_args args) {
  enum { share = 8, elements = share * block_threads }; // elements of a thread and of the tile
  static SHARED i32 idx[elements + 1];                  // entries of the first list, then of the second, then the next one of the second
  static SHARED float val[elements + 1];
  static SHARED u32 totals[block_warps], splits[2], ticket;
  control *c = args.c;
  const u64 tag = tag_of(c);
  const float factor = (float)args.scale;
  const u32 key = args.threshold ? threshold_key(*args.threshold) : 0;
  const sharing others(args.shared);
  const list a = list_of(args.list, 0), b = list_of(args.list, 1);
  const u64 all = (u64)a.n + b.n;
  const u32 tiles = (u32)((all + elements - 1) / elements);
  u32 faults = 0;
  for (;;) {
    if (thread() == 0) ticket = add_to(&c->ticket, 1);
    barrier();
    const u32 number = ticket;
    if (number >= tiles) break;
    const u64 start = (u64)number * elements, end = least(start + elements, all);
    if (warp() < 2) { // how many entries of the first list precede the tile, and its end
      const u32 d = (u32)(warp() ? end : start);
      const u32 found = warp_search(d > b.n ? d - b.n : 0, least(d, a.n), [&] METHOD (u32 at) { return a.idx[at] <= b.idx[d - 1 - at]; });
      if (lane() == 0) splits[warp()] = found;
    }
    barrier();
    // Keeps the accesses in bounds even if the lists do not ascend.
    const u32 a0 = splits[0], a1 = most(a0, least(splits[1], a0 + (u32)(end - start)));
    const u32 b0 = (u32)start - a0, b1 = least((u32)end - a1, b.n);
    const u32 na = a1 - a0, nb = b1 - b0;
    i32 index[share];
    float value[share];
#pragma unroll
    for (u32 s = 0; s < share; s++) {
      const u32 i = s * block_threads + thread();
      if (i < na + nb) index[s] = i < na ? a.idx[a0 + i] : b.idx[b0 + i - na], value[s] = i < na ? a.val[a0 + i] : b.val[b0 + i - na];
    }
    const bool has_next = b1 < b.n, has_last = a0 > 0;
    if (thread() == 0 && has_next) idx[na + nb] = b.idx[b1], val[na + nb] = b.val[b1];
    const i32 last = has_last ? a.idx[a0 - 1] : 0;
#pragma unroll
    for (u32 s = 0; s < share; s++) {
      const u32 i = s * block_threads + thread();
      if (i < na + nb) idx[i] = index[s], val[i] = value[s];
    }
    barrier();
    const u32 d = least(thread() * share, na + nb);
    u32 i = d > nb ? d - nb : 0;
    for (u32 high = least(d, na); i < high;) {
      const u32 middle = i + (high - i) / 2;
      if (idx[middle] <= idx[na + d - 1 - middle])
        i = middle + 1;
      else
        high = middle;
    }
    u32 j = d - i, flags = 0;
#pragma unroll
    for (u32 s = 0; s < share; s++) {
      if (i + j >= na + nb || i + j >= d + share) continue;
      const bool first = j >= nb || (i < na && idx[i] <= idx[na + j]);
      index[s] = idx[first ? i : na + j];
      value[s] = 0 + val[first ? i : na + j] * factor;
      bool wanted = (u32)index[s] < args.n;
      faults += !wanted;
      if (first) {
        if ((j < nb || has_next) && idx[na + j] == index[s]) value[s] = value[s] + val[na + j] * factor;
        i++;
      } else {
        if ((i > 0 || has_last) && (i > 0 ? idx[i - 1] : last) == index[s]) wanted = false; // it is part of that sum
        j++;
      }
      if (wanted && key_of(value[s]) >= key) flags |= 1u << s;
    }
    u32 count, place = scan(ones(flags), totals, count);
#pragma unroll
    for (u32 s = 0; s < share; s++)
      if (flags >> s & 1) idx[place] = index[s], val[place++] = value[s];
    const u32 before = block_look_back(args.status, number, count, tag);
    if (thread() == 0 && number == tiles - 1) c->total = before + count;
    barrier();
    for (u32 k = thread(); k < count && before + k < args.to.n; k += block_threads) {
      args.to.idx[before + k] = idx[k];
      args.to.val[before + k] = val[k];
      others.put(before + k, idx[k], val[k]);
    }
  }
  count_faults(args.faults, faults);
  finish_union(args, others);
}
