// What the kernels need of CUDA, spelled with clang's builtins: the PTX is
// compiled by clang from Debian main, without NVIDIA's headers or libraries.
#pragma once

#define KERNEL extern "C" __attribute__((global)) void
#define DEVICE static inline __attribute__((device)) __attribute__((always_inline))

#define SHARED __attribute__((shared))

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2, "type sizes");

// The global thread index and the number of threads of a one-dimensional grid.
DEVICE u64 thread_index() {
  return (u64)__nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
}
DEVICE u64 thread_count() {
  return (u64)__nvvm_read_ptx_sreg_nctaid_x() * __nvvm_read_ptx_sreg_ntid_x();
}

// Waits until all threads of the block are here, and what they wrote shows.
DEVICE void barrier() { __syncthreads(); }

// The 16-bit floats by their bits, each a type of its own.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

// Conversions of the 16-bit floats, round to nearest even, as one PTX
// instruction each (bf16 widens by a shift).
DEVICE float f16_to_f32(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
DEVICE u16 f32_to_f16(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEVICE float bf16_to_f32(u16 h) {
  u32 bits = (u32)h << 16;
  return __builtin_bit_cast(float, bits);
}
DEVICE u16 f32_to_bf16(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
