/* MPICH asks its network for progress without a pause, also with more processes than processors. Preloaded, this has
 * others run when there was none for a while, as Open MPI's mpi_yield_when_idle does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

unsigned ucp_worker_progress(void *worker) {
  static unsigned (*progress)(void *);
  static __thread unsigned idle;
  if (!progress) progress = (unsigned (*)(void *))dlsym(dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD), "ucp_worker_progress");
  const unsigned events = progress(worker);
  idle = events ? 0 : idle + 1;
  if (idle && idle % 256 == 0) nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
  return events;
}
