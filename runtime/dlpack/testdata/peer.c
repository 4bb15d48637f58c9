/* A library at the other end: DLPack's structs as dlpack.h of version 1.0 has them, a
 * producer, and a consumer that calls deleters on a thread of its own. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct { uint32_t major, minor; } DLPackVersion;
typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

static int64_t alive;
int64_t peer_alive(void) { return alive; }

static void drop(DLManagedTensor *m) { alive--, free(m->manager_ctx), free(m); }
static void drop_versioned(DLManagedTensorVersioned *m) { alive--, free(m->manager_ctx), free(m); }

/* The transpose of the 2 x 3 matrix of 0 to 5 as float, one element into its memory; without
 * strides, the matrix. */
static DLTensor matrix(int strided) {
  int64_t *sizes = malloc(4 * sizeof *sizes + 7 * sizeof(float));
  float *values = (float *)(sizes + 4);
  for (int i = 0; i < 7; i++) values[i] = (float)i - 1;
  sizes[0] = strided ? 3 : 2, sizes[1] = strided ? 2 : 3, sizes[2] = 1, sizes[3] = 3;
  alive++;
  return (DLTensor){values, {1, 0}, 2, {2, 32, 1}, sizes, strided ? sizes + 2 : NULL, sizeof(float)};
}
DLManagedTensor *peer_produce(int strided) {
  DLManagedTensor *m = malloc(sizeof *m);
  m->dl_tensor = matrix(strided), m->manager_ctx = m->dl_tensor.shape, m->deleter = drop;
  return m;
}
/* Changes one number: 0 nothing, 1 the major version, 2 the flags, 3 the device, 4 its number, 5 the
 * lanes, 6 the type, 7 the rank, 8 the shape. */
DLManagedTensorVersioned *peer_produce_versioned(int strided, int change) {
  DLManagedTensorVersioned *m = malloc(sizeof *m);
  *m = (DLManagedTensorVersioned){{1, 3}, NULL, drop_versioned, 0, matrix(strided)};
  m->manager_ctx = m->dl_tensor.shape;
  switch (change) {
  case 1: m->version.major = 2; break;
  case 2: m->flags = 3; break;
  case 3: m->dl_tensor.device.device_type = 4; break;
  case 4: m->dl_tensor.device = (DLDevice){2, 0}; break;
  case 5: m->dl_tensor.dtype.lanes = 4; break;
  case 6: m->dl_tensor.dtype.code = 5; break;
  case 7: m->dl_tensor.ndim = -1; break;
  case 8: m->dl_tensor.shape = NULL; break;
  }
  return m;
}
static void *call(void *m) { return ((DLManagedTensor *)m)->deleter(m), NULL; }
static void *call_versioned(void *m) { return ((DLManagedTensorVersioned *)m)->deleter(m), NULL; }
void peer_drop(void *m, int versioned) {
  pthread_t t;
  pthread_create(&t, NULL, versioned ? call_versioned : call, m);
  pthread_join(t, NULL);
}
/* The sum of float elements, each times ten to its number in row-major order. */
int64_t peer_digits(void *m, int versioned) {
  const DLTensor *t = versioned ? &((DLManagedTensorVersioned *)m)->dl_tensor : &((DLManagedTensor *)m)->dl_tensor;
  int64_t n = 1, sum = 0, factor = 1;
  for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
  for (int64_t i = 0; i < n; i++, factor *= 10) {
    int64_t at = 0, rest = i;
    for (int d = t->ndim - 1; d >= 0; rest /= t->shape[d], d--) at += rest % t->shape[d] * t->strides[d];
    sum += factor * (int64_t)((const float *)((const char *)t->data + t->byte_offset))[at];
  }
  return sum;
}
/* Type code, bits, lanes, device type and number, two digits each. */
int64_t peer_type(void *m, int versioned) {
  const DLManagedTensorVersioned *v = m;
  const DLTensor *t = versioned ? &v->dl_tensor : &((DLManagedTensor *)m)->dl_tensor;
  if (versioned && (v->version.major != 1 || v->flags)) return -1;
  return (((int64_t)t->dtype.code * 100 + t->dtype.bits) * 100 + t->dtype.lanes) * 10000 + t->device.device_type * 100 + t->device.device_id;
}
