// The gradient of a layer's weights: the derivative of the loss by each output (delta) times each input, summed over
// the batch. All matrices are stored by rows; the grid has one row of blocks for each row of the gradient.
//
// gradient.ptx is this file compiled by clang, which needs nothing from NVIDIA:
//
//	clang-16 -x cuda -nocudainc -nocudalib --cuda-device-only --cuda-gpu-arch=sm_80 -O3 -S gradient.cu -o gradient.ptx
extern "C" __attribute__((global)) void weight_gradient(float *gradient, const float *delta, const float *input,
                                                        unsigned long long batch, unsigned long long width) {
  unsigned row = __nvvm_read_ptx_sreg_ctaid_y();
  unsigned column = __nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
  if (column >= width) return;
  float sum = 0;
  for (unsigned long long b = 0; b < batch; b++) sum += delta[b * width + row] * input[b * width + column];
  gradient[row * width + column] = sum;
}
