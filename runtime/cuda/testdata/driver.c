/* A stand-in for libcuda on host memory, for tests on machines without a GPU.
 *
 * It has the functions of the driver API that runtime/cuda calls, with the
 * documented signatures and answers. Work is done at the call, or while work is
 * held (fake_hold) when that ends, by plain loops in place of the kernels. What a test needs to know or provoke is exported as
 * fake_*: what is alive, calls that a driver would refuse or crash on (no
 * context, one of another GPU, a stream of another context), work that does not
 * end, faults.
 *
 * Environment: FAKE_CUDA_DEVICES (1), FAKE_CUDA_MEMORY (bytes per device,
 * 1 GiB), FAKE_CUDA_VERSION (12040), FAKE_CUDA_PEERS (1; 0: no GPU reaches the memory of
 * another one, and all memory that was imported is another's). Compiled with -DTOO_OLD it lacks functions
 * that came with CUDA 11. */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;

enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
  ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
};

enum { MAX_DEVICES = 8, MAX_STREAMS = 4096, MAX_DIMS = 8 };
static const size_t PAGE = 2u << 20;

struct context {
  int device, references; /* 0: destroyed */
  struct stream *legacy;
};

struct layout { /* of the strided copy kernels */
  uint64_t shape[MAX_DIMS];
  int64_t dst[MAX_DIMS], src[MAX_DIMS];
  uint64_t count;
  uint32_t dims;
};

struct operation {
  enum { COPY, SET, KERNEL } kind;
  uint64_t a, b, c; /* destination, source or count, value */
  int width;        /* of an element of SET */
  const struct kernel *kernel;
  unsigned grid, block;
  void **parameters; /* pointers, and behind them what they point to */
  struct operation *next;
};

struct graph { struct operation *first; };

struct stream {
  struct context *context;
  int id, alive, full;
  uint64_t submitted;            /* operations so far */
  uint64_t waited[MAX_STREAMS];  /* how many of each other stream's it waited for */
  struct graph *capture;
  uint64_t known[MAX_STREAMS];   /* the same, with what those had waited for; see fake_exclusive */
  uint64_t exclusive;            /* position of the last operation that must overlap with no other */
  uint64_t stalled;              /* 1 + how many operations still end; 0: all */
  pthread_t owner; /* of the capture */
  int mode;        /* of the capture */
  int invalid;     /* capture */
};

struct event {
  struct context *context;
  int alive, timing;
  struct stream *stream; /* of the last record */
  uint64_t position;
  uint64_t known[MAX_STREAMS]; /* by the stream at the record */
};

struct mapping { /* address range, memory, or both */
  uint64_t address;
  size_t bytes;
  int device, reserved, pinned;
  struct memory *memory;
  struct mapping *next;
};

struct memory { size_t bytes; int device, mapped, fd; }; /* fd: -1 for none */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static __thread struct context *current;

static int devices, held, streams_made;
static size_t limit, used[MAX_DEVICES];
static struct context primary[MAX_DEVICES];
static struct mapping *mappings;
static struct stream *all_streams[MAX_STREAMS];

/* What a test asks for. */
enum { CONTEXTS, STREAMS, EVENTS, GRAPHS, MODULES, MAPPINGS, PINNED, REGISTERED, KINDS };
static int alive[KINDS], violations, fault, fault_frees;
static char failing[64];
static int failing_status, failing_times;

int fake_alive(int kind) { return alive[kind]; }
int fake_violations(void) { return violations; }

/* From now on all calls in a context fail, those that free things only if asked. */
void fake_break(int status, int frees) { fault = status, fault_frees = frees; }

/* So many of the next calls of one function fail; below 0, the one with that number does.
 * "" is any function that neither frees nor queries, of which those behind that one fail as
 * well. Returns what is left of what was asked for before: below 0, that never came. */
int fake_fail(const char *call, int status, int times) {
  pthread_mutex_lock(&lock);
  int left = failing_times;
  snprintf(failing, sizeof failing, "%s", call);
  failing_status = status, failing_times = times;
  pthread_mutex_unlock(&lock);
  return left;
}

/* While held, no work ends, nor does what is submitted begin; with 2, launches do not
 * return, as into a stream that is full. */
static struct operation *waiting, **last_waiting = &waiting;
static void execute(struct operation *o);
void fake_hold(int on) {
  pthread_mutex_lock(&lock);
  held = on;
  while (!held && waiting) {
    struct operation *o = waiting;
    waiting = o->next;
    execute(o);
    free(o->parameters), free(o);
  }
  if (!waiting) last_waiting = &waiting;
  pthread_cond_broadcast(&released);
  pthread_mutex_unlock(&lock);
}

/* What a stream gets from now on does not end. */
void fake_stall(struct stream *s, int on) { s->stalled = on ? s->submitted + 1 : 0; }

/* A context that is nobody's primary one. */
struct context *fake_context(int device) {
  struct context *c = calloc(1, sizeof *c);
  c->device = device, c->references = 1;
  return c;
}

/* From now on, with 1, launches of kernels and graphs are not to overlap, whatever their streams. Returns
 * how many did: that is decided by what their streams had waited for. */
static int exclusive, overlaps;
int fake_exclusive(int on) {
  pthread_mutex_lock(&lock);
  int before = overlaps;
  exclusive = on, overlaps = 0;
  for (int i = 0; i < streams_made; i++) all_streams[i]->exclusive = 0;
  pthread_mutex_unlock(&lock);
  return before;
}
/* The next operation of a stream is to overlap with no other. */
static void exclude(struct stream *s) {
  if (!exclusive) return;
  for (int i = 0; i < streams_made; i++)
    if (all_streams[i] != s) overlaps += all_streams[i]->exclusive > s->known[i];
  s->exclusive = s->submitted + 1;
}

/* A stream that is full: records of events wait until it is not. Returns how many calls wait. */
static int waiting_for_room;
int fake_full(struct stream *s, int on) {
  pthread_mutex_lock(&lock);
  s->full = on;
  int calls = waiting_for_room;
  pthread_cond_broadcast(&released);
  pthread_mutex_unlock(&lock);
  return calls;
}

uint64_t fake_submitted(struct stream *s) { return s->submitted; }
uint64_t fake_waited(struct stream *s, struct stream *other) { return s->waited[other->id]; }

static uint64_t number(const char *variable, uint64_t otherwise) {
  const char *text = getenv(variable);
  return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static CUresult violation(CUresult status) { return violations++, status; }

/* asked_to_fail returns with what a test wants a call to fail. The caller holds the lock. */
static CUresult asked_to_fail(const char *call, int frees) {
  if (*failing ? strcmp(call, failing) != 0 : frees || strstr(call, "Query")) return SUCCESS;
  if (failing_times > 0) return failing_times--, failing_status;
  if (failing_times == 0 || ++failing_times < 0) return SUCCESS;
  if (!*failing) failing_times = INT_MAX;
  return failing_status;
}

/* enter begins a call that needs a context. */
static CUresult enter(const char *call, int frees) {
  pthread_mutex_lock(&lock);
  CUresult status = asked_to_fail(call, frees);
  if (status) return status;
  if (fault && (!frees || fault_frees)) return fault;
  if (!current || current->references == 0) return violation(INVALID_CONTEXT);
  return SUCCESS;
}

static CUresult leave(CUresult status) { return pthread_mutex_unlock(&lock), status; }

#define ENTER() do { CUresult s_ = enter(__func__, 0); if (s_) return leave(s_); } while (0)
#define ENTER_FREE() do { CUresult s_ = enter(__func__, 1); if (s_) return leave(s_); } while (0)

/* The same for calls that a capture forbids. The driver does not say which of those that make and free things they
 * are: here it is all that do so with memory, modules, streams and events. */
static CUresult undisturbed(void);
#define CHANGE() do { ENTER(); CUresult s_ = undisturbed(); if (s_) return leave(s_); } while (0)
#define CHANGE_FREE() do { ENTER_FREE(); CUresult s_ = undisturbed(); if (s_) return leave(s_); } while (0)

static struct stream *new_stream(struct context *c) {
  if (streams_made == MAX_STREAMS) abort();
  struct stream *s = calloc(1, sizeof *s);
  s->context = c, s->id = streams_made, s->alive = 1;
  return all_streams[streams_made++] = s;
}

/* resolve finds a stream, NULL if the current context has none like it. */
static struct stream *resolve(struct stream *s) {
  if ((uintptr_t)s <= 1) {
    if (!current->legacy) current->legacy = new_stream(current);
    return current->legacy;
  }
  if (!s->alive || s->context != current) return violations++, NULL;
  return s;
}

/* --- what the kernels do --- */

#define ARGUMENT(type, i) (*(type *)p[i])

static void fill_u64(void **p) {
  for (uint64_t i = 0; i < ARGUMENT(uint64_t, 1); i++) ARGUMENT(uint64_t *, 0)[i] = ARGUMENT(uint64_t, 2);
}

static void copy_strided(void **p, int width) {
  const struct layout *l = p[2];
  for (uint64_t i = 0; i < l->count; i++) {
    uint64_t rest = i;
    int64_t to = 0, from = 0;
    for (int d = (int)l->dims - 1; d >= 0; d--) {
      to += (int64_t)(rest % l->shape[d]) * l->dst[d];
      from += (int64_t)(rest % l->shape[d]) * l->src[d];
      rest /= l->shape[d];
    }
    memcpy(ARGUMENT(char *, 0) + to * width, ARGUMENT(char *, 1) + from * width, (size_t)width);
  }
}
static void copy_strided_1(void **p) { copy_strided(p, 1); }
static void copy_strided_2(void **p) { copy_strided(p, 2); }
static void copy_strided_4(void **p) { copy_strided(p, 4); }
static void copy_strided_8(void **p) { copy_strided(p, 8); }

/* The same copy, in another order. */
static void transpose_1(void **p) { copy_strided(p, 1); }
static void transpose_2(void **p) { copy_strided(p, 2); }
static void transpose_4(void **p) { copy_strided(p, 4); }
static void transpose_8(void **p) { copy_strided(p, 8); }

static void store_f32(void **p) {
  for (uint64_t i = 0; i < ARGUMENT(uint64_t, 2); i++) ARGUMENT(float *, 0)[i] = ARGUMENT(float *, 1)[i] * ARGUMENT(float, 3);
}

static const struct kernel {
  const char *name;
  void (*run)(void **parameters);
  unsigned bytes[5]; /* of the parameters */
} kernels[] = {
#define K(name, ...) {#name, name, {__VA_ARGS__}}
  K(fill_u64, 8, 8, 8), K(store_f32, 8, 8, 8, 4),
  K(copy_strided_1, 8, 8, sizeof(struct layout)), K(copy_strided_2, 8, 8, sizeof(struct layout)),
  K(copy_strided_4, 8, 8, sizeof(struct layout)), K(copy_strided_8, 8, 8, sizeof(struct layout)),
  K(transpose_1, 8, 8, sizeof(struct layout)), K(transpose_2, 8, 8, sizeof(struct layout)),
  K(transpose_4, 8, 8, sizeof(struct layout)), K(transpose_8, 8, 8, sizeof(struct layout)),
};

/* Of the other kernels of the PTX, the emulator runs those that it knows, if it
 * was linked, and the rest do nothing. */
int emulated_find(const char *name) __attribute__((weak));
unsigned emulated_parameter(int kernel, unsigned i) __attribute__((weak));
void emulated_run(int kernel, unsigned grid, unsigned block, void **parameters) __attribute__((weak));
enum { MAX_EMULATED = 64 };
static const struct kernel emulated[MAX_EMULATED], other = {"", NULL, {0}};

static unsigned parameter(const struct kernel *k, unsigned i) {
  if (k >= emulated && k < emulated + MAX_EMULATED) return emulated_parameter((int)(k - emulated), i);
  return i < sizeof k->bytes / sizeof *k->bytes ? k->bytes[i] : 0;
}

/* keep copies a kernel's arguments. Those of captured work are never freed. */
static void **keep(const struct kernel *k, void **from) {
  enum { MAX_PARAMETERS = 8 };
  size_t bytes = 0;
  for (unsigned i = 0; parameter(k, i); i++) bytes += (parameter(k, i) + 7) & ~7u;
  void **to = malloc(MAX_PARAMETERS * sizeof *to + bytes);
  char *end = (char *)(to + MAX_PARAMETERS);
  for (unsigned i = 0; parameter(k, i); i++) {
    to[i] = memcpy(end, from[i], parameter(k, i));
    end += (parameter(k, i) + 7) & ~7u;
  }
  return to;
}

static void execute(struct operation *o) {
  switch (o->kind) {
  case COPY: memmove((void *)o->a, (void *)o->b, o->c); return;
  case SET:
    /* A hole in shared memory is zero, and takes no pages. */
    if (!o->c && !(o->a % 4096) && !(o->b * (uint64_t)o->width % 4096) && !madvise((void *)o->a, o->b * (uint64_t)o->width, MADV_REMOVE)) return;
    if (o->c == (o->c & 0xff) * ((~0ull >> (64 - 8 * o->width)) / 0xff)) { /* equal bytes */
      memset((void *)o->a, (int)o->c, o->b * (uint64_t)o->width);
      return;
    }
    for (uint64_t i = 0; i < o->b; i++) memcpy((char *)o->a + i * (uint64_t)o->width, &o->c, (size_t)o->width);
    return;
  case KERNEL:
    if (o->kernel->run) o->kernel->run(o->parameters);
    else if (o->kernel != &other) emulated_run((int)(o->kernel - emulated), o->grid, o->block, o->parameters);
  }
}

/* submit executes an operation, or adds it to what the stream captures. */
static CUresult submit(struct stream *handle, struct operation o) {
  struct stream *s = resolve(handle);
  if (!s) return INVALID_HANDLE;
  s->submitted++;
  if (!s->capture && !held) return execute(&o), free(o.parameters), SUCCESS;
  struct operation **end = s->capture ? &s->capture->first : last_waiting, *copy = malloc(sizeof o);
  while (*end) end = &(*end)->next;
  *copy = o, copy->next = NULL;
  *end = copy;
  if (!s->capture) last_waiting = &copy->next;
  return SUCCESS;
}

/* --- the library and its devices --- */

CUresult cuInit(unsigned flags) {
  (void)flags;
  devices = (int)number("FAKE_CUDA_DEVICES", 1);
  limit = number("FAKE_CUDA_MEMORY", 1u << 30);
  for (int i = 0; i < devices; i++) primary[i].device = i;
  return devices == 0 ? NO_DEVICE : SUCCESS;
}

CUresult cuDriverGetVersion(int *v) { return *v = (int)number("FAKE_CUDA_VERSION", 12040), SUCCESS; }

static const struct { CUresult status; const char *name, *text; } texts[] = {
  {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
  {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
  {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
  {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};

static CUresult describe(CUresult status, const char **out, int text) {
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    if (texts[i].status == status) return *out = text ? texts[i].text : texts[i].name, SUCCESS;
  return *out = NULL, INVALID_VALUE;
}
CUresult cuGetErrorName(CUresult s, const char **out) { return describe(s, out, 0); }
CUresult cuGetErrorString(CUresult s, const char **out) { return describe(s, out, 1); }

CUresult cuDeviceGetCount(int *n) { return *n = devices, SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int ordinal) {
  return ordinal < 0 || ordinal >= devices ? INVALID_DEVICE : (*d = ordinal, SUCCESS);
}
CUresult cuDeviceGetName(char *out, int n, CUdevice d) { return snprintf(out, (size_t)n, "Fake GPU %d", d), SUCCESS; }
CUresult cuDeviceGetPCIBusId(char *out, int n, CUdevice d) { return snprintf(out, (size_t)n, "0000:%02X:00.0", d), SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice d) { return (void)d, *bytes = limit, SUCCESS; }
CUresult cuDeviceGetAttribute(int *out, int attribute, CUdevice d) {
  (void)d;
  switch (attribute) {
  case 16: *out = 4; break; /* multiprocessors */
  case 75: *out = (int)number("FAKE_CUDA_MAJOR", 9); break;
  case 76: *out = 0; break;
  default: *out = 1;
  }
  return SUCCESS;
}
CUresult cuDeviceGetP2PAttribute(int *out, int attribute, CUdevice a, CUdevice b) {
  return (void)attribute, a == b ? INVALID_DEVICE : (*out = (int)number("FAKE_CUDA_PEERS", 1), SUCCESS);
}

/* --- contexts --- */

CUresult cuDevicePrimaryCtxRetain(struct context **out, CUdevice d) {
  pthread_mutex_lock(&lock);
  CUresult status = asked_to_fail(__func__, 0);
  if (!status) status = undisturbed();
  if (status) return leave(status);
  primary[d].references++, alive[CONTEXTS]++;
  *out = &primary[d];
  return leave(SUCCESS);
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) {
  pthread_mutex_lock(&lock);
  if (primary[d].references == 0) return leave(violation(INVALID_CONTEXT));
  primary[d].references--, alive[CONTEXTS]--;
  return leave(SUCCESS);
}
CUresult cuCtxGetCurrent(struct context **out) { return *out = current, SUCCESS; }
CUresult cuCtxSetCurrent(struct context *c) { return current = c, SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) {
  ENTER();
  return *d = current->device, leave(SUCCESS);
}

/* finish waits until work ends. The caller holds the lock. */
static CUresult finish(void) {
  while (held) pthread_cond_wait(&released, &lock);
  return fault;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }

/* --- streams and events --- */

CUresult cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
  (void)flags, (void)priority;
  CHANGE();
  alive[STREAMS]++;
  *out = new_stream(current);
  return leave(SUCCESS);
}
CUresult cuStreamDestroy_v2(struct stream *s) {
  CHANGE_FREE();
  if (!s->alive) return leave(violation(INVALID_HANDLE));
  s->alive = 0, alive[STREAMS]--;
  return leave(SUCCESS);
}
CUresult cuStreamGetCtx(struct stream *s, struct context **out) {
  ENTER();
  *out = (uintptr_t)s <= 2 ? current : s->context;
  return leave(SUCCESS);
}
static int ended(const struct stream *s, uint64_t operations) {
  return !held && (!s || s->stalled == 0 || operations < s->stalled);
}

/* Modes of captures and of threads. A call that may disturb a capture ends those that forbid it to this thread: all
 * global ones, and the thread's own, unless that is relaxed. A thread may take itself out of the first, or of both. */
enum { GLOBAL, THREAD_LOCAL, RELAXED };
static __thread int thread_mode;
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = thread_mode;
  if (*mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
  thread_mode = *mode, *mode = before;
  return SUCCESS;
}
static int disturbs(const struct stream *s) {
  if (!s->capture || s->mode == RELAXED || thread_mode == RELAXED) return 0;
  return pthread_equal(s->owner, pthread_self()) || (s->mode == GLOBAL && thread_mode == GLOBAL);
}
static CUresult undisturbed(void) {
  CUresult status = SUCCESS;
  for (int i = 0; i < streams_made; i++)
    if (disturbs(all_streams[i])) all_streams[i]->invalid = 1, status = CAPTURE_UNSUPPORTED;
  return status;
}
static CUresult quiet(struct stream *handle) {
  struct stream *s = resolve(handle);
  if (!s) return INVALID_HANDLE;
  if (s->capture) return s->invalid = 1, CAPTURE_UNSUPPORTED;
  return undisturbed();
}
CUresult cuStreamSynchronize(struct stream *handle) {
  ENTER();
  CUresult status = quiet(handle);
  return leave(status ? status : finish());
}
CUresult cuStreamQuery(struct stream *handle) {
  ENTER();
  CUresult status = quiet(handle);
  return leave(status ? status : ended(resolve(handle), resolve(handle)->submitted) ? SUCCESS : NOT_READY);
}
CUresult cuStreamIsCapturing(struct stream *handle, int *status) {
  ENTER();
  struct stream *s = resolve(handle);
  return leave(s ? (*status = s->capture != NULL, SUCCESS) : INVALID_HANDLE);
}
CUresult cuStreamWriteValue64_v2(struct stream *handle, CUdeviceptr p, uint64_t v, unsigned flags) {
  ENTER();
  struct stream *s = resolve(handle);
  if (flags || !s || s->capture || p % 8) return leave(violation(INVALID_VALUE)); /* a graph would write it again */
  return leave(submit(handle, (struct operation){.kind = SET, .a = p, .b = 1, .c = v, .width = 8}));
}
CUresult cuStreamWaitEvent(struct stream *handle, struct event *e, unsigned flags) {
  (void)flags;
  ENTER();
  struct stream *s = resolve(handle);
  if (!s) return leave(INVALID_HANDLE);
  if (!e->alive) return leave(violation(INVALID_HANDLE));
  if (e->stream && s->waited[e->stream->id] < e->position) s->waited[e->stream->id] = e->position;
  for (int i = 0; exclusive && i < streams_made; i++)
    if (s->known[i] < e->known[i]) s->known[i] = e->known[i];
  return leave(SUCCESS);
}

CUresult cuEventCreate(struct event **out, unsigned flags) {
  CHANGE();
  alive[EVENTS]++;
  struct event *e = calloc(1, sizeof *e);
  e->context = current, e->alive = 1, e->timing = !(flags & 2);
  *out = e;
  return leave(SUCCESS);
}
CUresult cuEventDestroy_v2(struct event *e) {
  CHANGE_FREE();
  if (!e->alive) return leave(violation(INVALID_HANDLE));
  e->alive = 0, alive[EVENTS]--; /* kept, so that use after this shows */
  return leave(SUCCESS);
}
CUresult cuEventRecord(struct event *e, struct stream *handle) {
  ENTER();
  struct stream *s = resolve(handle);
  if (!s || !e->alive || e->context != s->context) return leave(violation(INVALID_HANDLE));
  for (waiting_for_room++; s->full;) pthread_cond_wait(&released, &lock);
  waiting_for_room--;
  if (!s->alive) return leave(violation(INVALID_HANDLE));
  e->stream = s, e->position = s->submitted;
  if (exclusive) memcpy(e->known, s->known, sizeof *e->known * (size_t)streams_made), e->known[s->id] = s->submitted;
  return leave(SUCCESS);
}
CUresult cuEventQuery(struct event *e) {
  ENTER();
  if (!e->alive) return leave(violation(INVALID_HANDLE));
  if (undisturbed()) return leave(CAPTURE_UNSUPPORTED);
  return leave(ended(e->stream, e->position) ? SUCCESS : NOT_READY);
}
CUresult cuEventSynchronize(struct event *e) {
  ENTER();
  if (undisturbed()) return leave(CAPTURE_UNSUPPORTED);
  return leave(e->alive ? finish() : violation(INVALID_HANDLE));
}
CUresult cuEventElapsedTime(float *ms, struct event *start, struct event *end) {
  CHANGE();
  if (!start->timing || !end->timing) return leave(INVALID_HANDLE);
  *ms = 0.25f;
  return leave(SUCCESS);
}

/* --- graphs --- */

CUresult cuStreamBeginCapture_v2(struct stream *s, int mode) {
  ENTER();
  if (!resolve(s) || s->capture) return leave(INVALID_VALUE);
  s->capture = calloc(1, sizeof *s->capture), s->owner = pthread_self(), s->mode = mode, s->invalid = 0;
  return leave(SUCCESS);
}
static void free_graph(struct graph *g) {
  for (struct operation *o = g->first, *next; o; o = next) next = o->next, free(o);
  free(g);
}
CUresult cuStreamEndCapture(struct stream *s, struct graph **out) { /* ends it also when that fails */
  ENTER_FREE();
  struct graph *g = s->capture;
  *out = NULL;
  if (!g) return leave(INVALID_VALUE);
  if (!pthread_equal(s->owner, pthread_self())) return leave(violation(INVALID_VALUE));
  s->capture = NULL;
  if (s->invalid) return free_graph(g), leave(CAPTURE_INVALIDATED);
  alive[GRAPHS]++;
  *out = g;
  return leave(SUCCESS);
}
CUresult cuGraphDestroy(struct graph *g) {
  ENTER_FREE();
  alive[GRAPHS]--;
  return free_graph(g), leave(SUCCESS);
}
CUresult cuGraphExecDestroy(struct graph *g) { return cuGraphDestroy(g); }
CUresult cuGraphLaunch(struct graph *g, struct stream *handle) {
  ENTER();
  struct stream *s = resolve(handle);
  if (!s) return leave(INVALID_HANDLE);
  for (struct operation *o = g->first; o; o = o->next) execute(o);
  exclude(s);
  s->submitted++;
  return leave(SUCCESS);
}

/* --- memory --- */

static struct mapping *find(uint64_t p) {
  for (struct mapping *m = mappings; m; m = m->next)
    if (p >= m->address && p < m->address + m->bytes) return m;
  return NULL;
}
static struct mapping *add(uint64_t address, size_t bytes) {
  struct mapping *m = calloc(1, sizeof *m);
  m->address = address, m->bytes = bytes, m->next = mappings;
  return mappings = m;
}
static void drop(struct mapping *gone) {
  struct mapping **m = &mappings;
  while (*m != gone) m = &(*m)->next;
  *m = gone->next;
  free(gone);
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags) {
  (void)at, (void)flags;
  CHANGE();
  if (bytes == 0 || bytes % PAGE) return leave(INVALID_VALUE);
  char *p = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return leave(OUT_OF_MEMORY);
  char *start = (char *)(((uintptr_t)p + alignment - 1) / alignment * alignment);
  if (start > p) munmap(p, (size_t)(start - p));
  if (start < p + alignment) munmap(start + bytes, (size_t)(p + alignment - start));
  add((uint64_t)start, bytes)->reserved = 1;
  alive[MAPPINGS]++;
  *out = (CUdeviceptr)start;
  return leave(SUCCESS);
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
  CHANGE_FREE();
  struct mapping *m = find(p);
  if (!m || m->address != p || m->bytes != bytes || m->memory) return leave(violation(INVALID_VALUE));
  munmap((void *)p, bytes);
  drop(m);
  alive[MAPPINGS]--;
  return leave(SUCCESS);
}

struct properties { /* CUmemAllocationProp */
  int type, handle_types;
  struct { int type, id; } location;
  void *windows;
  struct { uint8_t compression, rdma; uint16_t usage; uint8_t reserved[4]; } flags;
};
static int good(const struct properties *p) {
  return p->type == 1 && p->location.type == 1 && p->location.id >= 0 && p->location.id < devices &&
         p->flags.rdma <= 1 && p->flags.compression == 0 && p->flags.usage == 0;
}
#ifndef TOO_OLD
CUresult cuMemCreate(struct memory **out, size_t bytes, const struct properties *p, unsigned long long flags) {
  (void)flags;
  CHANGE();
  if (!good(p) || bytes % PAGE) return leave(violation(INVALID_VALUE));
  if (bytes > limit - used[p->location.id]) return leave(OUT_OF_MEMORY);
  struct memory *m = calloc(1, sizeof *m);
  m->bytes = bytes, m->device = p->location.id, m->fd = -1;
  if (p->handle_types && ((m->fd = memfd_create("memory", MFD_CLOEXEC)) < 0 || ftruncate(m->fd, (off_t)bytes))) return leave(INVALID_VALUE);
  used[m->device] += bytes;
  alive[MAPPINGS]++;
  *out = m;
  return leave(SUCCESS);
}
CUresult cuMemExportToShareableHandle(int *fd, struct memory *m, int type, unsigned long long flags) {
  CHANGE();
  if (type != 1 || flags || m->fd < 0) return leave(violation(INVALID_VALUE));
  *fd = dup(m->fd);
  return leave(SUCCESS);
}
CUresult cuMemImportFromShareableHandle(struct memory **out, uintptr_t fd, int type) {
  CHANGE();
  struct stat file;
  if (type != 1 || fstat((int)fd, &file)) return leave(INVALID_VALUE);
  struct memory *m = calloc(1, sizeof *m);
  m->bytes = (size_t)file.st_size, m->device = -1, m->fd = dup((int)fd);
  alive[MAPPINGS]++;
  *out = m;
  return leave(SUCCESS);
}
CUresult cuGraphInstantiateWithFlags(struct graph **out, struct graph *g, unsigned long long flags) {
  (void)flags;
  ENTER();
  struct graph *copy = calloc(1, sizeof *copy);
  struct operation **end = &copy->first;
  for (struct operation *o = g->first; o; o = o->next, end = &(*end)->next) {
    *end = malloc(sizeof *o);
    **end = *o;
  }
  *end = NULL;
  alive[GRAPHS]++;
  *out = copy;
  return leave(SUCCESS);
}
#endif
CUresult cuMemRelease(struct memory *m) {
  CHANGE_FREE();
  if (m->mapped) return leave(violation(INVALID_VALUE));
  if (m->device >= 0) used[m->device] -= m->bytes;
  if (m->fd >= 0) close(m->fd);
  alive[MAPPINGS]--;
  return free(m), leave(SUCCESS);
}
CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, struct memory *memory, unsigned long long flags) {
  (void)flags;
  CHANGE();
  struct mapping *m = find(p);
  if (!m || m->address != p || m->bytes != bytes || m->memory || offset || memory->bytes != bytes)
    return leave(violation(INVALID_VALUE));
  m->memory = memory, m->device = memory->device, memory->mapped = 1;
  return leave(SUCCESS);
}

/* A driver may free its own memory twice if two threads unmap the same memory at once. With
 * fake_meet(1) a thread waits there for another one, for a while. */
static int unmapping, meeting;
void fake_meet(int on) { __atomic_store_n(&meeting, on, __ATOMIC_SEQ_CST); }
static void alone(void) {
  int together = __atomic_add_fetch(&unmapping, 1, __ATOMIC_SEQ_CST) > 1;
  for (int ms = 0; ms < 200 && __atomic_load_n(&meeting, __ATOMIC_SEQ_CST) && !together; ms++) {
    usleep(1000);
    together = __atomic_load_n(&unmapping, __ATOMIC_SEQ_CST) > 1;
  }
  pthread_mutex_lock(&lock);
  violations += together;
  pthread_mutex_unlock(&lock);
  __atomic_sub_fetch(&unmapping, 1, __ATOMIC_SEQ_CST);
}

CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
  alone();
  CHANGE_FREE();
  struct mapping *m = find(p);
  if (!m || m->address != p || m->bytes != bytes || !m->memory) return leave(violation(INVALID_VALUE));
  if (held) violations++; /* the driver does not wait for work that uses the memory */
  m->memory->mapped = 0, m->memory = NULL;
  mmap((void *)p, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return leave(SUCCESS);
}
struct access { struct { int type, id; } location; int flags; }; /* CUmemAccessDesc */
CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const struct access *a, size_t n) {
  CHANGE();
  struct mapping *m = find(p);
  if (!m || !m->memory || n != 1 || a->location.type != 1 || a->flags != 3) return leave(violation(INVALID_VALUE));
  if (m->device < 0) { /* imported */
    if (!number("FAKE_CUDA_PEERS", 1)) return leave(INVALID_DEVICE);
    m->device = a->location.id;
  }
  if (a->location.id != m->device) return leave(violation(INVALID_VALUE));
  if (m->memory->fd >= 0) mmap((void *)p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->memory->fd, 0);
  else mprotect((void *)p, bytes, PROT_READ | PROT_WRITE);
  return leave(SUCCESS);
}
CUresult cuMemGetAllocationGranularity(size_t *out, const struct properties *p, int option) {
  ENTER();
  if (!good(p) || option != 0) return leave(violation(INVALID_VALUE));
  *out = PAGE;
  return leave(SUCCESS);
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  CHANGE();
  *total = limit, *free_bytes = limit - used[current->device];
  return leave(SUCCESS);
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
  (void)flags;
  CHANGE();
  /* Of its own, so that who reads it after it was freed crashes, as with the driver. */
  if ((*out = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) == MAP_FAILED) return leave(OUT_OF_MEMORY);
  add((uint64_t)*out, bytes)->pinned = 1;
  alive[PINNED]++;
  return leave(SUCCESS);
}
CUresult cuMemFreeHost(void *p) {
  CHANGE_FREE();
  struct mapping *m = find((uint64_t)p);
  if (!m || m->pinned != 1 || m->address != (uint64_t)p) return leave(violation(INVALID_VALUE));
  munmap(p, m->bytes);
  drop(m);
  alive[PINNED]--;
  return leave(SUCCESS);
}
/* Memory that is registered stays where it is: whoever mapped it unmaps it afterwards. */
CUresult cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
  CHANGE();
  if (!bytes || flags > 7) return leave(INVALID_VALUE);
  if (find((uint64_t)p)) return leave(violation(INVALID_VALUE));
  add((uint64_t)p, bytes)->pinned = 2;
  alive[REGISTERED]++;
  return leave(SUCCESS);
}
CUresult cuMemHostUnregister(void *p) {
  CHANGE_FREE();
  struct mapping *m = find((uint64_t)p);
  if (!m || m->pinned != 2 || m->address != (uint64_t)p || held) return leave(violation(INVALID_VALUE));
  drop(m);
  alive[REGISTERED]--;
  return leave(SUCCESS);
}
CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr p) {
  CHANGE();
  struct mapping *m = find(p);
  if (!m || (m->reserved && !m->memory)) return leave(INVALID_VALUE);
  switch (attribute) {
  case 2: *(unsigned *)out = m->pinned ? 1 : 2; break;
  case 8: *(char *)out = 0; break;
  case 9: *(int *)out = m->device; break;
  default: return leave(INVALID_VALUE);
  }
  return leave(SUCCESS);
}

/* on_device checks that memory is mapped and of the current device. */
static int on_device(uint64_t p, uint64_t bytes) {
  struct mapping *m = find(p);
  return m && m->memory && m->device == current->device && p + bytes <= m->address + m->bytes;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, struct stream *s) {
  ENTER();
  if (!on_device(dst, n)) return leave(INVALID_VALUE);
  return leave(submit(s, (struct operation){.kind = COPY, .a = dst, .b = (uint64_t)src, .c = n}));
}
CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, struct stream *s) {
  ENTER();
  if (!on_device(src, n)) return leave(INVALID_VALUE);
  return leave(submit(s, (struct operation){.kind = COPY, .a = (uint64_t)dst, .b = src, .c = n}));
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, struct stream *s) {
  ENTER();
  if (!on_device(dst, n) || !on_device(src, n)) return leave(INVALID_VALUE);
  return leave(submit(s, (struct operation){.kind = COPY, .a = dst, .b = src, .c = n}));
}
static CUresult set(CUdeviceptr dst, uint64_t value, size_t n, int width, struct stream *s) {
  if (dst % (unsigned)width || !on_device(dst, n * (size_t)width)) return INVALID_VALUE;
  return submit(s, (struct operation){.kind = SET, .a = dst, .b = n, .c = value, .width = width});
}
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, struct stream *s) { ENTER(); return leave(set(p, v, n, 1, s)); }
CUresult cuMemsetD16Async(CUdeviceptr p, unsigned short v, size_t n, struct stream *s) { ENTER(); return leave(set(p, v, n, 2, s)); }
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, struct stream *s) { ENTER(); return leave(set(p, v, n, 4, s)); }

/* --- kernels --- */

/* A module is the names of its kernels, each in ".entry name(". */
CUresult cuModuleLoadData(char **out, const char *ptx) {
  CHANGE();
  size_t n = 0;
  for (const char *p = ptx; (p = strstr(p, ".entry ")); p++) n += strcspn(p, "(") + 1;
  char *end = *out = malloc(n + 1);
  for (const char *p = ptx; (p = strstr(p, ".entry ")); p++) end = mempcpy(end, p, strcspn(p, "(") + 1);
  *end = 0;
  alive[MODULES]++;
  return leave(SUCCESS);
}
CUresult cuModuleUnload(char *module) {
  CHANGE_FREE();
  alive[MODULES]--;
  return free(module), leave(SUCCESS);
}
CUresult cuModuleGetFunction(const struct kernel **out, const char *module, const char *name) {
  CHANGE();
  char entry[256];
  snprintf(entry, sizeof entry, ".entry %s(", name);
  if (!strstr(module, entry)) return leave(NOT_FOUND);
  *out = &other;
  int found = emulated_find ? emulated_find(name) : -1;
  if (found >= 0) *out = &emulated[found];
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
    if (strcmp(kernels[i].name, name) == 0) *out = &kernels[i];
  return leave(SUCCESS);
}
CUresult cuLaunchKernel(const struct kernel *k, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, struct stream *s, void **params, void **extra) {
  (void)shared;
  ENTER();
  if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || (params && extra)) return leave(violation(INVALID_VALUE));
  void *packed[8];
  if (extra) { /* one buffer: its address, and that of its size */
    if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return leave(violation(INVALID_VALUE));
    size_t at = 0;
    for (unsigned i = 0; parameter(k, i); i++) {
      unsigned align = parameter(k, i) < 8 ? parameter(k, i) : 8;
      at = (at + align - 1) / align * align;
      packed[i] = (char *)extra[1] + at;
      at += parameter(k, i);
    }
    if (k != &other && *(size_t *)extra[3] != at) return leave(INVALID_VALUE);
    params = packed;
  }
  while (held == 2) pthread_cond_wait(&released, &lock);
  struct stream *in = resolve(s);
  if (in && !in->capture) exclude(in);
  struct operation o = {.kind = KERNEL, .kernel = k, .grid = gx, .block = bx, .parameters = keep(k, params)};
  return leave(submit(s, o));
}
