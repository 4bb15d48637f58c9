// MPI_Allreduce of float32 by a program in C, measured as `tutti bench allreduce` measures:
// after a barrier as many calls as take about 20 ms, the time of the slowest rank, the median of
// seven rounds; out of place and in place. One JSON object a line, microseconds per call.
//
//     allreduce SMALLEST LARGEST FACTOR      (bytes)
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { rounds = 7 };
static const double round_seconds = 0.02;

static int ascending(const void *a, const void *b) {
  double d = *(const double *)a - *(const double *)b;
  return (d > 0) - (d < 0);
}

// calls returns the seconds that a number of calls take on the slowest rank.
static double calls(const void *in, float *out, int n, int count) {
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  for (int i = 0; i < count; i++) MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  double own = MPI_Wtime() - start, slowest;
  MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest;
}

static double measure(const void *in, float *out, int n) {
  int count = 2;
  double took;
  while ((took = calls(in, out, n, count)) < round_seconds / 16 && count < 20000) count *= 8;
  double fit = count * round_seconds / took;
  count = fit < 3 ? 3 : fit > 20000 ? 20000 : (int)fit;
  double each[rounds];
  for (int r = 0; r < rounds; r++) each[r] = calls(in, out, n, count) / count;
  qsort(each, rounds, sizeof each[0], ascending);
  return each[rounds / 2] * 1e6;
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  long low = atol(argv[1]), high = atol(argv[2]), factor = atol(argv[3]);
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (long bytes = low;; bytes = bytes > high / factor ? high : bytes * factor) {
    int n = bytes / sizeof(float);
    float *in = malloc(bytes), *out = malloc(bytes);
    for (int i = 0; i < n; i++) in[i] = out[i] = 0; // sums of sums stay ordinary numbers
    double apart = measure(in, out, n), in_place = measure(MPI_IN_PLACE, out, n);
    if (rank == 0)
      printf("{\"bytes\":%ld,\"place\":\"out-of-place\",\"time_us\":%.3f}\n"
             "{\"bytes\":%ld,\"place\":\"in-place\",\"time_us\":%.3f}\n",
             bytes, apart, bytes, in_place);
    free(in);
    free(out);
    if (bytes == high) break;
  }
  MPI_Finalize();
}
