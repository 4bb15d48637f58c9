// Shared code of kernels whose blocks write one list together, in order.
#pragma once
#include "tutti.cuh"

// Blocks have 256 threads, on which kernels with barriers rely.
enum { block_threads = 256, block_warps = block_threads / warp_size };

// entries is kernel.Entries: a list and the address of its length.
struct entries {
  i32 *idx;
  float *val;
  u64 n;
  const i32 *length;
};

// The length of a list that is read.
DEVICE u32 length_of(u64 n, const i32 *length) {
  if (!length) return (u32)n;
  i32 l = *length;
  return l < 0 ? 0 : least((u32)l, (u32)n);
}
DEVICE u32 length_of(const entries &l) { return length_of(l.n, l.length); }

// array is kernel.Array.
struct array {
  float *p;
  u64 n;
  i32 *faults;
  METHOD bool has(i32 i) const { return (u32)i < n; }
};

// Adds the number of threads of the grid that met a fault to *faults.
DEVICE void count_faults(i32 *faults, u32 mine) {
  if (!faults) return;
  const u32 all = warp_sum(mine);
  if (lane() == 0 && all) add_to((u32 *)faults, all);
}

// warp_search finds the first place in [low, high) for which before is false. The whole warp searches; each step
// divides the interval into 33 parts.
template <typename F> DEVICE u32 warp_search(u32 low, u32 high, F before) {
  while (low < high) {
    const u32 step = (high - low) / (warp_size + 1) + 1, at = low + step * (lane() + 1) - 1;
    const u32 below = trailing_zeros(~ballot(at < high && before(at))); // number of probes for which before holds
    const u32 end = low + step * (below + 1) - 1;
    low += step * below;
    high = least(high, end);
  }
  return low;
}
// warp_lower_bound is lower_bound by a whole warp: how many of the first n indices are below bound.
DEVICE u32 warp_lower_bound(const i32 *idx, u32 n, i32 bound) {
  return warp_search(0, n, [&] METHOD (u32 at) { return idx[at] < bound; });
}

enum { histogram_bins = 4096, superset_bins = 4096, max_phases = 8, max_counts = 64 };

// A phase of cut (select.cu).
struct phase {
  u32 kind, first, units; // its units are the tickets from first on
  u32 lo, bits, rank;     // the threshold is the rank-th largest key in [lo, lo + 2^bits)
  u32 split;              // of the entries with key lo, only `rank` are selected
};

// The results of pick for cut, besides the segments and the histogram of the superset.
struct listed {
  u32 mode, key; // how entries were listed, and the least key
  float threshold;
};

// The results of sift for cut: the last of the k largest is the rank-th largest of the candidates, the entries with
// keys in [key, key + 2^bits).
struct last {
  u32 enough; // 1 if the segments hold the k largest
  u32 key, bits, rank;
};

// Memory that kernels share with later launches. Between two kernels all of it is zero, except the epoch and the
// results of pick and sift for cut: listed, last, candidates and superset.
struct control {
  u32 epoch;  // number of this launch; tags its status words
  u32 ticket; // next tile
  u32 done;   // finished blocks
  u32 total;  // entries found
  u32 candidates;
  u32 phases; // published phases of cut after the first
  u32 finished;
  struct listed listed;
  struct last last;
  struct phase phase[max_phases];
  u32 counts[max_counts + 2];
  alignas(16) u32 histogram[histogram_bins], superset[superset_bins];
};

// last_block ends the work of a block, and returns true for the last block of the grid. That block sees the writes of
// the others, and has to reset the control.
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

// Decoupled look-back (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016): tile i
// of a launch publishes its count, adds up the published counts of the tiles before it, and publishes the sum. Tiles
// are tickets that running blocks take, so a tile waits only for tiles in progress, even if not all blocks fit on the
// GPU at once. A status word is | epoch: 31 | kind: 2 | count: 31 |. Words of earlier launches need no clearing,
// except one last written exactly 2^31 launches ago.
enum : u64 { status_count = (1ull << 31) - 1, status_part = 1ull << 31, status_whole = 2ull << 31, status_kind = 3ull << 31 };

DEVICE u64 tag_of(const control *c) { return (u64)load(&c->epoch) << 33; }

// look_back returns the sum of the counts of all tiles before this one, whose count is `count`. One whole warp calls
// it.
DEVICE u32 look_back(u64 *status, u32 tile, u32 count, u64 tag) {
  if (lane() == 0) store(status + tile, tag | (tile == 0 ? status_whole : status_part) | count);
  if (tile == 0) return 0;
  u32 sum = 0;
  for (u32 end = tile;; end -= warp_size) { // end of the window; lane 0 looks at the nearest tile
    const bool inside = lane() < end;
    u64 word;
    u32 whole, first; // the nearest lane with a complete sum
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

// block_look_back is look_back by a whole block, with a window as wide as the block.
DEVICE u32 block_look_back(u64 *status, u32 tile, u32 count, u64 tag) {
  static SHARED u32 sums[block_warps], wholes[block_warps];
  if (thread() == 0) store(status + tile, tag | (tile == 0 ? status_whole : status_part) | count);
  u32 sum = 0, found = tile == 0;
  for (u32 end = tile; !found; end -= block_threads) { // end of the window; thread 0 looks at the nearest tile
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

// scan returns the sum of v over the threads before this one, and sets total to the sum over the block. It has a
// barrier; reusing totals needs one more.
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
