// Copies of pieces of lists, which the device cuts where its numbers say.
#include "order.cuh"

struct piece {
  entries from;
  const i32 *start, *end;
  i32 *idx; // of the list that it is put into
  float *val;
  u64 room;
  i32 *length;
};
enum { max_pieces = 11 }; // of a launch

struct pieces_args {
  u64 count;
  u64 pieces[max_pieces * (sizeof(piece) / 8)];
};

// copy_pieces puts pieces that follow each other and go to the same list one
// behind the other.
KERNEL BOUNDS(block_threads, 4) copy_pieces(pieces_args a) {
  static SHARED piece pieces[max_pieces];
  for (u32 i = thread(); i < a.count * (sizeof(piece) / 8); i += block_threads) ((u64 *)pieces)[i] = a.pieces[i];
  barrier();
  u64 total = 0; // of the pieces before, in this list
  for (u32 p = 0; p < a.count; p++) {
    const piece x = pieces[p];
    if (p == 0 || x.length != pieces[p - 1].length) total = 0;
    u32 end = length_of(x.from), start = x.start ? length_of(end, x.start) : 0;
    if (x.end) end = most(length_of(end, x.end), start);
    for (u64 j = thread_index(); j < end - start && total + j < x.room; j += thread_count()) {
      x.idx[total + j] = x.from.idx[start + j];
      x.val[total + j] = x.from.val[start + j];
    }
    total = least(total + (end - start), (u64)0x7fffffff);
    if (thread_index() == 0) *x.length = (i32)total;
  }
}
