// Package simd says which vector instructions the assembly of this module may use and how large the processor's cache
// is, and contains the generators of that assembly.
//
// Packages with assembly (internal/convert, internal/fixedpoint, internal/gaps, internal/hostops,
// runtime/cpu/internal/f32 and quant) have every function in Go as well. Both give the same bits, except for the
// payload and sign of a NaN that an addition, multiplication or division produces, which depend on the processor.
//
// The generators are in a separate module, gen, so that users of this module do not inherit their dependencies.
package simd

//go:generate env GOWORK=off go run -C gen ./arith -of cpuid -out ../cpuid_amd64.s -stubs ../cpuid_amd64.go -pkg simd

// AVX2 reports whether the processor has AVX2, BMI2 and F16C, on which all assembly of this module relies. It is set
// when the program starts; only tests change it.
var AVX2 = detect()

// Cache is the size of the processor's last-level cache in bytes, 0 if unknown. A hypervisor may make it the size for
// the whole machine.
var Cache = largestCache()

// Chunk is the number of bytes of each buffer that one call of a kernel handles. Assembly cannot be preempted. A chunk
// takes some ten microseconds, so the garbage collector does not wait long.
const Chunk = 256 << 10
