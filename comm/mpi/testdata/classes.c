// Prints the error classes that the package knows, as numbers of this library.
#include <mpi.h>
#include <stdio.h>

#define CLASS(name) printf(#name " %d\n", MPI_ERR_##name)

int main(void) {
  CLASS(BUFFER);
  CLASS(COUNT);
  CLASS(TYPE);
  CLASS(TAG);
  CLASS(COMM);
  CLASS(RANK);
  CLASS(REQUEST);
  CLASS(ROOT);
  CLASS(GROUP);
  CLASS(OP);
  CLASS(TOPOLOGY);
  CLASS(DIMS);
  CLASS(ARG);
  CLASS(TRUNCATE);
  CLASS(NO_MEM);
  CLASS(NO_SPACE);
  CLASS(QUOTA);
  CLASS(ACCESS);
  CLASS(READ_ONLY);
  CLASS(UNSUPPORTED_OPERATION);
  CLASS(OTHER);
  CLASS(INTERN);
  CLASS(UNKNOWN);
}
