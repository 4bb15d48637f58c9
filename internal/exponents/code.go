package exponents

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"slices"
)

// The longest code is short enough for its table to fit the first-level cache.
const (
	maxBits   = 11
	tableSize = 1 << maxBits
	perWord   = 5 // codes that fit 64 bits together with a partial byte
)

// prefixCode has the code of each exponent.
type prefixCode struct {
	lowest  byte       // lowest exponent with a code
	highest byte       // highest exponent with a code
	lengths [256]uint8 // 0: no code
	codes   codes      // by exponent
}

// codes have their first bit lowest, and their length in the upper 16 bits.
type codes [256]uint32

// pair returns two codes in a row, and their length in bits.
func (c *codes) pair(first, second byte) (code uint64, length uint) {
	a := c[first]
	b := c[second]
	return uint64(a&0xffff) | uint64(b&0xffff)<<(a>>16&63), uint(a>>16 + b>>16)
}

// leaf is an exponent with its number of occurrences.
type leaf struct {
	exponent byte // the exponent
	count    int  // number of occurrences
}

// fit sets p to the best code for these counts, at least one of which is not 0.
func (p *prefixCode) fit(counts *[256]int) {
	var room [256]leaf
	leaves := room[:0]
	for exponent, n := range counts {
		if n > 0 {
			leaves = append(leaves, leaf{
				exponent: byte(exponent),
				count:    n,
			})
		}
	}
	p.lowest = leaves[0].exponent
	p.highest = leaves[len(leaves)-1].exponent
	slices.SortStableFunc(leaves, func(a, b leaf) int { return cmp.Compare(a.count, b.count) })
	var numbers [256]int // number of leaves at each depth
	depths(leaves, &numbers)
	limit(&numbers)
	p.lengths = [256]uint8{}
	next := 0
	for length := maxBits; length > 0; length-- {
		for range numbers[length] { // the rarest ones first
			p.lengths[leaves[next].exponent] = uint8(length)
			next++
		}
	}
	p.assign()
}

// depths counts the leaves at each depth of Huffman's tree. The leaves are sorted by their counts.
func depths(leaves []leaf, numbers *[256]int) {
	type node struct {
		count  int // occurrences of the exponents below it
		parent int // place of the node above
	}
	var room [512]node
	nodes := room[:0]
	for _, l := range leaves {
		nodes = append(nodes, node{count: l.count})
	}
	leaf := 0            // the next one without a parent
	inner := len(leaves) // the next inner node without a parent
	lightest := func() int {
		if leaf < len(leaves) && (inner == len(nodes) || nodes[leaf].count <= nodes[inner].count) {
			leaf++
			return leaf - 1
		}
		inner++
		return inner - 1
	}
	for range len(leaves) - 1 {
		first := lightest()
		second := lightest()
		nodes[first].parent = len(nodes)
		nodes[second].parent = len(nodes)
		nodes = append(nodes, node{count: nodes[first].count + nodes[second].count})
	}
	var depth [512]int
	for i := len(nodes) - 2; i >= 0; i-- {
		depth[i] = depth[nodes[i].parent] + 1
		if i < len(leaves) {
			numbers[depth[i]]++
		}
	}
}

// limit shortens codes longer than maxBits to maxBits, and lengthens others until there is room for all.
func limit(numbers *[256]int) {
	used := 0 // used sequences of bits, of tableSize
	for length := len(numbers) - 1; length > maxBits; length-- {
		numbers[maxBits] += numbers[length]
		numbers[length] = 0
	}
	for length := 1; length <= maxBits; length++ {
		used += numbers[length] << (maxBits - length)
	}
	for used > tableSize {
		length := maxBits - 1
		for numbers[length] == 0 {
			length--
		}
		// A code of this length becomes two longer ones, one of which makes room for a code of maxBits.
		numbers[maxBits]--
		numbers[length]--
		numbers[length+1] += 2
		used--
	}
}

// assign sets the codes from their lengths.
func (p *prefixCode) assign() {
	code := 0
	for length := 1; length <= maxBits; length++ {
		for exponent, l := range p.lengths {
			if int(l) != length {
				continue
			}
			reversed := bits.Reverse32(uint32(code)) >> (32 - length)
			p.codes[exponent] = reversed | uint32(length)<<16
			code++
		}
		code <<= 1
	}
}

// single reports whether there is only one exponent, which takes no bits.
func (p *prefixCode) single() bool { return p.lowest == p.highest }

// bytes returns the maximum length of streams with these counts, including the table before them.
func (p *prefixCode) bytes(counts *[256]int) int {
	if p.single() {
		return 2
	}
	total := 0
	for exponent, n := range counts {
		total += n * int(p.lengths[exponent])
	}
	return 2 + (int(p.highest)-int(p.lowest)+2)/2 + headBytes + total/8 + streams
}

// appendLengths appends the range of exponents and the lengths of their codes.
func (p *prefixCode) appendLengths(dst []byte) []byte {
	dst = append(dst, p.lowest, p.highest)
	if p.single() {
		return dst
	}
	lengths := p.lengths[p.lowest : int(p.highest)+1]
	for pair := range slices.Chunk(lengths, 2) {
		b := pair[0]
		if len(pair) == 2 {
			b |= pair[1] << 4
		}
		dst = append(dst, b)
	}
	return dst
}

// readLengths reads the output of appendLengths, and returns the rest.
func (p *prefixCode) readLengths(code []byte) ([]byte, error) {
	if len(code) < 2 || code[0] > code[1] {
		return nil, ErrDamaged
	}
	p.lowest = code[0]
	p.highest = code[1]
	code = code[2:]
	if p.single() {
		return code, nil
	}
	count := int(p.highest) - int(p.lowest) + 1
	packed := (count + 1) / 2
	if len(code) < packed {
		return nil, ErrDamaged
	}
	p.lengths = [256]uint8{}
	used := 0
	for i := range 2 * packed {
		length := code[i/2] >> (4 * (i % 2)) & 15
		if length > maxBits || length > 0 && i >= count {
			return nil, ErrDamaged
		}
		if length > 0 {
			p.lengths[int(p.lowest)+i] = length
			used += 1 << (maxBits - length)
		}
	}
	if used != tableSize || p.lengths[p.lowest] == 0 || p.lengths[p.highest] == 0 {
		return nil, ErrDamaged
	}
	p.assign()
	return code[packed:], nil
}

// appendStream appends the codes of exponents.
func (p *prefixCode) appendStream(dst, exponents []byte) []byte {
	from := len(dst)
	dst = slices.Grow(dst, len(exponents)*maxBits/8+2*wordBytes)
	room := dst[from:cap(dst)]
	codes := &p.codes
	next := 0 // index of the next byte of room
	var word uint64
	var filled uint // bits of word, below 8 between rounds
	for ; len(exponents) >= perWord; exponents = exponents[perWord:] {
		first, firstBits := codes.pair(exponents[0], exponents[1])
		second, secondBits := codes.pair(exponents[2], exponents[3])
		last := codes[exponents[4]]
		word |= first << (filled & 63)
		filled += firstBits
		word |= second << (filled & 63)
		filled += secondBits
		word |= uint64(last&0xffff) << (filled & 63)
		filled += uint(last >> 16)
		binary.LittleEndian.PutUint64(room[next:], word)
		next += int(filled / 8)
		word >>= filled &^ 7 & 63
		filled %= 8
	}
	for _, exponent := range exponents {
		code := codes[exponent]
		word |= uint64(code&0xffff) << (filled & 63)
		filled += uint(code >> 16)
	}
	binary.LittleEndian.PutUint64(room[next:], word)
	next += int(filled+7) / 8
	return dst[:from+next]
}

// table maps each sequence of maxBits bits to the exponents with which it begins: up to perEntry of them, from the
// lowest byte on, then their number and their length in bits.
type table [tableSize]uint64

const (
	perEntry   = 6
	countShift = 8 * perEntry
	bitsShift  = countShift + 8
)

// fill sets t for a code of at least two exponents.
func (t *table) fill(p *prefixCode) {
	var first [tableSize]uint16 // the exponent, and above it the length of its code
	for exponent := int(p.lowest); exponent <= int(p.highest); exponent++ {
		length := p.lengths[exponent]
		if length == 0 {
			continue
		}
		entry := uint16(exponent) | uint16(length)<<8
		for i := int(p.codes[exponent] & 0xffff); i < tableSize; i += 1 << length {
			first[i] = entry
		}
	}
	for i := range t {
		entry := uint64(0)
		count := uint64(0)
		used := uint64(0)
		for count < perEntry {
			next := uint64(first[i>>used])
			if used+next>>8 > maxBits {
				break
			}
			entry |= next & 0xff << (8 * count)
			used += next >> 8
			count++
		}
		t[i] = entry | count<<countShift | used<<bitsShift
	}
}

// stream is the position in one stream of a chunk.
type stream struct {
	bit  int // next bit of the code
	next int // index of the next exponent
	end  int // index after the last exponent
}

// roundBytes is the maximum number of bytes that a round writes.
const roundBytes = perEntry*(perWord-1) + wordBytes

// round decodes some exponents, unless it is near their end or the end of the code.
func (t *table) round(s *stream, exponents, code []byte) bool {
	next := s.next
	begin := s.bit / 8
	if next+roundBytes > s.end || begin+wordBytes > len(code) {
		return false
	}
	word := binary.LittleEndian.Uint64(code[begin:]) >> (uint(s.bit) % 8)
	to := (*[roundBytes]byte)(exponents[next:])
	written := 0
	taken := 0
	for range perWord {
		entry := t[word%tableSize]
		binary.LittleEndian.PutUint64(to[written:], entry)
		written += int(entry >> countShift & 0xff)
		word >>= entry >> bitsShift & 63
		taken += int(entry >> bitsShift)
	}
	s.next = next + written
	s.bit += taken
	return true
}

// finish decodes the last exponents. Zeros follow the code.
func (t *table) finish(p *prefixCode, s *stream, exponents, code []byte) {
	for s.next < s.end {
		var word [wordBytes]byte
		if begin := s.bit / 8; begin < len(code) {
			copy(word[:], code[begin:])
		}
		exponent := byte(t[binary.LittleEndian.Uint64(word[:])>>(uint(s.bit)%8)%tableSize])
		exponents[s.next] = exponent
		s.next++
		s.bit += int(p.lengths[exponent])
	}
}
