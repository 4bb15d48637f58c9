// How many results one sum has in MPI_Allreduce: mpicc -O2 -o probe mpi.c -lm && mpirun -n 4 ./probe
//
// It does what gloo.py does.
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { width = 64, most = 64 };

static uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// 24 bits each, of 12 magnitudes.
static void numbers(int rank, float *to) {
  for (int i = 0; i < width; i++) {
    const uint64_t h = mix(1000 * (uint64_t)rank + i);
    to[i] = (float)ldexp((double)(h >> 40) / (1 << 23) - 1, (int)(h % 12));
  }
}

int main(int argc, char **argv) {
  static const int lengths[] = {64, 65, 1000, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20};
  int rank, ranks, messages = 0, results = 0, kept = 0;
  float mine[width], other[width], chain[width], seen[most][width];
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Get_library_version(version, &length);
  version[strcspn(version, ",\n")] = 0;
  numbers(rank, mine);
  numbers(0, chain);
  for (int r = 1; r < ranks; r++) {
    numbers(r, other);
    for (int i = 0; i < width; i++) chain[i] += other[i];
  }
  for (unsigned l = 0; l < sizeof lengths / sizeof *lengths; l++) {
    const int n = lengths[l];
    const int places[] = {0, n / 3 - 20, n / 2, n - width};
    for (int p = 0; p < 4; p++) {
      if (places[p] < 0 || places[p] + width > n) continue;
      float *message = calloc((size_t)n, sizeof *message);
      memcpy(message + places[p], mine, sizeof mine);
      MPI_Allreduce(MPI_IN_PLACE, message, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      messages++;
      int known = 0;
      while (known < results && memcmp(seen[known], message + places[p], sizeof mine)) known++;
      if (known == results && results < most) memcpy(seen[results++], message + places[p], sizeof mine);
      kept |= !memcmp(chain, message + places[p], sizeof mine);
      free(message);
    }
  }
  if (rank == 0)
    printf("%s, %d ranks, %d messages: %d results, the chain's %s\n", version, ranks, messages, results,
           kept ? "among them" : "not among them");
  MPI_Finalize();
}
