// Prints the constants of an mpi.h, one "name value" per line: handles of Open
// MPI, which are addresses, as the size of a pointer alone.
#include <mpi.h>
#include <stddef.h>
#include <stdio.h>

#define NUMBER(x) printf(#x " %lld\n", (long long)(x))
#ifdef OPEN_MPI
#define HANDLE(x) (void)(x)
#else
#define HANDLE(x) printf(#x " %lld\n", (long long)(unsigned)(x))
#endif

int main(void) {
  NUMBER(sizeof(MPI_Request));
  NUMBER(sizeof(MPI_Status));
  NUMBER(offsetof(MPI_Status, MPI_ERROR));
  NUMBER(MPI_TAG_UB);
  NUMBER(MPI_UNDEFINED);
  NUMBER(MPI_IN_PLACE);
  NUMBER(MPI_THREAD_SERIALIZED);
  NUMBER(MPI_THREAD_MULTIPLE);
  NUMBER(MPI_ERR_IN_STATUS);
  NUMBER(MPI_ERR_PENDING);
  HANDLE(MPI_COMM_WORLD);
  HANDLE(MPI_ERRORS_RETURN);
  HANDLE(MPI_BYTE);
  HANDLE(MPI_DOUBLE);
  HANDLE(MPI_FLOAT);
  HANDLE(MPI_INT64_T);
  HANDLE(MPI_INT32_T);
  HANDLE(MPI_INT16_T);
  HANDLE(MPI_INT8_T);
  HANDLE(MPI_UINT64_T);
  HANDLE(MPI_UINT32_T);
  HANDLE(MPI_UINT16_T);
  HANDLE(MPI_UINT8_T);
  HANDLE(MPI_C_BOOL);
  HANDLE(MPI_SUM);
  HANDLE(MPI_PROD);
  HANDLE(MPI_MIN);
  HANDLE(MPI_MAX);
  HANDLE(MPI_LOR);
  HANDLE(MPI_LAND);
  return 0;
}
