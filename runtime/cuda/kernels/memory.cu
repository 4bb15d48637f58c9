// Fill, strided copy and scale. Every kernel is a grid-stride loop over a
// one-dimensional grid, so any launch geometry is right.
#include "tutti.cuh"

// Eight-byte fill; smaller elements use the driver's memset.
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

template <typename T> DEVICE void copy_strided(T *dst, const T *src, const layout &l) {
  for (u64 i = thread_index(); i < l.count; i += thread_count()) {
    u64 rest = i;
    i64 to = 0, from = 0;
    for (int d = (int)l.dims - 1; d >= 0; d--) {
      // A 64-bit division is many times as slow as a 32-bit one.
      u64 q = (rest | l.shape[d]) >> 32 ? rest / l.shape[d] : (u32)rest / (u32)l.shape[d];
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

// x[i] *= s, computed in the element's own precision or float32, whichever is
// greater, and rounded once.
DEVICE double scaled(double x, float s) { return x * (double)s; }
DEVICE float scaled(float x, float s) { return x * s; }
DEVICE f16 scaled(f16 x, float s) { return {f32_to_f16(f16_to_f32(x.bits) * s)}; }
DEVICE bf16 scaled(bf16 x, float s) { return {f32_to_bf16(bf16_to_f32(x.bits) * s)}; }

// Memory is read and written sixteen bytes at a time where x allows it: two to
// eight elements a thread keep enough loads in flight to fill the bandwidth.
template <typename T> DEVICE void scale(T *x, u64 n, float s) {
  const u32 width = 16 / sizeof(T);
  struct alignas(16) vector { T lane[width]; };
  u64 vectors = (u64)x % 16 == 0 ? n / width : 0;
  vector *v = (vector *)x;
  for (u64 i = thread_index(); i < vectors; i += thread_count()) {
    vector w = v[i];
#pragma unroll
    for (u32 l = 0; l < width; l++) w.lane[l] = scaled(w.lane[l], s);
    v[i] = w;
  }
  for (u64 i = vectors * width + thread_index(); i < n; i += thread_count()) x[i] = scaled(x[i], s);
}

KERNEL scale_f64(double *x, u64 n, float s) { scale(x, n, s); }
KERNEL scale_f32(float *x, u64 n, float s) { scale(x, n, s); }
KERNEL scale_f16(f16 *x, u64 n, float s) { scale(x, n, s); }
KERNEL scale_bf16(bf16 *x, u64 n, float s) { scale(x, n, s); }
