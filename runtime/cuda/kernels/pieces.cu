// Copies pieces of lists whose bounds are numbers in device memory.
#include "order.cuh"

struct piece {
  entries from;
  const i32 *start, *end;
  u64 by_index;
  i32 *idx; // of the destination list
  float *val;
  u64 room;
  i32 *length;
};
enum { max_pieces = 11 }; // in a launch

struct pieces_args {
  u64 count;
  u64 pieces[max_pieces * (sizeof(piece) / 8)];
};

// copy_pieces concatenates consecutive pieces that go to the same list.
KERNEL BOUNDS(block_threads, 4) copy_pieces(pieces_args a) {
  static SHARED piece pieces[max_pieces];
  static SHARED u32 ends[2 * max_pieces];
  for (u32 i = thread(); i < a.count * (sizeof(piece) / 8); i += block_threads) ((u64 *)pieces)[i] = a.pieces[i];
  barrier();
  for (u32 e = warp(); e < 2 * a.count; e += block_warps) {
    const piece &x = pieces[e / 2];
    const i32 *at = e % 2 ? x.end : x.start;
    const u32 n = length_of(x.from);
    u32 place = e % 2 ? n : 0;
    if (at) place = x.by_index ? warp_lower_bound(x.from.idx, n, *at) : length_of(n, at);
    if (lane() == 0) ends[e] = place;
  }
  barrier();
  u64 total = 0; // length of the preceding pieces in this list
  for (u32 p = 0; p < a.count; p++) {
    const piece x = pieces[p];
    if (p == 0 || x.length != pieces[p - 1].length) total = 0;
    const u32 start = ends[2 * p], end = most(ends[2 * p + 1], start);
    for (u64 j = thread_index(); j < end - start && total + j < x.room; j += thread_count()) {
      x.idx[total + j] = x.from.idx[start + j];
      x.val[total + j] = x.from.val[start + j];
    }
    total = least(total + (end - start), (u64)0x7fffffff);
    if (thread_index() == 0) *x.length = (i32)total;
  }
}
