// Rank 0 of a job whose other rank is a Go program of this package's tests: an
// MPI program that knows nothing of it. It returns the number of wrong results.
#include <mpi.h>
#include <stdio.h>

enum { count = 1000, tag_to_go = 11, tag_from_go = 22 };

static int wrong;

static void expect(const char *what, int i, double got, double want) {
  if (got == want) return;
  if (wrong++ == 0) printf("C: %s[%d] is %g, want %g\n", what, i, got, want);
}

int main(int argc, char **argv) {
  int provided, rank, size;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  expect("rank", 0, rank, 0);
  expect("size", 0, size, 2);

  static float in[count], sum[count];
  for (int i = 0; i < count; i++) in[i] = i;
  MPI_Request request;
  MPI_Iallreduce(in, sum, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  for (int i = 0; i < count; i++) expect("allreduce", i, sum[i], 3 * i);

  static long long numbers[count];
  for (int i = 0; i < count; i++) numbers[i] = 7LL * i - (1LL << 40);
  MPI_Send(numbers, count, MPI_INT64_T, 1, tag_to_go, MPI_COMM_WORLD);

  static double back[count];
  MPI_Status status;
  int received;
  MPI_Recv(back, count, MPI_DOUBLE, 1, tag_from_go, MPI_COMM_WORLD, &status);
  MPI_Get_count(&status, MPI_DOUBLE, &received);
  expect("received", 0, received, count);
  for (int i = 0; i < count; i++) expect("message", i, back[i], i / 4.0);

  MPI_Finalize();
  return wrong != 0;
}
