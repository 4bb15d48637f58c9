/* Runs the kernels of kernels/ on the host, for the stand-in for the driver, as runtime/cuda/testdata/emulator.cpp does. */
#define EMULATOR "../testdata/emulator.h"
#include "../kernels/delta.cu"

#define KERNELS \
  K(diff_1), K(diff_2), K(diff_4), K(diff_8), K(patch_1), K(patch_2), K(patch_4), K(patch_8),
#include "../../runtime/cuda/testdata/table.h"
