// Package crc updates the CRC-32C of a block from the changes in it, without reading the rest of the block.
//
// A CRC is a remainder of polynomials over bits, and so is linear: an element that changes in some bits changes the
// CRC by these bits times a power of x that depends on its distance from the end. The GPU kernels do the same
// (delta.cu).
package crc

import (
	"hash/crc32"
	"sync"
)

const (
	windowBytes = 2048 // bytes that a table of powers spans
	costly      = 32   // bytes of a block that can be read in the time of one changed element
)

// Change returns the XOR of a block's old and new CRC-32C. The block has this many bytes, and its elements of size
// bytes change in the given bits: those at positions idx, which ascend strictly. Elements outside the block do not
// count. It returns false if reading the block is faster, or if the processor lacks the instructions.
func Change(idx []int32, bits []byte, size, bytes int) (difference uint32, ok bool) {
	if len(idx) == 0 {
		return 0, true
	}
	if len(idx) > bytes/costly {
		return 0, false
	}
	return change(idx, bits[:len(idx)*size], size, bytes)
}

// constants are powers of x modulo the polynomial of CRC-32C. Bit 31 is the coefficient of 1.
type constants struct {
	// powers has, at e, the factor of an element that begins e bytes before the last byte of its window:
	// x^(8(e+1)-33). A carryless product of mirrored numbers lacks a factor of x, and its CRC has one of x^32.
	powers [windowBytes]uint32
	step   uint32 // likewise, for all bytes of a window
}

var tables = sync.OnceValue(func() *constants {
	t := new(constants)
	power := uint32(1 << 31)
	for range 33 - 8 {
		power = overX(power)
	}
	for e := range t.powers {
		t.powers[e] = power
		t.step = power
		for range 8 {
			power = timesX(power)
		}
	}
	return t
})

// timesX returns a times x.
func timesX(a uint32) uint32 { return a>>1 ^ -(a&1)&crc32.Castagnoli }

// overX returns a divided by x.
func overX(a uint32) uint32 {
	top := a >> 31 // set if timesX has subtracted the polynomial
	return (a^-top&crc32.Castagnoli)<<1 | top
}
