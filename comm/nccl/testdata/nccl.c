/* A stand-in for libnccl on the memory of the host, for tests on machines without a GPU, together
 * with the stand-in for the driver. Each rank is alone: in a world of several, its collectives are
 * those of a world of one, and its messages go to itself.
 *
 * It has the functions that comm/nccl calls, with the documented signatures and
 * answers; all work is done at the call. What a test needs to know is exported as
 * fake_*: communicators alive, calls on one that was freed, groups that were left
 * open, threads that ended. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WHATEVER = 1, SPLITS = 2 }; /* of fake_in_progress */
enum { SUCCESS = 0, CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7, VERSION = 22803 };

struct comm { int ranks, rank; int alive, aborted, finalized, calls, served; pthread_t service; struct comm **child; /* of a split in progress */ };
struct id { char bytes[128]; };
struct message { const void *from; void *to; size_t bytes; };

static int alive, violations, in_progress, reductions, aborted, abrupt;
static __thread int depth; /* of groups of this thread */
static int open_groups;    /* of all threads that live */
enum { MAX_MESSAGES = 4096 }; /* of a group */
static __thread struct message sends[MAX_MESSAGES], receives[MAX_MESSAGES];
static __thread int sent, received;
static __thread struct comm *aborting[8]; /* in this thread's group, which frees them at its end */
static __thread int aborts;

int fake_alive(void) { return __atomic_load_n(&alive, __ATOMIC_SEQ_CST); }
int fake_reductions(void) { return __atomic_load_n(&reductions, __ATOMIC_SEQ_CST); } /* allreduces that were launched */
int fake_aborted(void) { return __atomic_load_n(&aborted, __ATOMIC_SEQ_CST); } /* communicators told to end */
int fake_abrupt(void) { return __atomic_load_n(&abrupt, __ATOMIC_SEQ_CST); } /* freed without having been finalized */
int fake_open_groups(void) { return __atomic_load_n(&open_groups, __ATOMIC_SEQ_CST); }
int fake_violations(void) { return __atomic_load_n(&violations, __ATOMIC_SEQ_CST); }

/* A launch that waits for a peer: it goes on when the communicator is aborted, and returns,
 * on which it still uses it, when a test lets it. */
static int stuck, holding;
void fake_hold_launch(int on) { __atomic_store_n(&holding, on, __ATOMIC_SEQ_CST); }
int fake_stuck(void) { return __atomic_load_n(&stuck, __ATOMIC_SEQ_CST); }

static int hold, ending;
void fake_hold_abort(int on) { __atomic_store_n(&hold, on, __ATOMIC_SEQ_CST); } /* as if kernels ran that it waits for */
int fake_ending(void) { return __atomic_load_n(&ending, __ATOMIC_SEQ_CST); }
void fake_in_progress(int kind) { __atomic_store_n(&in_progress, kind, __ATOMIC_SEQ_CST); } /* what waits for peers */
static int pending;
int fake_pending(void) { return __atomic_load_n(&pending, __ATOMIC_SEQ_CST); } /* splits that wait for peers */

/* The call with this number that is neither asked for a state nor frees anything fails, with
 * an error of CUDA's. Returns what is left of the number before: 0 if that call came. */
static int failing;
int fake_fail(int n) { return __atomic_exchange_n(&failing, n, __ATOMIC_SEQ_CST); }
static int fails(void) {
  for (int left = __atomic_load_n(&failing, __ATOMIC_SEQ_CST); left > 0;)
    if (__atomic_compare_exchange_n(&failing, &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return left == 1;
  return 0;
}

/* So many of the next ncclCommDestroy and ncclCommAbort fail before they have begun, and leave
 * the group that they opened on their thread, as NCCL's do. */
static int failing_ends, threads_ended;
static pthread_key_t ends;
static pthread_once_t ends_once = PTHREAD_ONCE_INIT;
static void thread_ends(void *unused) { __atomic_add_fetch(&threads_ended, 1, __ATOMIC_SEQ_CST); }
static void make_ends(void) { pthread_key_create(&ends, thread_ends); }
void fake_fail_end(int n) { __atomic_store_n(&failing_ends, n, __ATOMIC_SEQ_CST); }
int fake_threads_ended(void) { return __atomic_load_n(&threads_ended, __ATOMIC_SEQ_CST); } /* of those on which one failed */

static void open_group(void) { depth++, __atomic_add_fetch(&open_groups, 1, __ATOMIC_SEQ_CST); }
static int fails_to_end(void) {
  int left = __atomic_load_n(&failing_ends, __ATOMIC_SEQ_CST);
  if (left <= 0) return 0;
  __atomic_store_n(&failing_ends, left - 1, __ATOMIC_SEQ_CST);
  pthread_once(&ends_once, make_ends);
  pthread_setspecific(ends, &depth);
  return open_group(), 1;
}

static int check(const struct comm *c) {
  if (c && c->alive) return SUCCESS;
  __atomic_add_fetch(&violations, 1, __ATOMIC_SEQ_CST);
  return INVALID_ARGUMENT;
}

/* A call that frees memory ends a framework's capture, unless its thread is in the relaxed mode. */
static void disturb(void) {
  int (*exchange)(int *) = (int (*)(int *))dlsym(RTLD_DEFAULT, "cuThreadExchangeStreamCaptureMode");
  const int relaxed = 2;
  int mode = relaxed;
  if (!exchange || exchange(&mode)) return;
  __atomic_add_fetch(&violations, mode != relaxed, __ATOMIC_SEQ_CST);
  exchange(&mode);
}

/* A communicator has a service thread, which ends when it was finalized, or freed, and a test lets it. */
static int hold_services, early;
void fake_hold_services(int on) { __atomic_store_n(&hold_services, on, __ATOMIC_SEQ_CST); }
int fake_early(void) { return __atomic_load_n(&early, __ATOMIC_SEQ_CST); } /* freed before its thread had ended */
static void *serve(void *of) {
  struct comm *c = of;
  while (!__atomic_load_n(&c->finalized, __ATOMIC_SEQ_CST) || __atomic_load_n(&hold_services, __ATOMIC_SEQ_CST)) {
    if (!__atomic_load_n(&c->alive, __ATOMIC_SEQ_CST)) break;
    usleep(200);
  }
  return __atomic_store_n(&c->served, 1, __ATOMIC_SEQ_CST), NULL;
}

static int make(struct comm **out, int ranks, int rank) {
  __atomic_add_fetch(&alive, 1, __ATOMIC_SEQ_CST);
  struct comm *c = malloc(sizeof *c);
  *c = (struct comm){.ranks = ranks, .rank = rank, .alive = 1};
  pthread_create(&c->service, NULL, serve, c);
  const char *named = getenv("NCCL_SET_THREAD_NAME");
  if (named && !strcmp(named, "1")) pthread_setname_np(c->service, "NCCL Service  0");
  return __atomic_store_n(out, c, __ATOMIC_SEQ_CST), SUCCESS;
}

static int end(struct comm *c) { /* its memory stays, to notice who calls it */
  if (check(c)) return INVALID_ARGUMENT;
  disturb();
  __atomic_add_fetch(&violations, __atomic_load_n(&c->calls, __ATOMIC_SEQ_CST), __ATOMIC_SEQ_CST); /* they still use it */
  __atomic_add_fetch(&abrupt, !c->finalized, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&early, c->finalized && !__atomic_load_n(&c->served, __ATOMIC_SEQ_CST), __ATOMIC_SEQ_CST);
  __atomic_store_n(&c->alive, 0, __ATOMIC_SEQ_CST);
  pthread_join(c->service, NULL);
  __atomic_sub_fetch(&alive, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

int ncclGetVersion(int *v) { return *v = VERSION, SUCCESS; }
int ncclGetUniqueId(struct id *id) {
  static int made;
  if (fails()) return CUDA_ERROR;
  memset(id, 7, sizeof *id);
  const int number = __atomic_add_fetch(&made, 1, __ATOMIC_SEQ_CST);
  return memcpy(id, &number, sizeof number), SUCCESS;
}
const char *ncclGetErrorString(int status) { return status ? "a failure" : "no error"; }
const char *ncclGetLastError(struct comm *c) { return ""; }

int ncclCommInitRankConfig(struct comm **out, int ranks, struct id id, int rank, void *config) {
  if (fails()) return CUDA_ERROR;
  return rank >= 0 && rank < ranks && id.bytes[127] == 7 && config ? make(out, ranks, rank) : INVALID_ARGUMENT;
}
int ncclCommSplit(struct comm *c, int color, int key, struct comm **out, void *config) {
  if (check(c)) return INVALID_ARGUMENT;
  if (fails()) return CUDA_ERROR;
  *out = NULL;
  if (color < 0) return SUCCESS;
  if (!__atomic_load_n(&in_progress, __ATOMIC_SEQ_CST)) return make(out, c->ranks, c->rank);
  __atomic_add_fetch(&pending, 1, __ATOMIC_SEQ_CST);
  return __atomic_store_n(&c->child, out, __ATOMIC_SEQ_CST), IN_PROGRESS;
}
static void finish_split(struct comm *c) {
  struct comm **out = __atomic_exchange_n(&c->child, NULL, __ATOMIC_SEQ_CST);
  if (!out) return;
  make(out, c->ranks, c->rank);
  __atomic_sub_fetch(&pending, 1, __ATOMIC_SEQ_CST);
}
int ncclCommFinalize(struct comm *c) {
  if (check(c) || c->finalized || depth) return INVALID_ARGUMENT; /* a group would put it off */
  return __atomic_store_n(&c->finalized, 1, __ATOMIC_SEQ_CST), SUCCESS;
}
int ncclCommDestroy(struct comm *c) { return fails_to_end() ? CUDA_ERROR : end(c); }
static int reclaim(struct comm *c) {
  __atomic_add_fetch(&ending, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&hold, __ATOMIC_SEQ_CST)) sched_yield();
  __atomic_sub_fetch(&ending, 1, __ATOMIC_SEQ_CST);
  return end(c);
}
int ncclCommAbort(struct comm *c) {
  if (check(c)) return INVALID_ARGUMENT;
  if (fails_to_end()) return CUDA_ERROR;
  __atomic_add_fetch(&aborted, 1, __ATOMIC_SEQ_CST);
  __atomic_store_n(&c->aborted, 1, __ATOMIC_SEQ_CST);
  finish_split(c); /* which fails, but makes what is to be freed */
  if (!depth) return reclaim(c);
  return aborts == 8 ? INVALID_USAGE : (aborting[aborts++] = c, SUCCESS);
}
int ncclCommGetAsyncError(struct comm *c, int *status) {
  if (check(c)) return INVALID_ARGUMENT;
  const int kind = __atomic_load_n(&in_progress, __ATOMIC_SEQ_CST);
  if (kind == WHATEVER || (kind == SPLITS && __atomic_load_n(&c->child, __ATOMIC_SEQ_CST))) return *status = IN_PROGRESS, SUCCESS;
  return finish_split(c), *status = SUCCESS, SUCCESS;
}
int ncclCommCount(struct comm *c, int *count) { return *count = c->ranks, check(c); }
int ncclCommUserRank(struct comm *c, int *rank) { return *rank = c->rank, check(c); }

/* Windows are nothing here. A second thread that ends one while another does is a violation, as
 * both unmap the memory of the same GPUs; the first one waits a moment for it. */
static int ending_windows, ended_windows;
int fake_ended_windows(void) { return __atomic_load_n(&ended_windows, __ATOMIC_SEQ_CST); }
int ncclCommWindowRegister(struct comm *c, void *buf, size_t bytes, void **window, int flags) {
  if (check(c)) return INVALID_ARGUMENT;
  if (fails()) return CUDA_ERROR;
  return *window = buf, SUCCESS;
}
int ncclCommWindowDeregister(struct comm *c, void *window) {
  if (check(c)) return INVALID_ARGUMENT;
  disturb();
  __atomic_add_fetch(&violations, __atomic_fetch_add(&ending_windows, 1, __ATOMIC_SEQ_CST), __ATOMIC_SEQ_CST);
  for (int i = 0; i < 100 && __atomic_load_n(&ending_windows, __ATOMIC_SEQ_CST) == 1; i++) usleep(100);
  __atomic_sub_fetch(&ending_windows, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&ended_windows, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

static size_t size(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? sizes[type] : 0;
}

static int copy(struct comm *c, const void *send, void *recv, size_t count, int type, int root) {
  if (check(c) || !size(type) || root != 0) return INVALID_ARGUMENT;
  if (fails()) return CUDA_ERROR;
  memmove(recv, send, count * size(type));
  return SUCCESS;
}

int ncclAllReduce(const void *s, void *r, size_t n, int type, int op, struct comm *c, void *stream) {
  __atomic_fetch_add(&reductions, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&holding, __ATOMIC_SEQ_CST)) {
    __atomic_add_fetch(&c->calls, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&stuck, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&c->aborted, __ATOMIC_SEQ_CST) || __atomic_load_n(&holding, __ATOMIC_SEQ_CST)) sched_yield();
    __atomic_sub_fetch(&stuck, 1, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&c->calls, 1, __ATOMIC_SEQ_CST);
    return CUDA_ERROR;
  }
  return op < 4 ? copy(c, s, r, n, type, 0) : INVALID_ARGUMENT; /* no average of one rank is asked for */
}
int ncclReduce(const void *s, void *r, size_t n, int type, int op, int root, struct comm *c, void *stream) {
  return op < 4 ? copy(c, s, r, n, type, root) : INVALID_ARGUMENT;
}
int ncclReduceScatter(const void *s, void *r, size_t n, int type, int op, struct comm *c, void *stream) {
  return op < 4 ? copy(c, s, r, n, type, 0) : INVALID_ARGUMENT;
}
int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, struct comm *c, void *stream) {
  return copy(c, s, r, n, type, root);
}
int ncclAllGather(const void *s, void *r, size_t n, int type, struct comm *c, void *stream) { return copy(c, s, r, n, type, 0); }
int ncclAlltoAll(const void *s, void *r, size_t n, int type, struct comm *c, void *stream) { return copy(c, s, r, n, type, 0); }
int ncclGather(const void *s, void *r, size_t n, int type, int root, struct comm *c, void *stream) {
  return copy(c, s, r, n, type, root);
}
int ncclScatter(const void *s, void *r, size_t n, int type, int root, struct comm *c, void *stream) {
  return copy(c, s, r, n, type, root);
}

/* Messages are matched by order alone, at the end of the outermost group. */
int ncclGroupStart(void) { return open_group(), SUCCESS; }

int ncclGroupEnd(void) {
  if (depth == 0) return INVALID_USAGE;
  __atomic_sub_fetch(&open_groups, 1, __ATOMIC_SEQ_CST);
  if (--depth > 0) return SUCCESS;
  if (aborts) {
    int status = SUCCESS;
    while (aborts) status |= reclaim(aborting[--aborts]);
    return status;
  }
  int status = sent != received ? INVALID_USAGE : fails() ? CUDA_ERROR : SUCCESS;
  for (int i = 0; i < sent && !status; i++) {
    if (sends[i].bytes != receives[i].bytes) status = INVALID_USAGE;
    else memmove(receives[i].to, sends[i].from, sends[i].bytes);
  }
  sent = received = 0;
  return status;
}

static int add(struct message *list, int *length, const void *from, void *to, size_t n, int type, int peer, struct comm *c) {
  if (check(c) || peer < 0 || peer >= c->ranks || !depth || *length == MAX_MESSAGES) return INVALID_ARGUMENT;
  if (fails()) return CUDA_ERROR;
  list[(*length)++] = (struct message){from, to, n * size(type)};
  return SUCCESS;
}
int ncclSend(const void *buf, size_t n, int type, int peer, struct comm *c, void *stream) {
  return add(sends, &sent, buf, NULL, n, type, peer, c);
}
int ncclRecv(void *buf, size_t n, int type, int peer, struct comm *c, void *stream) {
  return add(receives, &received, NULL, buf, n, type, peer, c);
}
