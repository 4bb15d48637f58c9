// Package exponents codes elements of two or four bytes, such as floats, in which the eight bits after the sign have
// few different values: it codes these by a prefix code (Huffman's), and stores the others unchanged. A bf16 weight
// takes 10.7 bits, since the exponents of a layer's weights have an entropy of 2.6 bits.
//
// Elements are coded in chunks of [Chunk]; the last one may be shorter. A chunk is a byte for its kind, and
//
//   - kind 0: the unchanged elements;
//   - kind 1: the low bytes of each element; the lowest and the highest exponent (bytes); and, unless they are the
//     same, the lengths of the codes from the lowest to the highest (4 bits each, the first one in the low bits, 0 if
//     there is no code), the lengths of the first three of four streams in bytes (32 bits each), and the streams.
//
// An exponent here is the highest byte of an element that is rotated by one bit to the left; the others are its low
// bytes. Stream i has the exponents from i*q on, at most q of them, where q is a quarter of the chunk's elements,
// rounded up. Codes are canonical: codes of the same length ascend with their exponents, and a longer code is above a
// shorter one. A code is stored from its first bit on, from the lowest bit of a byte on. No code is longer than 11
// bits, and each sequence of bits begins with a code. Unused bits in a stream's last byte are 0. Integers are
// little-endian.
package exponents

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync"
)

// Chunk is the number of elements of a chunk.
const Chunk = 1 << 17

// ErrDamaged means that no encoder wrote this code.
var ErrDamaged = errors.New("not a code of exponents")

// Kinds of chunks.
const (
	kindStored = iota
	kindCoded
)

const (
	streams   = 4
	headBytes = 4 * (streams - 1) // the lengths of all streams except the last
	wordBytes = 8
)

// coder is the scratch memory for a chunk.
type coder struct {
	exponents [Chunk]byte // of a chunk
	counts    [256]int    // of each exponent
	code      prefixCode  // of the chunk
	table     table       // for decoding
}

var coders = sync.Pool{New: func() any { return new(coder) }}

// Supports reports whether elements of this many bytes can be coded.
func Supports(size int) bool { return size == 2 || size == 4 }

// Longest returns the maximum length of the code of this many bytes.
func Longest(bytes, size int) int {
	chunk := Chunk * size
	return bytes + (bytes+chunk-1)/chunk
}

// Append appends the code of elements of that size to dst.
func Append(dst, data []byte, size int) []byte {
	c := coders.Get().(*coder)
	defer coders.Put(c)
	for len(data) > 0 {
		n := min(len(data), Chunk*size)
		dst = c.appendChunk(dst, data[:n], size)
		data = data[n:]
	}
	return dst
}

// appendChunk appends the code of a chunk, or the unchanged chunk if that is not longer.
func (c *coder) appendChunk(dst, data []byte, size int) []byte {
	n := len(data) / size
	exponents := c.exponents[:n]
	start := len(dst)
	dst = slices.Grow(append(dst, kindCoded), n*(size-1))
	low := dst[len(dst) : len(dst)+n*(size-1)]
	split(exponents, low, data, size)
	count(&c.counts, exponents)
	c.code.fit(&c.counts)
	if length := len(low) + c.code.bytes(&c.counts); length >= len(data) {
		dst = append(dst[:start], kindStored)
		return append(dst, data...)
	}
	dst = dst[:len(dst)+len(low)]
	dst = c.code.appendLengths(dst)
	if c.code.single() {
		return dst
	}
	head := len(dst)
	dst = append(dst, make([]byte, headBytes)...)
	quarter := (n + streams - 1) / streams
	for i := range streams {
		from := len(dst)
		dst = c.code.appendStream(dst, exponents[min(i*quarter, n):min((i+1)*quarter, n)])
		if i < streams-1 {
			binary.LittleEndian.PutUint32(dst[head+4*i:], uint32(len(dst)-from))
		}
	}
	return dst
}

// Decode sets data to the elements of this size whose code is code, all of it.
func Decode(data, code []byte, size int) error {
	c := coders.Get().(*coder)
	defer coders.Put(c)
	for len(data) > 0 {
		n := min(len(data), Chunk*size)
		var err error
		code, err = c.decodeChunk(data[:n], code, size)
		if err != nil {
			return err
		}
		data = data[n:]
	}
	if len(code) > 0 {
		return ErrDamaged
	}
	return nil
}

// decodeChunk decodes a chunk, and returns the rest.
func (c *coder) decodeChunk(data, code []byte, size int) ([]byte, error) {
	if len(code) == 0 {
		return nil, ErrDamaged
	}
	kind := code[0]
	code = code[1:]
	if kind == kindStored && len(code) >= len(data) {
		copy(data, code)
		return code[len(data):], nil
	}
	if kind != kindCoded {
		return nil, ErrDamaged
	}
	n := len(data) / size
	if len(code) < n*(size-1) {
		return nil, ErrDamaged
	}
	low := code[:n*(size-1)]
	code, err := c.code.readLengths(code[len(low):])
	if err != nil {
		return nil, err
	}
	exponents := c.exponents[:n]
	if c.code.single() {
		fill(exponents, c.code.lowest)
	} else if code, err = c.decodeStreams(exponents, code); err != nil {
		return nil, err
	}
	merge(data, exponents, low, size)
	return code, nil
}

func fill(to []byte, b byte) {
	for i := range to {
		to[i] = b
	}
}

// decodeStreams decodes the exponents of a chunk, and returns the data after their streams.
func (c *coder) decodeStreams(exponents, code []byte) ([]byte, error) {
	if len(code) < headBytes {
		return nil, ErrDamaged
	}
	n := len(exponents)
	quarter := (n + streams - 1) / streams
	var all [streams]stream
	var ends [streams - 1]int // bytes
	begin := headBytes
	for i := range all {
		all[i] = stream{
			bit:  8 * begin,
			next: min(i*quarter, n),
			end:  min((i+1)*quarter, n),
		}
		if i < len(ends) {
			length := binary.LittleEndian.Uint32(code[4*i:])
			if uint64(length) > uint64(len(code)-begin) {
				return nil, ErrDamaged
			}
			begin += int(length)
			ends[i] = begin
		}
	}
	c.table.fill(&c.code)
	// Rounds of different streams are independent.
	for c.table.round(&all[0], exponents, code) && c.table.round(&all[1], exponents, code) &&
		c.table.round(&all[2], exponents, code) && c.table.round(&all[3], exponents, code) {
	}
	end := 0
	for i := range all {
		s := &all[i]
		for c.table.round(s, exponents, code) {
		}
		c.table.finish(&c.code, s, exponents, code)
		end = (s.bit + 7) / 8
		if end > len(code) || i < len(ends) && end != ends[i] {
			return nil, ErrDamaged
		}
		if s.bit%8 != 0 && code[end-1]>>(s.bit%8) != 0 {
			return nil, ErrDamaged
		}
	}
	return code[end:], nil
}
