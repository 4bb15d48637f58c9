// Package simd holds the element arithmetic of the host: reductions over
// buffers, conversions between 16-bit floats and float32, and copies.
//
// Every function has a portable implementation in Go. On amd64 processors with
// AVX2 and F16C it is replaced, once, when the program starts, by assembly
// that the programs in gen write. Both give the same bits, except that the
// payload and sign of a NaN that an addition, multiplication or division
// produces are the processor's.
//
// The generators live in a module of their own, so that users of this module
// do not inherit the tool that they are written with.
package simd

//go:generate env GOWORK=off go run -C gen ./arith -out ../arith_amd64.s -stubs ../arith_amd64.go -dispatch ../dispatch_amd64.go -pkg simd
