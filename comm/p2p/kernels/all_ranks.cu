// The same kernels for tests on one GPU: all ranks in one launch.
#define ALL_RANKS
#include "p2p.cu"
