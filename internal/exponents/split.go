package exponents

import (
	"encoding/binary"
	"math/bits"
)

// Four elements of two bytes are handled at a time, in a word.
const (
	lowBits  = 0x0001_0001_0001_0001
	lowBytes = 0x00ff_00ff_00ff_00ff
)

// squeeze returns the low bytes of four elements.
func squeeze(word uint64) uint32 {
	word &= lowBytes
	word = (word | word>>8) & 0x0000_ffff_0000_ffff
	return uint32(word | word>>16)
}

// spread is the inverse of squeeze.
func spread(four uint32) uint64 {
	word := uint64(four)
	word = (word | word<<16) & 0x0000_ffff_0000_ffff
	return (word | word<<8) & lowBytes
}

// split sets the exponents of elements, and their low bytes.
func split(exponents, low, data []byte, size int) {
	if size == 4 {
		for i := range exponents {
			x := bits.RotateLeft32(binary.LittleEndian.Uint32(data[4*i:]), 1)
			exponents[i] = byte(x >> 24)
			three := low[3*i : 3*i+3]
			three[0] = byte(x)
			three[1] = byte(x >> 8)
			three[2] = byte(x >> 16)
		}
		return
	}
	for ; len(exponents) >= 8 && len(low) >= 8 && len(data) >= 16; exponents = exponents[8:] {
		first := binary.LittleEndian.Uint64(data)
		second := binary.LittleEndian.Uint64(data[8:])
		binary.LittleEndian.PutUint64(exponents, uint64(squeeze(first>>7))|uint64(squeeze(second>>7))<<32)
		binary.LittleEndian.PutUint64(low, uint64(squeeze(turn(first)))|uint64(squeeze(turn(second)))<<32)
		low = low[8:]
		data = data[16:]
	}
	for i := range exponents {
		x := bits.RotateLeft16(binary.LittleEndian.Uint16(data[2*i:]), 1)
		exponents[i] = byte(x >> 8)
		low[i] = byte(x)
	}
}

// turn rotates the low bytes of four elements as the elements are rotated: the sign becomes the lowest bit.
func turn(word uint64) uint64 { return word<<1&^lowBits | word>>15&lowBits }

// merge sets data to the elements with these exponents and low bytes.
func merge(data, exponents, low []byte, size int) {
	if size == 4 {
		for i, exponent := range exponents {
			three := low[3*i : 3*i+3]
			x := uint32(three[0]) | uint32(three[1])<<8 | uint32(three[2])<<16 | uint32(exponent)<<24
			binary.LittleEndian.PutUint32(data[4*i:], bits.RotateLeft32(x, -1))
		}
		return
	}
	for ; len(exponents) >= 4 && len(low) >= 4 && len(data) >= 8; exponents = exponents[4:] {
		word := spread(binary.LittleEndian.Uint32(exponents))<<8 | spread(binary.LittleEndian.Uint32(low))
		word = word>>1&^(lowBits<<15) | word&lowBits<<15
		binary.LittleEndian.PutUint64(data, word)
		low = low[4:]
		data = data[8:]
	}
	for i, exponent := range exponents {
		x := uint16(low[i]) | uint16(exponent)<<8
		binary.LittleEndian.PutUint16(data[2*i:], bits.RotateLeft16(x, -1))
	}
}

// count counts the exponents.
func count(counts *[256]int, exponents []byte) {
	var parts [4][256]uint32 // avoids waiting for the count of a repeated exponent
	for ; len(exponents) >= 8; exponents = exponents[8:] {
		eight := binary.LittleEndian.Uint64(exponents)
		parts[0][byte(eight)]++
		parts[1][byte(eight>>8)]++
		parts[2][byte(eight>>16)]++
		parts[3][byte(eight>>24)]++
		parts[0][byte(eight>>32)]++
		parts[1][byte(eight>>40)]++
		parts[2][byte(eight>>48)]++
		parts[3][byte(eight>>56)]++
	}
	for _, exponent := range exponents {
		parts[0][exponent]++
	}
	for i := range counts {
		counts[i] = int(parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i])
	}
}
