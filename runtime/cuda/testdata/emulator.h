/* tutti.cuh's other half for the emulator: a block's threads as coroutines, and
 * what they say to each other. */
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((noinline, no_sanitize_thread)) // of what coroutines share as one thread
#else
#define UNSEEN
#endif
#ifndef OF_A_RANK
#define OF_A_RANK // thread_local where each rank is a thread that runs kernels
#endif

#define KERNEL extern "C" void
#define METHOD
#define DEVICE static inline
#define SHARED OF_A_RANK
#define CONSTANT static constexpr
#define GLOBAL
#define BOUNDS(threads, blocks)

namespace {

// Stacks start in different sets of a cache.
enum { max_threads = 1024, stack_bytes = (128 << 10) + 4096 + 5 * 64 };
enum progress { ready, in_warp, in_block, done };

// A switch saves the stack and the place, and the compiler the registers that it uses. To
// ThreadSanitizer each coroutine is a thread, whose accesses only releases and acquires order.
#ifdef __SANITIZE_THREAD__
struct context {
  ucontext_t at;
  void *fiber;
};
void releases(void *what) { __tsan_release(what); }
void acquires(void *what) { __tsan_acquire(what); }
UNSEEN void change(context &from, context &to) {
  from.fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.fiber, __tsan_switch_to_fiber_no_sync);
  swapcontext(&from.at, &to.at);
}
#else
void releases(void *) {}
void acquires(void *) {}
#ifdef __x86_64__
typedef void *context[5];
#define SAVE(p) __builtin_setjmp(p)
#define GO(p) __builtin_longjmp(p, 1)
#else
typedef jmp_buf context;
#define SAVE(p) _setjmp(p)
#define GO(p) _longjmp(p, 1)
#endif
#endif

struct coroutine {
  context at;
  progress is;
  u64 said;
};

OF_A_RANK coroutine coroutines[max_threads];
OF_A_RANK context scheduler;
OF_A_RANK char *stacks;
OF_A_RANK u32 now, thread_total, block_now, block_total;
OF_A_RANK u64 heard[max_threads]; // what the lanes of each warp said last
OF_A_RANK u32 bits_heard[max_threads / 32], sum_heard[max_threads / 32];
OF_A_RANK u32 conditions;         // for which barrier_count holds

OF_A_RANK void (*body)(void *);
OF_A_RANK void *body_argument;

void failed(const char *what) {
  fprintf(stderr, "emulator: block %u: %s\n", block_now, what);
  abort();
}

#ifdef __SANITIZE_THREAD__
UNSEEN void wait_as(progress p) {
  coroutines[now].is = p;
  change(coroutines[now].at, scheduler);
}
#else
// The next thread of the warp goes on at once if it can: a switch less than by way of the scheduler.
__attribute__((noinline)) void yield() {
  const u32 next = now + 1;
  if (next % 32 && next < thread_total && coroutines[next].is == ready) {
    now = next;
    GO(coroutines[next].at);
  }
  GO(scheduler);
}

__attribute__((noinline)) void wait_as(progress p) {
  coroutines[now].is = p;
  if (SAVE(coroutines[now].at) == 0) yield();
}
#endif

// entry runs one block after the other: a coroutine is made once, as that takes system calls.
UNSEEN void entry() {
  for (;;) {
    acquires(&body);
    body(body_argument);
    releases(&body);
    wait_as(done);
  }
}

// start readies a coroutine for a block. A new one enters entry when it is first resumed.
UNSEEN void start(u32 t) {
  static OF_A_RANK u32 made_so_far;
  coroutines[t].is = ready;
  if (t < made_so_far) return;
  made_so_far = t + 1;
  static OF_A_RANK ucontext_t back, made;
  getcontext(&made);
  made.uc_stack.ss_sp = stacks + (size_t)t * stack_bytes;
  made.uc_stack.ss_size = stack_bytes;
  made.uc_link = nullptr;
#ifdef __SANITIZE_THREAD__
  coroutines[t].at = {made, __tsan_create_fiber(0)};
  makecontext(&coroutines[t].at.at, entry, 0);
#else
  makecontext(&made, [] {
    if (SAVE(coroutines[now].at) == 0) swapcontext(&made, &back);
    entry();
  }, 0);
  now = t;
  swapcontext(&back, &made);
#endif
}

#ifdef __SANITIZE_THREAD__
UNSEEN void resume(u32 t) {
  now = t;
  change(scheduler, coroutines[t].at);
}
#else
__attribute__((noinline)) void enter(u32 t) { GO(coroutines[t].at); }

__attribute__((noinline)) void resume(u32 t) {
  now = t;
  if (SAVE(scheduler) == 0) enter(t);
}
#endif

UNSEEN void run_block() {
  if (!stacks)
    stacks = (char *)mmap(nullptr, (size_t)max_threads * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  releases(&body);
  for (u32 t = 0; t < thread_total; t++) start(t);
  for (;;) {
    bool moved = false;
    u32 waiting = 0, ended = 0;
    for (u32 w = 0; w < thread_total; w += 32) {
      u32 told = 0, paused = 0, size = thread_total - w < 32 ? thread_total - w : 32;
      for (u32 t = w; t < w + size; t++)
        if (coroutines[t].is == ready) resume(t), moved = true, t = now;
      for (u32 t = w; t < w + size; t++) {
        told += coroutines[t].is == in_warp, paused += coroutines[t].is == ready, waiting += coroutines[t].is == in_block, ended += coroutines[t].is == done;
      }
      if (!told || paused) continue;
      if (told != 32) failed("not all threads of a warp take part");
      u32 bits = 0, sum = 0;
      for (u32 t = w; t < w + 32; t++) {
        const u64 said = coroutines[t].said;
        heard[t] = said, coroutines[t].is = ready, sum += (u32)said, bits |= (u32)(said & 1) << (t - w);
      }
      bits_heard[w / 32] = bits, sum_heard[w / 32] = sum;
      moved = true;
    }
    if (ended == thread_total) return acquires(&body);
    if (waiting == thread_total) {
      conditions = 0;
      for (u32 t = 0; t < thread_total; t++) conditions += (u32)coroutines[t].said, coroutines[t].is = ready;
      moved = true;
    }
    if (!moved) failed("not all threads come to a barrier");
  }
}

} // namespace

DEVICE void start_behind() {} // one kernel runs after the other
DEVICE void start() {}

UNSEEN DEVICE u32 thread() { return now; }
UNSEEN DEVICE u32 threads() { return thread_total; }
UNSEEN DEVICE u32 block() { return block_now; }
UNSEEN DEVICE u32 blocks() { return block_total; }

UNSEEN DEVICE u32 barrier_count(bool condition) {
  coroutines[now].said = condition;
  releases(&conditions);
  wait_as(in_block);
  acquires(&conditions);
  return conditions;
}
DEVICE void barrier() { barrier_count(false); }

// tell returns what all lanes of the warp said.
UNSEEN DEVICE const u64 *tell(u64 v) {
  coroutines[now].said = v;
  wait_as(in_warp);
  return heard + now / 32 * 32;
}
UNSEEN DEVICE void warp_barrier() {
  void *warp = heard + now / 32 * 32;
  releases(warp);
  tell(0);
  acquires(warp);
}
UNSEEN DEVICE u32 ballot(bool condition) {
  tell(condition);
  return bits_heard[now / 32];
}
UNSEEN DEVICE u32 shuffle(u32 v, u32 from) { return (u32)tell(v)[from & 31]; }
UNSEEN DEVICE u32 shuffle_up(u32 v, u32 by) { return now % 32 < by ? (u32)tell(v)[now % 32] : (u32)tell(v)[now % 32 - by]; }
UNSEEN DEVICE u32 shuffle_xor(u32 v, u32 mask) { return (u32)tell(v)[(now % 32) ^ mask]; }
UNSEEN DEVICE u32 warp_sum(u32 v) {
  tell(v);
  return sum_heard[now / 32];
}

DEVICE u32 ones(u32 v) { return (u32)__builtin_popcount(v); }
DEVICE u32 leading_zeros(u32 v) { return v ? (u32)__builtin_clz(v) : 32; }
DEVICE u32 trailing_zeros(u32 v) { return v ? (u32)__builtin_ctz(v) : 32; }

DEVICE u32 add_to(u32 *p, u32 v) { const u32 before = *p; *p += v; return before; }
DEVICE void set_bits(u32 *p, u32 bits) { *p |= bits; }
DEVICE void flip_bits(u32 *p, u32 bits) { *p ^= bits; }
DEVICE u32 load(const u32 *p) { return *p; }
DEVICE u64 load(const u64 *p) { return *p; }
DEVICE void store(u32 *p, u32 v) { *p = v; }
DEVICE void store(u64 *p, u64 v) { *p = v; }
DEVICE void fence() {}
DEVICE void store_system(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }

template <u32 n> DEVICE words<n> load_words(const void *p) {
  if ((u64)p % sizeof(words<n>)) failed("a load is not aligned");
  words<n> w;
  memcpy(&w, p, sizeof w);
  return w;
}
template <u32 n> DEVICE void store_words(void *p, const words<n> &w) {
  if ((u64)p % sizeof w) failed("a store is not aligned");
  memcpy(p, &w, sizeof w);
}
template <u32 n> DEVICE words<n> stream_words(const void *p) { return load_words<n>(p); }
template <u32 n> DEVICE void stream_words(void *p, const words<n> &w) { store_words(p, w); }

DEVICE words<4> load_near(const void *p) { return load_words<4>(p); }
DEVICE void store_near(void *p, const words<4> &w) { store_words(p, w); }

DEVICE float f16_to_f32(u16 h) { return (float)__builtin_bit_cast(_Float16, h); }
DEVICE u16 f32_to_f16(float f) { return __builtin_bit_cast(u16, (_Float16)f); }
DEVICE u16 f32_to_bf16(float f) {
  const u32 w = __builtin_bit_cast(u32, f);
  return f != f ? (u16)0x7fff : (u16)((w + 0x7fff + (w >> 16 & 1)) >> 16);
}
DEVICE u32 f32_to_f16(float low, float high) { return f32_to_f16(low) | (u32)f32_to_f16(high) << 16; }
DEVICE u32 f32_to_bf16(float low, float high) { return f32_to_bf16(low) | (u32)f32_to_bf16(high) << 16; }
DEVICE double square_root(double x) { return __builtin_sqrt(x); }
DEVICE float multiplied(float a, float b) { return a * b; }
