package delta

import (
	"cmp"
	"encoding/binary"
	"math"
	"math/bits"
)

// The coder of values is a range asymmetric numeral system (rANS) with one table for each block (Jarek Duda,
// "Asymmetric numeral systems", 2013, https://arxiv.org/abs/1311.2540). docs/delta-format.md has its format.
const (
	tableBits   = 12      // frequencies of a table sum to 1<<tableBits
	stateLow    = 1 << 16 // states are in [stateLow, stateLow<<16)
	direct      = 16      // each smaller value is a symbol
	symbolCount = direct + 60*8
	interleaved = 1024 // number of values from which there are four states
)

// symbolOf returns the symbol of a value, and the number of its lowest bits that follow the symbol.
func symbolOf(v uint64) (symbol int, extra uint) {
	if v < direct {
		return int(v), 0
	}
	extra = uint(bits.Len64(v)) - 4
	return int(direct + (extra-1)*8 + uint(v>>extra&7)), extra
}

// leastOf returns the smallest value with a symbol, and the number of bits that follow.
func leastOf(symbol int) (v uint64, extra uint) {
	if symbol < direct {
		return uint64(symbol), 0
	}
	extra = uint(symbol-direct)/8 + 1
	return uint64(8|(symbol-direct)%8) << extra, extra
}

// frequencies are the frequencies of the symbols of a table.
type frequencies [symbolCount]uint16

// standard are the tables of blocks that are too small to carry one. If an optimizer moves all weights equally far,
// differences in units in the last place are inversely proportional to the weights: the share of values from v on is
// a/(v+a).
var standard = func() (all [4]frequencies) {
	const symbols = direct + 12*8
	for t, a := range []uint64{1, 3, 9, 27} {
		for s := range symbols {
			from, _ := leastOf(s)
			to, _ := leastOf(s + 1)
			all[t][s] = uint16(1 + (1<<tableBits-symbols)*a/(from+a))
			if s < symbols-1 {
				all[t][s] -= uint16((1<<tableBits - symbols) * a / (to + a))
			}
		}
	}
	return all
}()

// fit sets f to the counts, scaled, and returns the number of symbols that occur.
func (f *frequencies) fit(counts *[symbolCount]int, total int) (used int) {
	sum := 0
	for s, n := range counts {
		f[s] = 0
		if n > 0 {
			f[s] = uint16(max(1, (n<<tableBits+total/2)/total))
			used++
			sum += int(f[s])
		}
	}
	for sum != 1<<tableBits { // the remainder goes to the most frequent symbols
		frequent := 0
		by := cmp.Compare(1<<tableBits, sum)
		for s := range f {
			if f[s] > f[frequent] {
				frequent = s
			}
		}
		f[frequent] = uint16(int(f[frequent]) + by)
		sum += by
	}
	return used
}

// cost returns the approximate number of bits of the counted symbols, or infinity if one of them has no frequency.
func (f *frequencies) cost(counts *[symbolCount]int) (total float64) {
	for s, n := range counts {
		if n > 0 {
			total += float64(n) * (tableBits - math.Log2(float64(f[s])))
		}
	}
	return total
}

// appendValues appends the section of values, the last one of a block.
func (c *coder) appendValues(dst []byte, values []uint64) []byte {
	if len(values) == 0 {
		return dst
	}
	clear(c.counts[:])
	for _, v := range values {
		s, _ := symbolOf(v)
		c.counts[s]++
	}
	f := &c.freq
	used := f.fit(&c.counts, len(values))
	cheapest := f.cost(&c.counts) + 24*float64(used)
	table := len(standard) - 1 + used
	for t := range standard {
		if cost := standard[t].cost(&c.counts); cost <= cheapest {
			f = &standard[t]
			cheapest = cost
			table = t
		}
	}
	dst = binary.AppendUvarint(dst, uint64(table))
	if table >= len(standard) {
		before := -1
		for s, n := range f {
			if n > 0 {
				dst = binary.AppendUvarint(binary.AppendUvarint(dst, uint64(s-before-1)), uint64(n))
				before = s
			}
		}
	}
	var starts [symbolCount]uint32
	sum := uint32(0)
	for s, n := range f {
		starts[s] = sum
		sum += uint32(n)
	}
	states := [4]uint32{stateLow, stateLow, stateLow, stateLow}
	mask := statesOf(len(values)) - 1
	words := c.words[:0]
	for i := len(values) - 1; i >= 0; i-- {
		x := states[i&mask]
		s, extra := symbolOf(values[i])
		for done := extra; done > 0; { // parts of up to 16 bits, the highest first
			n := (done-1)%16 + 1
			done -= n
			if uint64(x) >= 1<<(32-n) {
				words = append(words, uint16(x))
				x = x >> 16
			}
			x = x<<n | uint32(values[i]>>done)&(1<<n-1)
		}
		n := uint32(f[s])
		if uint64(x) >= uint64(n)<<(32-tableBits) {
			words = append(words, uint16(x))
			x = x >> 16
		}
		states[i&mask] = x/n<<tableBits + x%n + starts[s]
	}
	c.words = words
	for _, x := range states[:mask+1] {
		dst = binary.LittleEndian.AppendUint32(dst, x)
	}
	for i := len(words) - 1; i >= 0; i-- {
		dst = binary.LittleEndian.AppendUint16(dst, words[i])
	}
	return dst
}

func statesOf(values int) int {
	if values < interleaved {
		return 1
	}
	return 4
}

// slot is one of the places of a table.
type slot struct{ symbol, freq, offset uint16 }

// readTable reads a table into the slots of c.
func (c *coder) readTable(src *cursor) error {
	f := &c.freq
	if table := src.uvarint(); table < uint64(len(standard)) {
		f = &standard[table]
	} else {
		*f = frequencies{}
		symbol := uint64(0)
		sum := uint64(0)
		for range min(table-uint64(len(standard)-1), symbolCount+1) {
			symbol += src.uvarint()
			n := src.uvarint()
			sum += n
			if symbol >= symbolCount || n == 0 || n > 1<<tableBits || sum > 1<<tableBits {
				return errDamaged
			}
			f[symbol] = uint16(n)
			symbol++
		}
		if sum != 1<<tableBits {
			return errDamaged
		}
	}
	next := 0
	for s, n := range f {
		for i := range n {
			c.slots[next] = slot{uint16(s), n, i}
			next++
		}
	}
	return nil
}

// readValues reads the section of len(values) values, up to the end of src.
func (c *coder) readValues(src *cursor, values []uint64) error {
	if len(values) == 0 {
		return nil
	}
	if err := c.readTable(src); err != nil {
		return err
	}
	mask := statesOf(len(values)) - 1
	head := src.take(4 * uint64(mask+1))
	if src.bad {
		return errDamaged
	}
	words := src.data
	src.data = nil
	var states [4]uint32
	for i := range mask + 1 {
		states[i] = binary.LittleEndian.Uint32(head[4*i:])
	}
	for i := range values {
		x := states[i&mask]
		s := &c.slots[x&(1<<tableBits-1)]
		x = uint32(s.freq)*(x>>tableBits) + uint32(s.offset)
		if x < stateLow && len(words) >= 2 {
			x = x<<16 | uint32(binary.LittleEndian.Uint16(words))
			words = words[2:]
		}
		v := uint64(s.symbol)
		if v >= direct {
			var extra uint
			v, extra = leastOf(int(v))
			for shift := uint(0); shift < extra; {
				n := min(extra-shift, 16)
				v |= uint64(x&(1<<n-1)) << shift
				shift += n
				if x >>= n; x < stateLow && len(words) >= 2 {
					x = x<<16 | uint32(binary.LittleEndian.Uint16(words))
					words = words[2:]
				}
			}
		}
		values[i] = v
		states[i&mask] = x
	}
	for _, x := range states[:mask+1] {
		if x != stateLow {
			return errDamaged
		}
	}
	if len(words) > 0 {
		return errDamaged
	}
	return nil
}
