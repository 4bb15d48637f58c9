// Arithmetic on whole arrays: rounding to a gradient's type, scaling, and sums. The order of a sum depends neither on
// the number of multiprocessors nor on the address.
#include "elements.cuh"

// each runs f on the tiles of an array, whole or partial.
template <typename T> DEVICE void scale(T *x, u64 n, float factor) {
  enum { Q = 4 };
  const u32 lead = lead_of(x), tiles = tile<Q>::blocks(n, lead);
  for (u32 number = block(); number < tiles; number += blocks()) {
    const tile<Q> t = tile_of_block<Q>(number, lead, (u32)n);
    T v[Q * quad];
    if (t.whole()) {
      load_rows(v, t, x);
#pragma unroll
      for (u32 j = 0; j < Q * quad; j++) narrow(v[j], widen(v[j]) * factor);
      store_rows(x, t, v);
      continue;
    }
    for (u32 j = 0; j < Q * quad; j++) {
      const i64 i = t.at(j / quad) + j % quad;
      if (t.has(i)) narrow(x[i], widen(x[i]) * factor);
    }
  }
}
KERNEL scale_f32(float *x, u64 n, const float *factor) { scale(x, n, *factor); }
KERNEL scale_f16(f16 *x, u64 n, const float *factor) { scale(x, n, *factor); }
KERNEL scale_bf16(bf16 *x, u64 n, const float *factor) { scale(x, n, *factor); }

// dst[i] = src[i] * factor, rounded and clamped to the largest finite number; rest receives the rounding error.
template <typename T> DEVICE void store_as(T *dst, const float *src, u64 n, float factor, float *rest) {
  enum { Q = 4 };
  const u32 lead = lead_of(src), tiles = tile<Q>::blocks(n, lead);
  for (u32 number = block(); number < tiles; number += blocks()) {
    const tile<Q> t = tile_of_block<Q>(number, lead, (u32)n);
    if (t.whole()) {
      float v[Q * quad];
      T to[Q * quad];
      load_rows(v, t, src);
#pragma unroll
      for (u32 j = 0; j < Q * quad; j++) narrow_into(to[j], v[j] * factor, rest ? rest + t.at(j / quad) + j % quad : nullptr);
      store_rows(dst, t, to);
      continue;
    }
    for (u32 j = 0; j < Q * quad; j++) {
      const i64 i = t.at(j / quad) + j % quad;
      if (t.has(i)) narrow_into(dst[i], src[i] * factor, rest ? rest + i : nullptr);
    }
  }
}
KERNEL store_f32(float *dst, const float *src, u64 n, float factor, float *rest) { store_as(dst, src, n, factor, rest); }
KERNEL store_f16(f16 *dst, const float *src, u64 n, float factor, float *rest) { store_as(dst, src, n, factor, rest); }
KERNEL store_bf16(bf16 *dst, const float *src, u64 n, float factor, float *rest) { store_as(dst, src, n, factor, rest); }

// Copies src, or writes zeros if the flag is not 0.
struct copy {
  void *dst;
  const void *src;
  u64 n, size; // number of elements, and bytes of one
};
enum { max_copies = 4 };
struct copy_if_args {
  const u32 *flags;
  u64 m, count;
  struct copy copies[max_copies];
};

template <typename T> DEVICE void copy_elements(const struct copy &c) {
  T *dst = (T *)c.dst;
  const T *src = (const T *)c.src;
  for (u64 i = thread_index(); i < c.n; i += thread_count()) dst[i] = src ? src[i] : T(0);
}

KERNEL copy_if(copy_if_args a) {
  u32 any = 0;
  for (u32 i = 0; i < a.m; i++) any |= a.flags[i];
  if (any == 0) return;
#pragma unroll
  for (u32 i = 0; i < max_copies; i++) {
    if (i >= a.count) break;
    if (a.copies[i].size == 2)
      copy_elements<u16>(a.copies[i]);
    else
      copy_elements<u32>(a.copies[i]);
  }
}

// Moments: the sum of some numbers, and the sum of their squared distances to the mean. They are combined as Chan,
// Golub and LeVeque do ("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979).
struct moments {
  double sum, squares, n;
  METHOD void join(const moments &m) {
    if (m.n == 0) return;
    if (n > 0) {
      const double d = m.sum / m.n - sum / n;
      squares += m.squares + d * d * (n * m.n / (n + m.n));
    } else {
      squares = m.squares;
    }
    sum += m.sum, n += m.n;
  }
};
// Only the sum, for SumSquares.
struct total {
  double sum;
  METHOD void join(const total &t) { sum += t.sum; }
};

// One block reduces a segment of two tiles, each warp a part. The last block of the grid combines the results of the
// segments from memory.
enum { segment_tiles = 2, segment_elements = segment_tiles * 4 * quad * block_threads };
DEVICE u32 segments_of(u64 n) { return (u32)((n + segment_elements - 1) / segment_elements); }

// join_warps combines the results of a block's warps in thread 0.
template <typename M> DEVICE M join_warps(M m) {
  static SHARED M parts[block_warps];
  barrier();
  if (lane() == 0) parts[warp()] = m;
  barrier();
  if (thread() == 0)
    for (u32 w = 1; w < block_warps; w++) m.join(parts[w]);
  return m;
}

// join_segments combines the results in memory in thread 0.
template <typename M> DEVICE M join_segments(const M *from, u32 count) {
  static SHARED M parts[block_threads];
  const u32 share = (count + block_threads - 1) / block_threads;
  M m = {};
  for (u32 i = thread() * share; i < least((thread() + 1) * share, count); i++) m.join(from[i]);
  parts[thread()] = m;
  for (u32 half = block_threads / 2; half > 0; half /= 2) {
    barrier();
    if (thread() < half) parts[thread()].join(parts[thread() + half]);
  }
  barrier();
  return parts[0];
}

struct fit_args {
  control *c;
  moments *parts;
  float *x;
  u64 n;
  const float *from;
  const void *grad;
  u64 type;
  const float *factor;
  double z;
  float *threshold;
  float *keep;
};

KERNEL BOUNDS(block_threads, 3) fit(fit_args a) {
  enum { Q = 4 };
  const float factor = a.factor ? *a.factor : 1;
  const u32 segments = segments_of(a.n);
  for (u32 s = block(); s < segments; s += blocks()) {
    moments m = {};
    for (u32 k = 0; k < segment_tiles; k++) {
      float v[Q * quad];
      const u32 exist = load_tile(v, tile_of_block<Q>(s * segment_tiles + k, 0, (u32)a.n), a.x, a.from, a.grad, a.type, factor, a.keep);
      double sum = 0, squares = 0;
#pragma unroll
      for (u32 j = 0; j < Q * quad; j++)
        if (exist >> j & 1) sum += (double)v[j];
      sum = warp_sum(sum);
      const double n = (double)warp_sum(ones(exist)), mean = n > 0 ? sum / n : 0;
#pragma unroll
      for (u32 j = 0; j < Q * quad; j++) {
        const double d = (double)v[j] - mean;
        if (exist >> j & 1) squares += d * d;
      }
      m.join(moments{sum, warp_sum(squares), n});
    }
    m = join_warps(m);
    if (thread() == 0) a.parts[s] = m;
  }
  if (!last_block(a.c)) return;
  const moments m = join_segments(a.parts, segments);
  if (thread() == 0) {
    const double mean = m.n > 0 ? m.sum / m.n : 0, deviation = m.n > 0 ? square_root(m.squares / m.n) : 0;
    const float t = (float)((mean < 0 ? -mean : mean) + a.z * deviation);
    *a.threshold = t < tiny ? tiny : t;
  }
  reset(a.c);
}

struct sum_args {
  control *c;
  total *parts;
  const void *x;
  u64 n;
  double *sum;
};

template <typename T> DEVICE void sum_squares(const sum_args &a) {
  enum { Q = 4 };
  const T *x = (const T *)a.x;
  const u32 segments = segments_of(a.n);
  for (u32 s = block(); s < segments; s += blocks()) {
    total m = {};
    for (u32 k = 0; k < segment_tiles; k++) {
      const tile<Q> t = tile_of_block<Q>(s * segment_tiles + k, 0, (u32)a.n);
      T v[Q * quad];
      if (t.whole()) {
        load_rows(v, t, x);
      } else {
#pragma unroll
        for (u32 j = 0; j < Q * quad; j++) {
          const i64 i = t.at(j / quad) + j % quad;
          v[j] = t.has(i) ? x[i] : T{};
        }
      }
      double sum = 0;
#pragma unroll
      for (u32 j = 0; j < Q * quad; j++) {
        const double d = (double)widen(v[j]);
        sum += d * d;
      }
      m.join(total{warp_sum(sum)});
    }
    m = join_warps(m);
    if (thread() == 0) a.parts[s] = m;
  }
  if (!last_block(a.c)) return;
  const total m = join_segments(a.parts, segments);
  if (thread() == 0) *a.sum = m.sum;
  reset(a.c);
}
KERNEL sum_squares_f32(sum_args a) { sum_squares<float>(a); }
KERNEL sum_squares_f16(sum_args a) { sum_squares<f16>(a); }
KERNEL sum_squares_bf16(sum_args a) { sum_squares<bf16>(a); }

KERNEL clip_factor(float *factor, const double *squares, u64 m, double share, double limit) {
  if (thread_index() > 0) return;
  double sum = 0;
  for (u64 i = 0; i < m; i++) sum += squares[i];
  const double norm = square_root(sum * share), most = 0x1.fffffffffffffp1023;
  *factor = norm > limit && norm <= most ? (float)(limit / norm) : 1;
}

// refine counts the values that reach each of the products t * factors[j]. The products ascend, so it counts the
// values between neighbors.
enum { max_factors = 64 };
struct refine_args {
  control *c;
  const float *x;
  u64 n;
  float *threshold;
  u64 k, m;
  u32 factors[max_factors];
};

KERNEL BOUNDS(block_threads, 4) refine(refine_args a) {
  enum { Q = 4 };
  static SHARED u32 keys[max_factors], counts[max_factors + 2]; // values by interval between products; the last counts those that reach t
  const float t = *a.threshold;
  const u32 m = (u32)a.m, key = threshold_key(t);
  if (thread() < m) keys[thread()] = threshold_key(t * float_of(a.factors[thread()]));
  if (thread() < m + 2) counts[thread()] = 0;
  barrier();
  const u32 floor = m ? least(key, keys[0]) : key;
  const u32 lead = lead_of(a.x), tiles = tile<Q>::blocks(a.n, lead);
  for (u32 number = block(); number < tiles; number += blocks()) {
    float v[Q * quad];
    const u32 exist = load_tile(v, tile_of_block<Q>(number, lead, (u32)a.n), a.x);
#pragma unroll
    for (u32 j = 0; j < Q * quad; j++) {
      const u32 mine = key_of(v[j]);
      if (!(exist >> j & 1) || mine < floor) continue;
      u32 low = 0, high = m; // number of products that v reaches
      while (low < high) {
        const u32 middle = (low + high) / 2;
        if (keys[middle] <= mine)
          low = middle + 1;
        else
          high = middle;
      }
      add_to(&counts[low], 1);
      if (mine >= key) add_to(&counts[m + 1], 1);
    }
  }
  barrier();
  if (thread() < m + 2 && counts[thread()]) add_to(&a.c->counts[thread()], counts[thread()]);
  if (!last_block(a.c)) return;
  if (thread() == 0) {
    const u64 k = a.k, passed = load(&a.c->counts[m + 1]);
    if (m > 0 && finite(t) && !(3 * k <= 4 * passed && 4 * passed <= 5 * k)) {
      u64 above = 0;
      u32 j = m - 1; // the lowest product that few enough values exceed
      for (above = load(&a.c->counts[m]); j > 0; j--) {
        above += load(&a.c->counts[j]);
        if (4 * above > 5 * k) break;
      }
      *a.threshold = t * float_of(a.factors[j]);
    }
  }
  barrier();
  if (thread() < m + 2) a.c->counts[thread()] = 0;
  reset(a.c);
}
