// Element types and their reductions, sixteen bytes at a time, with the semantics of internal/simd. Narrow floats are
// combined as float32 and rounded once. Integers wrap around. Minimum and maximum follow IEEE 754-2019. A truth value
// is 0 or 1.
//
// No result depends on which NaN an operand is. Additions and multiplications return the hardware's canonical NaN;
// minimum and maximum return a NaN with only the quiet bit set. A sender may therefore replace one NaN by another.
#pragma once
#include "tutti.cuh"

// Sixteen bytes of a buffer.
struct alignas(16) pack { u32 word[4]; };

// The operations of a reduction. Must match package internal/elements.
enum reduction : u32 { sum, product, minimum, maximum, average, signed_minimum, signed_maximum, any, all };

// Tests the bits: compilers treat all NaNs as equal, and otherwise choose an instruction that returns the hardware's.
DEVICE bool is_nan(float x) { return (__builtin_bit_cast(u32, x) & 0x7fffffff) > 0x7f800000; }
DEVICE bool is_nan(double x) { return (__builtin_bit_cast(u64, x) & ~0ull >> 1) > 0x7ffull << 52; }
#ifdef EMULATOR
template <typename T> DEVICE T quiet(bool nan, T x) { return nan ? (T)__builtin_nan("") : x; }
template <typename T> DEVICE T first_of(T a, T b) { return a < b || a == b && __builtin_signbit(a) ? a : b; }
DEVICE float lesser(float a, float b) { return quiet(is_nan(a) || is_nan(b), first_of(a, b)); }
DEVICE double lesser(double a, double b) { return quiet(is_nan(a) || is_nan(b), first_of(a, b)); }
DEVICE float greater(float a, float b) { return quiet(is_nan(a) || is_nan(b), -first_of(-a, -b)); }
DEVICE double greater(double a, double b) { return quiet(is_nan(a) || is_nan(b), -first_of(-a, -b)); }
template <typename T> DEVICE T quotient(T a, T b) { return a / b; }
DEVICE float times(float a, float b) { return a * b; }
#else
DEVICE float quiet(bool nan, float x) {
  float r;
  asm("{ .reg .pred p; setp.ne.u32 p, %2, 0; selp.b32 %0, 0x7fc00000, %1, p; }" : "=f"(r) : "f"(x), "r"((u32)nan));
  return r;
}
DEVICE double quiet(bool nan, double x) {
  double r;
  asm("{ .reg .pred p; setp.ne.u32 p, %2, 0; selp.b64 %0, 0x7ff8000000000000, %1, p; }" : "=d"(r) : "d"(x), "r"((u32)nan));
  return r;
}

// PTX orders -0 below +0.
DEVICE float lesser(float a, float b) {
  float r;
  asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return quiet(is_nan(a) || is_nan(b), r);
}
DEVICE float greater(float a, float b) {
  float r;
  asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return quiet(is_nan(a) || is_nan(b), r);
}
DEVICE double lesser(double a, double b) {
  double r;
  asm("min.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));
  return quiet(is_nan(a) || is_nan(b), r);
}
DEVICE double greater(double a, double b) {
  double r;
  asm("max.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));
  return quiet(is_nan(a) || is_nan(b), r);
}
// The quotient. A compiler may otherwise insert a division by one, which changes a NaN.
DEVICE float quotient(float a, float b) {
  float r;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// The product, rounded before it is added to anything.
DEVICE float times(float a, float b) {
  float r;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
DEVICE double quotient(double a, double b) {
  double r;
  asm("div.rn.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));
  return r;
}
#endif
template <typename T> DEVICE T lesser(T a, T b) { return a < b ? a : b; }
template <typename T> DEVICE T greater(T a, T b) { return a > b ? a : b; }

// Arithmetic on float64 preserves the payload of a NaN.
DEVICE float single_nan(float x) { return x; }
DEVICE double single_nan(double x) { return quiet(is_nan(x), x); }

// combine returns a op b for floating point.
template <typename A> DEVICE A combine_floats(u32 op, A a, A b) {
  switch (op) {
  case product: return single_nan(a * b);
  case minimum: return lesser(a, b);
  case maximum: return greater(a, b);
  }
  return single_nan(a + b);
}

// combine returns a op b for integers. A is unsigned, and S is its signed counterpart. Elements occupy the upper bits
// of A, so that they wrap around as the narrow type does.
template <typename A, typename S> DEVICE A combine_integers(u32 op, A a, A b) {
  switch (op) {
  case minimum: return lesser(a, b);
  case maximum: return greater(a, b);
  case signed_minimum: return (A)lesser((S)a, (S)b);
  case signed_maximum: return (A)greater((S)a, (S)b);
  }
  return a + b;
}

// An 8-bit format: its mantissa bits, its bias, and the bit patterns of the largest number and of infinity (0 if the
// format has none).
template <u32 mantissa, u32 bias, u32 largest, u32 infinity> struct minifloat {
  static const u32 shift = 23 - mantissa;
  DEVICE float decode(u32 pattern) {
    u32 sign = (pattern & 0x80) << 24, magnitude = pattern & 0x7f;
    // Shifted to their places in float32, the fields are the number, normal or subnormal, except for the bias of the
    // exponent.
    u32 moved = magnitude << shift;
    if (magnitude <= largest)
      moved = __builtin_bit_cast(u32, __builtin_bit_cast(float, moved) * __builtin_bit_cast(float, (254 - bias) << 23));
    else
      moved = magnitude == infinity ? 0x7f800000 : moved | 0x7fc00000;
    return __builtin_bit_cast(float, sign | moved);
  }
  DEVICE u32 encode(float v, u32 nan, u32 limit) {
    u32 bits = __builtin_bit_cast(u32, v), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | nan | (magnitude >> shift & ((1 << mantissa) - 1));
    magnitude = magnitude < limit ? magnitude : limit; // saturates
    const u32 rebias = (127 - bias) << 23;
    if (magnitude < rebias + (1 << 23)) {
      // Subnormal: the addition rounds, because one unit in the last place of this power of two equals one unit of the
      // subnormals.
      const u32 magic = (128 - bias + shift) << 23;
      float rounded = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, magic);
      return sign | (__builtin_bit_cast(u32, rounded) - magic);
    }
    u32 odd = magnitude >> shift & 1;
    return sign | ((magnitude - rebias + (1u << (shift - 1)) - 1 + odd) >> shift);
  }
};
typedef minifloat<3, 7, 0x7e, 0> e4m3_format;
typedef minifloat<2, 15, 0x7b, 0x7c> e5m2_format;

// The element types. A is the type that elements are combined in; get and put access a lane of a pack. Lane numbers
// are constants once the loops over them are unrolled.
template <u32 size> DEVICE u32 bits_of(const pack &p, u32 lane) {
  const u32 per = 4 / size;
  return per == 1 ? p.word[lane] : p.word[lane / per] >> (lane % per * 8 * size) & ((1ull << 8 * size) - 1);
}
template <u32 size> DEVICE void set_bits(pack &p, u32 lane, u32 bits) {
  const u32 per = 4 / size;
  if (lane % per == 0) p.word[lane / per] = 0;
  p.word[lane / per] |= bits << (lane % per * 8 * size);
}
DEVICE u64 bits64_of(const pack &p, u32 lane) { return (u64)p.word[2 * lane + 1] << 32 | p.word[2 * lane]; }
DEVICE void set_bits64(pack &p, u32 lane, u64 bits) {
  p.word[2 * lane] = (u32)bits, p.word[2 * lane + 1] = (u32)(bits >> 32);
}

template <typename A, u32 bytes> struct floating {
  typedef A accumulator;
  static const u32 size = bytes;
  DEVICE A combine(u32 op, A a, A b) { return combine_floats(op, a, b); }
  DEVICE A divide(A a, u32 ranks) { return single_nan(quotient(a, (A)ranks)); }
};
struct f64_element : floating<double, 8> {
  DEVICE double get(const pack &p, u32 lane) { return __builtin_bit_cast(double, bits64_of(p, lane)); }
  DEVICE void put(pack &p, u32 lane, double v) { set_bits64(p, lane, __builtin_bit_cast(u64, v)); }
};
struct f32_element : floating<float, 4> {
  DEVICE float get(const pack &p, u32 lane) { return __builtin_bit_cast(float, p.word[lane]); }
  DEVICE void put(pack &p, u32 lane, float v) { p.word[lane] = __builtin_bit_cast(u32, v); }
};
// The hardware's conversions return the canonical NaN. As on the host, the upper bits of the payload are kept.
struct f16_element : floating<float, 2> {
  DEVICE float get(const pack &p, u32 lane) { return f16_to_f32((u16)bits_of<2>(p, lane)); }
  DEVICE void put(pack &p, u32 lane, float v) {
    u32 bits = __builtin_bit_cast(u32, v);
    set_bits<2>(p, lane, is_nan(v) ? bits >> 16 & 0x8000 | 0x7e00 | bits >> 13 & 0x3ff : f32_to_f16(v));
  }
};
struct bf16_element : floating<float, 2> {
  DEVICE float get(const pack &p, u32 lane) { return bf16_to_f32((u16)bits_of<2>(p, lane)); }
  DEVICE void put(pack &p, u32 lane, float v) {
    set_bits<2>(p, lane, is_nan(v) ? __builtin_bit_cast(u32, v) >> 16 | 0x40 : f32_to_bf16(v));
  }
};
struct e4m3_element : floating<float, 1> {
  DEVICE float get(const pack &p, u32 lane) { return e4m3_format::decode(bits_of<1>(p, lane)); }
  DEVICE void put(pack &p, u32 lane, float v) { set_bits<1>(p, lane, e4m3_format::encode(v, 0x7f, 0x43e00000)); }
};
struct e5m2_element : floating<float, 1> {
  DEVICE float get(const pack &p, u32 lane) { return e5m2_format::decode(bits_of<1>(p, lane)); }
  DEVICE void put(pack &p, u32 lane, float v) { set_bits<1>(p, lane, e5m2_format::encode(v, 0x7e, 0x47600000)); }
};

// Integers narrower than 32 bits occupy the upper bits of a word, so that they wrap around and compare in their own
// type.
struct i64_element {
  typedef u64 accumulator;
  static const u32 size = 8;
  DEVICE u64 get(const pack &p, u32 lane) { return bits64_of(p, lane); }
  DEVICE void put(pack &p, u32 lane, u64 v) { set_bits64(p, lane, v); }
  DEVICE u64 combine(u32 op, u64 a, u64 b) { return op == product ? a * b : combine_integers<u64, i64>(op, a, b); }
  DEVICE u64 divide(u64 a, u32) { return a; }
};
template <u32 bytes> struct narrow_integer {
  typedef u32 accumulator;
  static const u32 size = bytes, above = 32 - 8 * bytes;
  DEVICE u32 get(const pack &p, u32 lane) { return bits_of<bytes>(p, lane) << above; }
  DEVICE void put(pack &p, u32 lane, u32 v) { set_bits<bytes>(p, lane, v >> above); }
  DEVICE u32 combine(u32 op, u32 a, u32 b) {
    switch (op) {
    case product: return a * (b >> above);
    case any: return (u32)(a != 0 || b != 0) << above;
    case all: return (u32)(a != 0 && b != 0) << above;
    }
    return combine_integers<u32, int>(op, a, b);
  }
  DEVICE u32 divide(u32 a, u32) { return a; }
};
typedef narrow_integer<4> i32_element;
typedef narrow_integer<2> i16_element;
typedef narrow_integer<1> i8_element;

// lanes holds the elements of a pack in the type that they are combined in.
template <typename T> struct lanes {
  static const u32 count = 16 / T::size;
  typename T::accumulator lane[count];
};
template <typename T> DEVICE lanes<T> widen(const pack &p) {
  lanes<T> v;
#pragma unroll
  for (u32 l = 0; l < lanes<T>::count; l++) v.lane[l] = T::get(p, l);
  return v;
}
template <typename T> DEVICE void combine(u32 op, lanes<T> &a, const pack &b) {
#pragma unroll
  for (u32 l = 0; l < lanes<T>::count; l++) a.lane[l] = T::combine(op, a.lane[l], T::get(b, l));
}
template <typename T> DEVICE pack finish(u32 op, lanes<T> a, u32 ranks) {
  if (op == average) {
#pragma unroll
    for (u32 l = 0; l < lanes<T>::count; l++) a.lane[l] = T::divide(a.lane[l], ranks);
  }
  pack p;
#pragma unroll
  for (u32 l = 0; l < lanes<T>::count; l++) T::put(p, l, a.lane[l]);
  return p;
}

DEVICE u64 least(u64 a, u64 b) { return a < b ? a : b; }

// Whether packs are whole and aligned, as most are.
struct whole { static const bool value = true; };
struct ragged { static const bool value = false; };

// The pack at p, of which `left` bytes exist.
template <typename S> DEVICE pack read(const char *p, u64 left, S) {
  if constexpr (S::value) return *(const pack *)p;
  const u32 *word = (const u32 *)p;
  if (left >= 16 && ((u64)p & 3) == 0) return {{word[0], word[1], word[2], word[3]}};
  u64 low = 0, high = 0;
#pragma unroll 1
  for (u32 i = (u32)least(left, 16); i-- > 0;) high = high << 8 | low >> 56, low = low << 8 | ((const u8 *)p)[i];
  return {{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)}};
}
template <typename S> DEVICE void write(char *p, u64 left, const pack &v, S) {
  if constexpr (S::value) {
    *(pack *)p = v;
  } else if (left >= 16 && ((u64)p & 3) == 0) {
    u32 *word = (u32 *)p;
    word[0] = v.word[0], word[1] = v.word[1], word[2] = v.word[2], word[3] = v.word[3];
  } else {
    u64 low = bits64_of(v, 0), high = bits64_of(v, 1);
#pragma unroll 1
    for (u32 i = 0; i < (u32)least(left, 16); i++) ((u8 *)p)[i] = (u8)low, low = low >> 8 | high << 56, high >>= 8;
  }
}

// Visits packs first to last, every step-th for a thread. Packs below middle are whole and are visited by fast(i), U
// at a time; slow(i) visits each other one.
template <u32 U, typename F, typename G> DEVICE void go_through(u64 first, u64 middle, u64 last, u64 step, F fast, G slow) {
  u64 i = first;
  for (; i < middle; i += U * step) fast(i);
  while (i >= first + step && i - step >= middle) i -= step;
#pragma unroll 1
  for (; i < last; i += step) slow(i);
}
