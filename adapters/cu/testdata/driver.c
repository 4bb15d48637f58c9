/* The stand-in for the driver of runtime/cuda, and what programs of
 * gorgonia.org/cu call beside that. */
#include "../../../runtime/cuda/testdata/driver.c"

CUresult cuCtxCreate_v2(struct context **out, unsigned flags, CUdevice d) {
  (void)flags;
  pthread_mutex_lock(&lock);
  *out = current = fake_context(d);
  alive[CONTEXTS]++;
  return leave(SUCCESS);
}
CUresult cuCtxDestroy_v2(struct context *c) {
  pthread_mutex_lock(&lock);
  if (c->references == 0) return leave(violation(INVALID_CONTEXT));
  c->references = 0, alive[CONTEXTS]--;
  if (current == c) current = NULL;
  return leave(SUCCESS);
}
CUresult cuCtxSynchronize(void) {
  ENTER();
  return leave(finish());
}
CUresult cuStreamCreate(struct stream **out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
  ENTER();
  struct mapping *m = add((uint64_t)calloc(1, bytes), bytes);
  m->device = current->device, m->memory = calloc(1, sizeof *m->memory);
  *out = m->address;
  return leave(SUCCESS);
}
CUresult cuMemFree_v2(CUdeviceptr p) {
  ENTER_FREE();
  struct mapping *m = find(p);
  if (!m || m->address != p || m->reserved) return leave(violation(INVALID_VALUE));
  free(m->memory);
  drop(m);
  return free((void *)p), leave(SUCCESS);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n) {
  CUresult s = cuMemcpyHtoDAsync_v2(dst, src, n, NULL);
  return s ? s : cuCtxSynchronize();
}
CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n) {
  CUresult s = cuMemcpyDtoHAsync_v2(dst, src, n, NULL);
  return s ? s : cuCtxSynchronize();
}
