/* Runs the kernels of kernels/p2p.cu on the host: the same text, compiled as C++.
 *
 * It reads names of images, a line each, and says of each when it is done. The
 * file is the memory of a world at a fixed address, as emulator_test.go writes
 * it: what each rank launches, and everything that kernels have pointers to. Each
 * rank is a thread. It runs its kernels one after the other, of a kernel the
 * blocks in ascending order, of a block the threads as coroutines. So no rank has
 * room for more than one block. */
#define EMULATOR "../testdata/emulator.h"
#define OF_A_RANK thread_local
#include "../kernels/p2p.cu"
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <fcntl.h>
#include <mutex>
#include <sys/stat.h>
#include <thread>

namespace {

struct launched {
  char name[16];
  u32 blocks, width;
  launch l;
};
struct image {
  u64 ranks, launches, seed;
  u64 abort_rank, abort_after; // so many stores of all ranks, 0: none
  launched first; // by rank
};
const u64 base = 1ull << 36;

// What a test has the host copy, between kernels.
void copy_bytes(launch l) {
  if (thread() == 0) memcpy(l.c.recv, l.c.send, l.c.bytes);
}

const struct { const char *name; void (*run)(launch); } kernels[] = {
#define K(name) {#name, name},
#define FLOATS(family) K(family##_f64) K(family##_f32) K(family##_f16) K(family##_bf16)
#define ALL(family) FLOATS(family) K(family##_e4m3) K(family##_e5m2) K(family##_i64) K(family##_i32) K(family##_i16) K(family##_i8)
  FLOATS(pair) FLOATS(add) FLOATS(twice) ALL(reduce) ALL(ring) K(move) K(move_ring) K(rounded_i8) K(rounded_e4m3) K(ragged_i8) K(ragged_e4m3)
  K(post_list) K(receive_lists) K(copy_bytes)
};

/* The boundary of a grid, as comm/p2p/model has it: what a rank did before its
 * kernel comes before what a peer does after its own, which has heard of that. */
void run(const image *im, u64 rank, u64 i) {
  const launched *all = &im->first, &e = all[rank * im->launches + i];
  static thread_local const launched *current;
  static thread_local void (*kernel)(launch);
  current = &e, kernel = nullptr;
  for (auto &k : kernels)
    if (strcmp(k.name, e.name) == 0) kernel = k.run;
  if (!kernel) failed(e.name);
  body = [](void *) { kernel(current->l); };
  thread_total = e.width, block_total = e.blocks;
  releases((void *)&e);
  for (block_now = 0; block_now < e.blocks; block_now++) run_block();
  const bool hears = kernel != post_list && kernel != copy_bytes;
  for (u64 p = 0; hears && p < im->ranks; p++) acquires((void *)(all + p * im->launches + i));
}

std::mutex lock;
std::condition_variable changed;
u64 worlds, ranks_now;        // so far, and of the last one
std::atomic<u64> running;     // of these ranks

// serve is a rank of one world after the other: its coroutines are made once, which takes ThreadSanitizer long.
void serve(u64 rank) {
  for (u64 seen = 0;;) {
    {
      std::unique_lock<std::mutex> held(lock);
      changed.wait(held, [&] { return worlds > seen; });
      seen = worlds;
      if (rank >= ranks_now) continue;
    }
    const image *im = (const image *)base;
    random_state = (im->seed * max_ranks + rank + 1) * 0x9e3779b97f4a7c15;
    for (u64 i = 0; i < im->launches; i++) run(im, rank, i);
    std::lock_guard<std::mutex> held(lock);
    if (--running == 0) changed.notify_all();
  }
}

} // namespace

int main() {
  char path[4096];
  for (u64 threads = 0; fgets(path, sizeof path, stdin);) {
    path[strcspn(path, "\n")] = 0;
    const int file = open(path, O_RDWR);
    struct stat st;
    if (file < 0 || fstat(file, &st) < 0) return perror(path), 1;
    if (mmap((void *)base, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0) != (void *)base)
      return perror("mmap"), 1;
    close(file);
    image *im = (image *)base;
    __atomic_store_n(&stores, 0, __ATOMIC_RELAXED);
    for (; threads < im->ranks; threads++) std::thread(serve, threads).detach();
    {
      std::lock_guard<std::mutex> held(lock);
      running = ranks_now = im->ranks, worlds++;
    }
    changed.notify_all();
    while (im->abort_after && running && __atomic_load_n(&stores, __ATOMIC_RELAXED) < im->abort_after) usleep(50);
    if (im->abort_after) __atomic_store_n(&(&im->first)[im->abort_rank * im->launches].l.w.host->abort, 1, __ATOMIC_RELAXED);
    {
      std::unique_lock<std::mutex> held(lock);
      changed.wait(held, [] { return running == 0; });
    }
    munmap((void *)base, (size_t)st.st_size);
    puts("done"), fflush(stdout);
  }
  _exit(0);
}
