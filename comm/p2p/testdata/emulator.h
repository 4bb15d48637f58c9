/* p2p.cu's other half for the emulator: memory that other ranks, and the host, see
 * or make. Every store comes after a pause now and then, as the seed has it, and
 * the words of a vector arrive one by one, in any order. */
#include <sched.h>
#include <time.h>
#include <unistd.h>

namespace {

OF_A_RANK u64 random_state;
u64 stores; // of all ranks

UNSEEN u32 draw(u32 n) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return (u32)(random_state >> 33) % n;
}

// Lets the other threads of the block go on, and now and then other ranks.
void give_way() {
  if (draw(16) == 0) sched_yield();
  wait_as(ready);
}

void shake() {
  __atomic_fetch_add(&stores, 1, __ATOMIC_RELAXED);
  const u32 n = draw(2048);
  if (n == 0) usleep(1 + draw(200));
  else if (n < 16) sched_yield();
  else if (n < 128) give_way();
}

template <typename T> void put_word(T *p, T v) {
  if ((u64)p % sizeof v) failed("a store is not aligned");
  shake();
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
template <typename T> T get_word(const T *p) {
  if ((u64)p % sizeof(T)) failed("a load is not aligned");
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}

} // namespace

DEVICE void store(void *p, const pack &v) {
  if ((u64)p % sizeof v) failed("a store is not aligned");
  const u32 first = draw(4), turn = draw(2) ? 1 : 3;
  for (u32 i = 0, w = first; i < 4; i++, w = (w + turn) % 4) put_word((u32 *)p + w, v.word[w]);
}
DEVICE pack load(const void *p) {
  pack v;
  const u32 first = draw(4);
  for (u32 i = 0; i < 4; i++) v.word[(first + i) % 4] = get_word((const u32 *)p + (first + i) % 4);
  return v;
}
DEVICE void store(void *p, u64 a, u64 b) {
  if ((u64)p % 16) failed("a store is not aligned");
  const bool back = draw(2);
  put_word((u64 *)p + back, back ? b : a);
  put_word((u64 *)p + !back, back ? a : b);
}
DEVICE pair load_pair(const void *p) {
  const u64 *w = (const u64 *)p;
  pair v;
  const bool back = draw(2);
  v.word[back] = get_word(w + back);
  v.word[!back] = get_word(w + !back);
  return v;
}
DEVICE void store64(u64 *p, u64 v) { put_word(p, v); }
DEVICE u64 load64(const u64 *p) { return get_word(p); }
DEVICE void store32(u32 *p, u32 v) { put_word(p, v); }
DEVICE u32 load32(const u32 *p) { return get_word(p); }
DEVICE void release64(u64 *p, u64 v) {
  shake();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
DEVICE u64 acquire64(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE u32 set_once(u32 *p) {
  u32 before = 0;
  __atomic_compare_exchange_n(p, &before, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return before;
}
DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
DEVICE u64 nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
}
DEVICE u32 active_lanes() { return 1u << thread() % 32; }
DEVICE bool all_lanes(bool condition) { return ballot(condition) == ~0u; }

// A wait that goes on lets others run. A look at what may end it comes earlier.
DEVICE bool due(u32 tries) {
  give_way();
  return tries % 64 == 0;
}
DEVICE bool asks_host(u32 tries) { return tries % 256 == 0; }
