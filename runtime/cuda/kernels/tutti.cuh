// What the kernels need of CUDA, spelled with clang's builtins: the PTX is
// compiled by clang from Debian main, without NVIDIA's headers or libraries.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2, "type sizes");

// The 16-bit floats by their bits, each a type of its own.
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
// What a pointer points to that comes out of memory: it is not shared memory, which the compiler cannot know.
#define GLOBAL __attribute__((address_space(1)))

// Threads of a block, at most, and blocks of a multiprocessor, at least.
#define BOUNDS(threads, blocks) __attribute__((launch_bounds(threads, blocks)))

DEVICE u32 thread() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE u32 threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
DEVICE u32 block() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE u32 blocks() { return __nvvm_read_ptx_sreg_nctaid_x(); }

// Waits until all threads of the block are here, and what they wrote shows.
// barrier_count also counts those for which the condition holds.
DEVICE void barrier() { __syncthreads(); }
DEVICE u32 barrier_count(bool condition) { return (u32)__nvvm_bar0_popc(condition); }

// start_behind is the start of a kernel that may be launched before the one ahead of it in the stream has ended
// (cuda.Geometry.Dependent). It waits until that one has, and its writes show; nothing that other kernels write, or
// read, is touched before. What comes further ahead has ended too: each kernel that starts early has to pass this wait
// in all its threads before it can end. start also lets the next kernel be launched already, which then waits here.
// That takes room on the GPU: a kernel that waits for other GPUs only does it for kernels that leave room.
// The instructions need compute capability 9.0. Where the GPU has it, the host takes what hides them away.
DEVICE void start_behind() { asm volatile("//sm_90 griddepcontrol.wait;" ::: "memory"); }
DEVICE void start() {
  start_behind();
  asm volatile("//sm_90 griddepcontrol.launch_dependents;" ::: "memory"); // not before, or kernels without end would wait on the GPU
}

// What the threads of a warp tell each other; all 32 take part. After warp_barrier
// they see what the others wrote.
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

// Memory that several blocks work on. What is loaded so comes from the cache
// that the blocks share. A fence makes what this thread knows of, its own
// writes and those that a barrier showed it, come before what follows it.
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

// One access of eight or sixteen bytes, which are aligned like that: of structs
// the compiler makes several.
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
// The same for what is not read soon, or once: it leaves the cache that blocks share before other things do.
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
// Of sixteen bytes in shared memory.
DEVICE words<4> load_near(const void *p) {
  words<4> w;
  asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3]) : "l"(p) : "memory");
  return w;
}
DEVICE void store_near(void *p, const words<4> &w) {
  asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]) : "memory");
}

// Conversions of the 16-bit floats, round to nearest even, as one PTX
// instruction each (bf16 widens by a shift).
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
// The same of two, the first in the lower half: many times as fast as two by themselves.
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

// multiplied is a*b where it is written and nowhere else. Of an ordinary one the compiler
// may make a product by 1 where none is wanted, which changes the bits of a NaN.
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

// Elements of every type as float32, and back.
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
// Whether a number is finite and beyond the largest of T.
template <typename T> DEVICE constexpr float largest() {
  return __is_same(T, f16) ? 65504.0f : __is_same(T, float) ? 0x1.fffffep127f : 0x1.fep127f;
}
template <typename T> DEVICE bool too_large(float x) {
  if (__is_same(T, float)) return false;
  const u32 first = bits_of(largest<T>()) + 1;
  return (bits_of(x) & ~(1u << 31)) - first < 0x7f800000 - first;
}
// narrow_into narrows x, or the largest number with its sign if x is too large, and
// adds the rest to *rest, unless rest is 0.
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

// The same for words of eight bytes.
DEVICE u64 shuffle_xor(u64 v, u32 mask) {
  return (u64)shuffle_xor((u32)(v >> 32), mask) << 32 | shuffle_xor((u32)v, mask);
}
DEVICE double shuffle_xor(double v, u32 mask) {
  return __builtin_bit_cast(double, shuffle_xor(__builtin_bit_cast(u64, v), mask));
}
// The sum over a warp, in the same order for every lane.
DEVICE double warp_sum(double v) {
#pragma unroll
  for (u32 mask = warp_size / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
  return v;
}
