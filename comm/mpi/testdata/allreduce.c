// The blocking MPI_Allreduce of float32, out of place, that BenchmarkAllReduce
// compares with: one JSON line per size, with the median of seven rounds in
// microseconds per call.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { rounds = 7 };

static int ascending(const void *a, const void *b) {
  double d = *(const double *)a - *(const double *)b;
  return (d > 0) - (d < 0);
}

static double measure(float *in, float *out, int n, int calls) {
  double took[rounds];
  for (int r = 0; r < rounds; r++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int i = 0; i < calls; i++) MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    took[r] = (MPI_Wtime() - start) / calls;
  }
  qsort(took, rounds, sizeof took[0], ascending);
  return took[rounds / 2] * 1e6;
}

int main(int argc, char **argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int bytes = 8; bytes <= 16 << 20; bytes *= 8) {
    int n = bytes / 4, calls = bytes < 100000 ? 2000 : bytes < 10000000 ? 50 : 10;
    float *in = malloc(bytes), *out = malloc(bytes);
    for (int i = 0; i < n; i++) in[i] = rank + 1, out[i] = 0;
    double micros = measure(in, out, n, calls);
    if (rank == 0)
      printf("{\"backend\":\"c\",\"ranks\":%d,\"bytes\":%d,\"time_us\":%.3f}\n", size, bytes, micros);
    free(in);
    free(out);
  }
  MPI_Finalize();
}
