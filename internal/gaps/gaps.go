// Package gaps codes ascending indices as the gaps between them: blocks of Rice codes. Low bits and quotients are
// stored separately, so that several threads can decode a block. [github.com/tutti-go/tutti/kernel.Codec] describes
// the format.
package gaps

import (
	"encoding/binary"
	"math/bits"
)

// Block is the maximum number of entries of a block.
const Block = 1024

// Header describes the coding of a block.
type Header uint16

const (
	lowMask     = 31
	cappedFlag  = 1 << 5
	quotients   = 6 // shift of the number of bytes of quotients
	maxQuotient = 1<<(16-quotients) - 1
	capAt       = 8  // quotients from this value on are stored separately
	capFrom     = 32 // the smallest maximum of quotients for which capping is tried
	slack       = 32 // bytes that are read after the end of a block
)

func (h Header) split() (k uint, capped bool, u int) {
	return uint(h & lowMask), h&cappedFlag != 0, int(h >> quotients)
}

// Bytes returns the length of a block with this number of entries.
func (h Header) Bytes(count int) int {
	return (count*int(h&lowMask)+7)/8 + int(h>>quotients)
}

// Ascends reports whether the indices of a block ascend whatever bits it holds, if the first one is at most 1<<30.
// With fewer than 14 low bits and no capped quotients, the last index is less than 1<<30 higher.
func (h Header) Ascends() bool {
	k, capped, _ := h.split()
	return k < 14 && !capped
}

// Gaps are the gaps before the entries of a block.
type Gaps struct {
	gaps [Block]uint32 // the first n are set
	n    int           // entries of the block
	sum  uint64        // of the gaps
	or   uint32        // of the gaps, bit by bit
}

// Set makes g the gaps before the indices, of which there are 1 to Block; before is the index before the first one.
// Gaps are modulo 2^31.
func (g *Gaps) Set(idx []int32, before int32) {
	gaps := g.gaps[:len(idx)]
	first := uint32(idx[0]-before-1) & (1<<31 - 1)
	gaps[0] = first
	var done int
	done, g.sum, g.or = scan(gaps[1:], idx)
	for i := done + 1; i < len(idx); i++ {
		gap := uint32(idx[i]-idx[i-1]-1) & (1<<31 - 1)
		gaps[i] = gap
		g.sum += uint64(gap)
		g.or |= gap
	}
	g.n = len(idx)
	g.sum = g.sum + uint64(first)
	g.or = g.or | first
}

// Choose returns the header with the shortest code of the gaps, as described at kernel.RiceParameter.
func (g *Gaps) Choose() Header {
	k := uint(max(bits.Len64(g.sum/uint64(g.n))-1, 0))
	// Quotients with one bit less, as many, and one bit more are mostly enough.
	gaps := g.gaps[:g.n]
	var sums [3]int
	if k == 0 {
		sums[1] = int(g.sum)
		sums[2] = sumQuotients(gaps, 1)
	} else {
		done := 0
		if g.or < 1<<25 {
			done, sums = sumSome(gaps, k-1)
		}
		for i, s := range sumThree(gaps[done:], k-1) {
			sums[i] += s
		}
	}
	best := g.cost(k, sums[1])
	down := false
	for next := sums[0]; k > 0; next = sumQuotients(gaps, k-1) {
		c := g.cost(k-1, next)
		if c>>1 >= best>>1 {
			break
		}
		k--
		best = c
		down = true
		if k == 0 {
			break
		}
	}
	for next := sums[2]; !down && k < 30; next = sumQuotients(gaps, k+1) {
		c := g.cost(k+1, next)
		if c>>1 >= best>>1 {
			break
		}
		k = k + 1
		best = c
	}
	high := (best>>1 - g.n*int(k) + 7) / 8
	h := Header(k) | Header(best&1*cappedFlag) | Header(high<<quotients)
	if fixed := Header(bits.Len32(g.or)); fixed.Bytes(g.n) <= h.Bytes(g.n) {
		return fixed
	}
	return h
}

// cost returns the length of a block with this many low bits and this sum of quotients: twice the number of bits
// without padding, plus one if quotients are capped.
func (g *Gaps) cost(k uint, sum int) int {
	total := sum + g.n
	flag := 0
	if g.or>>k >= capFrom {
		capped := g.n
		for _, gap := range g.gaps[:g.n] {
			q := int(gap >> (k & 31))
			if q >= capAt {
				q = capAt + 2*bits.Len(uint(q-capAt+1)) - 1
			}
			capped += q
		}
		if capped < total {
			total = capped
			flag = 1
		}
	}
	if total > 8*maxQuotient {
		total = 1 << 40
	}
	return 2*(total+g.n*int(k)) + flag
}

func sumQuotients(gaps []uint32, k uint) (total int) {
	for _, gap := range gaps {
		total += int(gap >> (k & 31))
	}
	return total
}

// sumThree sums quotients for k, k+1 and k+2.
func sumThree(gaps []uint32, k uint) (sums [3]int) {
	var a, b, c int
	for _, gap := range gaps {
		q := int(gap >> (k & 31))
		a += q
		b += q >> 1
		c += q >> 2
	}
	return [3]int{a, b, c}
}

// Encode writes the block to dst, which has h.Bytes bytes. h is what Choose returned.
func (g *Gaps) Encode(dst []byte, h Header) {
	k, capped, u := h.split()
	gaps := g.gaps[:g.n]
	low := len(dst) - u
	if !putFast(dst[:low], gaps, k, false) {
		putLow(dst[:low], gaps, k)
	}
	if u == 0 || !capped && g.or>>k <= 27 && putFast(dst[low:], gaps, k, true) {
		return
	}
	limit := uint32(1<<32 - 1)
	if capped {
		limit = capAt
	}
	w := putHigh(dst[low:], gaps, k, limit)
	if capped {
		for _, gap := range gaps {
			if q := gap >> (k & 31); q >= capAt {
				x := q - capAt + 1
				n := uint(bits.Len32(x) - 1)
				w.put(0, n)
				w.put(1, 1)
				w.put(x&(1<<n-1), n)
			}
		}
	}
	w.end()
}

// putLow writes the k lowest bits of each gap.
func putLow(dst []byte, gaps []uint32, k uint) {
	var acc uint64
	n := uint(0)
	mask := uint32(1)<<(k&31) - 1
	for _, gap := range gaps {
		acc |= uint64(gap&mask) << (n & 63)
		n += k
		if n >= 32 {
			binary.LittleEndian.PutUint32(dst, uint32(acc))
			dst = dst[4:]
			acc = acc >> 32
			n = n - 32
		}
	}
	w := writer{dst, acc, n}
	w.end()
}

// putHigh writes quotients, larger ones as limit.
func putHigh(dst []byte, gaps []uint32, k uint, limit uint32) writer {
	var acc uint64
	n := uint(0)
	for _, gap := range gaps {
		q := uint(min(gap>>(k&31), limit))
		for ; q >= 32; q -= 32 {
			binary.LittleEndian.PutUint32(dst, uint32(acc))
			dst = dst[4:]
			acc = 0
		}
		acc |= 1 << ((n + q) & 63)
		n += q + 1
		if n >= 32 {
			binary.LittleEndian.PutUint32(dst, uint32(acc))
			dst = dst[4:]
			acc = acc >> 32
			n = n - 32
		}
	}
	return writer{dst, acc, n}
}

// writer is a bit stream for writing.
type writer struct {
	dst []byte // the remaining room
	acc uint64 // bits that are not in dst yet, the first one lowest
	n   uint   // bits in acc, below 32
}

// put writes the n bits of v, at most 32.
func (w *writer) put(v uint32, n uint) {
	w.acc |= uint64(v) << w.n
	w.n += n
	if w.n >= 32 {
		binary.LittleEndian.PutUint32(w.dst, uint32(w.acc))
		w.dst = w.dst[4:]
		w.acc = w.acc >> 32
		w.n = w.n - 32
	}
}

// end writes the last byte.
func (w *writer) end() {
	for ; w.n > 0; w.n -= min(w.n, 8) {
		w.dst[0] = byte(w.acc)
		w.dst = w.dst[1:]
		w.acc = w.acc >> 8
	}
}

// Decode decodes the first indices of a block of count entries at the beginning of src; next is the smallest value
// that the first one may have. It reads no further than src, even in an invalid block.
func Decode(idx []int32, count int, src []byte, h Header, next int32) {
	k, capped, u := h.split()
	low := (count*int(k) + 7) / 8
	if len(src) < low+u+slack {
		var padded [Block*31/8 + maxQuotient + slack]byte
		copy(padded[:low+u], src)
		src = padded[:]
	}
	bit := uint(0)
	mask := uint32(1)<<k - 1
	switch high := src[low : low+u+slack]; {
	case u == 0:
		for i := range idx {
			next += int32(uint32(word(src, bit)) & mask)
			idx[i] = next
			next++
			bit += k
		}
	case capped:
		decodeCapped(idx, count, src, reader{src: high[:u]}, k, next)
	default:
		decodePlain(idx, src, high, k, next)
	}
}

// decodePlain decodes a block without capped quotients. high has slack more bytes.
func decodePlain(idx []int32, src, high []byte, k uint, next int32) {
	if decodeFast(idx, src, high[:len(high)-slack], k, next) {
		return
	}
	mask := uint32(1)<<k - 1
	w := binary.LittleEndian.Uint64(high)
	from := 0
	bit := uint(0)
	sum := uint32(next) // sum of the low bits, plus one for each entry; quotients are added where they end
	for i := range idx {
		for w == 0 {
			from += 64
			if from/8+slack >= len(high) { // no ones are left
				w = 1
				break
			}
			w = binary.LittleEndian.Uint64(high[from/8:])
		}
		q := uint32(from + bits.TrailingZeros64(w) - i)
		w &= w - 1
		sum += uint32(word(src, bit)) & mask
		bit += k
		idx[i] = int32(sum + q<<(k&31))
		sum++
	}
}

// decodeCapped decodes a block with capped quotients.
func decodeCapped(idx []int32, count int, src []byte, high reader, k uint, next int32) {
	mask := uint32(1)<<k - 1
	excess := high
	for range count {
		excess.zeros()
	}
	for i := range idx {
		gap := uint32(word(src, uint(i)*k)) & mask
		q := high.zeros()
		if q == capAt {
			n := excess.zeros()
			q += uint(1<<n|excess.take(n)) - 1
		}
		next += int32(gap | uint32(q)<<k)
		idx[i] = next
		next++
	}
}

// word returns at least 57 bits beginning at a bit.
func word(src []byte, bit uint) uint64 {
	return binary.LittleEndian.Uint64(src[bit/8:]) >> (bit % 8)
}

// reader is a bit stream for reading, followed by zeros.
type reader struct {
	src []byte // bytes to read
	bit uint   // number of the next one
}

func (r *reader) word() uint64 {
	var b [8]byte
	if i := r.bit / 8; i < uint(len(r.src)) {
		copy(b[:], r.src[i:])
	}
	return binary.LittleEndian.Uint64(b[:]) >> (r.bit % 8)
}

// take returns the next n bits, at most 31 (of more, some are lost).
func (r *reader) take(n uint) uint64 {
	v := r.word() & (1<<n - 1)
	r.bit += n
	return v
}

// zeros returns the number of zeros before the next one, and reads that one too. At the end it returns 0.
func (r *reader) zeros() (n uint) {
	for r.bit < uint(8*len(r.src)) {
		w := r.word()
		if w != 0 {
			z := uint(bits.TrailingZeros64(w))
			r.bit += z + 1
			return n + z
		}
		skip := 64 - r.bit%8
		n = n + skip
		r.bit = r.bit + skip
	}
	return 0
}
