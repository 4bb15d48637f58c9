// The parts of CUDA that the kernels need, written with clang's builtins. clang from Debian main compiles the PTX,
// without NVIDIA's headers or libraries.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2, "type sizes");

// The 16-bit floats by their bits, as separate types.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

// Words that are loaded and stored together.
template <u32 n> struct words { u32 word[n]; };

enum { warp_size = 32 };

#ifdef EMULATOR // testdata/emulator.cpp, which runs kernels on the host
#include EMULATOR
#else

#define KERNEL extern "C" __attribute__((global)) void
#define METHOD __attribute__((device)) __attribute__((always_inline))
#define DEVICE static inline METHOD
#define SHARED __attribute__((shared))
#define CONSTANT static constexpr __attribute__((device))
// The address space of global memory. For a pointer loaded from memory the compiler cannot know that it is not shared
// memory.
#define GLOBAL __attribute__((address_space(1)))

// The maximum number of threads of a block, and the minimum number of blocks of a multiprocessor.
#define BOUNDS(threads, blocks) __attribute__((launch_bounds(threads, blocks)))

DEVICE u32 thread() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE u32 threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
DEVICE u32 block() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE u32 blocks() { return __nvvm_read_ptx_sreg_nctaid_x(); }

// Waits for all threads of the block and makes their writes visible. barrier_count also counts the threads for which
// the condition holds.
DEVICE void barrier() { __syncthreads(); }
DEVICE u32 barrier_count(bool condition) { return (u32)__nvvm_bar0_popc(condition); }

// start_behind begins a kernel that may launch before the kernel ahead of it in the stream has ended
// (cuda.Geometry.Dependent). It waits until that kernel has ended and its writes are visible; nothing that other
// kernels read or write may be touched before. Kernels further ahead have ended too, because every kernel that starts
// early passes this wait in all its threads. start also lets the next kernel launch, which then waits here and
// occupies room on the GPU. A kernel that waits for other GPUs therefore does so only for kernels that leave room. The
// instructions need compute capability 9.0; on such GPUs the host removes the comment that hides them.
DEVICE void start_behind() { asm volatile("//sm_90 griddepcontrol.wait;" ::: "memory"); }
DEVICE void start() {
  start_behind();
  asm volatile("//sm_90 griddepcontrol.launch_dependents;" ::: "memory"); // not earlier, or an unbounded number of kernels would wait on the GPU
}

// Exchanges among the 32 threads of a warp, all of which must take part. After warp_barrier they see each other's
// writes.
DEVICE void warp_barrier() { __nvvm_bar_warp_sync(~0u); }
DEVICE u32 ballot(bool condition) { return __nvvm_vote_ballot_sync(~0u, condition); }
DEVICE u32 shuffle(u32 v, u32 from) { return (u32)__nvvm_shfl_sync_idx_i32(~0u, (int)v, (int)from, 31); }
DEVICE u32 shuffle_up(u32 v, u32 by) { return (u32)__nvvm_shfl_sync_up_i32(~0u, (int)v, (int)by, 0); }
DEVICE u32 shuffle_xor(u32 v, u32 mask) { return (u32)__nvvm_shfl_sync_bfly_i32(~0u, (int)v, (int)mask, 31); }
DEVICE u32 warp_sum(u32 v) {
  u32 sum;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(v));
  return sum;
}

DEVICE u32 ones(u32 v) { return (u32)__builtin_popcount(v); }
DEVICE u32 leading_zeros(u32 v) { return v ? (u32)__builtin_clz(v) : 32; }
DEVICE u32 trailing_zeros(u32 v) { return v ? (u32)__builtin_ctz(v) : 32; }

// Access to memory that several blocks share. Loads come from the cache that the blocks share. A fence orders the
// writes that this thread knows of, its own and those that a barrier made visible, before its later accesses.
DEVICE u32 add_to(u32 *p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE void set_bits(u32 *p, u32 bits) { __atomic_fetch_or(p, bits, __ATOMIC_RELAXED); }
DEVICE void flip_bits(u32 *p, u32 bits) { __atomic_fetch_xor(p, bits, __ATOMIC_RELAXED); }
DEVICE u32 load(const u32 *p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u64 load(const u64 *p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store(u32 *p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void store(u64 *p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Stores a word that another GPU waits for.
DEVICE void store_system(u64 *p, u64 v) { asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// One access of eight or sixteen bytes with that alignment. The compiler would split the access of a struct.
template <u32 n> DEVICE words<n> load_words(const void *p);
template <> METHOD inline words<2> load_words<2>(const void *p) {
  words<2> w;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w.word[0]), "=r"(w.word[1]) : "l"(p) : "memory");
  return w;
}
template <> METHOD inline words<4> load_words<4>(const void *p) {
  words<4> w;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3]) : "l"(p) : "memory");
  return w;
}
DEVICE void store_words(void *p, const words<2> &w) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w.word[0]), "r"(w.word[1]) : "memory");
}
DEVICE void store_words(void *p, const words<4> &w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]) : "memory");
}
// The same for data that is not read again soon: the shared cache evicts it first.
template <u32 n> DEVICE words<n> stream_words(const void *p);
template <> METHOD inline words<2> stream_words<2>(const void *p) {
  words<2> w;
  asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];" : "=r"(w.word[0]), "=r"(w.word[1]) : "l"(p) : "memory");
  return w;
}
template <> METHOD inline words<4> stream_words<4>(const void *p) {
  words<4> w;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3]) : "l"(p) : "memory");
  return w;
}
DEVICE void stream_words(void *p, const words<2> &w) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w.word[0]), "r"(w.word[1]) : "memory");
}
DEVICE void stream_words(void *p, const words<4> &w) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]) : "memory");
}
// Loads sixteen bytes of shared memory.
DEVICE words<4> load_near(const void *p) {
  words<4> w;
  asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3]) : "l"(p) : "memory");
  return w;
}
DEVICE void store_near(void *p, const words<4> &w) {
  asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]) : "memory");
}

// Conversions of 16-bit floats, rounding to nearest even, as one PTX instruction each. A shift widens bf16.
DEVICE float f16_to_f32(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
DEVICE u16 f32_to_f16(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEVICE u16 f32_to_bf16(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// Converts two at once, the first in the lower half: many times faster than two conversions.
DEVICE u32 f32_to_f16(float low, float high) {
  u32 w;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
DEVICE u32 f32_to_bf16(float low, float high) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}

DEVICE double square_root(double x) { return __nvvm_sqrt_rn_d(x); }

// multiplied is a*b exactly as written. From an ordinary product the compiler may derive a multiplication by 1, which
// changes the bits of a NaN.
DEVICE float multiplied(float a, float b) {
  float x;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

#endif

DEVICE float bf16_to_f32(u16 h) {
  u32 bits = (u32)h << 16;
  return __builtin_bit_cast(float, bits);
}

// Conversions of elements of every type to float32 and back.
DEVICE float widen(float x) { return x; }
DEVICE float widen(f16 x) { return f16_to_f32(x.bits); }
DEVICE float widen(bf16 x) { return bf16_to_f32(x.bits); }
DEVICE void narrow(float &to, float x) { to = x; }
DEVICE void narrow(f16 &to, float x) { to.bits = f32_to_f16(x); }
DEVICE void narrow(bf16 &to, float x) { to.bits = f32_to_bf16(x); }

// The global thread index and the number of threads of a one-dimensional grid.
DEVICE u64 thread_index() { return (u64)block() * threads() + thread(); }
DEVICE u64 thread_count() { return (u64)blocks() * threads(); }
DEVICE u32 lane() { return thread() % warp_size; }
DEVICE u32 warp() { return thread() / warp_size; }

DEVICE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
// The largest finite number of T, and whether a finite number exceeds it.
template <typename T> DEVICE constexpr float largest() {
  return __is_same(T, f16) ? 65504.0f : __is_same(T, float) ? 0x1.fffffep127f : 0x1.fep127f;
}
template <typename T> DEVICE bool too_large(float x) {
  if (__is_same(T, float)) return false;
  const u32 first = bits_of(largest<T>()) + 1;
  return (bits_of(x) & ~(1u << 31)) - first < 0x7f800000 - first;
}
// narrow_into narrows x, clamped to the largest finite number, and adds the rounding error to *rest unless rest is 0.
template <typename T> DEVICE void narrow_into(T &to, float x, float *rest) {
  if (too_large<T>(x) && rest) {
    const float most = x < 0 ? -largest<T>() : largest<T>();
    *rest += x - most;
    x = most;
  }
  narrow(to, x);
}
template <typename T> DEVICE T least(T a, T b) { return a < b ? a : b; }
template <typename T> DEVICE T most(T a, T b) { return a > b ? a : b; }

// The same for 8-byte words.
DEVICE u64 shuffle_xor(u64 v, u32 mask) {
  return (u64)shuffle_xor((u32)(v >> 32), mask) << 32 | shuffle_xor((u32)v, mask);
}
DEVICE double shuffle_xor(double v, u32 mask) {
  return __builtin_bit_cast(double, shuffle_xor(__builtin_bit_cast(u64, v), mask));
}
// The sum over a warp, added in the same order for every lane.
DEVICE double warp_sum(double v) {
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
  return v;
}
