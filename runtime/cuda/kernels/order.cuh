// What kernels share whose blocks write one list together, in order.
#pragma once
#include "tutti.cuh"

// Blocks have 256 threads. The kernels with barriers rely on it.
enum { block_threads = 256, block_warps = block_threads / warp_size };

// Entries is kernel.Entries: a list, and where its length is.
struct entries {
  i32 *idx;
  float *val;
  u64 n;
  const i32 *length;
};

// How many entries a list has that is read.
DEVICE u32 length_of(u64 n, const i32 *length) {
  if (!length) return (u32)n;
  i32 l = *length;
  return l < 0 ? 0 : least((u32)l, (u32)n);
}
DEVICE u32 length_of(const entries &l) { return length_of(l.n, l.length); }

// Array is kernel.Array.
struct array {
  float *p;
  u64 n;
  i32 *faults;
  METHOD bool has(i32 i) const { return (u32)i < n; }
};

// Adds to the number at faults how many threads of the grid met one.
DEVICE void count_faults(i32 *faults, u32 mine) {
  if (!faults) return;
  const u32 all = warp_sum(mine);
  if (lane() == 0 && all) add_to((u32 *)faults, all);
}

// warp_search finds, by a whole warp, the first place from low up to high for which before
// does not hold: 33 parts a step instead of two.
template <typename F> DEVICE u32 warp_search(u32 low, u32 high, F before) {
  while (low < high) {
    const u32 step = (high - low) / (warp_size + 1) + 1, at = low + step * (lane() + 1) - 1;
    const u32 below = trailing_zeros(~ballot(at < high && before(at))); // of the probes
    const u32 end = low + step * (below + 1) - 1;
    low += step * below;
    high = least(high, end);
  }
  return low;
}
// lower_bound by a whole warp: how many of the first n indices are below bound.
DEVICE u32 warp_lower_bound(const i32 *idx, u32 n, i32 bound) {
  return warp_search(0, n, [&] METHOD (u32 at) { return idx[at] < bound; });
}

enum { histogram_bins = 4096, superset_bins = 4096, max_phases = 8, max_counts = 64 };

// A phase of cut, see there.
struct phase {
  u32 kind, first, units; // its units are the tickets from first on
  u32 lo, bits, rank;     // the entry sought is the rank-th largest of those with keys in [lo, lo + 2^bits)
  u32 split;              // not all entries with the key lo are taken, but rank
};

// What pick leaves to cut beside the segments and the histogram of the superset.
struct listed {
  u32 mode, key; // what passed, and from which key on
  float threshold;
};

// What sift leaves to cut: the last of the k largest is the rank-th largest of those
// with keys in [key, key + 2^bits), the candidates.
struct last {
  u32 enough; // the segments have the k largest
  u32 key, bits, rank;
};

// The memory that kernels leave to each other, and to themselves: all of it is
// zero between two kernels, except the epoch and what pick and sift leave to cut:
// listed, last, candidates and superset.
struct control {
  u32 epoch;  // of this launch; tags what its blocks tell each other
  u32 ticket; // next tile
  u32 done;   // blocks
  u32 total;  // entries found
  u32 candidates;
  u32 phases; // of cut that are known, beyond the first
  u32 finished;
  struct listed listed;
  struct last last;
  struct phase phase[max_phases];
  u32 counts[max_counts + 2];
  alignas(16) u32 histogram[histogram_bins], superset[superset_bins];
};

// last_block ends the work of a block, and reports whether it was the last of
// the grid, which sees what the others wrote and has to reset the control.
DEVICE bool last_block(control *c) {
  static SHARED bool last;
  barrier();
  if (thread() == 0) {
    fence();
    last = add_to(&c->done, 1) == blocks() - 1;
    fence();
  }
  barrier();
  return last;
}
DEVICE void reset(control *c) {
  barrier();
  if (thread() == 0) c->ticket = c->done = c->phases = c->finished = c->total = 0, c->epoch++;
}

// Decoupled look-back (Merrill and Garland, "Single-pass Parallel Prefix Scan
// with Decoupled Look-back", 2016): tile i of a launch publishes its count, adds
// up what the tiles before it have published, and publishes the sum. Tiles are
// tickets, taken by blocks that run, so what a tile waits for is under way, also
// when not all blocks have room at a time. A status word is | epoch: 31 | kind: 2 | count: 31 |, so words of
// earlier launches need no clearing, but for one that was last written exactly 2^31
// launches ago.
enum : u64 { status_count = (1ull << 31) - 1, status_part = 1ull << 31, status_whole = 2ull << 31, status_kind = 3ull << 31 };

DEVICE u64 tag_of(const control *c) { return (u64)load(&c->epoch) << 33; }

// look_back returns how many there are before a tile that has count of them. It
// is called by one whole warp.
DEVICE u32 look_back(u64 *status, u32 tile, u32 count, u64 tag) {
  if (lane() == 0) store(status + tile, tag | (tile == 0 ? status_whole : status_part) | count);
  if (tile == 0) return 0;
  u32 sum = 0;
  for (u32 end = tile;; end -= warp_size) { // of the window, whose lane 0 is nearest
    const bool inside = lane() < end;
    u64 word;
    u32 whole, first; // the nearest lane that knows all before it
    do {
      word = inside ? load(status + (end - 1 - lane())) : tag | status_whole;
      const bool known = (word & ~(status_kind | status_count)) == tag && (word & status_kind) != 0;
      whole = ballot(known && (word & status_kind) == status_whole);
      first = trailing_zeros(whole);
      const u32 unknown = ballot(!known);
      if (trailing_zeros(unknown) >= least(first, (u32)warp_size)) break;
    } while (true);
    sum += warp_sum(lane() <= first ? (u32)(word & status_count) : 0);
    if (whole) break;
  }
  if (lane() == 0) store(status + tile, tag | status_whole | (sum + count));
  return sum;
}

// block_look_back is look_back by a whole block, which looks at as many tiles at a time as it
// has threads.
DEVICE u32 block_look_back(u64 *status, u32 tile, u32 count, u64 tag) {
  static SHARED u32 sums[block_warps], wholes[block_warps];
  if (thread() == 0) store(status + tile, tag | (tile == 0 ? status_whole : status_part) | count);
  u32 sum = 0, found = tile == 0;
  for (u32 end = tile; !found; end -= block_threads) { // of the window, whose thread 0 is nearest
    u64 word = tag | status_whole;
    if (thread() < end) do word = load(status + (end - 1 - thread()));
      while ((word & ~(status_kind | status_count)) != tag || (word & status_kind) == 0);
    warp_barrier();
    const u32 whole = ballot((word & status_kind) == status_whole);
    const u32 mine = warp_sum(lane() <= trailing_zeros(whole) ? (u32)(word & status_count) : 0);
    barrier();
    if (lane() == 0) sums[warp()] = mine, wholes[warp()] = whole;
    barrier();
    for (u32 w = 0; w < block_warps && !found; w++) sum += sums[w], found = wholes[w];
  }
  if (thread() == 0 && tile > 0) store(status + tile, tag | status_whole | (sum + count));
  return sum;
}

// scan returns the sum of v over the threads of the block before this one, and
// in total that over all. It has a barrier; the next use of totals needs one
// before it.
DEVICE u32 scan(u32 v, u32 *totals, u32 &total) {
  u32 inclusive = v;
#pragma unroll
  for (u32 by = 1; by < warp_size; by *= 2) {
    const u32 below = shuffle_up(inclusive, by);
    if (lane() >= by) inclusive += below;
  }
  if (lane() == warp_size - 1) totals[warp()] = inclusive;
  barrier();
  u32 before = 0;
  total = 0;
#pragma unroll
  for (u32 w = 0; w < block_warps; w++) {
    if (w < warp()) before += totals[w];
    total += totals[w];
  }
  return before + inclusive - v;
}
