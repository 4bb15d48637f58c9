// Fill and strided copy. Every kernel is a grid-stride loop over a one-dimensional grid, so any launch geometry is
// right unless its comment says otherwise.
#include "tutti.cuh"

// Fills 8-byte elements. The driver's memset fills smaller ones.
KERNEL fill_u64(u64 *dst, u64 n, u64 value) {
  for (u64 i = thread_index(); i < n; i += thread_count()) dst[i] = value;
}

// The layout of a strided copy: shape and strides in elements, innermost
// dimension last. Must match stridedLayout in strided.go.
enum { max_dims = 8 };
struct layout {
  u64 shape[max_dims];
  i64 dst[max_dims];
  i64 src[max_dims];
  u64 count;
  u32 dims;
};

// A 64-bit division is many times slower than a 32-bit one.
DEVICE u64 divide(u64 a, u64 b) { return (a | b) >> 32 ? a / b : (u32)a / (u32)b; }

template <typename T> DEVICE void copy_strided(T *dst, const T *src, const layout &l) {
  for (u64 i = thread_index(); i < l.count; i += thread_count()) {
    u64 rest = i;
    i64 to = 0, from = 0;
    for (int d = (int)l.dims - 1; d >= 0; d--) {
      u64 q = divide(rest, l.shape[d]);
      i64 at = (i64)(rest - q * l.shape[d]);
      to += at * l.dst[d];
      from += at * l.src[d];
      rest = q;
    }
    dst[to] = src[from];
  }
}

KERNEL copy_strided_1(u8 *dst, const u8 *src, layout l) { copy_strided(dst, src, l); }
KERNEL copy_strided_2(u16 *dst, const u16 *src, layout l) { copy_strided(dst, src, l); }
KERNEL copy_strided_4(u32 *dst, const u32 *src, layout l) { copy_strided(dst, src, l); }
KERNEL copy_strided_8(u64 *dst, const u64 *src, layout l) { copy_strided(dst, src, l); }

// A batch of transposes: a strided copy whose last dimension is contiguous in the destination and whose second-to-last
// is contiguous in the source. Each block moves tiles of 32 by 32 elements through shared memory, so that adjacent
// threads both read and write adjacent elements. A 33rd column avoids bank conflicts. A block must have 256 threads;
// any number of blocks is right.
enum { tile_size = 32, tile_rows = 8 };

template <typename T> DEVICE void transpose(T *dst, const T *src, const layout &l) {
  static SHARED T tile[tile_size][tile_size + 1];
  const u32 x = thread() % tile_size, y = thread() / tile_size;
  const int column = (int)l.dims - 1, row = column - 1;
  const u64 columns = l.shape[column], rows = l.shape[row];
  const u64 across = (columns + tile_size - 1) / tile_size, down = (rows + tile_size - 1) / tile_size;
  u64 tiles = across * down;
  for (int d = 0; d < row; d++) tiles *= l.shape[d];

  // All threads of a block must iterate equally often, because of the barriers.
  for (u64 t = block(); t < tiles; t += blocks()) {
    u64 rest = divide(t, across);
    const u64 c0 = (t - rest * across) * tile_size;
    u64 q = divide(rest, down);
    const u64 r0 = (rest - q * down) * tile_size;
    i64 to = 0, from = 0;
    for (int d = row - 1; d >= 0; d--) {
      rest = q;
      q = divide(rest, l.shape[d]);
      i64 at = (i64)(rest - q * l.shape[d]);
      to += at * l.dst[d];
      from += at * l.src[d];
    }
#pragma unroll
    for (u32 k = 0; k < tile_size; k += tile_rows) {
      u64 r = r0 + x, c = c0 + y + k;
      if (r < rows && c < columns) tile[y + k][x] = src[from + (i64)r * l.src[row] + (i64)c * l.src[column]];
    }
    barrier();
#pragma unroll
    for (u32 k = 0; k < tile_size; k += tile_rows) {
      u64 r = r0 + y + k, c = c0 + x;
      if (r < rows && c < columns) dst[to + (i64)r * l.dst[row] + (i64)c * l.dst[column]] = tile[x][y + k];
    }
    barrier(); // before the next tile overwrites this one
  }
}

KERNEL transpose_1(u8 *dst, const u8 *src, layout l) { transpose(dst, src, l); }
KERNEL transpose_2(u16 *dst, const u16 *src, layout l) { transpose(dst, src, l); }
KERNEL transpose_4(u32 *dst, const u32 *src, layout l) { transpose(dst, src, l); }
KERNEL transpose_8(u64 *dst, const u64 *src, layout l) { transpose(dst, src, l); }
