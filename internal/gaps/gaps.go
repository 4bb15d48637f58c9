// Package gaps codes ascending indices as the gaps between them: blocks of Rice codes, whose low bits
// and quotients lie apart, so that a block can be decoded by several threads. The format is
// described at [github.com/tutti-go/tutti/runtime.Codec].
package gaps

import (
	"encoding/binary"
	"math/bits"
)

// Header says how a block is coded.
type Header uint16

const (
	lowMask     = 31
	cappedFlag  = 1 << 5
	quotients   = 6 // shift of the number of bytes of quotients
	maxQuotient = 1<<(16-quotients) - 1
	cap8        = 8 // what larger quotients are written as
)

func (h Header) split() (k uint, capped bool, u int) {
	return uint(h & lowMask), h&cappedFlag != 0, int(h >> quotients)
}

// Bytes returns the length of a block with that many entries.
func (h Header) Bytes(count int) int {
	k, _, u := h.split()
	return (count*int(k)+7)/8 + u
}

// Of stores the gaps before the indices; before is the index before the first one. Gaps are modulo 2^31.
func Of(gaps []uint32, idx []int32, before int32) {
	gaps = gaps[:len(idx)]
	for i, x := range idx {
		gaps[i] = uint32(x-before-1) & (1<<31 - 1)
		before = x
	}
}

// Choose returns the header with which gaps, at least one, take the least room, as described at
// runtime.RiceParameter.
func Choose(gaps []uint32) Header {
	var sum uint64
	var or uint32
	for _, g := range gaps {
		sum += uint64(g)
		or |= g
	}
	start := uint(max(bits.Len64(sum/uint64(len(gaps)))-1, 0))
	k := start
	best, flag := cost(gaps, k)
	better := func(try uint) bool {
		c, f := cost(gaps, try)
		if c >= best {
			return false
		}
		k, best, flag = try, c, f
		return true
	}
	for k > 0 && better(k-1) {
	}
	for k >= start && k < 30 && better(k+1) {
	}
	unary := (best - len(gaps)*int(k) + 7) / 8
	if fixed := bits.Len32(or); (len(gaps)*fixed+7)/8 <= (len(gaps)*int(k)+7)/8+unary {
		return Header(fixed)
	}
	return Header(k) | flag | Header(unary<<quotients)
}

// cost returns the length of a block in bits, without filling, and whether quotients are capped.
func cost(gaps []uint32, k uint) (int, Header) {
	plain, capped := len(gaps), len(gaps)
	for _, g := range gaps {
		q := int(g >> k)
		plain += q
		if q >= cap8 {
			q = cap8 + 2*bits.Len(uint(q-cap8+1)) - 1
		}
		capped += q
	}
	flag := Header(0)
	if capped < plain {
		plain, flag = capped, cappedFlag
	}
	if plain > 8*maxQuotient {
		plain = 1 << 40
	}
	return plain + len(gaps)*int(k), flag
}

// Encode writes a block to dst, which has h.Bytes(len(gaps)) bytes. h is what Choose returned.
func Encode(dst []byte, gaps []uint32, h Header) {
	clear(dst)
	k, capped, u := h.split()
	w := writer{dst: dst}
	for _, g := range gaps {
		w.put(uint64(g)&(1<<k-1), k)
	}
	if u == 0 {
		return
	}
	w.at = (w.at + 7) &^ 7
	for _, g := range gaps {
		q := uint(g >> k)
		if capped {
			q = min(q, cap8)
		}
		w.at += q
		w.put(1, 1)
	}
	if !capped {
		return
	}
	for _, g := range gaps {
		if q := uint64(g >> k); q >= cap8 {
			x := q - cap8 + 1
			n := uint(bits.Len64(x) - 1)
			w.at += n
			w.put(1, 1)
			w.put(x&^(1<<n), n)
		}
	}
}

// writer writes bits to zeros.
type writer struct {
	dst []byte
	at  uint
}

// put writes the n bits of v.
func (w *writer) put(v uint64, n uint) {
	v <<= w.at % 8
	for i := w.at / 8; v != 0; i++ {
		w.dst[i] |= byte(v)
		v >>= 8
	}
	w.at += n
}

// Decode writes the first indices of a block of count entries, which src begins with; next is the least
// index that the first one may have. Whatever the block holds, no more than src is read.
func Decode(idx []int32, count int, src []byte, h Header, next int32) {
	k, capped, u := h.split()
	low := reader{src: src}
	start := min((count*int(k)+7)/8, len(src))
	high := reader{src: src[start:min(start+u, len(src))]}
	large := high
	if capped {
		for range count {
			large.zeros()
		}
	}
	for i := range idx {
		gap := uint32(low.take(k))
		if u > 0 {
			q := high.zeros()
			if capped && q == cap8 {
				n := large.zeros()
				q = uint(1<<n|large.take(n)) + cap8 - 1
			}
			gap |= uint32(q << k)
		}
		next += int32(gap)
		idx[i] = next
		next++
	}
}

// reader reads bits; there are zeros behind the end.
type reader struct {
	src []byte
	at  uint
}

func (r *reader) word() uint64 {
	var b [8]byte
	if i := r.at / 8; i < uint(len(r.src)) {
		copy(b[:], r.src[i:])
	}
	return binary.LittleEndian.Uint64(b[:]) >> (r.at % 8)
}

// take returns the next n bits, at most 31 (of more, some are lost).
func (r *reader) take(n uint) uint64 {
	v := r.word() & (1<<n - 1)
	r.at += n
	return v
}

// zeros returns how many zeros come before the next one, and reads that too. At the end there are none.
func (r *reader) zeros() (n uint) {
	for r.at < uint(8*len(r.src)) {
		w := r.word()
		if w != 0 {
			z := uint(bits.TrailingZeros64(w))
			r.at += z + 1
			return n + z
		}
		skip := 64 - r.at%8
		n, r.at = n+skip, r.at+skip
	}
	return 0
}
